//! The bytes of one GGUF file -> version, metadata and tensor table. Trusts nothing.
//!
//! Every count and length is checked against the bytes that are left before anything is allocated.

use std::fmt::Display;

use indexmap::IndexMap;

use super::dtype::DType;
use super::tensor::TensorInfo;
use super::value::{Array, Value, ValueType};
use crate::error::{Error, Result};
use crate::numerics::Storage;

/// First bytes of every file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: usize = 32;
/// Names the padding of the tensor data.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Axes of a tensor: GGML_MAX_DIMS.
const MAX_AXES: usize = 4;
/// Arrays within arrays that are followed. No known writer nests at all.
const MAX_NESTING: usize = 8;
/// The least bytes of a metadata entry: key length, type, a one-byte value.
const MIN_METADATA_BYTES: usize = 8 + 4 + 1;
/// The least bytes of a tensor entry: name length, number of axes, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 4 + 8;
const DAMAGED: &str =
    "the file is damaged or was not fetched whole: compare its size and checksum with the original's";

/// One file, read.
#[derive(Debug)]
pub struct Parsed {
    /// 2 or 3.
    pub version: u32,
    /// In the order of the file.
    pub metadata: IndexMap<String, Value>,
    /// In the order of the file; offsets count from the start of the file.
    pub tensors: Vec<TensorInfo>,
}

/// Reads everything but the tensor data. `file` names the file in errors.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Parsed> {
    let mut cursor = Cursor { file, bytes, at: 0, part: "the header".to_owned() };
    let version = header(&mut cursor)?;
    let tensor_count = cursor.count(MIN_TENSOR_BYTES, "tensors")?;
    let metadata_count = cursor.count(MIN_METADATA_BYTES, "metadata entries")?;
    let mut metadata = IndexMap::new();
    for index in 0..metadata_count {
        let (key, value) = metadata_entry(&mut cursor, index)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(cursor.error(format!("has metadata key `{key}` twice")).hint(DAMAGED));
        }
    }
    let alignment = alignment(&cursor, &metadata)?;
    let mut tensors = Vec::new();
    for index in 0..tensor_count {
        tensors.push(tensor_entry(&mut cursor, index)?);
    }
    place(&cursor, alignment, &mut tensors)?;
    Ok(Parsed { version, metadata, tensors })
}

/// Magic and version.
fn header(cursor: &mut Cursor<'_>) -> Result<u32> {
    let magic = cursor.array::<4>()?;
    if &magic != MAGIC {
        return Err(cursor
            .error("is not a GGUF file")
            .expected("it starts with `GGUF`")
            .found(format!("`{}`", magic.escape_ascii()))
            .hint("convert the model with llama.cpp's convert_hf_to_gguf.py"));
    }
    let version = u32::from_le_bytes(cursor.array()?);
    match version {
        2 | 3 => Ok(version),
        // The low half of any version to come is not zero; a swapped one's is.
        _ if version & 0xffff == 0 && version != 0 => Err(cursor
            .error("is a big-endian GGUF file")
            .expected("little-endian, version 2 or 3")
            .found(format!("big-endian, version {}", version.swap_bytes()))
            .hint("convert it with `gguf-convert-endian FILE little` of the Python package gguf")),
        _ => Err(cursor
            .error("has a GGUF version that parity does not read")
            .expected("2 or 3")
            .found(version)
            .hint("write the file anew with a current llama.cpp: `llama-quantize FILE NEW.gguf COPY`")),
    }
}

fn metadata_entry(cursor: &mut Cursor<'_>, index: usize) -> Result<(String, Value)> {
    cursor.part = format!("the key of metadata entry {index}");
    let key = cursor.string()?;
    cursor.part = format!("metadata `{key}`");
    let kind = cursor.value_type()?;
    Ok((key, cursor.value(kind, 0)?))
}

fn alignment(cursor: &Cursor<'_>, metadata: &IndexMap<String, Value>) -> Result<usize> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let alignment = value.as_integer().and_then(|v| u32::try_from(v).ok()).filter(|v| v.is_power_of_two());
    alignment.map(|v| v as usize).ok_or_else(|| {
        let error = cursor.error(format!("has an unusable `{ALIGNMENT_KEY}`"));
        error.expected("a power of two").found(value).hint(DAMAGED)
    })
}

