//! A tensor of a file: its description, its bytes, its values.

use std::ops::Range;

use rayon::prelude::*;

use super::blocks::decode;
use super::dtype::DType;
use crate::numerics::Storage;
use crate::scalar::{self, Scalar};

/// Values that one task of a parallel decode writes, at least: below, starting tasks costs more than decoding.
const VALUES_PER_TASK: usize = 1 << 16;

/// One line of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// E.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// How the values are stored.
    pub dtype: DType,
    /// Slowest axis first: ggml's `ne` turned round.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file that holds it.
    pub offset: usize,
    /// Bytes.
    pub byte_len: usize,
    /// Which file of a split model holds it, from 0.
    pub shard: usize,
    /// The type that values are rounded to as they are decoded, for an engine that loads them so; f32: not at all.
    pub loaded: Storage,
}

impl TensorInfo {
    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Product of all axes but the fastest; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, slower)| slower.iter().product())
    }

    /// The fastest axis.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Whether it is one row in f32, as weights of norms and biases are.
    pub fn is_plain_vector(&self) -> bool {
        self.shape.len() == 1 && self.dtype == DType::F32
    }

    /// Whether it is such a row, and added.
    pub fn is_bias(&self) -> bool {
        self.is_plain_vector() && self.name.ends_with(".bias")
    }

    /// Decodes whole blocks, and rounds what they hold.
    fn load<S: Scalar>(&self, bytes: &[u8], out: &mut [S]) {
        decode(self.dtype, bytes, out);
        self.loaded.store(out);
    }

    /// Bytes of one row.
    pub fn row_len_bytes(&self) -> usize {
        self.cols() / self.dtype.block_len() * self.dtype.block_bytes()
    }
}

/// A tensor whose bytes are at hand.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    /// Description.
    pub info: &'a TensorInfo,
    /// The stored blocks, `info.byte_len` of them.
    pub bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    /// Product of all axes but the fastest; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.info.rows()
    }

    /// The fastest axis.
    pub fn cols(&self) -> usize {
        self.info.cols()
    }

    /// The stored blocks of some rows.
    ///
    /// # Panics
    /// If there are fewer rows (a mistake in the caller, not in data).
    pub fn row_bytes(&self, rows: Range<usize>) -> &'a [u8] {
        let len = self.info.row_len_bytes();
        &self.bytes[rows.start * len..rows.end * len]
    }

    /// Some rows alone: what describes a matrix of them, and their bytes.
    ///
    /// # Panics
    /// If there are fewer rows (a mistake in the caller, not in data).
    pub fn gathered(&self, rows: &[usize]) -> (TensorInfo, Vec<u8>) {
        let bytes: Vec<u8> = rows.iter().flat_map(|&row| self.row_bytes(row..row + 1)).copied().collect();
        let shape = vec![rows.len(), self.cols()];
        (TensorInfo { shape, byte_len: bytes.len(), ..self.info.clone() }, bytes)
    }

    /// Decodes some rows into `out`, (rows, cols), on this thread.
    ///
    /// # Panics
    /// If `out` has another length, there are fewer rows, or the type is not decodable. The last is
    /// refused with an error by [`super::Gguf::require_tensor`] and [`super::Gguf::optional_tensor`].
    pub fn decode_rows<S: Scalar>(&self, rows: Range<usize>, out: &mut [S]) {
        self.info.load(self.row_bytes(rows), out);
    }

    /// All values, (rows, cols), decoded on all threads.
    ///
    /// # Panics
    /// If the type is not decodable: see [`TensorRef::decode_rows`].
    pub fn decode<S: Scalar>(&self) -> Vec<S> {
        let (len, bytes) = (self.info.dtype.block_len(), self.info.dtype.block_bytes());
        let blocks = VALUES_PER_TASK / len;
        let mut values = scalar::zeros(self.info.elements());
        values
            .par_chunks_mut(blocks * len)
            .zip(self.bytes.par_chunks(blocks * bytes))
            .for_each(|(out, bytes)| self.info.load(bytes, out));
        values
    }
}
