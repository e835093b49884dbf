//! Products whose sums are kept in f16, in the order of the kernel.

use rayon::prelude::*;

use super::super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::Problem;
use crate::arithmetic::HalfSums;
use crate::gguf::DType;
use crate::scalar::half;
use crate::scalar::{Scalar, vectorized};
use crate::tensor::Matrix;

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

/// Rows of activations, (·, k) each: from where to where they may be.
pub(super) struct Between<'b> {
    pub low: &'b Matrix<f64>,
    pub high: &'b Matrix<f64>,
}

impl<S: Scalar> Problem<'_, '_, S> {
    /// (rows, m); where activations are only known to be `between`, the sums are as well.
    pub(super) fn in_half(&self, sums: HalfSums, between: Option<&Between<'_>>) -> Vec<Sum> {
        self.in_tiles(|columns, x, row| {
            let between = between.map(|x| (x.low.row(row), x.high.row(row)));
            tile(sums, self.run_length(), columns, x, between)
        })
    }

    /// The values of [`Problem::in_half`] alone.
    pub(super) fn values_in_half(&self, sums: HalfSums) -> Vec<S> {
        let run = self.run_length();
        self.in_tiles(|columns, x, _| {
            let product = |k: usize, lane: usize| columns[k][lane] * x[k];
            in_order(sums, run, x.len(), product, 0.0).0.map(S::from_f64)
        })
    }

    /// Terms that Vulkan's kernel takes from the last to the first.
    fn run_length(&self) -> usize {
        if self.weight.dtype == DType::F16 { 4 } else { 2 }
    }

    /// (rows, m), of outputs side by side: of their columns of the matrix, and of a row with its number.
    fn in_tiles<T: Copy + Default + Send>(
        &self,
        of_tile: impl Fn(&[[f64; LANES]], &[f64], usize) -> [T; LANES] + Sync,
    ) -> Vec<T> {
        let (m, k) = (self.outputs(), self.x.values.cols);
        let mut out = vec![T::default(); self.rows * m];
        for meeting in &self.meetings {
            let tiles: Vec<usize> = (0..m).step_by(LANES).collect();
            let rows: Vec<Vec<[T; LANES]>> = tiles
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
                        of_tile(&columns, &x, row)
                    };
                    meeting.pairs.iter().map(|(row, _)| of(*row)).collect()
                })
                .collect();
            for (start, rows) in tiles.into_iter().zip(rows) {
                let end = (start + LANES).min(m);
                for ((_, row), values) in meeting.pairs.iter().zip(rows) {
                    out[row * m + start..row * m + end].copy_from_slice(&values[..end - start]);
                }
            }
        }
        out
    }
}

/// Outputs side by side, of one row.
fn tile(
    sums: HalfSums,
    run: usize,
    columns: &[[f64; LANES]],
    x: &[f64],
    between: Option<(&[f64], &[f64])>,
) -> [Sum; LANES] {
    let groups = matches!(sums, HalfSums::Groups { .. });
    let exact = |k: usize, lane: usize| columns[k][lane] * x[k];
    let (values, squares) = in_order(sums, run, x.len(), exact, 0.0);
    let (low, high) = match between {
        None if !groups => (values, values),
        None => (in_order(sums, run, x.len(), exact, -CUT).0, in_order(sums, run, x.len(), exact, CUT).0),
        Some((from, to)) => {
            let corner = |k: usize, lane: usize| (columns[k][lane] * from[k], columns[k][lane] * to[k]);
            let least = |k: usize, lane: usize| {
                let (a, b) = corner(k, lane);
                if a < b { a } else { b }
            };
            let largest = |k: usize, lane: usize| {
                let (a, b) = corner(k, lane);
                if a > b { a } else { b }
            };
            (in_order(sums, run, x.len(), least, -CUT).0, in_order(sums, run, x.len(), largest, CUT).0)
        }
    };
    let factor = match sums {
        HalfSums::Threads(threads) => accumulation(2 * threads, UNIT_F32),
        HalfSums::Running { .. } | HalfSums::Plain { .. } | HalfSums::Groups { .. } => 0.0,
    };
    std::array::from_fn(|lane| {
        let slack = factor * (squares[lane].sqrt() + values[lane].abs());
        Sum { value: values[lane], low: low[lane], high: high[lane], slack }
    })
}

