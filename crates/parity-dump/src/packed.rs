//! Step files that are compressed: each tensor by itself, so that one can be read without the others.
//!
//! A packed step is a safetensors file still. A tensor that became smaller is listed as `U8`, a zstd frame, and the metadata
//! entry [`PACKED`] has its type and shape. In the frame bytes of equal rank lie side by side (those of a float's exponent
//! resemble one another, those of its mantissa do not), in blocks, so that neither direction needs a whole tensor in memory.
//! The manifest `requires` [`ZSTD_SHUFFLE`].

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Write};
#[cfg(feature = "zstd")]
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::Mmap;
use safetensors::Dtype;
#[cfg(feature = "zstd")]
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use crate::error::DumpError;
use crate::files::{map_file, unreadable};

/// What a manifest requires whose steps are packed.
pub const ZSTD_SHUFFLE: &str = "zstd-shuffle";
/// The metadata entry: JSON, by name of the tensor.
const PACKED: &str = "packed";
/// Bytes that are shuffled among themselves: few enough for a core's own cache, many enough for long runs of a rank.
const BLOCK: usize = 128 << 10;

/// What a packed tensor is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Plain {
    dtype: Dtype,
    shape: Vec<usize>,
}

/// A tensor of a step file, packed or not: where its bytes lie in the file, and what it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Its name.
    pub name: String,
    /// Bytes of the file from its start.
    pub range: std::ops::Range<u64>,
    /// The type that it has, or that it was packed from.
    dtype: Dtype,
    /// Likewise, slowest axis first.
    shape: Vec<usize>,
    is_packed: bool,
}

impl Stored {
    /// Bytes of its values.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |all, &n| all.checked_mul(n as u64))?;
        elements.checked_mul(self.dtype.bitsize() as u64).map(|bits| bits / 8)
    }

    /// Writes the values that `bytes`, those of its range, stand for.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn unpack(&self, bytes: &[u8], to: &mut impl Write) -> Result<(), String> {
        let wanted = self.bytes().ok_or("its shape stands for too many values")?;
        let written = |e: std::io::Error| format!("cannot be written: {e}");
        if !self.is_packed {
            if bytes.len() as u64 != wanted {
                return Err(format!("{} bytes for the {wanted} of its shape", bytes.len()));
            }
            return to.write_all(bytes).map_err(written);
        }
        let size = self.dtype.bitsize() / 8;
        let (mut left, mut block, mut plain) = (wanted, Vec::new(), Vec::new());
        let mut frame = decoder(bytes)?;
        while left > 0 {
            let n = left.min(BLOCK as u64) as usize;
            block.resize(n, 0);
            frame.read_exact(&mut block).map_err(|e| format!("is no whole zstd frame: {e}"))?;
            unshuffle(&block, size, &mut plain);
            to.write_all(&plain).map_err(written)?;
            left -= n as u64;
        }
        match frame.read(&mut [0]) {
            Ok(0) => Ok(()),
            _ => Err(format!("holds more than the {wanted} bytes of its shape")),
        }
    }
}

/// Reads what a zstd frame holds.
///
/// # Errors
/// Bytes that begin otherwise.
#[cfg(not(feature = "zstd"))]
pub fn decoder(bytes: &[u8]) -> Result<impl Read, String> {
    ruzstd::decoding::StreamingDecoder::new(bytes).map_err(|e| format!("is no zstd frame: {e}"))
}

/// Reads what a zstd frame holds.
///
/// # Errors
/// Bytes that begin otherwise.
#[cfg(feature = "zstd")]
pub fn decoder(bytes: &[u8]) -> Result<impl Read, String> {
    zstd::stream::read::Decoder::with_buffer(bytes).map_err(|e| format!("is no zstd frame: {e}"))
}

/// Bytes by their rank within elements of `size` bytes; what is left of a last element stays as it is.
#[cfg(feature = "zstd")]
fn shuffle(block: &[u8], size: usize, out: &mut Vec<u8>) {
    out.clear();
    let whole = block.len() / size * size;
    for rank in 0..size {
        out.extend(block[..whole].iter().skip(rank).step_by(size));
    }
    out.extend_from_slice(&block[whole..]);
}

