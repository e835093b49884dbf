//! Whether a node is further from what was recorded of it than may be left, which most mistakes show at a few outputs and
//! without a bound.

use std::cell::Cell;

use parity_graph::Op;

use super::node::{Hypothesis, settled};
use super::stored::Narrowed;
use super::tokens::Tokens;
use crate::ops::{Args, Check, Rule, problem};

/// Of so many outputs of a product one is looked at: first, and where that does not show it.
const ONE_OF: [usize; 2] = [64, 4];
/// How many times further the outputs must be: sums in another order differ by far less.
const CLEARLY: f64 = 2.0;

/// Whether the squared distance is more than `most` in everything that a node is `tried` in; `false` where that is not known.
pub fn is_further(
    rule: &Rule,
    args: &Args<'_, f64>,
    (recorded, looked_at): (&[f64], &dyn Fn(usize) -> bool),
    tried: &[Hypothesis],
    most: f64,
) -> bool {
    // Of a device's kernels others may be taken than those that are tried, and attention has a judge of its own.
    let is_own = rule.op == Op::FlashAttn || tried.iter().any(Hypothesis::is_unordered);
    if is_own || matches!(rule.check, Check::Choice(_)) || recorded.len() != args.elements() {
        return false;
    }
    let is_far = |exact: Vec<f64>, at: &dyn Fn(usize) -> usize| {
        let off = exact.iter().enumerate().map(|(i, exact)| (at(i), exact)).filter(|(i, _)| looked_at(*i));
        let squares = off.map(|(i, exact)| (recorded[i] - exact).powi(2));
        squares.filter(|square| square.is_finite()).sum::<f64>() > CLEARLY * most
    };
    if let Some(tokens) = Tokens::of(rule, args, recorded) {
        let (all, inner) = ((0..tokens.count()).collect(), tokens.inner());
        for outputs in ONE_OF.into_iter().filter_map(|one_of| tokens.outputs(inner.div_ceil(one_of))) {
            let at = |i: usize| i / outputs.len() * inner + outputs[i % outputs.len()];
            let is_far = |args: &Args<'_, f64>| is_far(unsettled(rule, args).unwrap_or_default(), &at);
            if tokens.with_outputs(&all, Some(&outputs), |args| in_all(rule, args, tried, &is_far)) {
                return true;
            }
        }
    }
    let is_far = |args: &Args<'_, f64>| is_far(settled(rule, args, recorded).unwrap_or_default(), &|i| i);
    in_all(rule, args, tried, &is_far)
}

/// The squared distance of what was recorded from a node in that of what it is `tried` in that comes nearest, at some outputs of
/// a product; infinite where it is not known.
pub fn distance(
    rule: &Rule,
    args: &Args<'_, f64>,
    (recorded, looked_at): (&[f64], &dyn Fn(usize) -> bool),
    tried: &[Hypothesis],
) -> f64 {
    let of = |exact: Vec<f64>, at: &dyn Fn(usize) -> usize| {
        let off = exact.iter().enumerate().map(|(i, exact)| (at(i), exact)).filter(|(i, _)| looked_at(*i));
        off.map(|(i, exact)| (recorded[i] - exact).powi(2)).sum::<f64>()
    };
    let least = Cell::new(f64::INFINITY);
    let note = |args: &Args<'_, f64>, at: &dyn Fn(usize) -> usize| {
        let square = settled(rule, args, recorded).map_or(f64::INFINITY, |exact| of(exact, at));
        least.set(least.get().min(square));
        true
    };
    let some = Tokens::of(rule, args, recorded).and_then(|tokens| {
        let outputs = tokens.outputs(tokens.inner().div_ceil(ONE_OF[1]))?;
        Some((tokens, outputs))
    });
    match some {
        Some((tokens, outputs)) => {
            let (all, inner) = ((0..tokens.count()).collect(), tokens.inner());
            let at = |i: usize| i / outputs.len() * inner + outputs[i % outputs.len()];
            tokens.with_outputs(&all, Some(&outputs), |args| {
                in_all(rule, args, tried, &|args| note(args, &at))
            });
        }
        None => {
            in_all(rule, args, tried, &|args| note(args, &|i| i));
        }
    }
    least.get()
}

/// Whether something holds of what a node reads in everything that it is tried in.
fn in_all(
    rule: &Rule,
    args: &Args<'_, f64>,
    tried: &[Hypothesis],
    holds: &dyn Fn(&Args<'_, f64>) -> bool,
) -> bool {
    tried.iter().all(|Hypothesis { arithmetic, .. }| {
        let narrowed = Narrowed::of(&rule.op, args, arithmetic);
        holds(&Args { arithmetic, sources: narrowed.sources(args), ..*args })
    })
}

/// Some outputs of a product, where no tie decides about them.
fn unsettled(rule: &Rule, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let x = problem(&rule.op, args).ok()?.x;
    (x.ties.is_empty() && x.scale_ties.is_empty()).then(|| settled(rule, args, &[]).ok()).flatten()
}
