//! What MUL_MAT and MUL_MAT_ID share: matrices of one source that meet rows of another.
//!
//! A matrix is decoded in tiles, once for all rows that meet it. Tiles do not depend on the number of threads, so
//! that results do not either.

mod carry;
mod form;
mod half_sums;
mod pairs;
mod settle;

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::bound::{SUBNORMAL_F16, TINY_F32, UNIT_F16, UNIT_F32, accumulation};
use super::source::{Args, Data, Source};
use crate::arithmetic::cache_blocks;
use crate::arithmetic::cuda_blocks::{Blocks, Form};
use crate::arithmetic::product::{FEW_ROWS, group_sums, multiply};
use crate::arithmetic::round::{self, Rounded, Rounding};
use crate::arithmetic::{Arithmetic, HalfSums, Narrow, Operand, Operands, Storing};
use crate::error::{Error, Result};
use crate::gguf::{self, DType};
use crate::numerics::{Products, Storage};
use crate::scalar::{Scalar, vectorized};
use crate::tensor::{Matrix, View};

/// Elements of a matrix that one thread decodes at a time: 1 MiB of f32.
const TILE_ELEMENTS: usize = 1 << 18;
/// The same where this many rows meet it, which are packed anew for every tile.
const TILE_ELEMENTS_MANY: usize = 1 << 21;
const MANY_ROWS: usize = 256;
/// The same where few rows meet it, which cost less than to decode it: what was decoded is still near when it is multiplied, in
/// f64 too. (Two dumps of a 1.5B were judged in 17.6 s of processor time, and in 23.0 s with the larger tiles.)
const TILE_ELEMENTS_FEW: usize = 1 << 16;
/// Rows of a tile at least: products of fewer keep no register busy.
const TILE_ROWS_MIN: usize = 64;
/// The same where few rows meet it.
const TILE_ROWS_MIN_FEW: usize = 8;
/// Rows of a tile at most: work for several threads.
const TILE_ROWS_MAX: usize = 512;
/// Values of f32 in a line of a processor's cache.
const LINE: usize = 16;
/// Magnitudes are scaled to 1 before f32 squares them; a square below this share of the largest is lost.
const LOST: f64 = 1.0 / (1u64 << 62) as f64;
/// The rounding of a value and of the same value moved a little: two errors in quadrature.
const TWO_ROUNDINGS: f64 = std::f64::consts::SQRT_2;

/// One matrix and the rows that it is multiplied by.
pub struct Meeting {
    /// Which matrix of source 0, counted over its two slower axes.
    pub matrix: usize,
    /// Row of the other source, and row of the result that it makes.
    pub pairs: Vec<(usize, usize)>,
}

/// result[r, o] = Σ_i w[matrix, o, i]·x[row, i] for every pair (row, r) of every meeting.
pub struct Problem<'b, 'a, S> {
    /// Source 0: matrices (m, k).
    pub weight: &'b Source<'a, S>,
    /// Rows (·, k) of source 1, rounded as the arithmetic says.
    pub x: Rounded<S>,
    /// What was rounded to.
    pub rounding: Rounding,
    /// The lesser parts of those rows, where operands are sums of two.
    lesser: Option<Matrix<S>>,
    /// What the matrices are rounded to.
    weights: Option<Narrow>,
    /// How a kernel on integers multiplies the matrices.
    form: Option<Form>,
    /// In what order sums are kept in f16, where that is followed.
    half_sums: Option<HalfSums>,
    /// Whether sums are kept in f16 in an order that nobody knows.
    unordered: bool,
    /// What weights are read in.
    pub narrow: Storage,
    /// Whether those that are no normal numbers of f16 are 0.
    flushes: bool,
    /// Every row of the result is in one of them.
    pub meetings: Vec<Meeting>,
    /// Rows of the result.
    pub rows: usize,
}

/// What magnitudes are summed as.
#[derive(Clone, Copy, PartialEq)]
enum Power {
    /// Σ |w|·|x|
    One,
    /// Σ (w·x)²
    Two,
}

