//! RMS_NORM: `dst = x / sqrt(mean(x²) + eps)`, over the fastest axis, without a weight.
//!
//! s0 (a, b, c, d); the result has its shape. Words: eps, which may be 0: a row of zeros then gives NaN. The CPU squares
//! in f32, adds up in f64, and rounds mean and scale to f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, finite, row_sum, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::RmsNorm,
    formula: "each row divided by the root of its mean square plus epsilon: x / √(mean(x²) + eps)",
    explained: "half the error of the sum of squares (u = 2^-24 where it is kept in f64, 4·√n·u in f32) and \
        four and a half roundings, relative to the result",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// The squares are rounded, the mean and the sum with epsilon, half of which the root lets through; then the root, the
/// quotient and the product.
const ROUNDINGS: f64 = 3.0 / 2.0 + 3.0;

const NORM: ByLength = ByLength { scale: scale::<f64>, roundings: ROUNDINGS, is_mean: true };

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    scaled(args, scale)
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    NORM.bound(args, exact)
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    NORM.carry(args, exact, slot, error)
}

/// 1 / sqrt(mean(x²) + eps)
pub fn scale<S: Scalar>(x: &[S], eps: f64) -> f64 {
    let squares: f64 = x.iter().map(|x| x.to_f64() * x.to_f64()).sum();
    1.0 / (squares / x.len() as f64 + eps).sqrt()
}

/// Each row times what `scale` makes of it and of epsilon.
///
/// # Errors
/// A source of another shape.
pub fn scaled<S: Scalar>(args: &Args<'_, S>, scale: fn(&[S], f64) -> f64) -> Result<Vec<S>> {
    let x = args.source(0)?;
    if x.shape() != args.shape {
        return Err(args.misfit("a source of the result's shape"));
    }
    let eps = f64::from(args.params.float(0));
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let x = x.row(row);
        let scale = S::from_f64(scale(&x, eps));
        out.extend(x.iter().map(|&x| convert(args.dtype, x * scale)));
    }
    Ok(out)
}

/// A norm that divides a row by the root of its squares' mean, or of their sum.
pub struct ByLength {
    /// What a row is multiplied by, of its values and epsilon.
    pub scale: fn(&[f64], f64) -> f64,
    /// Roundings beside those of the sum, relative to the result.
    pub roundings: f64,
    /// Whether the sum is divided by the width.
    pub is_mean: bool,
}

impl ByLength {
    /// What the sum of squares is divided by.
    fn divisor(&self, width: usize) -> f64 {
        if self.is_mean { width as f64 } else { 1.0 }
    }

    /// Every output is relative to itself; engines that add the squares up in f32 round at every addition. What is lost
    /// of squares too small for f32 shows only where epsilon and all of the row are as small.
    pub fn bound(&self, args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
        let Some(x) = args.get(0) else { return vec![0.0; exact.len()] };
        let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
        let factor = row_sum(args.arithmetic, width, 1) / 2.0 + self.roundings * UNIT_F32;
        let mut out = Vec::with_capacity(exact.len());
        for (row, y) in rows(args.shape).zip(exact.chunks(width)) {
            let scale = (self.scale)(&x.row(row), eps);
            let tiny = width as f64 / self.divisor(width) * TINY_F32 * scale * scale / 2.0;
            let bound = |&y: &f64| finite(y, (factor + tiny) * y.abs() + TINY_F32 + storage(args.dtype, y));
            out.extend(y.iter().map(bound));
        }
        out
    }

    /// dy_i = r·(dx_i - y_i·mean(y∘dx)): at most r·(e_i + |y_i|·mean(|y|∘e)); the sum in the place of the mean where the norm
    /// has it.
    pub fn carry(&self, args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
        let Some(x) = args.get(slot).filter(|_| slot == 0) else { return vec![0.0; exact.len()] };
        let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
        let mut out = Vec::with_capacity(exact.len());
        for ((row, y), e) in rows(args.shape).zip(exact.chunks(width)).zip(error.chunks(width)) {
            let scale = (self.scale)(&x.row(row), eps);
            let along = y.iter().zip(e).map(|(y, e)| y.abs() * e).sum::<f64>() / self.divisor(width);
            out.extend(y.iter().zip(e).map(|(&y, e)| finite(y, scale * (e + y.abs() * along))));
        }
        out
    }
}
