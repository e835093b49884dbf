//! What rounding explains, element by element: products of named factors.
//!
//! `docs/bounds.md` derives each of them under the same name. A bound is never chosen to pass: it follows
//! from how many roundings of which unit the producer's declared arithmetic makes.

use crate::dense::Rows;
use crate::dense::rope::{columns, rates};
use crate::model::graph::Rope;
use crate::numerics::{Numerics, Products, Storage};
pub use crate::ops::bound::{
    ANGLE_ROUNDINGS, CONFIDENCE, DECODE_ROUNDINGS, EXP_ROUNDINGS, FAST_EXP_ARGUMENT, FAST_TRIG,
    GLU_ROUNDINGS, NORMALISE_ROUNDINGS, ROPE_ROUNDINGS, SCORE_ROUNDINGS, SINCOS_ROUNDINGS, SUBNORMAL_F16,
    TINY_F32, UNIT_BF16, UNIT_F16, UNIT_F32, accumulation, storage_unit,
};
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// A scale 1/sqrt(mean + eps) is rounded at the mean, the sum with eps, the root and the quotient (half of
/// the first two shows), the products with it and with the weight are two more.
pub const NORM_ROUNDINGS: f64 = 6.0;
/// The units of one producer.
#[derive(Clone, Copy, Debug)]
pub struct Units {
    /// Of the type that sums are accumulated in.
    pub accumulator: f64,
    /// Of the type that values are stored in between nodes.
    pub storage: f64,
    /// Half the distance between its smallest numbers, where a result can be that small; 0 where it is wide enough.
    pub subnormal: f64,
    /// Whether fast-math intrinsics may have been used.
    pub fast_math: bool,
}

impl Units {
    /// From what a producer declares.
    pub fn of(numerics: &Numerics) -> Units {
        let single = <f32 as Scalar>::UNIT_ROUNDOFF;
        let fast_math = numerics.products == Products::LlamaCuda;
        // An engine that sums in f64 is recorded in f32 all the same: every term of its sums carries the
        // rounding of a recorded input that the engine itself did not see.
        let subnormal = if numerics.storage == Storage::F16 { SUBNORMAL_F16 } else { 0.0 };
        Units { accumulator: single, storage: storage_unit(numerics.storage), subnormal, fast_math }
    }

    /// The roundings of one elementwise operation: in the accumulator's type, and once where it is stored.
    fn operation(&self, roundings: f64) -> f64 {
        roundings * self.accumulator + self.storage_operation(roundings)
    }

    /// Engines that store f16 or bf16 may compute elementwise operations in that type, step by step.
    fn storage_operation(&self, roundings: f64) -> f64 {
        let narrow = self.storage > <f32 as Scalar>::UNIT_ROUNDOFF;
        if narrow { self.storage * roundings } else { self.storage }
    }
}

/// ‖w∘x‖ (T, O), all terms in quadrature, and the exact output (T, O) to the bound of a product over `inner`
/// columns: the sums so far wander as far as the terms in quadrature, and on to the output.
pub fn linear(units: &Units, inner: usize, terms: &Matrix<f64>, exact: &Matrix<f64>) -> Matrix<f64> {
    let factor = accumulation(inner, units.accumulator);
    // Each term may have been flushed to zero.
    let tiny = (inner as f64).sqrt() * TINY_F32;
    zip(terms, exact, |terms, exact| {
        factor * (terms + exact.abs()) + units.storage * exact.abs() + units.subnormal + tiny
    })
}

/// A table row: nothing for what is stored as floating point, a decoder's roundings for blocks.
pub fn embed(units: &Units, exact: &Matrix<f64>, blocks: bool) -> Matrix<f64> {
    let unit = <f32 as Scalar>::UNIT_ROUNDOFF;
    let stored_narrow = if units.storage > unit { units.storage } else { 0.0 };
    per_row(exact, |row, out| {
        let largest = row.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let decoded = if blocks { DECODE_ROUNDINGS * unit * largest } else { 0.0 };
        out.iter_mut()
            .zip(row)
            .for_each(|(out, x)| *out = decoded + stored_narrow * x.abs() + units.subnormal);
    })
}

/// x + b: one rounding of the result; the magnitudes cover engines that add the bias into a product.
pub fn sum(units: &Units, a: View<'_, f64>, out: &Matrix<f64>) -> Matrix<f64> {
    let unit = units.operation(1.0);
    let terms = |a: f64, out: f64| unit * (a.abs() + (out - a).abs()) + units.subnormal + TINY_F32;
    Matrix::new(out.rows, out.cols, a.data.iter().zip(&out.data).map(|(&a, &out)| terms(a, out)).collect())
}

/// RMS norm over `width` columns: every output is relative to itself; inputs too small for f32 may be flushed to zero.
pub fn norm(units: &Units, width: usize, x: View<'_, f64>, out: &Matrix<f64>) -> Matrix<f64> {
    let factor = accumulation(width, units.accumulator) / 2.0 + units.operation(NORM_ROUNDINGS);
    let flushed = |x: f64, out: f64| if x == 0.0 { TINY_F32 } else { TINY_F32 * (1.0 + (out / x).abs()) };
    let bound = |x: f64, out: f64| factor * out.abs() + units.subnormal + flushed(x, out);
    Matrix::new(out.rows, out.cols, x.data.iter().zip(&out.data).map(|(&x, &out)| bound(x, out)).collect())
}

