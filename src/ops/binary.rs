//! What ADD, SUB, MUL and DIV have in common: the second source repeats to the shape of the first.

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, finite, quotient, storage};
use super::convert::{convert, spread};
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

/// A function of two values, rounded once in f32 and once more where the result's type is narrower.
pub(super) trait Binary {
    /// f(a, b)
    fn value<S: Scalar>(a: S, b: S) -> S;
    /// To first order, how far an error of up to `e` of the value in slot 0 or 1 moves f(a, b) = y.
    fn carry(slot: usize, a: f64, b: f64, y: f64, e: f64) -> f64;
}

/// What rounding explains of a sum, a difference or a product.
pub(super) const ONCE: &str = "one rounding of the result in f32";

/// The rule of such an op.
pub(super) const fn rule<F: Binary>(op: Op, formula: &'static str, explained: &'static str) -> Rule {
    Rule {
        op,
        formula,
        explained,
        single: compute::<F, f32>,
        double: compute::<F, f64>,
        check: Check::Bound(bound),
        carry: carry::<F>,
    }
}

fn compute<F: Binary, S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let mut out = Vec::with_capacity(args.elements());
    each(args, |a, b| out.push(convert(args.dtype, F::value(a, b))))?;
    Ok(out)
}

/// Calls `f` with each pair of values, in the order of the result.
fn each<S: Scalar>(args: &Args<'_, S>, mut f: impl FnMut(S, S)) -> Result<()> {
    let (a, b) = (args.source(0)?, args.source(1)?);
    let (x, y) = (a.shape(), b.shape());
    if x != args.shape || (0..4).any(|axis| y[axis] == 0 || !x[axis].is_multiple_of(y[axis])) {
        return Err(args.misfit("a first source of the result's shape, and a second that repeats to it"));
    }
    for row in rows(args.shape) {
        let other = b.row(std::array::from_fn(|axis| row[axis] % y[axis]));
        a.row(row).iter().zip(other.iter().cycle()).for_each(|(&a, &b)| f(a, b));
    }
    Ok(())
}

/// One rounding of the result; a quotient may have more of them.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let roundings = quotient(args.arithmetic);
    let bound = |y: f64| finite(y, roundings * UNIT_F32 * y.abs() + TINY_F32 + storage(args.dtype, y));
    exact.iter().map(|&y| bound(y)).collect()
}

fn carry<F: Binary>(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(source) = args.get(slot).filter(|_| slot < 2) else { return vec![0.0; exact.len()] };
    let shape = source.shape();
    let [_, b, c, d] = shape;
    let mut errors = Vec::with_capacity(exact.len());
    for row in rows(args.shape) {
        let [i, j, k]: [usize; 3] = std::array::from_fn(|axis| row[axis] % shape[axis].max(1));
        let start = ((i * b + j) * c + k) * d;
        errors.extend((0..args.shape[3]).map(|l| error[start + l % d.max(1)]));
    }
    let mut out = Vec::with_capacity(exact.len());
    let done = each(args, |a, b| {
        let (y, e) = (exact[out.len()], errors[out.len()]);
        out.push(finite(y, spread(args.dtype, F::value(a, b), F::carry(slot, a, b, y, e))));
    });
    if done.is_ok() { out } else { vec![0.0; exact.len()] }
}
