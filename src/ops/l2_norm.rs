//! L2_NORM: `dst = x / max(sqrt(Σ x²), eps)`, over the fastest axis, without a weight.
//!
//! s0 (a, b, c, d); the result has its shape. Words: eps, which may be 0: a row of zeros then gives NaN. The CPU squares in
//! f32, adds up in f64 and has the root in f32 (ggml-cpu/ops.cpp); CUDA compares the sum with eps² (norm.cu).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, finite, row_sum, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::L2Norm,
    formula: "each row divided by its length, or by epsilon where that is larger: x / max(√Σx², eps)",
    explained: "half the error of the sum of squares (u = 2^-24 where it is kept in f64, 4·√n·u in f32) and \
        four roundings, relative to the result",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// The squares and their sum are rounded, half of each of which the root lets through; then the root, the quotient and the
/// product.
const ROUNDINGS: f64 = 1.0 + 3.0;

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
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

/// 1 / max(sqrt(Σ x²), eps)
fn scale<S: Scalar>(x: &[S], eps: f64) -> f64 {
    1.0 / x.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt().max(eps)
}

/// Every output is relative to itself, as in RMS_NORM. What is lost of squares too small for f32 shows only where the row is
/// as small, and epsilon smaller.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(0) else { return vec![0.0; exact.len()] };
    let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
    let factor = row_sum(args.arithmetic, width, 1) / 2.0 + ROUNDINGS * UNIT_F32;
    let mut out = Vec::with_capacity(exact.len());
    for (row, y) in rows(args.shape).zip(exact.chunks(width)) {
        let scale = scale(&x.row(row), eps);
        let tiny = width as f64 * TINY_F32 * scale * scale / 2.0;
        out.extend(
            y.iter().map(|&y| finite(y, (factor + tiny) * y.abs() + TINY_F32 + storage(args.dtype, y))),
        );
    }
    out
}

/// dy_i = r·(dx_i - y_i·Σ(y∘dx)): at most r·(e_i + |y_i|·Σ(|y|∘e)); less where epsilon divides.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(slot).filter(|_| slot == 0) else { return vec![0.0; exact.len()] };
    let (eps, width) = (f64::from(args.params.float(0)), args.shape[3].max(1));
    let mut out = Vec::with_capacity(exact.len());
    for ((row, y), e) in rows(args.shape).zip(exact.chunks(width)).zip(error.chunks(width)) {
        let scale = scale(&x.row(row), eps);
        let along = y.iter().zip(e).map(|(y, e)| y.abs() * e).sum::<f64>();
        out.extend(y.iter().zip(e).map(|(&y, e)| finite(y, scale * (e + y.abs() * along))));
    }
    out
}
