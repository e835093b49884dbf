//! POOL_2D: `dst[.., i, j]` = the maximum or the mean of `s0[.., i·s1 - p1 + 0..k1, j·s0 - p0 + 0..k0]`.
//!
//! s0 (a, b, H, W); the result is (a, b, H', W') with `H' = (H + 2·p1 - k1) / s1 + 1`, in F32. Words, all i32: pool (0
//! maximum, 1 mean), k0, k1, s0, s1, p0, p1, where 0 is the W axis. What lies outside counts for nothing in a maximum and
//! for 0 in a mean, which is always over k0·k1. The maximum starts at -3.4028235e38, so that a window of -inf gives
//! that (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, accumulation, finite, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Pool2d,
    formula: "the maximum or the mean of windows of a plane",
    explained: "nothing of a maximum; of a mean the roundings of its sum, all terms in quadrature",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// A mean instead of a maximum.
const MEAN: i32 = 1;

/// One axis of the window.
struct Axis {
    kernel: usize,
    stride: usize,
    padding: usize,
}

impl Axis {
    /// Of the axis W (0) or H (1).
    fn of<S>(args: &Args<'_, S>, axis: usize) -> Axis {
        let word = |word: usize| usize::try_from(args.params.int(word + axis)).unwrap_or(0);
        Axis { kernel: word(1), stride: word(3), padding: word(5) }
    }

    /// Number of windows over an axis of this length.
    fn count(&self, length: usize) -> Option<usize> {
        (length + 2 * self.padding).checked_sub(self.kernel)?.checked_div(self.stride).map(|count| count + 1)
    }

    /// What window `i` covers of an axis of this length.
    fn window(&self, i: usize, length: usize) -> std::ops::Range<usize> {
        let start = i * self.stride;
        let end = (start + self.kernel).saturating_sub(self.padding).min(length);
        start.saturating_sub(self.padding).min(end)..end
    }
}

/// Calls `f` with the values of each window, in the order of the result.
fn each<S: Scalar>(args: &Args<'_, S>, mut f: impl FnMut(&[S])) -> Result<()> {
    let x = args.source(0)?;
    let [a, b, height, width] = x.shape();
    let (w, h) = (Axis::of(args, 0), Axis::of(args, 1));
    let expected = h.count(height).zip(w.count(width)).map(|(h, w)| [a, b, h, w]);
    if expected != Some(args.shape) {
        return Err(args.misfit("a source (a, b, H, W) whose windows are the result's planes"));
    }
    let mut values = Vec::with_capacity(w.kernel * h.kernel);
    for [i, j, k] in rows(args.shape) {
        let covered: Vec<_> = h.window(k, height).map(|k| x.row([i, j, k])).collect();
        for l in 0..args.shape[3] {
            values.clear();
            covered.iter().for_each(|row| values.extend_from_slice(&row[w.window(l, width)]));
            f(&values);
        }
    }
    Ok(())
}

fn is_mean<S>(args: &Args<'_, S>) -> bool {
    args.params.int(0) == MEAN
}

/// Elements of a whole window.
fn area<S>(args: &Args<'_, S>) -> usize {
    Axis::of(args, 0).kernel * Axis::of(args, 1).kernel
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let mut out = Vec::with_capacity(args.elements());
    let count = S::from_f64(area(args) as f64);
    each(args, |window| {
        let value = if is_mean(args) {
            window.iter().copied().sum::<S>() / count
        } else {
            window.iter().fold(S::from_f32(-f32::MAX), |max, &x| if x > max { x } else { max })
        };
        out.push(convert(args.dtype, value));
    })?;
    Ok(out)
}

/// A maximum is exact. A mean's sum is kept in f32: its partial sums wander as far as the terms in quadrature, and on to
/// the result; the quotient is rounded.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    if !is_mean(args) {
        return vec![0.0; exact.len()];
    }
    let mut out = Vec::with_capacity(exact.len());
    let done = each(args, |window| {
        let y = exact[out.len()];
        let length = window.iter().map(|x| x * x).sum::<f64>().sqrt() / area(args) as f64;
        let sum = accumulation(window.len(), UNIT_F32) * (length + y.abs());
        out.push(finite(y, sum + UNIT_F32 * y.abs() + TINY_F32 + storage(args.dtype, y)));
    });
    if done.is_ok() { out } else { vec![0.0; exact.len()] }
}

/// The largest error of a window moves its maximum; the errors of a window, over its size, its mean.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(source) = args.get(slot).filter(|_| slot == 0) else { return vec![0.0; exact.len()] };
    let [_, b, height, width] = source.shape();
    let (w, h) = (Axis::of(args, 0), Axis::of(args, 1));
    let mut out = Vec::with_capacity(exact.len());
    for [i, j, k] in rows(args.shape) {
        for l in 0..args.shape[3] {
            let errors = h.window(k, height).flat_map(|row| {
                let start = ((i * b + j) * height + row) * width;
                w.window(l, width).map(move |column| error[start + column])
            });
            out.push(match is_mean(args) {
                true => errors.sum::<f64>() / area(args).max(1) as f64,
                false => errors.fold(0.0, f64::max),
            });
        }
    }
    out
}