/// The reverse of `shuffle`.
fn unshuffle(block: &[u8], size: usize, out: &mut Vec<u8>) {
    out.clear();
    out.resize(block.len(), 0);
    let n = block.len() / size;
    let (ranks, rest) = block.split_at(n * size);
    match size {
        4 => {
            let (a, ranks) = ranks.split_at(n);
            let (b, ranks) = ranks.split_at(n);
            let (c, d) = ranks.split_at(n);
            for (i, element) in out.chunks_exact_mut(4).enumerate() {
                element.copy_from_slice(&[a[i], b[i], c[i], d[i]]);
            }
        }
        _ => {
            for (rank, bytes) in ranks.chunks_exact(n.max(1)).enumerate() {
                out.iter_mut().skip(rank).step_by(size).zip(bytes).for_each(|(to, byte)| *to = *byte);
            }
        }
    }
    out[n * size..].copy_from_slice(rest);
}

/// Bytes that the length of a header takes in front of it.
pub const LENGTH_BYTES: usize = 8;

/// The tensors of a step file, of which `head` is a beginning that holds the whole header, in the order in which they lie.
///
/// # Errors
/// What is wrong with the header.
pub fn stored(head: &[u8]) -> Result<Vec<Stored>, String> {
    let (length, rest) = head.split_first_chunk::<LENGTH_BYTES>().ok_or("no header")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok();
    let text = length.and_then(|length| rest.get(..length)).ok_or("its header is longer than the file")?;
    let metadata: Metadata = serde_json::from_slice(text).map_err(|e| format!("its header: {e}"))?;
    let start = (LENGTH_BYTES + text.len()) as u64;
    let text = metadata.metadata().as_ref().and_then(|all| all.get(PACKED));
    let packed: HashMap<String, Plain> = match text {
        Some(text) => serde_json::from_str(text).map_err(|e| format!("its list of packed tensors: {e}"))?,
        None => HashMap::new(),
    };
    let mut all = Vec::new();
    for (name, info) in metadata.tensors() {
        let (from, to) = info.data_offsets;
        let end = start.checked_add(to as u64).filter(|_| from <= to);
        let range = start + from as u64..end.ok_or_else(|| format!("{name} lies nowhere"))?;
        let of = packed.get(&name);
        if of.is_some_and(|plain| info.dtype != Dtype::U8 || plain.dtype.bitsize() % 8 != 0) {
            return Err(format!("{name} is listed as packed, and is {:?}", info.dtype));
        }
        let (dtype, shape) = of.map_or((info.dtype, &info.shape), |plain| (plain.dtype, &plain.shape));
        all.push(Stored { name, range, dtype, shape: shape.clone(), is_packed: of.is_some() });
    }
    all.sort_by_key(|tensor| tensor.range.start);
    Ok(all)
}

/// Whether the header of a step lists packed tensors.
pub fn is_packed(tensors: &[Stored]) -> bool {
    tensors.iter().any(|tensor| tensor.is_packed)
}

/// Header of a safetensors file with these tensors, one after another: name, what it is, bytes.
fn header<'t>(
    tensors: impl Iterator<Item = (&'t str, Dtype, &'t [usize], u64)>,
    packed: &BTreeMap<&str, Plain>,
) -> Result<Vec<u8>, String> {
    let mut json = serde_json::Map::new();
    if !packed.is_empty() {
        let text = serde_json::to_string(packed).map_err(|e| e.to_string())?;
        json.insert("__metadata__".to_owned(), serde_json::json!({ PACKED: text }));
    }
    let mut end = 0;
    for (name, dtype, shape, bytes) in tensors {
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes] });
        json.insert(name.to_owned(), entry);
        end += bytes;
    }
    let mut text = serde_json::to_vec(&json).map_err(|e| e.to_string())?;
    // What follows is aligned for any element.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    Ok(out)
}

/// Bytes of each tensor's values, and the header of a plain step file of them.
fn plain_header(tensors: &[Stored]) -> Result<(Vec<u64>, Vec<u8>), String> {
    let too_many = |tensor: &Stored| format!("{}: its shape stands for too many values", tensor.name);
    let sizes: Vec<u64> = tensors
        .iter()
        .map(|tensor| tensor.bytes().ok_or_else(|| too_many(tensor)))
        .collect::<Result<_, _>>()?;
    let listed = tensors.iter().zip(&sizes);
    let listed = listed.map(|(t, &bytes)| (t.name.as_str(), t.dtype, t.shape.as_slice(), bytes));
    let head = header(listed, &BTreeMap::new())?;
    Ok((sizes, head))
}

