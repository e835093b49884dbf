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

/// Which of these columns, each added once or not at all, bring a row nearest to what was recorded, from which it is
/// `missing` something. One or two are added or taken back at a time, those that help most, until none does. One at a time
/// would not do: where columns are much alike, as those of weights whose minimum is kept apart, two ties that were rounded
/// up and down each lead away from the row when taken alone.
fn nearest(columns: &[Vec<f64>], missing: &[f64]) -> Vec<bool> {
    let n = columns.len();
    let of: Vec<Vec<f64>> = columns.iter().map(|a| columns.iter().map(|b| dot(a, b)).collect()).collect();
    let mut towards: Vec<f64> = columns.iter().map(|column| dot(column, missing)).collect();
    let distance = dot(missing, missing);
    let mut taken = vec![false; n];
    // Each step covers more than a sum of squares resolves, so that this ends; twice for each is more than it takes.
    for _ in 0..2 * n {
        let sign = |i: usize| if taken[i] { -1.0 } else { 1.0 };
        let alone = |i: usize| 2.0 * sign(i) * towards[i] - of[i][i];
        let pairs = (0..n).flat_map(|i| (i..n).map(move |j| (i, j)));
        let gain = |(i, j): (usize, usize)| match i == j {
            true => alone(i),
            false => alone(i) + alone(j) - 2.0 * sign(i) * sign(j) * of[i][j],
        };
        let best = pairs.map(|pair| (pair, gain(pair))).max_by(|a, b| a.1.total_cmp(&b.1));
        let Some(((i, j), _)) = best.filter(|(_, gained)| *gained > f64::EPSILON * distance) else {
            break;
        };
        let moved: Vec<usize> = if i == j { vec![i] } else { vec![i, j] };
        for moved in moved {
            let by = if taken[moved] { 1.0 } else { -1.0 };
            towards.iter_mut().zip(&of[moved]).for_each(|(towards, of)| *towards += by * of);
            taken[moved] = !taken[moved];
        }
    }
    taken
}

/// The sum of products.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Problem<'_, '_, f64> {
    /// A tie is rounded to the side that the recorded output says: each moves all outputs of its row by a known
    /// column of the matrices, so that the output shows it hundreds of times over.
    pub fn settle(&self, exact: &mut [f64], recorded: &[f64]) {
        let m = self.outputs();
        for (row, ties) in self.moves() {
            let met = self.met(row);
            let rows = || met.iter().map(|(_, result)| result * m..(result + 1) * m);
            let missing: Vec<f64> = rows().flatten().map(|i| recorded[i] - exact[i]).collect();
            let of = |tie: &Moves<'_>| met.iter().flat_map(|(matrix, _)| self.moved(*tie, *matrix)).collect();
            let columns: Vec<Vec<f64>> = ties.iter().map(of).collect();
            let taken = nearest(&columns, &missing);
            for (column, _) in columns.iter().zip(taken).filter(|(_, taken)| *taken) {
                rows().flatten().zip(column).for_each(|(i, moved)| exact[i] += moved);
            }
        }
    }

    /// How far ties may move each output where no recorded one shows to which side they went.
    pub fn unsettled(&self) -> Vec<f64> {
        let m = self.outputs();
        let mut off = vec![0.0; self.rows * m];
        for (row, ties) in self.moves() {
            for (matrix, result) in self.met(row) {
                for moved in ties.iter().map(|tie| self.moved(*tie, matrix)) {
                    off[result * m..].iter_mut().zip(moved).for_each(|(off, moved)| *off += moved.abs());
                }
            }
        }
        off
    }

    /// The ties of each row that has few of them.
    fn moves(&self) -> BTreeMap<usize, Vec<Moves<'_>>> {
        let few = round::few_per_row(&self.x.ties, self.x.values.rows);
        let scales = self.x.scale_ties.iter().map(Moves::Scale);
        let mut of_row: BTreeMap<usize, Vec<Moves<'_>>> = BTreeMap::new();
        few.into_iter()
            .map(Moves::Value)
            .chain(scales)
            .for_each(|tie| of_row.entry(tie.row()).or_default().push(tie));
        of_row
    }

    /// The matrices that a row meets, each with the row of the result.
    fn met(&self, row: usize) -> Vec<(usize, usize)> {
        let met = self.meetings.iter().flat_map(|meeting| {
            meeting.pairs.iter().filter(move |(x, _)| *x == row).map(|(_, result)| (meeting.matrix, *result))
        });
        met.collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What brings the sum of the columns `added` to a row is found, of columns that are all positive and much alike.
    fn found(columns: &[Vec<f64>], added: &[usize]) -> Vec<usize> {
        let missing: Vec<f64> =
            (0..columns[0].len()).map(|i| added.iter().map(|c| columns[*c][i]).sum()).collect();
        let taken = nearest(columns, &missing);
        (0..columns.len()).filter(|i| taken[*i]).collect()
    }

    /// Columns of raw quants from 0 to 31, every second one negative: a tie that was rounded down.
    fn columns(n: usize) -> Vec<Vec<f64>> {
        let quant = |c: usize, i: usize| ((i * (2 * c + 7) + i * i * (c + 3) + c) % 32) as f64;
        let of = |c: usize| {
            (0..200).map(|i| if c.is_multiple_of(2) { quant(c, i) } else { -quant(c, i) }).collect()
        };
        (0..n).map(of).collect()
    }

    #[test]
    fn two_ties_that_lead_away_when_taken_alone_are_settled_together() {
        let columns = columns(8);
        for added in [vec![], vec![3], vec![0, 1], vec![2, 5], vec![0, 1, 4, 7]] {
            assert_eq!(found(&columns, &added), added);
        }
        // Each of the two alone makes the distance larger.
        let missing: Vec<f64> = columns[0].iter().zip(&columns[1]).map(|(a, b)| a + b).collect();
        for column in &columns[..2] {
            assert!(2.0 * dot(column, &missing) < dot(column, column));
        }
    }

    #[test]
    fn what_is_no_number_settles_nothing() {
        let mut columns = columns(2);
        columns[0][5] = f64::NAN;
        assert_eq!(found(&columns, &[1]), [0; 0]);
    }
}
