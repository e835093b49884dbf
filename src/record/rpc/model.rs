//! The model file behind a client: which tokens the rows of its embedding are, and whether the weights that it sends are the
//! file's.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use parity_graph::weights::{TOKEN_EMBD, weight};
use rayon::prelude::*;

use super::wire::WireTensor;
use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorRef};

/// A model file, and what was seen of it on the wire.
pub struct Model {
    /// The file.
    pub path: PathBuf,
    gguf: Gguf,
    /// The first token with a row of this hash.
    rows: OnceLock<HashMap<u64, u32>>,
    /// Bytes of each weight that were sent, and whether all were the file's.
    sent: BTreeMap<String, (u64, bool)>,
}

impl Model {
    /// Opens it.
    ///
    /// # Errors
    /// As for [`Gguf::open`], and a file without a token embedding that can be decoded.
    pub fn open(path: &Path) -> Result<Model> {
        let gguf = Gguf::open(path)?;
        let model = Model { path: path.to_owned(), gguf, rows: OnceLock::new(), sent: BTreeMap::new() };
        let table = model.gguf.weight(&weight(TOKEN_EMBD))?;
        if !table.info.dtype.is_decodable() {
            return Err(Error::file(
                path,
                format!("{} cannot be decoded, and tells no tokens", weight(TOKEN_EMBD)),
            )
            .found(table.info.dtype));
        }
        Ok(model)
    }

    fn table(&self) -> Option<TensorRef<'_>> {
        self.gguf.tensor(&weight(TOKEN_EMBD))
    }

    /// Whether the file has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// The width of a row of the embedding.
    pub fn width(&self) -> usize {
        self.table().map_or(0, |table| table.cols())
    }

    /// The tokens of (T, D) rows of f32 bytes, exactly the file's rows, the first of those that are alike; `None` where one is
    /// no row of the file.
    pub fn tokens(&self, rows: &[u8]) -> Option<Vec<u32>> {
        let table = self.table()?;
        let hashes = self.rows.get_or_init(|| hashes(&table));
        let mut own = vec![0f32; table.cols()];
        let token = |row: &[u8]| {
            let token = *hashes.get(&hash(row))?;
            table.decode_rows(token as usize..token as usize + 1, &mut own);
            let same = own.iter().zip(row.chunks_exact(4)).all(|(value, bytes)| value.to_le_bytes() == bytes);
            same.then_some(token)
        };
        rows.chunks_exact(4 * table.cols()).map(token).collect()
    }

    /// The embedding as a tensor on the wire, without values.
    pub fn table_on_the_wire(&self) -> Option<WireTensor> {
        let table = self.table()?;
        WireTensor::leaf(&weight(TOKEN_EMBD), table.info.dtype, [table.rows(), table.cols()])
    }

    /// Notes bytes of a tensor that were sent, or a hash (FNV-1a, 64 bits) of all from `offset` on.
    pub fn sent(&mut self, tensor: &WireTensor, offset: u64, bytes: Sent<'_>) {
        let name = tensor.name();
        let Some(file) = self.gguf.tensor(&name) else { return };
        let own = usize::try_from(offset).ok().and_then(|offset| file.bytes.get(offset..));
        let (length, same) = match (bytes, own) {
            (Sent::Bytes(bytes), Some(own)) => (bytes.len(), own.get(..bytes.len()) == Some(bytes)),
            (Sent::Hash(hash), Some(own)) => (own.len(), fnv(own) == hash),
            (_, None) => (0, false),
        };
        let (sent, equal) = self.sent.entry(name).or_insert((0, true));
        *sent += length as u64;
        *equal &= same;
    }

    /// The first weight that was sent with other bytes than the file's.
    pub fn other_weight(&self) -> Option<&str> {
        self.sent.iter().find(|(_, (_, equal))| !equal).map(|(name, _)| name.as_str())
    }

    /// How much of the file was sent and compared, in a sentence.
    pub fn compared(&self) -> String {
        let whole = |(name, (sent, equal)): &(&String, &(u64, bool))| {
            *equal && self.gguf.tensor(name).is_some_and(|weight| *sent >= weight.bytes.len() as u64)
        };
        let whole = self.sent.iter().filter(whole).count();
        format!("{whole} of {} tensors were sent with the file's bytes", self.gguf.tensors().len())
    }
}

/// What was sent of a tensor.
pub enum Sent<'a> {
    /// Its bytes.
    Bytes(&'a [u8]),
    /// A hash of them.
    Hash(u64),
}

fn hash(row: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(row);
    hasher.finish()
}

fn hashes(table: &TensorRef<'_>) -> HashMap<u64, u32> {
    let of = |token: usize| {
        let mut row = vec![0f32; table.cols()];
        table.decode_rows(token..token + 1, &mut row);
        hash(&row.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
    };
    let each: Vec<u64> = (0..table.rows()).into_par_iter().map(of).collect();
    // From the last to the first, so that the first of those that are alike stays.
    each.into_iter().enumerate().rev().map(|(token, hash)| (hash, token as u32)).collect()
}

/// ggml's hash of bytes that a server may have kept.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