/// Sums in the order of the kernel, and the squares of what is added up in f32 behind them. `cut` of the largest term is
/// added to what a matrix unit adds up at a time.
fn in_order(
    sums: HalfSums,
    run: usize,
    terms: usize,
    product: impl Fn(usize, usize) -> f64,
    cut: f64,
) -> ([f64; LANES], [f64; LANES]) {
    vectorized(
        #[inline(always)]
        || match sums {
            HalfSums::Running { fused } => (running(run, terms, product, fused), [0.0; LANES]),
            HalfSums::Plain { fused } => (running(1, terms, product, fused), [0.0; LANES]),
            HalfSums::Threads(threads) => threaded(terms, product, threads),
            HalfSums::Groups { parts, narrow } => (grouped(terms, product, parts, narrow, cut), [0.0; LANES]),
        },
    )
}

/// One term after the other, from the last to the first of every `run`.
#[inline(always)]
fn running(run: usize, terms: usize, product: impl Fn(usize, usize) -> f64, fused: bool) -> [f64; LANES] {
    let mut sums = [0f64; LANES];
    for start in (0..terms).step_by(run) {
        for k in (start..(start + run).min(terms)).rev() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let product = product(k, lane);
                *sum = half(*sum + if fused { product } else { half(product) });
            }
        }
    }
    sums
}

/// Each thread adds up every so many pairs of columns; a product is fused with its sum. What the threads have is added
/// up in f32.
#[inline(always)]
fn threaded(
    terms: usize,
    product: impl Fn(usize, usize) -> f64,
    threads: usize,
) -> ([f64; LANES], [f64; LANES]) {
    let (mut sums, mut squares) = ([0f64; LANES], [0f64; LANES]);
    for first in 0..(2 * threads).min(terms) {
        let mut own = [0f64; LANES];
        for k in (first..terms).step_by(2 * threads) {
            for (lane, own) in own.iter_mut().enumerate() {
                *own = half(*own + product(k, lane));
            }
        }
        for lane in 0..LANES {
            sums[lane] += own[lane];
            squares[lane] += own[lane] * own[lane];
        }
    }
    (sums, squares)
}

/// Groups of columns are added to the sum at once, in every part of the columns; then the parts are joined.
#[inline(always)]
fn grouped(
    terms: usize,
    product: impl Fn(usize, usize) -> f64,
    parts: usize,
    narrow: bool,
    cut: f64,
) -> [f64; LANES] {
    let size = terms.div_ceil(parts.max(1)).max(1);
    let mut total = [0f64; LANES];
    for start in (0..terms).step_by(size) {
        let end = (start + size).min(terms);
        let mut part = [0f64; LANES];
        for first in (start..end).step_by(GROUP) {
            let (mut sum, mut largest) = ([0f64; LANES], [0f64; LANES]);
            for k in first..(first + GROUP).min(end) {
                for lane in 0..LANES {
                    let product = product(k, lane);
                    sum[lane] += product;
                    largest[lane] = if product.abs() > largest[lane] { product.abs() } else { largest[lane] };
                }
            }
            for lane in 0..LANES {
                let own = part[lane].abs();
                let scale = if own > largest[lane] { own } else { largest[lane] };
                part[lane] = half(part[lane] + sum[lane] + cut * GROUP as f64 * scale);
            }
        }
        for (total, part) in total.iter_mut().zip(part) {
            *total = if narrow { half(*total + part) } else { *total + part };
        }
    }
    total.map(half)
}