/// What an arithmetic rounds the activations to that meet a weight of a type.
pub fn rounding_of(arithmetic: &Arithmetic, weight: DType) -> Rounding {
    match arithmetic.operands {
        // Matrix units take both sides in the type that values are kept in.
        Operands::Exact => match arithmetic.narrow {
            Storage::F32 => Rounding::None,
            Storage::F16 => Rounding::F16,
            Storage::Bf16 => Rounding::Bf16,
        },
        Operands::Candle => Rounding::of_candle(weight),
        Operands::Rows => Rounding::Q8Row,
        Operands::VecDot => Rounding::of(Products::LlamaCpu, weight),
        Operands::Both(narrow) | Operands::One(Operand::Activations, narrow) => narrow.rounding(),
        Operands::One(Operand::Weights, _) => Rounding::None,
        Operands::Blocks(kernel) => {
            Blocks::of(kernel, weight).map_or(Rounding::None, |(blocks, _)| Rounding::Cuda(blocks))
        }
        Operands::Half(_) | Operands::Unordered => Rounding::F16,
    }
}

impl<'b, 'a, S: Scalar> Problem<'b, 'a, S> {
    /// Rounds source 1 and takes the matrices of source 0, whose fastest axes must be equally long.
    pub fn new(args: &'b Args<'a, S>, meetings: Vec<Meeting>) -> Result<Self> {
        let (weight, other) = (args.source(0)?, args.source(1)?);
        if matches!(weight.data, Data::Weight(_)) && !weight.dtype.is_decodable() {
            return Err(Error::new(
                args.name,
                format!("its weight is {}, which parity cannot decode", weight.dtype),
            )
            .hint("quantise the model to another type"));
        }
        let rounding = rounding_of(args.arithmetic, weight.dtype);
        let (mut weights, mut form, mut half_sums) = (None, None, None);
        match args.arithmetic.operands {
            Operands::Both(narrow) | Operands::One(Operand::Weights, narrow) => weights = Some(narrow),
            Operands::Blocks(kernel) => form = Blocks::of(kernel, weight.dtype).map(|(_, how)| how),
            Operands::Half(sums) => (weights, half_sums) = (Some(Narrow::F16), Some(sums)),
            Operands::Unordered => weights = Some(Narrow::F16),
            _ => {}
        }
        // Each decoded value would be rounded to itself once more, which took a sixth of an audit of F16 on CUDA. Values that
        // are in memory, a cache's for one, need not be numbers of the type that the graph has for them.
        let decoded = matches!(weight.data, Data::Weight(_)) && args.arithmetic.narrow == Storage::F32;
        let weights = weights.filter(|narrow| !(decoded && narrow.holds(weight.dtype)));
        let unordered = args.arithmetic.operands == Operands::Unordered;
        let [a, b, c, k] = other.shape();
        let values = other.values();
        let x = match rounding {
            Rounding::None => Rounded {
                values: Matrix::new(a * b * c, k, values.into_owned()),
                sums: Matrix::default(),
                ties: Vec::new(),
                scale_ties: Vec::new(),
            },
            _ => round::activations(rounding, View::new(a * b * c, k, &values)),
        };
        let lesser = pairs::lesser(rounding, View::new(a * b * c, k, &other.values()));
        let rows = args.shape[..3].iter().product();
        let narrow = args.arithmetic.narrow;
        let flushes = args.arithmetic.storing == Storing::Flushed;
        Ok(Problem {
            weight,
            x,
            rounding,
            lesser,
            weights,
            form,
            half_sums,
            unordered,
            narrow,
            flushes,
            meetings,
            rows,
        })
    }

    /// Outputs of one matrix.
    fn outputs(&self) -> usize {
        self.weight.shape()[2]
    }

