//! ADD: `dst[i] = s0[i] + s1[i mod ne1]`.
//!
//! s0 (a, b, c, d), s1 any shape whose extents divide s0's: it is repeated, modulo in every axis. The result has s0's
//! shape. One addition in f32, rounded to the result's type (ggml-cpu/binary-ops.cpp).

use parity_graph::Op;

use super::bound::UNIT_F32;
use super::source::rows;
use super::{Args, Check, Needed, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Add,
    formula: "the sum of two tensors",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
    rows: needed,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (a, b) = (args.source(0)?, args.source(1)?);
    let (x, y) = (a.shape(), b.shape());
    if x != args.shape || (0..4).any(|axis| y[axis] == 0 || !x[axis].is_multiple_of(y[axis])) {
        return Err(args.misfit("a first source of the result's shape, and a second that repeats to it"));
    }
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let other = b.row(std::array::from_fn(|axis| row[axis] % y[axis]));
        out.extend(a.row(row).iter().zip(other.iter().cycle()).map(|(&a, &b)| a + b));
    }
    Ok(out)
}

/// One rounding of the result.
fn bound(_args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    exact.iter().map(|y| UNIT_F32 * y.abs()).collect()
}

/// An error of either source is the result's.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(source) = args.get(slot) else { return vec![0.0; exact.len()] };
    let [_, b, c, d] = source.shape();
    let mut out = Vec::with_capacity(exact.len());
    for row in rows(args.shape) {
        let [i, j, k]: [usize; 3] = std::array::from_fn(|axis| row[axis] % source.shape()[axis]);
        let start = ((i * b + j) * c + k) * d;
        out.extend((0..args.shape[3]).map(|l| error[start + l % d]));
    }
    out
}

fn needed(args: &Args<'_, f64>, slot: usize, row: [usize; 3]) -> Needed {
    args.get(slot).map_or(Needed::Nothing, |source| {
        Needed::Row(std::array::from_fn(|axis| row[axis] % source.shape()[axis].max(1)))
    })
}
