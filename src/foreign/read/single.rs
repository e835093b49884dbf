//! Dumps in one file: safetensors, npz, torch's, and raw logits.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use parity_dump::Element;
use parity_dump::manifest::Producer;
use parity_dump::single::Metadata;
use safetensors::{Dtype, SafeTensors};

use super::archive::{self, Archive};
use super::{folders, has_ending, name_of, npy, stem_of, torch};
use crate::error::{Error, Result};
use crate::foreign::array::{Array, Bytes, Type};
use crate::foreign::{Foreign, Pass};

/// What a file's first bytes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// An array of numpy's.
    Npy,
    /// Several of them.
    Npz,
    /// `torch.save`'s.
    Torch,
    /// A header's length, and a header in JSON.
    Safetensors,
}

/// One dump in one file.
///
/// # Errors
/// What is no dump that can be read, with the line that makes one of it.
pub fn file(path: &Path) -> Result<Foreign> {
    if let Some(raw) = folders::llama_debug_of(path)? {
        return Ok(raw);
    }
    let (format, arrays) = arrays(path)?;
    let format = match format {
        FileFormat::Npz => "npz",
        FileFormat::Torch => "torch",
        FileFormat::Safetensors => "safetensors",
        FileFormat::Npy => {
            return Err(Error::file(path, "is one array, and no dump")
                .hint("a folder of .npy files, one for each tensor, with tokens.npy beside them, is one"));
        }
    };
    let mut out = Foreign::new(path, format, vec![Pass { arrays, ..Pass::default() }]);
    if format == "safetensors" {
        told(path, &mut out)?;
    }
    Ok(out)
}

/// What a file says of itself in its `__metadata__`: its producer, and the steps that its rows are of.
fn told(path: &Path, dump: &mut Foreign) -> Result<()> {
    let Some(pass) = dump.passes.first() else { return Ok(()) };
    let is_tokens =
        |array: &&Array| array.dtype.is_integer() && ["tokens", "input_ids"].contains(&array.name.as_str());
    let n = pass.arrays.iter().find(is_tokens).map_or(0, Array::len);
    let said = parity_dump::single::said(path, map(path)?.as_slice(), n)?;
    let Metadata { producer, steps, .. } = said;
    (dump.layout, dump.complete, dump.stopped) = (said.layout, said.complete, said.stopped);
    dump.producer.numerics = producer.numerics.clone();
    if !producer.name.is_empty() {
        dump.producer = producer;
    }
    if steps.len() < 2 {
        return Ok(());
    }
    let mut passes: Vec<Pass> = Vec::with_capacity(steps.len());
    let mut first = 0;
    for positions in steps {
        let of_step = |array: &Array| {
            let axis = array.shape.iter().position(|extent| *extent == n);
            axis.map_or(Ok(array.clone()), |axis| array.clone().part(axis, first, positions.len(), 1))
        };
        let arrays = pass.arrays.iter().map(of_step).collect::<Result<Vec<Array>>>()?;
        first += positions.len();
        passes.push(Pass { arrays, positions: Some(positions), ..Pass::default() });
    }
    dump.passes = passes;
    Ok(())
}

/// Every array of a file, by its keys; the file's own name where it is one array alone.
///
/// # Errors
/// A format that is not known: with the line that makes a known one of it.
pub fn arrays(path: &Path) -> Result<(FileFormat, Vec<Array>)> {
    let format = format(path)?;
    let stem = stem_of(path);
    let arrays = match format {
        FileFormat::Npy => {
            let bytes = map(path)?;
            vec![npy::array(&stem, &bytes, 0).map_err(|e| Error::file(path, e))?]
        }
        FileFormat::Npz => {
            let mut archive = Archive::open(path)?;
            let names: Vec<String> = archive.names.clone();
            let mut all = Vec::with_capacity(names.len());
            for name in names.iter().filter(|name| name.ends_with(".npy")) {
                let (bytes, range) = archive.entry(name).map_err(|e| Error::file(path, e))?;
                let array = npy::array(name.trim_end_matches(".npy"), &bytes, range.start);
                all.push(array.map_err(|e| Error::file(path, e))?);
            }
            all
        }
        FileFormat::Torch => torch::read(path, &stem)?,
        FileFormat::Safetensors => safetensors(path)?,
    };
    Ok((format, arrays))
}

