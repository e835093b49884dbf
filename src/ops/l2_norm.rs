//! L2_NORM: `dst = x / max(sqrt(Σ x²), eps)`, over the fastest axis, without a weight.
//!
//! s0 (a, b, c, d); the result has its shape. Words: eps, which may be 0: a row of zeros then gives NaN. The CPU squares in
//! f32, adds up in f64 and has the root in f32 (ggml-cpu/ops.cpp); CUDA compares the sum with eps² (norm.cu).

use parity_graph::Op;

use super::rms_norm::{ByLength, scaled};
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

const NORM: ByLength = ByLength { scale: scale::<f64>, roundings: ROUNDINGS, is_mean: false };

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    scaled(args, scale)
}

/// 1 / max(sqrt(Σ x²), eps)
fn scale<S: Scalar>(x: &[S], eps: f64) -> f64 {
    1.0 / x.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt().max(eps)
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    NORM.bound(args, exact)
}

/// As of RMS_NORM; less where epsilon divides.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    NORM.carry(args, exact, slot, error)
}
