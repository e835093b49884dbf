//! Whether a node is further from what was recorded of it than may be left, which most mistakes show at a few outputs and
//! without a bound.

use parity_graph::Op;

use super::node::{Hypothesis, settled};
use super::stored::Narrowed;
use super::tokens::{Tokens, spread};
use crate::ops::{Args, Check, Rule, problem};

/// Of so many outputs of a product one is looked at: first, and where that does not show it.
const ONE_OF: [usize; 2] = [64, 4];
/// Tokens of attention that are looked at first.
const TOKENS: usize = 8;
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
    // Of a device's kernels others may be taken than those that are tried.
    let is_attention = rule.op == Op::FlashAttn;
    let on_device =
        |one: &Hypothesis| one.is_unordered() || is_attention && one.arithmetic.flash.is_of_a_device();
    if tried.iter().any(on_device)
        || matches!(rule.check, Check::Choice(_))
        || recorded.len() != args.elements()
    {
        return false;
    }
    let is_far = |exact: Vec<f64>, at: &dyn Fn(usize) -> usize| {
        let squares = squares(&exact, at, (recorded, looked_at));
        squares.filter(|square| square.is_finite()).sum::<f64>() > CLEARLY * most
    };
    if let Some(tokens) = Tokens::of(rule, args, recorded) {
        let inner = tokens.inner();
        if is_attention {
            let some = spread(&(0..tokens.count()).collect::<Vec<usize>>(), TOKENS);
            let order: Vec<usize> = some.iter().copied().collect();
            let at = |i: usize| order[i / inner] * inner + i % inner;
            let is_far = |args: &Args<'_, f64>| is_far(settled(rule, args, &[]).unwrap_or_default(), &at);
            if tokens.with(&some, |args| in_all(rule, args, tried, &is_far)) {
                return true;
            }
        }
        let all = (0..tokens.count()).collect();
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

/// In which of what it is `tried` in a node comes nearest to what was recorded, and the squared distance there, at some outputs
/// of a product; infinite where it is not known.
pub fn distance(
    rule: &Rule,
    args: &Args<'_, f64>,
    (recorded, looked_at): (&[f64], &dyn Fn(usize) -> bool),
    tried: &[Hypothesis],
) -> (usize, f64) {
    let nearest = |args: &Args<'_, f64>, at: &dyn Fn(usize) -> usize| {
        let of = |args: &Args<'_, f64>| {
            let exact = settled(rule, args, recorded);
            exact.map_or(f64::INFINITY, |exact| squares(&exact, at, (recorded, looked_at)).sum())
        };
        let all = tried.iter().map(|one| under(rule, args, one, &of)).enumerate();
        all.filter(|(_, found)| !found.is_nan())
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or((0, f64::INFINITY))
    };
    let some = Tokens::of(rule, args, recorded).and_then(|tokens| {
        let outputs = tokens.outputs(tokens.inner().div_ceil(ONE_OF[1]))?;
        Some((tokens, outputs))
    });
    let Some((tokens, outputs)) = some else { return nearest(args, &|i| i) };
    let (all, inner) = ((0..tokens.count()).collect(), tokens.inner());
    let at = |i: usize| i / outputs.len() * inner + outputs[i % outputs.len()];
    tokens.with_outputs(&all, Some(&outputs), |args| nearest(args, &at))
}

/// How many times more elements another arithmetic must leave unexplained.
const FEW: usize = 2;
/// Squared distances that are this near each other are those of the mistake, which both leave.
const ALIKE: f64 = 1.0 / 16.0;
/// One of so many elements is a mistake in a few at most.
const SOME: usize = 4;

/// Whether an arithmetic comes nearer to what was recorded than another, by how many elements each leaves unexplained, and its
/// squared distance. Of several that do not explain a node the one that comes nearest is shown: what explains all but one row
/// of it, however far that is off. Where either leaves most elements unexplained, how many fall within a bound by chance says
/// nothing.
pub fn is_nearer(
    (ours, own): (usize, f64),
    (theirs, other): (usize, f64),
    elements: &dyn Fn() -> usize,
) -> bool {
    let are_alike = || ours != theirs && (own - other).abs() <= ALIKE * own.min(other);
    let are_few = || SOME * ours.max(theirs) <= elements();
    match (ours, theirs) {
        (ours, theirs) if FEW * ours < theirs => true,
        (ours, theirs) if FEW * theirs < ours => false,
        // Which is nearer to a mistake in a few elements is chance; what either leaves beside them is not.
        (ours, theirs) if are_alike() && are_few() => ours < theirs,
        // The distance decides, and not its share of a bound, which is wider in one arithmetic than in another.
        _ => own < other,
    }
}

/// How far what was recorded is from exact values, each squared, which stand `at` other places of the whole.
fn squares<'a>(
    exact: &'a [f64],
    at: &'a dyn Fn(usize) -> usize,
    (recorded, looked_at): (&'a [f64], &'a dyn Fn(usize) -> bool),
) -> impl Iterator<Item = f64> + 'a {
    let off = exact.iter().enumerate().map(move |(i, exact)| (at(i), exact));
    off.filter(move |(i, _)| looked_at(*i)).map(move |(i, exact)| (recorded[i] - exact).powi(2))
}

/// Whether something holds of what a node reads in everything that it is tried in.
fn in_all(
    rule: &Rule,
    args: &Args<'_, f64>,
    tried: &[Hypothesis],
    holds: &dyn Fn(&Args<'_, f64>) -> bool,
) -> bool {
    tried.iter().all(|one| under(rule, args, one, holds))
}

/// What is seen of what a node reads, as it is in an arithmetic.
fn under<T>(rule: &Rule, args: &Args<'_, f64>, one: &Hypothesis, see: &dyn Fn(&Args<'_, f64>) -> T) -> T {
    let arithmetic = &one.arithmetic;
    let narrowed = Narrowed::of(&rule.op, args, arithmetic);
    see(&Args { arithmetic, sources: narrowed.sources(args), ..*args })
}

/// Some outputs of a product, where no tie decides about them.
fn unsettled(rule: &Rule, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let x = problem(&rule.op, args).ok()?.x;
    (x.ties.is_empty() && x.scale_ties.is_empty()).then(|| settled(rule, args, &[]).ok()).flatten()
}
