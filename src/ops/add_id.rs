//! ADD_ID: `dst[t, e, :] = s0[t, e, :] + s1[s2[t, e], :]`.
//!
//! s0 (1, T, E, D), s1 (1, 1, n, D), s2 (1, 1, T, E) of I32; the result has s0's shape. One addition in f32
//! (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, finite, storage};
use super::convert::convert;
use super::movement::index;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::AddId,
    formula: "the sum with rows picked by index: y[t, e] = x[t, e] + b[index[t, e]]",
    explained: "one rounding of the result in f32",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (x, table) = (args.source(0)?, args.source(1)?);
    let [one, t, e, d] = args.shape;
    let fits = x.shape() == args.shape && one == 1 && args.source(2)?.shape() == [1, 1, t, e];
    let [1, 1, _, width] = table.shape() else { return Err(misfit(args)) };
    if !fits || width != d {
        return Err(misfit(args));
    }
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let other = table.row([0, 0, picked(args, row)?]);
        let sums = x.row(row).iter().zip(other.iter()).map(|(&a, &b)| convert(args.dtype, a + b)).collect();
        out.extend::<Vec<S>>(sums);
    }
    Ok(out)
}

fn misfit<S: Scalar>(args: &Args<'_, S>) -> crate::error::Error {
    args.misfit("(1, T, E, D), a table (1, 1, n, D) and indices (1, 1, T, E)")
}

/// The row of the table that row (0, t, e) of the result adds.
fn picked<S: Scalar>(args: &Args<'_, S>, [_, t, e]: [usize; 3]) -> Result<usize> {
    index(args, args.source(2)?.at([0, 0, t, e]), args.source(1)?.shape()[2])
}

/// One rounding of the result.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let bound = |y: f64| finite(y, UNIT_F32 * y.abs() + TINY_F32 + storage(args.dtype, y));
    exact.iter().map(|&y| bound(y)).collect()
}

/// An error of either addend is the result's. Indices have none.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let d = args.shape[3];
    match slot {
        0 => error.to_vec(),
        1 => rows(args.shape)
            .flat_map(|row| {
                let start = picked(args, row).unwrap_or(0) * d;
                error[start..start + d].to_vec()
            })
            .collect(),
        _ => vec![0.0; exact.len()],
    }
}