    /// (rows, m)
    pub fn compute(&self) -> Vec<S> {
        if let Some(sums) = self.half_sums {
            return self.values_in_half(sums);
        }
        if self.form.is_some_and(|form| form.half_products) {
            return self.in_half_products();
        }
        let read = |matrix: usize, rows: Range<usize>, out: &mut [S]| {
            self.read(matrix, rows, out);
            1.0
        };
        let mut out = self.run(self.x.values.view(), read, |value, _| value);
        if self.x.sums.cols > 0
            && let Some(group) = self.group()
        {
            let minima = |matrix: usize, rows: Range<usize>, out: &mut [S]| {
                self.minima(matrix, rows, group, out);
                1.0
            };
            let excess = self.run(self.x.sums.view(), minima, |value, _| value);
            out.iter_mut().zip(excess).for_each(|(out, excess)| *out += excess);
        }
        self.without_lesser(&mut out);
        out
    }

    /// Whether sums are kept in f16 in an order that nobody knows.
    pub fn is_unordered(&self) -> bool {
        self.unordered
    }

    /// Whether an output is a sum of products, so that sums of outputs are too.
    pub fn is_linear(&self) -> bool {
        self.half_sums.is_none() && !self.form.is_some_and(|form| form.half_products)
    }

    /// Whether what meets minima is summed apart from the quants, and known.
    pub fn is_apart(&self) -> bool {
        self.form.is_some_and(|form| form.group.is_some())
    }

    /// Rows of a matrix in any precision, as the arithmetic has them.
    pub fn read<T: Scalar>(&self, matrix: usize, rows: Range<usize>, out: &mut [T]) {
        self.decode(matrix, rows, out);
        if let Some(narrow) = self.weights {
            narrow.store(out);
        }
    }

    /// The same before its values are rounded as operands.
    fn decode<T: Scalar>(&self, matrix: usize, rows: Range<usize>, out: &mut [T]) {
        let [_, b, c, k] = self.weight.shape();
        match &self.weight.data {
            Data::Weight(weight) => {
                weight.decode_rows(matrix * c + rows.start..matrix * c + rows.end, out);
                if let Some(form) = self.form {
                    let stored = weight.row_bytes(matrix * c + rows.start..matrix * c + rows.end);
                    form::apply(form, self.weight.dtype, stored, out);
                }
                self.narrow.store(out);
                if self.flushes {
                    round::flush(out);
                }
            }
            Data::Values(values) => {
                let [outer, inner, along, across] = values.strides;
                let first = values.offset + matrix / b * outer + matrix % b * inner + rows.start;
                if along == 1 && across != 1 {
                    // Of a matrix that lies column by column, a part of some columns at a time: single values of all rows would
                    // each be written to another line of the cache.
                    for i in (0..k).step_by(LINE) {
                        for (r, out) in out.chunks_exact_mut(k).enumerate() {
                            let places = out[i..].iter_mut().take(LINE).enumerate();
                            places.for_each(|(column, out)| {
                                *out = T::from_f64(values.data[first + (i + column) * across + r].to_f64());
                            });
                        }
                    }
                } else {
                    for (out, row) in out.chunks_exact_mut(k.max(1)).zip(rows) {
                        let row = values.row([matrix / b, matrix % b, row]);
                        out.iter_mut().zip(row.iter()).for_each(|(out, v)| *out = T::from_f64(v.to_f64()));
                    }
                }
                if let Some(group) = self.form.and_then(|form| form.group) {
                    form::apart(self.weight.dtype, group, out);
                }
            }
        }
    }

    /// Columns that share one minimum, where rows hold what meets it.
    pub fn group(&self) -> Option<usize> {
        self.form.map_or_else(|| gguf::minimum_group(self.weight.dtype), |form| form.group)
    }

    /// The minima of each group of columns. Of values that are decoded already they are found among the values: caches
    /// are quantised so that they are.
    pub fn minima<T: Scalar>(&self, matrix: usize, rows: Range<usize>, group: usize, out: &mut [T]) {
        match &self.weight.data {
            Data::Weight(weight) => {
                let first = matrix * self.outputs();
                let bytes = weight.row_bytes(first + rows.start..first + rows.end);
                match self.form.filter(|form| form.group.is_some()) {
                    Some(form) => form::minima(form, self.weight.dtype, bytes, out),
                    None => out.copy_from_slice(&gguf::minima::<T>(self.weight.dtype, bytes)),
                }
            }
            Data::Values(values) => {
                let b = self.weight.shape()[1];
                let minimum = |block: &[S]| T::from_f64(cache_blocks::group(self.weight.dtype, block).1);
                let per_row = self.x.values.cols / group;
                for (out, row) in out.chunks_exact_mut(per_row.max(1)).zip(rows) {
                    let row = values.row([matrix / b, matrix % b, row]);
                    out.iter_mut()
                        .zip(row.chunks_exact(group))
                        .for_each(|(out, block)| *out = minimum(block));
                }
            }
        }
    }

