//! The weights of a model, decoded where and when a node reads them.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::gguf::{DType, Gguf, TensorRef};
use crate::model::edit::Reading;
use crate::model::graph::WeightRef;
use crate::model::misread;
use crate::scalar::Scalar;

/// A weight matrix (rows, cols) as a node reads it. A vector is one row.
#[derive(Clone, Copy)]
pub struct Weight<'a> {
    tensor: TensorRef<'a>,
    reading: &'a Reading,
}

impl<'a> Weight<'a> {
    /// Looks a weight up.
    pub fn find(gguf: &'a Gguf, weight: &'a WeightRef) -> Result<Weight<'a>> {
        let tensor = gguf.tensor(&weight.name).ok_or_else(|| {
            Error::file(gguf.path(), format!("no tensor {}", weight.name))
                .hint(format!("parity inspect {} lists the tensors", gguf.path().display()))
        })?;
        Ok(Weight { tensor, reading: &weight.reading })
    }

    /// Output features; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.tensor.rows()
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.tensor.cols()
    }

    /// The type it is stored in.
    pub fn dtype(&self) -> DType {
        self.tensor.info.dtype
    }

    /// The stored tensor, without regard to how it is read.
    pub fn stored(&self) -> TensorRef<'a> {
        self.tensor
    }

    /// Rows `rows` into `out`, (rows, cols).
    pub fn decode_rows<S: Scalar>(&self, rows: Range<usize>, out: &mut [S]) {
        match *self.reading {
            Reading::AsStored => self.tensor.decode_rows(rows, out),
            Reading::RowShift(shift) => {
                let cols = self.cols();
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    let from = (row as i64 + shift).rem_euclid(self.rows() as i64) as usize;
                    self.tensor.decode_rows(from..from + 1, out);
                }
            }
            Reading::Transposed => self.decode_transposed(rows, out),
            Reading::HeadRows { width, pairs_for_halves } => {
                let cols = self.cols();
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    let from = head_row(row, width.max(2), pairs_for_halves).min(self.rows() - 1);
                    self.tensor.decode_rows(from..from + 1, out);
                }
            }
            Reading::Unfilled => out.fill(S::ZERO),
            Reading::Misread(misreading) => misread::decode_rows(misreading, &self.tensor, rows, out),
        }
    }

    /// The whole matrix, (rows, cols).
    pub fn decode<S: Scalar>(&self) -> Vec<S> {
        let mut out = vec![S::ZERO; self.rows() * self.cols()];
        self.decode_rows(0..self.rows(), &mut out);
        out
    }

    /// w[r, c] = buffer[c·R + r]: for each column one run of the buffer.
    fn decode_transposed<S: Scalar>(&self, rows: Range<usize>, out: &mut [S]) {
        let (all_rows, cols) = (self.rows(), self.cols());
        let mut run = vec![S::ZERO; rows.len()];
        for c in 0..cols {
            self.decode_run(c * all_rows + rows.start, &mut run);
            for (r, value) in run.iter().enumerate() {
                out[r * cols + c] = *value;
            }
        }
    }

    /// Consecutive elements of the buffer from `start`, decoded by whole blocks.
    fn decode_run<S: Scalar>(&self, start: usize, out: &mut [S]) {
        let info = self.tensor.info;
        let (len, bytes) = (info.dtype.block_len(), info.dtype.block_bytes());
        let blocks = start / len..(start + out.len()).div_ceil(len);
        let mut decoded = vec![S::ZERO; blocks.len() * len];
        let stored = &self.tensor.bytes[blocks.start * bytes..blocks.end * bytes];
        crate::gguf::decode(info.dtype, stored, &mut decoded);
        let skip = start - blocks.start * len;
        out.copy_from_slice(&decoded[skip..skip + out.len()]);
    }
}

/// The row of the file that a reader takes for `row` when it mistakes pairs for halves, or the reverse.
fn head_row(row: usize, width: usize, pairs_for_halves: bool) -> usize {
    let (head, within) = (row / width * width, row % width);
    let half = width / 2;
    head + match pairs_for_halves {
        // Taken for halves: i and i + half; the file has that pair at 2i and 2i + 1.
        true => within % half * 2 + within / half,
        false => within % 2 * half + within / 2,
    }
}
