//! Values in the middle between two roundings: the recorded output shows to which side they went.

use std::collections::BTreeMap;

use super::super::source::Data;
use super::{Problem, form};
use crate::arithmetic::cache_blocks;
use crate::arithmetic::round::{self, ScaleTie, Tie};
use crate::gguf;

/// What a tie moves: one value, or all values of a block by its scale.
#[derive(Clone, Copy)]
enum Moves<'a> {
    Value(&'a Tie),
    Scale(&'a ScaleTie),
}

impl Moves<'_> {
    fn row(&self) -> usize {
        match self {
            Moves::Value(tie) => tie.row,
            Moves::Scale(tie) => tie.row,
        }
    }
}

/// By how much the squared distance to what was recorded shrinks where these outputs are moved.
fn gain(moved: &[(usize, Vec<f64>)], exact: &[f64], recorded: &[f64], m: usize) -> f64 {
    let mut gain = 0.0;
    for (result, moved) in moved {
        let both = recorded[result * m..].iter().zip(&exact[result * m..]);
        for (moved, (recorded, exact)) in moved.iter().zip(both) {
            gain += (2.0 * (recorded - exact) - moved) * moved;
        }
    }
    gain
}

impl Problem<'_, '_, f64> {
    /// A tie is rounded to the side that the recorded output says: each moves all outputs of its row by a known
    /// column of the matrices, so that the output shows it hundreds of times over. Of several ties of a row, whose
    /// columns may be much alike, the one that brings the row nearest goes first.
    pub fn settle(&self, exact: &mut [f64], recorded: &[f64]) {
        let m = self.outputs();
        let few = round::few_per_row(self.x.ties.clone(), self.x.values.rows);
        let scales = self.x.scale_ties.iter().map(Moves::Scale);
        let mut of_row: BTreeMap<usize, Vec<Moves<'_>>> = BTreeMap::new();
        few.iter()
            .map(Moves::Value)
            .chain(scales)
            .for_each(|tie| of_row.entry(tie.row()).or_default().push(tie));
        for (row, ties) in of_row {
            let met = self.meetings.iter().flat_map(|meeting| {
                meeting.pairs.iter().filter(|(x, _)| *x == row).map(|(_, result)| (meeting.matrix, *result))
            });
            let met: Vec<(usize, usize)> = met.collect();
            let mut open: Vec<Vec<(usize, Vec<f64>)>> = ties
                .iter()
                .map(|tie| met.iter().map(|(matrix, result)| (*result, self.moved(*tie, *matrix))).collect())
                .collect();
            while let Some((best, _)) = open
                .iter()
                .map(|moved| gain(moved, exact, recorded, m))
                .enumerate()
                .filter(|(_, gain)| *gain > 0.0)
                .max_by(|a, b| a.1.total_cmp(&b.1))
            {
                for (result, moved) in open.swap_remove(best) {
                    exact[result * m..].iter_mut().zip(moved).for_each(|(exact, moved)| *exact += moved);
                }
            }
        }
    }

    /// How the outputs of one matrix (m,) move where a tie is rounded to the other side.
    fn moved(&self, tie: Moves<'_>, matrix: usize) -> Vec<f64> {
        let m = self.outputs();
        let tie = match tie {
            Moves::Value(tie) => tie,
            Moves::Scale(tie) => {
                let mut out = vec![0.0; m];
                for (i, moved) in tie.values.iter().enumerate().filter(|(_, moved)| **moved != 0.0) {
                    let column = self.column(matrix, tie.col + i);
                    out.iter_mut().zip(column).for_each(|(out, w)| *out += w * moved);
                }
                return out;
            }
        };
        let mut out: Vec<f64> = self.column(matrix, tie.col).into_iter().map(|w| w * tie.value).collect();
        if tie.sum != 0.0
            && let Some(group) = gguf::minimum_group(self.weight.dtype)
        {
            let groups = self.x.values.cols / group;
            let mut minima = vec![0.0; m * groups];
            self.minima(matrix, 0..m, group, &mut minima);
            for (out, minima) in out.iter_mut().zip(minima.chunks_exact(groups)) {
                *out += minima[tie.col / group] * tie.sum;
            }
        }
        out
    }

    /// One column of a matrix, (m,): of a weight, one block of each row is decoded.
    fn column(&self, matrix: usize, col: usize) -> Vec<f64> {
        let [_, b, m, _] = self.weight.shape();
        match &self.weight.data {
            Data::Values(values) => {
                let group = self.form.and_then(|form| form.group);
                let of = |row: usize| {
                    let row = values.row([matrix / b, matrix % b, row]);
                    let block = group.map(|group| &row[col / group * group..][..group]);
                    row[col] - block.map_or(0.0, |block| cache_blocks::group(self.weight.dtype, block).1)
                };
                (0..m).map(of).collect()
            }
            Data::Weight(weight) => {
                let (len, bytes) = (self.weight.dtype.block_len(), self.weight.dtype.block_bytes());
                let mut block = vec![0.0; len];
                let start = col / len * bytes;
                let decode = |row: usize| {
                    let stored = weight.row_bytes(matrix * m + row..matrix * m + row + 1);
                    let stored = &stored[start..start + bytes];
                    gguf::decode(self.weight.dtype, stored, &mut block);
                    if let Some(form) = self.form {
                        form::apply(form, self.weight.dtype, stored, &mut block);
                    }
                    block[col % len]
                };
                (0..m).map(decode).collect()
            }
        }
    }
}