    /// Multiplies rows x with what `left` reads of the matrices, of the same width; it may scale what it reads and
    /// says by what the result is to be multiplied for that.
    fn run<T: Scalar, O: Copy + Default + Send + Sync>(
        &self,
        x: View<'_, T>,
        left: impl Fn(usize, Range<usize>, &mut [T]) -> f64 + Sync,
        finish: impl Fn(T, f64) -> O + Sync,
    ) -> Vec<O> {
        let (m, k) = (self.outputs(), x.cols);
        let most = self.meetings.iter().map(|meeting| meeting.pairs.len()).max().unwrap_or(0);
        let many = self.meetings.iter().all(|meeting| meeting.pairs.len() >= MANY_ROWS);
        let (elements, least) = match most {
            _ if many => (TILE_ELEMENTS_MANY, TILE_ROWS_MIN),
            most if most < FEW_ROWS => (TILE_ELEMENTS_FEW, TILE_ROWS_MIN_FEW),
            _ => (TILE_ELEMENTS, TILE_ROWS_MIN),
        };
        let tile_rows = (elements / k.max(1)).clamp(least, TILE_ROWS_MAX);
        let gathered: Vec<Cow<'_, [T]>> =
            self.meetings.iter().map(|meeting| gather(x, &meeting.pairs)).collect();
        let tasks: Vec<(usize, Range<usize>)> = (0..self.meetings.len())
            .filter(|meeting| !self.meetings[*meeting].pairs.is_empty())
            .flat_map(|meeting| {
                (0..m).step_by(tile_rows).map(move |start| (meeting, start..(start + tile_rows).min(m)))
            })
            .collect();
        let blocks: Vec<Vec<O>> = tasks
            .par_iter()
            .map(|(index, tile)| {
                let count = self.meetings[*index].pairs.len();
                T::with_scratch(tile.len() * k, |w| {
                    let factor = left(self.meetings[*index].matrix, tile.clone(), w);
                    let block = multiply(w, tile.len(), k, View::new(count, k, &gathered[*index]));
                    block.into_iter().map(|value| finish(value, factor)).collect()
                })
            })
            .collect();
        let mut out = vec![O::default(); self.rows * m];
        for ((index, tile), block) in tasks.iter().zip(blocks) {
            for (t, (_, row)) in self.meetings[*index].pairs.iter().enumerate() {
                let part = &block[t * tile.len()..(t + 1) * tile.len()];
                out[row * m + tile.start..row * m + tile.end].copy_from_slice(part);
            }
        }
        out
    }

    /// Σ over the inner axis of magnitudes, in f32: a bound needs no more. `x` (·, k) replaces source 1, and
    /// `error`, contiguous in the shape of source 0, its values.
    fn magnitudes(&self, power: Power, x: &Matrix<f64>, error: Option<&[f64]>) -> Vec<f64> {
        let raise = |v: f32| if power == Power::One { v.abs() } else { v * v };
        let largest =
            x.data.iter().fold(0.0, |max: f64, x| if x.is_finite() { max.max(x.abs()) } else { max });
        let scale = power_of_two(largest);
        let scaled: Vec<f32> = x.data.iter().map(|x| raise((x / scale) as f32)).collect();
        let (m, k) = (self.outputs(), x.cols);
        let left = |matrix: usize, rows: Range<usize>, out: &mut [f32]| match error {
            Some(error) => {
                let error = &error[(matrix * m + rows.start) * k..(matrix * m + rows.end) * k];
                let scale = power_of_two(error.iter().fold(0.0, |max, e| max.max(limited(*e))));
                out.iter_mut().zip(error).for_each(|(out, e)| *out = raise((limited(*e) / scale) as f32));
                scale
            }
            None => {
                self.read(matrix, rows, out);
                vectorized(
                    #[inline(always)]
                    || {
                        // Bits of magnitudes are in their order, and unlike numbers are compared side by side.
                        let max = out.iter().fold(0, |max, w| w.abs().to_bits().max(max));
                        let max = f32::from_bits(max);
                        let scale = power_of_two(f64::from(if max.is_finite() { max } else { f32::MAX }));
                        let inverse = (1.0 / scale) as f32;
                        out.iter_mut().for_each(|w| *w = raise(*w * inverse));
                        scale
                    },
                )
            }
        };
        let lost = LOST * (k as f64).sqrt();
        self.run(View::new(x.rows, k, &scaled), left, |value, factor| match power {
            Power::One => f64::from(value) * (scale * factor),
            Power::Two => (f64::from(value).sqrt() + lost) * (scale * factor),
        })
    }
}

