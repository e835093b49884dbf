//! NORM: `dst = (x - mean(x)) / sqrt(mean((x - mean)²) + eps)`, over the fastest axis, without weight and bias.
//!
//! s0 (a, b, c, d); the result has its shape. Words: eps, which may be 0. The CPU adds the mean up in f64 and rounds
//! it, adds squares in groups of 16 in f32 and these in f64, rounds the variance, and has the root in f32
//! (ggml-cpu/ops.cpp, vec.cpp). A constant row with eps 0 gives NaN, or whatever rounding of the mean leaves.

use parity_graph::Op;

use super::bound::{GROUP, TINY_F32, UNIT_F32, accumulation, finite, row_sum, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::arithmetic::Sums;
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Norm,
    formula: "each row less its mean, divided by the root of its variance plus epsilon: (x - mean(x)) / \
        √(var(x) + eps)",
    explained: "half the error of the variance's sum and a few roundings, relative to the result, and the \
        rounding of the mean, which shifts the row",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// Of the variance, each of which the root halves: the difference (twice, in its square), the square, the quotient,
/// the sum with epsilon.
const INNER_ROUNDINGS: f64 = 5.0;
/// The root, the quotient, the difference and the product.
const OUTER_ROUNDINGS: f64 = 4.0;
/// The mean's sum is rounded, and its quotient.
const MEAN_ROUNDINGS: f64 = 2.0;

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let x = args.source(0)?;
    if x.shape() != args.shape {
        return Err(args.misfit("a source of the result's shape"));
    }
    let eps = f64::from(args.params.float(0));
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let x = x.row(row);
        let (mean, scale) = moments(&x, eps);
        let (mean, scale) = (S::from_f64(mean), S::from_f64(scale));
        out.extend(x.iter().map(|&x| convert(args.dtype, (x - mean) * scale)));
    }
    Ok(out)
}

/// mean(x) and 1 / sqrt(mean((x - mean)²) + eps). The mean is rounded to what rows are computed in before it is
/// subtracted, so that the variance is that of the differences.
pub fn moments<S: Scalar>(x: &[S], eps: f64) -> (f64, f64) {
    let count = x.len() as f64;
    let mean = S::from_f64(x.iter().map(|x| x.to_f64()).sum::<f64>() / count);
    let square = |&x: &S| (x - mean).to_f64() * (x - mean).to_f64();
    (mean.to_f64(), 1.0 / (x.iter().map(square).sum::<f64>() / count + eps).sqrt())
}

/// Every output is relative to itself but for the error of the mean, which all have in common: δ·scale, and by δ² in
/// the variance.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(0) else { return vec![0.0; exact.len()] };
    let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
    let variance = row_sum(args.arithmetic, width, GROUP) + INNER_ROUNDINGS * UNIT_F32;
    let relative = variance / 2.0 + OUTER_ROUNDINGS * UNIT_F32;
    let mut out = Vec::with_capacity(exact.len());
    for (row, y) in rows(args.shape).zip(exact.chunks(width)) {
        let x = x.row(row);
        let (mean, scale) = moments(&x, eps);
        let sum = match args.arithmetic.sums {
            Sums::Double => 0.0,
            Sums::Single => {
                let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
                accumulation(width, UNIT_F32) * (length / width as f64 + mean.abs())
            }
        };
        let shift = (sum + MEAN_ROUNDINGS * UNIT_F32 * mean.abs() + TINY_F32) * scale;
        // What is lost of squares too small for f32.
        let tiny = TINY_F32 * scale * scale / 2.0;
        let bound = |&y: &f64| {
            let bound = (relative + tiny + shift * shift / 2.0) * y.abs() + shift + TINY_F32;
            finite(y, bound + storage(args.dtype, y))
        };
        out.extend(y.iter().map(bound));
    }
    out
}

/// dy_i = r·(dx_i - mean(dx) - y_i·mean(y∘dx)): at most r·(e_i + mean(e) + |y_i|·mean(|y|∘e)).
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(slot).filter(|_| slot == 0) else { return vec![0.0; exact.len()] };
    let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
    let mut out = Vec::with_capacity(exact.len());
    for ((row, y), e) in rows(args.shape).zip(exact.chunks(width)).zip(error.chunks(width)) {
        let (_, scale) = moments(&x.row(row), eps);
        let mean = e.iter().sum::<f64>() / width as f64;
        let along = y.iter().zip(e).map(|(y, e)| y.abs() * e).sum::<f64>() / width as f64;
        out.extend(y.iter().zip(e).map(|(&y, e)| finite(y, scale * (e + mean + y.abs() * along))));
    }
    out
}