/// Writes a plain step file of these tensors, whose stored bytes `get` gives in turn.
///
/// # Errors
/// What is wrong, with the tensor's name.
pub fn write_plain(
    tensors: &[Stored],
    mut get: impl FnMut(&Stored) -> Result<Vec<u8>, String>,
    to: &mut impl Write,
) -> Result<(), String> {
    to.write_all(&plain_header(tensors)?.1).map_err(|e| format!("cannot be written: {e}"))?;
    for tensor in tensors {
        let bytes = get(tensor)?;
        tensor.unpack(&bytes, to).map_err(|what| format!("{}: {what}", tensor.name))?;
    }
    Ok(())
}

/// A step file as it is read: mapped, or unpacked into a temporary file that is mapped.
pub(crate) fn map_step(path: &Path) -> Result<Mmap, DumpError> {
    let map = map_file(path)?;
    let tensors = stored(&map).map_err(|e| unreadable(path, &e))?;
    if !is_packed(&tensors) {
        return Ok(map);
    }
    let failed = |what: String| DumpError::new(path, format!("cannot be unpacked: {what}"));
    let file = tempfile::tempfile().map_err(|e| failed(e.to_string()))?;
    unpack_all(&map, &tensors, &file).map_err(failed)?;
    // SAFETY: nobody else has the file: it has no name.
    unsafe { Mmap::map(&file) }.map_err(|e| failed(e.to_string()))
}

/// Writes what the step file `map` has packed, a tensor on each core at a time: one core alone is slower than a disk.
fn unpack_all(map: &[u8], tensors: &[Stored], file: &File) -> Result<(), String> {
    let (sizes, head) = plain_header(tensors)?;
    let mut offset = head.len() as u64;
    At { file, offset: 0 }.write_all(&head).map_err(|e| format!("cannot be written: {e}"))?;
    let mut places = Vec::with_capacity(tensors.len());
    for (tensor, bytes) in tensors.iter().zip(&sizes) {
        places.push((tensor, offset));
        offset = offset.checked_add(*bytes).ok_or("its shapes stand for too many values")?;
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&(tensor, offset)) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
            let range = tensor.range.start as usize..tensor.range.end as usize;
            let bytes = map.get(range).ok_or_else(|| format!("{}: the file ends before it", tensor.name))?;
            let unpacked = tensor.unpack(bytes, &mut At { file, offset });
            unpacked.map_err(|what| format!("{}: {what}", tensor.name))?;
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(tensors.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..cores).map(|_| scope.spawn(work)).collect();
        let mut all = vec![work()];
        all.extend(
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
        );
        all.into_iter().collect()
    })
}

/// Writes to a file from an offset on, whoever else writes to other places of it.
struct At<'f> {
    file: &'f File,
    offset: u64,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        #[cfg(unix)]
        let n = std::os::unix::fs::FileExt::write_at(self.file, bytes, self.offset)?;
        #[cfg(windows)]
        let n = std::os::windows::fs::FileExt::seek_write(self.file, bytes, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Packs a step file: every tensor that becomes smaller by it. Returns the bytes before and after.
///
/// # Errors
/// Names the file, and what is wrong with it.
#[cfg(feature = "zstd")]
pub fn pack(from: &Path, to: &mut File) -> Result<[u64; 2], DumpError> {
    let map = map_file(from)?;
    let file = SafeTensors::deserialize(&map).map_err(|e| unreadable(from, &e))?;
    let failed = |e: std::io::Error| DumpError::new(from, format!("cannot be packed: {e}"));
    let wrong = |e: String| DumpError::new(from, format!("cannot be packed: {e}"));
    let mut body = tempfile::tempfile().map_err(failed)?;
    let (mut packed, mut listed) = (BTreeMap::new(), Vec::new());
    let order = stored(&map).map_err(|e| unreadable(from, &e))?;
    if is_packed(&order) {
        return Err(DumpError::new(from, "is packed already"));
    }
    for tensor in &order {
        let view = file.tensor(&tensor.name).map_err(|e| unreadable(from, &e))?;
        let frame = compressed(view.data(), tensor.dtype.bitsize() / 8).map_err(failed)?;
        if frame.len() < view.data().len() {
            body.write_all(&frame).map_err(failed)?;
            let plain = Plain { dtype: tensor.dtype, shape: tensor.shape.clone() };
            packed.insert(tensor.name.as_str(), plain);
            listed.push((tensor.name.as_str(), Dtype::U8, vec![frame.len()], frame.len() as u64));
        } else {
            body.write_all(view.data()).map_err(failed)?;
            listed.push((tensor.name.as_str(), tensor.dtype, tensor.shape.clone(), view.data().len() as u64));
        }
    }
    let entries = listed.iter().map(|(name, dtype, shape, n)| (*name, *dtype, shape.as_slice(), *n));
    to.write_all(&header(entries, &packed).map_err(wrong)?).map_err(failed)?;
    body.seek(SeekFrom::Start(0)).map_err(failed)?;
    std::io::copy(&mut body, to).map_err(failed)?;
    Ok([map.len() as u64, to.stream_position().map_err(failed)?])
}

/// Level of zstd: 3 and 9 save less than one percent more of shuffled floats, and take twice and seven times as long.
#[cfg(feature = "zstd")]
const LEVEL: i32 = 1;

#[cfg(feature = "zstd")]
fn compressed(bytes: &[u8], size: usize) -> std::io::Result<Vec<u8>> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?;
    let mut shuffled = Vec::new();
    for block in bytes.chunks(BLOCK) {
        shuffle(block, size.max(1), &mut shuffled);
        encoder.write_all(&shuffled)?;
    }
    encoder.finish()
}

