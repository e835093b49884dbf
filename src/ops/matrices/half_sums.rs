//! Products whose sums are kept in f16, in the order of the kernel.

use rayon::prelude::*;

use super::super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::Problem;
use crate::arithmetic::HalfSums;
use crate::arithmetic::narrow::half;
use crate::gguf::DType;
use crate::scalar::{Scalar, vectorized};

/// Outputs that are summed side by side.
const LANES: usize = 16;
/// Columns that a matrix unit adds up before it rounds.
const GROUP: usize = 16;
/// A matrix unit aligns the products of a group to the largest of them, and cuts off what is below f32.
const CUT: f64 = 2.0 * UNIT_F32;

/// One output, and from where to where the kernel's may be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// The sum, every step rounded.
    pub value: f64,
    /// The least that it may be.
    pub low: f64,
    /// The largest.
    pub high: f64,
    /// What the steps that are not followed, in f32, may move it by.
    pub slack: f64,
}

impl Sum {
    /// How far a recorded value may be from `exact`.
    pub fn bound(&self, exact: f64) -> f64 {
        let off = (self.high - exact).max(exact - self.low).max(0.0);
        off + self.slack + UNIT_F32 * exact.abs() + TINY_F32
    }
}

impl<S: Scalar> Problem<'_, '_, S> {
    /// (rows, m)
    pub(super) fn in_half(&self, sums: HalfSums) -> Vec<Sum> {
        let (m, k) = (self.outputs(), self.x.values.cols);
        let run = if self.weight.dtype == DType::F16 { 4 } else { 2 };
        let mut out = vec![Sum::default(); self.rows * m];
        for meeting in &self.meetings {
            let tiles: Vec<usize> = (0..m).step_by(LANES).collect();
            let rows: Vec<Vec<[Sum; LANES]>> = tiles
                .par_iter()
                .map(|&start| {
                    let end = (start + LANES).min(m);
                    let mut w = vec![0f32; (end - start) * k];
                    self.read(meeting.matrix, start..end, &mut w);
                    // Column by column, so that outputs lie side by side.
                    let mut columns = vec![[0f64; LANES]; k];
                    for (lane, w) in w.chunks_exact(k.max(1)).enumerate() {
                        columns.iter_mut().zip(w).for_each(|(column, w)| column[lane] = f64::from(*w));
                    }
                    let of = |row: usize| {
                        let x: Vec<f64> = self.x.values.row(row).iter().map(|x| x.to_f64()).collect();
                        vectorized(
                            #[inline(always)]
                            || match sums {
                                HalfSums::Running { fused } => running(&x, &columns, run, fused),
                                HalfSums::Threads(threads) => threaded(&x, &columns, threads),
                                HalfSums::Groups { parts, narrow } => grouped(&x, &columns, parts, narrow),
                            },
                        )
                    };
                    meeting.pairs.iter().map(|(row, _)| of(*row)).collect()
                })
                .collect();
            for (start, rows) in tiles.into_iter().zip(rows) {
                let end = (start + LANES).min(m);
                for ((_, row), sums) in meeting.pairs.iter().zip(rows) {
                    out[row * m + start..row * m + end].copy_from_slice(&sums[..end - start]);
                }
            }
        }
        out
    }
}

/// One term after the other, from the last to the first of every `run`.
#[inline(always)]
fn running(x: &[f64], columns: &[[f64; LANES]], run: usize, fused: bool) -> [Sum; LANES] {
    let mut sums = [0f64; LANES];
    for (x, columns) in x.chunks(run).zip(columns.chunks(run)) {
        for (x, column) in x.iter().zip(columns).rev() {
            for lane in 0..LANES {
                let product = column[lane] * x;
                sums[lane] = half(sums[lane] + if fused { product } else { half(product) });
            }
        }
    }
    sums.map(|value| Sum { value, low: value, high: value, slack: 0.0 })
}

/// Each thread adds up every so many pairs of columns; a product is fused with its sum. What the threads have is added
/// up in f32.
#[inline(always)]
fn threaded(x: &[f64], columns: &[[f64; LANES]], threads: usize) -> [Sum; LANES] {
    let (mut sums, mut squares) = ([0f64; LANES], [0f64; LANES]);
    for first in 0..(2 * threads).min(x.len()) {
        let mut own = [0f64; LANES];
        for (x, column) in x[first..].iter().zip(&columns[first..]).step_by(2 * threads) {
            for lane in 0..LANES {
                own[lane] = half(own[lane] + column[lane] * x);
            }
        }
        for lane in 0..LANES {
            sums[lane] += own[lane];
            squares[lane] += own[lane] * own[lane];
        }
    }
    let factor = accumulation(2 * threads, UNIT_F32);
    std::array::from_fn(|lane| {
        let value = sums[lane];
        Sum { value, low: value, high: value, slack: factor * (squares[lane].sqrt() + value.abs()) }
    })
}

/// Groups of columns are added to the sum at once, in every part of the columns; then the parts are joined.
#[inline(always)]
fn grouped(x: &[f64], columns: &[[f64; LANES]], parts: usize, narrow: bool) -> [Sum; LANES] {
    let size = x.len().div_ceil(parts.max(1)).max(1);
    let mut total = [Sum::default(); LANES];
    for (x, columns) in x.chunks(size).zip(columns.chunks(size)) {
        let mut part = [Sum::default(); LANES];
        for (x, columns) in x.chunks(GROUP).zip(columns.chunks(GROUP)) {
            let (mut sum, mut largest) = ([0f64; LANES], [0f64; LANES]);
            for (x, column) in x.iter().zip(columns) {
                for lane in 0..LANES {
                    let product = column[lane] * x;
                    sum[lane] += product;
                    largest[lane] = if product.abs() > largest[lane] { product.abs() } else { largest[lane] };
                }
            }
            for lane in 0..LANES {
                let part = &mut part[lane];
                let scale = if part.value.abs() > largest[lane] { part.value.abs() } else { largest[lane] };
                let cut = CUT * GROUP as f64 * scale;
                part.value = half(part.value + sum[lane]);
                part.low = half(part.low + sum[lane] - cut);
                part.high = half(part.high + sum[lane] + cut);
            }
        }
        for (total, part) in total.iter_mut().zip(&part) {
            let round = |sum: f64| if narrow { half(sum) } else { sum };
            total.value = round(total.value + part.value);
            total.low = round(total.low + part.low);
            total.high = round(total.high + part.high);
        }
    }
    total.map(|sum| Sum { value: half(sum.value), low: half(sum.low), high: half(sum.high), slack: 0.0 })
}
