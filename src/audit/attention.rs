//! Attention in f64 under a producer's roundings, with the bound of each output.

use rayon::prelude::*;

use super::bounds::{
    self, CONFIDENCE, EXP_ROUNDINGS, NORMALISE_ROUNDINGS, SUBNORMAL_F16, TINY_F32, Units, accumulation,
    storage_unit,
};
use crate::arithmetic::round::{AttentionRounding, stored};
use crate::dense::Rows;
use crate::dense::attention::{kv_head, limited, visible};
use crate::model::graph::Attention;
use crate::numerics::Storage;
use crate::tensor::{Matrix, View};

/// What attention reads, and how far each value may be from what the producer had.
pub struct Operands<'a> {
    /// (T, H·E)
    pub q: View<'a, f64>,
    /// (S, K·E)
    pub k: View<'a, f64>,
    /// (S, K·E)
    pub v: View<'a, f64>,
    /// Bounds of the three where they were bridged.
    pub bounds: [Option<View<'a, f64>>; 3],
}

/// Exact output (T, H·E) and its bound.
pub fn attend(
    op: &Attention,
    operands: &Operands<'_>,
    rows: Rows<'_>,
    rounding: AttentionRounding,
    units: &Units,
) -> (Matrix<f64>, Matrix<f64>) {
    let q = stored(rounding.q, operands.q);
    let k = stored(rounding.kv, operands.k);
    let v = stored(rounding.kv, operands.v);
    let own = Operands { q: q.view(), k: k.view(), v: v.view(), bounds: operands.bounds };
    let heads = op.heads;
    let results: Vec<(Vec<f64>, Vec<f64>)> = (0..rows.len() * heads)
        .into_par_iter()
        .map(|i| Head { op, operands: &own, rounding, units, row: i / heads, head: i % heads }.run(rows))
        .collect();
    let mut exact = Matrix::zeros(rows.len(), heads * op.head_width);
    let mut bound = exact.clone();
    for (i, (value, error)) in results.iter().enumerate() {
        let columns = i % heads * op.head_width..(i % heads + 1) * op.head_width;
        exact.row_mut(i / heads)[columns.clone()].copy_from_slice(value);
        bound.row_mut(i / heads)[columns].copy_from_slice(error);
    }
    (exact, bound)
}

/// One query row of one head.
struct Head<'a> {
    op: &'a Attention,
    operands: &'a Operands<'a>,
    rounding: AttentionRounding,
    units: &'a Units,
    row: usize,
    head: usize,
}

/// One visible position.
struct Score {
    position: usize,
    /// Scaled score.
    z: f64,
    /// Bound of its error.
    error: f64,
    /// Probability.
    p: f64,
}

