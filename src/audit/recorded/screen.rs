//! Which tokens of a node are worth a look, by signed sums of their values.
//!
//! A row of a product costs as much as all of its outputs, and to see what rounding explains of it costs that once
//! more; a signed sum of its outputs (`signed_sum.rs`) costs one output. A row of attention costs its scores and
//! its values, and its bound both once more; two signed sums of each head (`ops/flash/signed.rs`) cost its scores.

use std::collections::BTreeSet;

use parity_graph::Op;
use rayon::prelude::*;

use super::narrow;
use super::narrowed::Narrowed;
use super::node::Hypothesis;
use super::sample::Tokens;
use super::signed_sum::{SignedSum, explained, factor, is_to_scale};
use crate::arithmetic::Arithmetic;
use crate::arithmetic::round::Tie;
use crate::engine::machine::compute;
use crate::numerics::Storage;
use crate::ops::bound::storage_unit;
use crate::ops::flash::{SUMS, Signed};
use crate::ops::source::Data;
use crate::ops::{Args, Check, Problem, Rule};

/// Tokens up to which attention is computed again in full: its cost grows with their square.
pub const ATTENTION_MAX: usize = 128;
/// Tokens up to which every head of a row is looked at; of longer texts as many fewer, in turn from row to row.
pub const ALL_HEADS_MAX: usize = 512;
/// By how much more than in the sample rounding may move the signed sum of another row of attention, whose scores may be
/// larger: what is beyond is only looked at more closely.
const LARGER: f64 = 4.0;

/// Pairs of signed sums of a row that is stored in a narrow type, whose roundings hide a factor of the whole row in each of
/// them: together they show a factor of three roundings in 999 of 1000 rows, see [`is_to_scale`].
const DRAWS: usize = 4;

/// Those of `some` tokens whose signed sums an arithmetic does not explain, which explains the `sample`; all where sums
/// cannot be told.
pub fn suspects(
    tokens: &Tokens<'_, '_>,
    [sample, some]: [&BTreeSet<usize>; 2],
    followed: &Hypothesis,
) -> Vec<usize> {
    let found = match tokens.rule.op {
        Op::FlashAttn => of_attention(tokens, [sample, some], &followed.arithmetic),
        _ => of_product(tokens, some, &followed.arithmetic),
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
    let narrowed = Narrowed::of(&tokens.rule.op, tokens.args, arithmetic);
    let args = Args { arithmetic, sources: narrowed.sources(tokens.args), ..*tokens.args };
    let [_, _, heads, width] = args.shape;
    let factors: [Vec<f64>; SUMS] =
        std::array::from_fn(|r| (0..width).map(|column| f64::from(factor(r, column))).collect());
    let signed = Signed::new(&args, &factors).ok()?;
    let bounds = tokens.with(sample, |args| bounds(tokens.rule, args, arithmetic))?;
    let mut shares = vec![0.0f64; heads];
    for (token, row) in sample.iter().zip(bounds.chunks_exact((heads * width).max(1))) {
        for (head, bounds) in row.chunks_exact(width.max(1)).enumerate() {
            for (sum, factors) in signed.of([0, head, *token]).iter().zip(&factors) {
                let squares = bounds.iter().zip(factors).map(|(bound, factor)| (bound * factor).powi(2));
                shares[head] = shares[head].max(LARGER * squares.sum::<f64>().sqrt() / sum.whole());
            }
        }
    }
    let looked_at = (heads * ALL_HEADS_MAX / args.get(1)?.shape()[2].max(1)).clamp(1, heads.max(1));
    let is_odd = |token: usize| {
        (0..looked_at).map(|i| (token * looked_at + i) % heads).any(|head| {
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
    narrow::widen(rule, &args, &exact, &mut bounds);
    Some(bounds)
}

/// As [`suspects`], of a product; `None` where its sums cannot be told.
fn of_product(
    tokens: &Tokens<'_, '_>,
    some: &BTreeSet<usize>,
    arithmetic: &Arithmetic,
) -> Option<Vec<usize>> {
    let Data::Weight(weight) = tokens.args.get(0)?.data else { return None };
    let args = Args { arithmetic, sources: tokens.args.sources.clone(), ..*tokens.args };
    let problem = crate::ops::problem(&tokens.rule.op, &args).ok()?;
    let m = tokens.args.shape[3];
    let rows_of_token = tokens.inner() / m.max(1);
    let kept = arithmetic.narrow;
    let mut suspects = BTreeSet::new();
    for meeting in &problem.meetings {
        let pairs: Vec<(usize, usize)> =
            meeting.pairs.iter().copied().filter(|(_, row)| some.contains(&(row / rows_of_token))).collect();
        if pairs.is_empty() {
            continue;
        }
        let matrix = meeting.matrix * m..(meeting.matrix + 1) * m;
        let mut sums = SignedSum::all(weight, matrix.clone(), kept);
        let own = sums.len();
        if kept != Storage::F32 {
            sums.extend((1..DRAWS).flat_map(|draw| SignedSum::drawn(weight, matrix.clone(), kept, draw)));
        }
        let odd = pairs.par_iter().filter(|(x, row)| {
            !is_explained(&problem, [&sums[..own], &sums], *x, &tokens.recorded[row * m..][..m], kept)
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
    kept: Storage,
) -> bool {
    let single = |values: &[f64]| -> Vec<f32> { values.iter().map(|&value| value as f32).collect() };
    let rounded = &problem.x;
    let excess = if rounded.sums.cols > 0 { single(rounded.sums.row(x)) } else { Vec::new() };
    let ties: Vec<&Tie> = rounded.ties.iter().filter(|tie| tie.row == x).collect();
    let (x, recorded) = (single(rounded.values.row(x)), single(recorded));
    explained(first, &x, &excess, &ties, &recorded, &[], kept)
        && (all.len() == first.len() || is_to_scale(all, &x, &excess, &recorded, storage_unit(kept)))
}
