//! SUM_ROWS: `dst[.., 0] = Σ s0[.., i]`, over the fastest axis.
//!
//! s0 (a, b, c, d); the result is (a, b, c, 1). The CPU adds up in f64 and rounds once (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, accumulation, finite, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::arithmetic::Sums;
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::SumRows,
    formula: "the sum of each row",
    explained: "one rounding of a sum kept in f64; 4·√n·u (u = 2^-24) of the root of the sum of squares in \
        f32",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let x = args.source(0)?;
    let [a, b, c, _] = x.shape();
    if args.shape != [a, b, c, 1] {
        return Err(args.misfit("a result with one element for each row of the source"));
    }
    let sum = |row| x.row(row).iter().map(|x| x.to_f64()).sum::<f64>();
    Ok(rows(args.shape).map(|row| convert(args.dtype, S::from_f64(sum(row)))).collect())
}

/// One rounding of the sum; of every sum so far where it is kept in f32: they wander as far as the terms in quadrature
/// and on to the result.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(0) else { return vec![0.0; exact.len()] };
    let terms = accumulation(x.shape()[3], UNIT_F32);
    let bound = |(row, &y): ([usize; 3], &f64)| {
        let sums = match args.arithmetic.sums {
            Sums::Double => 0.0,
            Sums::Single => terms * (x.row(row).iter().map(|x| x * x).sum::<f64>().sqrt() + y.abs()),
        };
        finite(y, sums + UNIT_F32 * y.abs() + TINY_F32 + storage(args.dtype, y))
    };
    rows(args.shape).zip(exact).map(bound).collect()
}

/// The errors of a row add up.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    match args.get(slot) {
        Some(x) if slot == 0 => error.chunks(x.shape()[3].max(1)).map(|row| row.iter().sum()).collect(),
        _ => vec![0.0; exact.len()],
    }
}