/// Whether a file may be one of tensors with a JSON header.
pub fn is_safetensors(path: &Path) -> bool {
    match format(path) {
        Ok(format) => format == FileFormat::Safetensors,
        // What cannot be opened is told by whoever opens it.
        Err(_) => has_ending(path, &["safetensors"]),
    }
}

fn format(path: &Path) -> Result<FileFormat> {
    let mut head = [0; 16];
    let mut file = parity_dump::open_regular(path, "cannot be opened")?;
    let length =
        read_up_to(&mut file, &mut head).map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    let head = &head[..length];
    if head.starts_with(npy::MAGIC) {
        return Ok(FileFormat::Npy);
    }
    if head.starts_with(archive::MAGIC) {
        let names = Archive::open(path)?.names;
        let is_torch = names.iter().any(|name| name.ends_with("/data.pkl"));
        return Ok(if is_torch { FileFormat::Torch } else { FileFormat::Npz });
    }
    // Raw numbers may look like the beginning of a header, whose length they hardly say.
    let header = head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let fits = file.metadata().is_ok_and(|file| header < file.len());
    let begins = fits && head.len() > 8 && matches!(head[8], b'{' | b' ');
    if begins || has_ending(path, &["safetensors"]) {
        return Ok(FileFormat::Safetensors);
    }
    Err(unknown(path, head))
}

fn read_up_to(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..])? {
            0 => break,
            n => length += n,
        }
    }
    Ok(length)
}

/// What cannot be read, with the line that makes something of it that can.
fn unknown(path: &Path, head: &[u8]) -> Error {
    let name = name_of(path);
    let hint = if head.starts_with(b"GGUF") {
        "this is a model: it goes behind -m; `parity inspect` shows what is in it".to_owned()
    } else if head.starts_with(b"\x89HDF") {
        format!(
            "python -c 'import h5py, numpy as np; f = h5py.File(\"{name}\"); np.savez(\"out.npz\", **{{k: v[()] for k, v in f.items()}})'"
        )
    } else if head.starts_with(b"\x80") && has_ending(path, &["pt", "pth", "bin"]) {
        format!(
            "torch's form from before 1.6: python -c 'import torch; torch.save(torch.load(\"{name}\"), \"out.pt\")'"
        )
    } else if head.starts_with(b"\x80") {
        format!(
            "python -c 'import pickle, numpy as np; np.savez(\"out.npz\", **pickle.load(open(\"{name}\", \"rb\")))'"
        )
    } else if head.starts_with(b"_logits_") {
        "log-probabilities are judged by `parity audit`, and as the candidate of `parity diff`".to_owned()
    } else if head.first().is_some_and(|byte| b"[{".contains(byte)) {
        format!(
            "python -c 'import json, numpy as np; np.savez(\"out.npz\", **{{k: np.array(v) for k, v in json.load(open(\"{name}\")).items()}})'"
        )
    } else {
        "python -c 'import numpy as np; np.savez(\"out.npz\", tokens=ids, **tensors)', of a dictionary of arrays".to_owned()
    };
    Error::file(path, "is no dump that can be read")
        .expected("a dump folder, .safetensors, .npz, .pt (torch.save), a folder of .npy or .pt files, SGLang's, msprobe's")
        .found(format!("a file that begins with {:?}", String::from_utf8_lossy(&head[..head.len().min(8)])))
        .hint(hint)
}

/// A mapped file.
///
/// # Errors
/// The system's.
pub fn map(path: &Path) -> Result<Bytes> {
    let file = parity_dump::open_regular(path, "cannot be opened")?;
    let map = archive::map(&file).map_err(|e| Error::file(path, format!("cannot be mapped: {e}")))?;
    Ok(Bytes::Mapped(map))
}