impl Problem<'_, '_, f64> {
    /// By output: all of its terms in quadrature.
    pub fn terms(&self) -> Vec<f64> {
        self.magnitudes(Power::Two, &self.x.values, None)
    }

    /// The sums so far wander as far as all terms in quadrature, and on to the output. Where groups of a matrix
    /// share a minimum, kernels add quants and minima up apart, and what cancels between them is added to the
    /// terms: twice minimum·max(|Σx|, max|x|) of each group.
    pub fn bound(&self, exact: &[f64]) -> Vec<f64> {
        if let Some(sums) = self.half_sums {
            return self
                .in_half(sums, None)
                .into_iter()
                .zip(exact)
                .map(|(sum, exact)| sum.bound(*exact))
                .collect();
        }
        let mut terms = self.magnitudes(Power::Two, &self.x.values, None);
        let apart = self.form.is_some_and(|form| form.group.is_some());
        if let Some(group) = if apart { self.group() } else { gguf::minimum_group(self.weight.dtype) }
            && self.x.values.cols.is_multiple_of(group)
        {
            let mut met = if apart { self.x.sums.clone() } else { group_sums(&self.x.values, group) };
            met.data.iter_mut().for_each(|met| *met *= *met);
            let squares = |matrix: usize, rows: Range<usize>, out: &mut [f64]| {
                self.minima(matrix, rows, group, out);
                out.iter_mut().for_each(|minimum| *minimum *= *minimum);
                1.0
            };
            let cancelled = self.run(met.view(), squares, |value, _| value);
            terms.iter_mut().zip(cancelled).for_each(|(terms, c)| *terms = (*terms * *terms + c).sqrt());
        }
        let k = self.x.values.cols;
        let (factor, least) = match self.unordered {
            // Product and sum of every term.
            true => (accumulation(2 * k, UNIT_F16), k as f64 * SUBNORMAL_F16),
            false => (accumulation(k, UNIT_F32), TINY_F32),
        };
        let bound =
            |(terms, exact): (f64, &f64)| factor * (terms + exact.abs()) + UNIT_F32 * exact.abs() + least;
        terms.into_iter().zip(exact).map(bound).collect()
    }
}

/// The rows of x that a meeting needs, side by side; borrowed where they are already.
fn gather<'x, T: Scalar>(x: View<'x, T>, pairs: &[(usize, usize)]) -> Cow<'x, [T]> {
    let Some((first, _)) = pairs.first() else { return Cow::Borrowed(&[]) };
    if pairs.iter().enumerate().all(|(i, (row, _))| *row == first + i) {
        return Cow::Borrowed(x.after(*first).first(pairs.len()).data);
    }
    pairs.iter().flat_map(|(row, _)| x.row(*row)).copied().collect()
}

/// An error that is no number, or infinite, is larger than any value: what is 0 times it stays 0.
fn limited(error: f64) -> f64 {
    error.min(f64::from(f32::MAX))
}

/// A power of two that a magnitude is divided by to become about 1.
fn power_of_two(magnitude: f64) -> f64 {
    let least = f64::from(f32::MIN_POSITIVE);
    magnitude.max(least).log2().floor().exp2()
}
