//! Which tokens of a node are worth a look, by signed sums of their values.
//!
//! A row of a product costs as much as all of its outputs, and to see what rounding explains of it costs that once
//! more; a signed sum of its outputs (`signed_sum.rs`) costs one output. A row of attention costs its scores and
//! its values, and its bound both once more; two signed sums of each head (`ops/flash/signed.rs`) cost its scores.

use std::collections::BTreeSet;
use std::ops::Range;

use parity_graph::Op;
use rayon::prelude::*;

use super::parts;
use super::signed_sum::{Rounds, Rows, SignedSum, explained, factor, is_to_scale};
use super::storage_types;
use super::stored::Narrowed;
use super::tokens::Tokens;
use crate::arithmetic::round::Tie;
use crate::arithmetic::{Arithmetic, Flash, Hypothesis};
use crate::engine::op_by_op::compute;
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_F16, storage_unit};
use crate::ops::flash::{SUMS, Signed};
use crate::ops::{Args, Check, Problem, Rule};

/// Tokens up to which attention is computed again in full: its cost grows with their square.
pub const ATTENTION_MAX: usize = 128;
/// By how much more than in the sample rounding may move the signed sum of another row of attention, whose scores may be
/// larger: what is beyond is only looked at more closely.
const LARGER: f64 = 4.0;

/// Pairs of signed sums of a row that is stored in a narrow type, whose roundings hide a factor of the whole row in each of
/// them: together they show a factor of three roundings in 999 of 1000 rows, see [`is_to_scale`].
const DRAWS: usize = 4;

/// Of sums in f16 in any order product and sum of every term are rounded.
const UNORDERED_ROUNDINGS: f64 = 2.0;
/// An error that is uniform within a unit comes to so much less of it: √3 times as little.
const UNIFORM: f64 = 1.732_050_807_568_877_2;

/// Those of `some` tokens whose signed sums an arithmetic does not explain, which explains the `sample`; all where sums
/// cannot be told. The values of the sample are `off` by so much of themselves.
pub fn suspects(
    tokens: &Tokens<'_, '_>,
    [sample, some]: [&BTreeSet<usize>; 2],
    arithmetic: &Arithmetic,
    off: f64,
) -> Vec<usize> {
    let found = match tokens.rule.op {
        Op::FlashAttn => of_attention(tokens, [sample, some], arithmetic),
        _ => of_product(tokens, some, arithmetic, off),
    };
    found.unwrap_or_else(|| some.iter().copied().collect())
}

/// As [`suspects`], of attention: a sum is held to the share of its size that rounding explains in the sample, head by head,
/// since a head of large scores rounds more than others.
fn of_attention(
    tokens: &Tokens<'_, '_>,
    [sample, some]: [&BTreeSet<usize>; 2],
    arithmetic: &Arithmetic,
) -> Option<Vec<usize>> {
    // Of a kernel on a device sums in f16 are bounded in any order: they are followed in the sample.
    let followed = Hypothesis { name: "", arithmetic: *arithmetic }.is_screened();
    let kernel = |flash| if followed { *arithmetic } else { Arithmetic { flash, ..*arithmetic } };
    let (arithmetic, bounded) = (&kernel(Flash::Exact), &kernel(Flash::NativeF16));
    let narrowed = Narrowed::of(&tokens.rule.op, tokens.args, arithmetic);
    let args = Args { arithmetic, sources: narrowed.sources(tokens.args), ..*tokens.args };
    let [_, _, heads, width] = args.shape;
    let factors: [Vec<f64>; SUMS] =
        std::array::from_fn(|r| (0..width).map(|column| f64::from(factor(r, column))).collect());
    let signed = Signed::new(&args, &factors).ok()?;
    let bounds = tokens.with(sample, |args| bounds(tokens.rule, args, bounded))?;
    let mut shares = vec![0.0f64; heads];
    for (token, row) in sample.iter().zip(bounds.chunks_exact((heads * width).max(1))) {
        for (head, bounds) in row.chunks_exact(width.max(1)).enumerate() {
            for (sum, factors) in signed.of([0, head, *token]).iter().zip(&factors) {
                let squares = bounds.iter().zip(factors).map(|(bound, factor)| (bound * factor).powi(2));
                shares[head] = shares[head].max(LARGER * squares.sum::<f64>().sqrt() / sum.whole());
            }
        }
    }
    let is_odd = |token: usize| {
        (0..heads).any(|head| {
            let row = &tokens.recorded[(token * heads + head) * width..][..width];
            signed.of([0, head, token]).iter().zip(&factors).any(|(sum, factors)| {
                let found: f64 = row.iter().zip(factors).map(|(value, factor)| value * factor).sum();
                // A NaN is not within.
                !((found - sum.expected).abs() <= shares[head] * sum.whole())
            })
        })
    };
    let some: Vec<usize> = some.iter().copied().collect();
    Some(some.into_par_iter().filter(|token| is_odd(*token)).collect())
}