/// silu(gate)·up: relative to the output but for the exponential, whose share is that of e^-x in 1 + e^-x.
pub fn glu(units: &Units, gate: View<'_, f64>, up: View<'_, f64>, out: &Matrix<f64>) -> Matrix<f64> {
    let argument = if units.fast_math { FAST_EXP_ARGUMENT } else { 1.0 };
    let bound = |gate: f64, up: f64, out: f64| {
        let share = 1.0 / (1.0 + gate.exp());
        let exp = share * units.accumulator * (EXP_ROUNDINGS + argument * gate.abs());
        let tiny = TINY_F32 + units.subnormal;
        (exp + units.operation(GLU_ROUNDINGS)) * out.abs() + tiny * (1.0 + gate.abs()) * (1.0 + up.abs())
    };
    let values = gate.data.iter().zip(up.data).zip(&out.data).map(|((&g, &u), &o)| bound(g, u, o));
    Matrix::new(out.rows, out.cols, values.collect())
}

/// Rotation: two products and a sum, and the angle's own error, which grows with the position and with the
/// index of the pair where engines multiply the angle on from pair to pair in f32, as llama.cpp does.
pub fn rope(units: &Units, rope: &Rope, freqs: &[f64], rows: Rows<'_>, x: View<'_, f64>) -> Matrix<f64> {
    let rates = rates(rope, freqs);
    let mut out = Matrix::zeros(x.rows, x.cols);
    for t in 0..x.rows {
        let position = f64::from(rows.positions[t]);
        let factors: Vec<f64> =
            rates.iter().enumerate().map(|(i, rate)| rotation(units, i, position * rate)).collect();
        let heads =
            out.row_mut(t).chunks_exact_mut(rope.head_width).zip(x.row(t).chunks_exact(rope.head_width));
        for (out, x) in heads {
            for (i, factor) in factors.iter().enumerate() {
                let (first, second) = columns(rope.pairing, i, rates.len());
                let bound = factor * (x[first].abs() + x[second].abs()) + units.subnormal + TINY_F32;
                (out[first], out[second]) = (bound, bound);
            }
        }
    }
    out
}

/// Error of turning pair `i` by `angle`, relative to the magnitudes of its two columns.
fn rotation(units: &Units, i: usize, angle: f64) -> f64 {
    let turned = (ANGLE_ROUNDINGS + 2.0 * i as f64) * units.accumulator * angle.abs();
    let fast =
        if units.fast_math { FAST_TRIG + ANGLE_ROUNDINGS * units.accumulator * angle.abs() } else { 0.0 };
    let trig = SINCOS_ROUNDINGS * units.accumulator + (turned + fast).min(2.0);
    trig + units.operation(ROPE_ROUNDINGS)
}

/// Softmax of recorded scores (T, H·S): `scale` on the scores, (T, H·S) exact probabilities.
pub fn softmax(
    units: &Units,
    scale: f64,
    heads: usize,
    scores: View<'_, f64>,
    exact: &Matrix<f64>,
) -> Matrix<f64> {
    let cached = scores.cols / heads.max(1);
    let mut out = Matrix::zeros(exact.rows, exact.cols);
    for t in 0..exact.rows {
        for head in 0..heads {
            let columns = head * cached..(head + 1) * cached;
            let (z, p) = (&scores.row(t)[columns.clone()], &exact.row(t)[columns.clone()]);
            let own: Vec<f64> =
                z.iter().map(|z| score_error(units, scale * z) + EXP_ROUNDINGS * units.accumulator).collect();
            let mean: f64 = own.iter().zip(p).map(|(e, p)| e * p).sum();
            let common =
                mean + accumulation(cached, units.accumulator) + units.operation(NORMALISE_ROUNDINGS);
            for ((out, e), p) in out.row_mut(t)[columns].iter_mut().zip(&own).zip(p) {
                *out = (e + common) * p + TINY_F32;
            }
        }
    }
    out
}

/// Absolute error of a scaled score z: relative error of the probability it becomes.
pub fn score_error(units: &Units, z: f64) -> f64 {
    units.operation(SCORE_ROUNDINGS) * z.abs()
}

/// One value per element of `a`.
pub fn map(a: &Matrix<f64>, f: impl Fn(f64) -> f64) -> Matrix<f64> {
    Matrix::new(a.rows, a.cols, a.data.iter().map(|&a| f(a)).collect())
}

/// One value per pair of elements.
pub fn zip(a: &Matrix<f64>, b: &Matrix<f64>, f: impl Fn(f64, f64) -> f64) -> Matrix<f64> {
    Matrix::new(a.rows, a.cols, a.data.iter().zip(&b.data).map(|(&a, &b)| f(a, b)).collect())
}

fn per_row(a: &Matrix<f64>, f: impl Fn(&[f64], &mut [f64])) -> Matrix<f64> {
    let mut out = Matrix::zeros(a.rows, a.cols);
    for t in 0..a.rows {
        f(a.row(t), out.row_mut(t));
    }
    out
}