/// One line of the tensor table; the offset still counts from the start of the data.
fn tensor_entry(cursor: &mut Cursor<'_>, index: usize) -> Result<TensorInfo> {
    cursor.part = format!("the name of tensor {index}");
    let name = cursor.string()?;
    cursor.part = format!("the description of tensor `{name}`");
    let axes = u32::from_le_bytes(cursor.array()?) as usize;
    if axes > MAX_AXES {
        let error = cursor.error(format!("tensor `{name}` has too many axes"));
        return Err(error.expected(format!("at most {MAX_AXES}")).found(axes).hint(DAMAGED));
    }
    let mut shape = Vec::with_capacity(axes);
    for _ in 0..axes {
        shape.push(cursor.size()?);
    }
    // ggml counts axes from the fastest; everything else here from the slowest.
    shape.reverse();
    let number = u32::from_le_bytes(cursor.array()?);
    let dtype = DType::from_number(number).ok_or_else(|| {
        let error = cursor.error(format!("tensor `{name}` has a type that parity does not know"));
        error
            .expected("a type number of ggml 0.5.0 that was not withdrawn")
            .found(number)
            .hint("a newer parity may know it; otherwise requantise the model with `llama-quantize`")
    })?;
    let offset = cursor.size()?;
    let byte_len = byte_len(cursor, &name, dtype, &shape)?;
    Ok(TensorInfo { name, dtype, shape, offset, byte_len, shard: 0, loaded: Storage::F32 })
}

/// Bytes of a tensor; an error where they do not fit an address or a row is no whole number of blocks.
fn byte_len(cursor: &Cursor<'_>, name: &str, dtype: DType, shape: &[usize]) -> Result<usize> {
    let cols = shape.last().copied().unwrap_or(1);
    if cols % dtype.block_len() != 0 {
        return Err(cursor
            .error(format!("tensor `{name}` has rows that are no whole number of {dtype} blocks"))
            .expected(format!("a multiple of {}", dtype.block_len()))
            .found(format!("{cols} columns"))
            .hint(DAMAGED));
    }
    let elements = shape.iter().try_fold(1usize, |product, axis| product.checked_mul(*axis));
    // `elements` bounds the host's buffers too: 8 bytes each where decoded to f64.
    elements
        .filter(|n| n.checked_mul(8).is_some_and(|bytes| isize::try_from(bytes).is_ok()))
        .and_then(|n| (n / dtype.block_len()).checked_mul(dtype.block_bytes()))
        .ok_or_else(|| {
            let error = cursor.error(format!("tensor `{name}` is larger than memory can address"));
            error.found(format!("shape {shape:?} of {dtype}")).hint(DAMAGED)
        })
}

/// Counts the offsets from the start of the file and holds them against its length.
fn place(cursor: &Cursor<'_>, alignment: usize, tensors: &mut [TensorInfo]) -> Result<()> {
    let file_len = cursor.bytes.len();
    for tensor in tensors {
        let name = &tensor.name;
        if tensor.offset % alignment != 0 {
            return Err(cursor
                .error(format!("tensor `{name}` starts at a misaligned offset"))
                .expected(format!("a multiple of {alignment}"))
                .found(tensor.offset)
                .hint(DAMAGED));
        }
        let start = cursor.at.checked_next_multiple_of(alignment);
        let start = start.and_then(|data| data.checked_add(tensor.offset));
        let end = start.and_then(|start| start.checked_add(tensor.byte_len));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_len => tensor.offset = start,
            _ => {
                let end =
                    end.map_or("more bytes than can be addressed".to_owned(), |end| format!("{end} bytes"));
                return Err(cursor
                    .error(format!("ends before the data of tensor `{name}`"))
                    .expected(format!("at least {end}"))
                    .found(format!("{file_len} bytes"))
                    .hint(DAMAGED));
            }
        }
    }
    Ok(())
}

/// A place in the file, and what is being read there.
struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
    part: String,
}