/// Packs the steps of a whole dump where it lies: each under a temporary name first, the manifest last, so that it can be
/// read at any time. Returns the bytes of all steps before and after.
///
/// # Errors
/// Names the file, and what is wrong with it.
#[cfg(feature = "zstd")]
pub fn pack_folder(dir: &Path) -> Result<[u64; 2], DumpError> {
    use crate::files::{read_manifest, write_manifest};
    let mut manifest = read_manifest(dir)?;
    // Readers that know nothing of it refuse the dump from here on.
    if !manifest.requires.iter().any(|name| name == ZSTD_SHUFFLE) {
        manifest.requires.push(ZSTD_SHUFFLE.to_owned());
    }
    write_manifest(dir, &manifest)?;
    let mut all = [0; 2];
    for step in &manifest.steps {
        let path = dir.join(&step.file);
        if is_packed(&stored(&map_file(&path)?).map_err(|e| unreadable(&path, &e))?) {
            continue;
        }
        let part = dir.join(format!("{}.part", step.file));
        let failed = |e: std::io::Error| DumpError::new(&part, format!("cannot be written: {e}"));
        let mut file = File::create(&part).map_err(failed)?;
        let [before, after] = pack(&path, &mut file)?;
        std::fs::rename(&part, &path).map_err(failed)?;
        (all[0], all[1]) = (all[0] + before, all[1] + after);
    }
    Ok(all)
}

#[cfg(all(test, feature = "zstd"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_read_back_to_the_last_bit() {
        for size in [1, 2, 4, 8] {
            for n in [0, 1, 3, size, BLOCK - 1, BLOCK + 7, 3 * BLOCK] {
                let bytes: Vec<u8> = (0..n).map(|i| (i * i / 7 % 251) as u8).collect();
                let frame = compressed(&bytes, size).unwrap();
                let dtype = [Dtype::U8, Dtype::F16, Dtype::F32, Dtype::I64][size.ilog2() as usize];
                let shape = vec![n / size];
                let tensor = Stored { name: "x".into(), range: 0..0, dtype, shape, is_packed: true };
                let whole = &bytes[..n / size * size];
                let frame = if whole.len() == n { frame } else { compressed(whole, size).unwrap() };
                let mut out = Vec::new();
                tensor.unpack(&frame, &mut out).unwrap();
                assert!(out == whole, "{size} {n}");
                // The decoder of builds without the library reads the same.
                let mut rust = Vec::new();
                let mut decoder = ruzstd::decoding::StreamingDecoder::new(&frame[..]).unwrap();
                decoder.read_to_end(&mut rust).unwrap();
                assert_eq!(rust.len(), whole.len());
                let longer = Stored { shape: vec![n / size + 1], ..tensor.clone() };
                assert!(longer.unpack(&frame, &mut Vec::new()).is_err(), "{size} {n}: more was asked for");
                if n >= size && n > 0 {
                    let shorter = Stored { shape: vec![n / size - 1], ..tensor };
                    assert!(shorter.unpack(&frame, &mut Vec::new()).is_err(), "{size} {n}: less was");
                }
            }
        }
    }
}