impl Head<'_> {
    fn run(&self, rows: Rows<'_>) -> (Vec<f64>, Vec<f64>) {
        let seen = visible(self.op.mask, rows, self.row, self.operands.k.rows);
        let mut scores: Vec<Score> = seen.map(|position| self.score(position)).collect();
        let max =
            scores.iter().fold(f64::NEG_INFINITY, |max, s| if s.z > max || s.z.is_nan() { s.z } else { max });
        scores.iter_mut().for_each(|s| s.p = (s.z - max).exp());
        let sum: f64 = scores.iter().map(|s| s.p).sum();
        scores.iter_mut().for_each(|s| s.p /= sum);
        let mut out = vec![0.0; self.op.head_width];
        for s in &scores {
            out.iter_mut().zip(self.value(s.position)).for_each(|(out, v)| *out += s.p * v);
        }
        let bound = self.bound(&scores, sum, &out);
        (out, bound)
    }

    fn kv<'a>(&self, matrix: View<'a, f64>, position: usize) -> &'a [f64] {
        let start = kv_head(self.op, self.head) * self.op.head_width;
        &matrix.row(position)[start..start + self.op.head_width]
    }

    fn value(&self, position: usize) -> &[f64] {
        self.kv(self.operands.v, position)
    }

    fn query<'a>(&self, matrix: View<'a, f64>) -> &'a [f64] {
        &matrix.row(self.row)[self.head * self.op.head_width..(self.head + 1) * self.op.head_width]
    }

    fn score(&self, position: usize) -> Score {
        let (q, k) = (self.query(self.operands.q), self.kv(self.operands.k, position));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let terms: f64 = q.iter().zip(k).map(|(q, k)| (q * k).powi(2)).sum();
        let z = self.op.scale * dot(q, k);
        let mut error =
            accumulation(q.len(), self.units.accumulator) * (terms.sqrt() * self.op.scale + z.abs());
        error += bounds::score_error(self.units, z);
        if let Some(bound) = self.operands.bounds[0] {
            error += self.op.scale * self.query(bound).iter().zip(k).map(|(b, k)| b * k.abs()).sum::<f64>();
        }
        if let Some(bound) = self.operands.bounds[1] {
            error +=
                self.op.scale * self.kv(bound, position).iter().zip(q).map(|(b, q)| b * q.abs()).sum::<f64>();
        }
        // No limit is steeper than 1: an error before it is none larger behind it.
        Score { position, z: limited(self.op.limit, z), error, p: 0.0 }
    }

    /// Σ p·error·|v - out| for the scores, the accumulation of the values and of the probabilities that they are
    /// divided by, and in quadrature what is rounded to f16 or bf16 on the way: each probability or term, and
    /// each running sum.
    fn bound(&self, scores: &[Score], sum: f64, out: &[f64]) -> Vec<f64> {
        let width = out.len();
        let (mut spread, mut terms, mut square) = (vec![0.0; width], vec![0.0; width], vec![0.0; width]);
        let mut running = vec![0.0; width];
        let (probs, sums) = (narrow(self.rounding.probs), narrow(self.rounding.sums));
        let stored = if self.units.storage > storage_unit(Storage::F32) { self.units.storage } else { 0.0 };
        let subnormal = SUBNORMAL_F16 / sum.max(1.0);
        let mut max = f64::NEG_INFINITY;
        for s in scores {
            let error = s.error + EXP_ROUNDINGS * self.units.accumulator;
            let rescaled = s.z > max;
            max = max.max(s.z);
            let v = self.value(s.position);
            let v_bound = self.operands.bounds[2].map(|bound| self.kv(bound, s.position));
            for d in 0..width {
                let term = s.p * v[d];
                spread[d] += s.p * error * (v[d] - out[d]).abs() + v_bound.map_or(0.0, |b| s.p * b[d]);
                // A probability that is too small for f32 becomes nothing.
                spread[d] += TINY_F32 * v[d].abs();
                terms[d] += term * term;
                running[d] += term;
                let unit = probs.max(sums).max(stored);
                square[d] += (unit * term).powi(2);
                if probs + sums > 0.0 {
                    square[d] += (subnormal * v[d]).powi(2);
                }
                if sums > 0.0 {
                    // Added to, and where the maximum moved multiplied by a factor that is rounded too.
                    let times = if rescaled { 3.0 } else { 1.0 };
                    square[d] += times * (sums * running[d]).powi(2) + subnormal.powi(2);
                }
            }
        }
        let factor = accumulation(scores.len(), self.units.accumulator);
        let last = NORMALISE_ROUNDINGS * self.units.accumulator + self.units.storage;
        let total = |d: usize| {
            let summed = factor * (f64::sqrt(terms[d]) + 2.0 * f64::abs(out[d]));
            let rounded = last * f64::abs(out[d]) + self.units.subnormal + TINY_F32;
            spread[d] + summed + CONFIDENCE * f64::sqrt(square[d]) + rounded
        };
        (0..width).map(total).collect()
    }
}

/// Unit of a type narrower than f32, else nothing: f32 has its own terms.
fn narrow(storage: Storage) -> f64 {
    if storage == Storage::F32 { 0.0 } else { storage_unit(storage) }
}