/// What rounding explains of a node's elements.
fn bounds(rule: &Rule, args: &Args<'_, f64>, arithmetic: &Arithmetic) -> Option<Vec<f64>> {
    let Check::Bound(bound) = &rule.check else { return None };
    let narrowed = Narrowed::of(&rule.op, args, arithmetic);
    let args = Args { arithmetic, sources: narrowed.sources(args), ..*args };
    let exact = compute::<f64>(rule, &args).ok()?;
    let mut bounds = bound(&args, &exact);
    storage_types::widen(rule, &args, &exact, &mut bounds);
    Some(bounds)
}

/// As [`suspects`], of a product; `None` where its sums cannot be told.
fn of_product(
    tokens: &Tokens<'_, '_>,
    some: &BTreeSet<usize>,
    arithmetic: &Arithmetic,
    off: f64,
) -> Option<Vec<usize>> {
    let args = Args { arithmetic, sources: tokens.args.sources.clone(), ..*tokens.args };
    let problem = crate::ops::problem(&tokens.rule.op, &args).ok().filter(Problem::is_linear)?;
    let m = tokens.args.shape[3];
    let rows_of_token = tokens.inner() / m.max(1);
    let kept = arithmetic.narrow;
    let mut rounds = Rounds::of(kept);
    // A factor of a row hides in what is rounded of each value where that is more than f32 rounds.
    let mut common = (kept != Storage::F32).then_some(storage_unit(kept));
    let times = parts::roundings(arithmetic);
    if times > 1.0 {
        rounds.accumulator += times * storage_unit(kept) / (problem.x.values.cols.max(1) as f64).sqrt();
        common = common.map(|unit| unit * times);
    }
    if problem.is_unordered() {
        rounds.accumulator = UNORDERED_ROUNDINGS.sqrt() * UNIT_F16;
        common = Some(UNIFORM * off);
    }
    let mut suspects = BTreeSet::new();
    for meeting in &problem.meetings {
        let pairs: Vec<(usize, usize)> =
            meeting.pairs.iter().copied().filter(|(_, row)| some.contains(&(row / rows_of_token))).collect();
        if pairs.is_empty() {
            continue;
        }
        let group = problem.group().unwrap_or(0);
        let read = |rows: Range<usize>, out: &mut [f32]| problem.read_columns(meeting.matrix, rows, out);
        let minima = |rows: Range<usize>, out: &mut [f64]| problem.minima(meeting.matrix, rows, group, out);
        let (cols, apart) = (problem.columns(), problem.is_apart());
        let rows = Rows { count: m, cols, group, apart, read: &read, minima: &minima };
        let draws = if common.is_some() { DRAWS } else { 1 };
        let sums = SignedSum::of(&rows, draws);
        let own = sums.len() / draws;
        let odd = pairs.par_iter().filter(|(x, row)| {
            let recorded = &tokens.recorded[row * m..][..m];
            !is_explained(&problem, [&sums[..own], &sums], *x, recorded, (&rounds, common))
        });
        suspects.extend(odd.map(|(_, row)| row / rows_of_token).collect::<Vec<_>>());
    }
    Some(suspects.into_iter().collect())
}

/// Whether rounding explains the sums of the first draw, and what all of them have in common.
fn is_explained(
    problem: &Problem<'_, '_, f64>,
    [first, all]: [&[SignedSum]; 2],
    x: usize,
    recorded: &[f64],
    (rounds, common): (&Rounds, Option<f64>),
) -> bool {
    let single = |values: &[f64]| -> Vec<f32> { values.iter().map(|&value| value as f32).collect() };
    let rounded = &problem.x;
    let excess = if rounded.sums.cols > 0 { single(rounded.sums.row(x)) } else { Vec::new() };
    let ties: Vec<&Tie> = rounded.ties.iter().filter(|tie| tie.row == x).collect();
    let (x, recorded) = (problem.row(x), single(recorded));
    explained(first, &x, &excess, &ties, &recorded, &[], rounds)
        && common.is_none_or(|unit| is_to_scale(all, &x, &excess, &recorded, unit))
}