/// Every tensor of a safetensors file whose elements are numbers.
///
/// # Errors
/// What is no such file.
pub fn safetensors(path: &Path) -> Result<Vec<Array>> {
    let bytes = map(path)?;
    let tensors = SafeTensors::deserialize(bytes.as_slice()).map_err(|e| {
        Error::file(path, format!("is no safetensors file: {e}"))
            .hint("a file that was not written to its end is none")
    })?;
    let base = bytes.as_slice().as_ptr() as usize;
    let mut all = Vec::new();
    for (name, view) in tensors.iter() {
        let dtype = match view.dtype() {
            Dtype::F32 => Type::Float(Element::F32),
            Dtype::F16 => Type::Float(Element::F16),
            Dtype::BF16 => Type::Float(Element::Bf16),
            Dtype::F64 => Type::F64,
            Dtype::I64 => Type::Int(8),
            Dtype::I32 => Type::Int(4),
            Dtype::I16 => Type::Int(2),
            Dtype::I8 => Type::Int(1),
            Dtype::U64 => Type::Uint(8),
            Dtype::U32 => Type::Uint(4),
            Dtype::U16 => Type::Uint(2),
            Dtype::U8 | Dtype::BOOL => Type::Uint(1),
            other => {
                return Err(Error::file(
                    path,
                    format!("tensor {name} has an element type that dumps do not have"),
                )
                .expected("floats of 16, 32 or 64 bits, or whole numbers")
                .found(format!("{other:?}")));
            }
        };
        let offset = view.data().as_ptr() as usize - base;
        all.push(Array::new(name, dtype, view.shape().to_vec(), None, offset, bytes.clone())?);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Raw values of one type, as a C program writes them.
///
/// # Errors
/// A length that is no multiple of the type's.
pub fn raw(path: &Path, name: &str, dtype: Type, rows: usize) -> Result<Array> {
    let bytes = map(path)?;
    let length = bytes.as_slice().len();
    let count = length / dtype.size();
    if !length.is_multiple_of(dtype.size() * rows.max(1)) || count == 0 {
        return Err(Error::file(path, "has another length than its values")
            .expected(format!("a multiple of {} bytes", dtype.size() * rows.max(1)))
            .found(format!("{length} bytes")));
    }
    Array::new(name, dtype, vec![rows, count / rows.max(1)], None, 0, bytes)
}

/// Logits of rows of `vocabulary` or more: of any of the formats, or raw f32; and the tokens, where the file has them.
///
/// # Errors
/// A file without such an array.
pub fn logits_of(path: &Path, vocabulary: usize) -> Result<(Option<Vec<u32>>, Array)> {
    let arrays = match (folders::llama_debug_of(path)?, format(path)) {
        (Some(debug), _) => debug.passes.into_iter().next().map(|pass| pass.arrays).unwrap_or_default(),
        (None, Ok(_)) => arrays(path)?.1,
        (None, Err(_)) => {
            let rows =
                std::fs::metadata(path).map_or(0, |data| data.len() as usize) / (vocabulary * 4).max(1);
            vec![raw(path, "logits", Type::Float(Element::F32), rows.max(1))?]
        }
    };
    let tokens = arrays.iter().find(|array| array.dtype.is_integer()).and_then(Array::integers);
    let tokens = tokens.and_then(|ids| ids.into_iter().map(|id| u32::try_from(id).ok()).collect());
    let wide =
        |array: &&Array| !array.dtype.is_integer() && array.shape.last().is_some_and(|n| *n >= vocabulary);
    let called = |name: &str| arrays.iter().filter(wide).find(|array| array.name == name);
    let logits = called("logits").or_else(|| called("result_output")).or_else(|| arrays.iter().find(wide));
    match logits {
        Some(logits) => Ok((tokens, logits.clone())),
        None => {
            let found: Vec<String> =
                arrays.iter().map(|array| format!("{} {:?}", array.name, array.shape)).collect();
            Err(Error::file(path, "holds no logits of this model")
                .expected(format!("an array with rows of {vocabulary}"))
                .found(found.join(", ")))
        }
    }
}

/// Who wrote a dump of this format.
pub fn producer(name: &str) -> Producer {
    Producer { name: name.to_owned(), ..Producer::default() }
}