impl<'a> Cursor<'a> {
    fn error(&self, message: impl Display) -> Error {
        Error::new(self.file, message)
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let taken = self.bytes[self.at..].get(..len).ok_or_else(|| {
            self.error(format!("ends inside {}", self.part))
                .expected(format!("{len} more bytes at offset {}", self.at))
                .found(format!("{} bytes", self.left()))
                .hint(DAMAGED)
        })?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// A 64-bit size that the host can address.
    fn size(&mut self) -> Result<usize> {
        let size = u64::from_le_bytes(self.array()?);
        usize::try_from(size).map_err(|_| {
            let error = self.error(format!("has a size in {} that this machine cannot address", self.part));
            error.found(size).hint(DAMAGED)
        })
    }

    /// A number of things of which each takes at least `min_bytes`: never more than the file can hold.
    fn count(&mut self, min_bytes: usize, things: &str) -> Result<usize> {
        let count = self.size()?;
        let most = self.left() / min_bytes;
        if count > most {
            return Err(self
                .error(format!("announces more {things} than it can hold in {}", self.part))
                .expected(format!("at most {most} in the {} bytes that are left", self.left()))
                .found(count)
                .hint(DAMAGED));
        }
        Ok(count)
    }

    fn string(&mut self) -> Result<String> {
        let len = self.count(1, "bytes of text")?;
        let text = self.take(len)?;
        std::str::from_utf8(text).map(str::to_owned).map_err(|error| {
            let error = self.error(format!("has text that is not UTF-8 in {}: {error}", self.part));
            error.found(format!("`{}`", text[..len.min(32)].escape_ascii())).hint(DAMAGED)
        })
    }

    fn bool(&mut self) -> Result<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => {
                let error = self.error(format!("has a bool that is neither 0 nor 1 in {}", self.part));
                Err(error.found(other).hint(DAMAGED))
            }
        }
    }

    fn value_type(&mut self) -> Result<ValueType> {
        let number = u32::from_le_bytes(self.array()?);
        ValueType::from_number(number).ok_or_else(|| {
            let error = self.error(format!("has an unknown value type in {}", self.part));
            error.expected("0 to 12").found(number).hint(DAMAGED)
        })
    }

    fn value(&mut self, kind: ValueType, nesting: usize) -> Result<Value> {
        Ok(match kind {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array()?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(self.array()?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array()?)),
            ValueType::Bool => Value::Bool(self.bool()?),
            ValueType::String => Value::String(self.string()?),
            ValueType::Array => Value::Array(self.values(nesting)?),
            ValueType::U64 => Value::U64(u64::from_le_bytes(self.array()?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array()?)),
        })
    }

    fn values(&mut self, nesting: usize) -> Result<Array> {
        if nesting == MAX_NESTING {
            let error = self.error(format!("nests arrays too deeply in {}", self.part));
            return Err(error.expected(format!("at most {MAX_NESTING} levels")).hint(DAMAGED));
        }
        Ok(match self.value_type()? {
            ValueType::U8 => Array::U8(self.numbers(u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(self.numbers(i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(self.numbers(u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(self.numbers(i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(self.numbers(u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(self.numbers(i32::from_le_bytes)?),
            ValueType::F32 => Array::F32(self.numbers(f32::from_le_bytes)?),
            ValueType::U64 => Array::U64(self.numbers(u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(self.numbers(i64::from_le_bytes)?),
            ValueType::F64 => Array::F64(self.numbers(f64::from_le_bytes)?),
            ValueType::Bool => Array::Bool(self.items(1, Cursor::bool)?),
            ValueType::String => Array::String(self.items(8, Cursor::string)?),
            ValueType::Array => Array::Array(self.items(4 + 8, |cursor| cursor.values(nesting + 1))?),
        })
    }

    fn numbers<T, const N: usize>(&mut self, from_le_bytes: fn([u8; N]) -> T) -> Result<Vec<T>> {
        self.items(N, |cursor| cursor.array().map(from_le_bytes))
    }

    /// A counted list of items of at least `min_bytes` each.
    fn items<T>(&mut self, min_bytes: usize, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.count(min_bytes, "elements")?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }
}
