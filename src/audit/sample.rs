//! Products with weights, and attention, of many tokens: a few tokens are computed again in full, all others are
//! screened (`screen.rs`), and a token that screening finds is judged like the sample: a suspicion alone is no finding.
//!
//! Sums that are followed step by step in f16 cost a hundred times as much as products. Of a large product some outputs of a
//! few tokens are; all others are bounded in any order.

mod each_row;

use std::collections::BTreeSet;

use parity_graph::Op;

use super::audit_rows::AuditRows;
use super::likely::{Likely, TOKENS, likely};
use super::node::{Held, Hypothesis, Sight, judge_each, with_worst};
use super::screen::{self, ATTENTION_MAX};
use super::tokens::{Tokens, spread};
use crate::arithmetic::{Arithmetic, Operands};
use crate::engine::op_by_op::Unknown;
use crate::numerics::Storage;
use crate::ops::{Args, Rule};

impl Sight<'_> {
    /// How many of so many elements were recorded.
    pub fn count(&self, of: usize) -> usize {
        (0..of).filter(|i| (self.looked_at)(*i)).count()
    }
}

/// Tokens of a product up to which all are judged: fewer are as cheap as screening them.
const PRODUCTS_ALL: usize = 16;
/// Tokens of a product up to which all are judged where its sums are bounded in any order: what they have in common is the
/// sharper the more there are.
const UNORDERED_ALL: usize = 32;
/// Multiplications of a product up to which all its sums are followed step by step.
const FOLLOWED_MAX: usize = 1 << 23;
/// Multiplications that are followed of a larger one.
const FOLLOWED_OF_LARGER: usize = 1 << 20;

/// Tokens up to which all rows of attention in a narrow type are judged.
const NARROW_ATTENTION_MAX: usize = 4 * ATTENTION_MAX;

/// Whether values of a type narrower than f32 are kept, or were recorded.
fn is_narrow(arithmetic: &Arithmetic) -> bool {
    arithmetic.narrow != Storage::F32 || arithmetic.recorded.is_some_and(|kept| kept != Storage::F32)
}

/// As [`super::judge`], by a sample of so many `rows` where the node is a product with a weight, or attention, of many
/// tokens.
///
/// # Errors
/// What the rule refuses.
pub fn judge_sampled(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
    tried: &[Hypothesis],
    rows: AuditRows,
) -> Result<Held, Unknown> {
    let Some(tokens) = Tokens::judged(rule, args, recorded, sight) else {
        return judge_each(rule, args, recorded, sight, tried);
    };
    let there = tokens.looked_at(sight);
    if rule.op == Op::FlashAttn {
        return attention(&tokens, sight, &there, tried, rows);
    }
    let held = match likely(&tokens, &there, tried) {
        Some(likely) => of_device(&tokens, sight, &there, &likely, rows),
        None => sampled(&tokens, sight, &there, tried, rows),
    }?;
    if held.is_healthy() {
        return Ok(held);
    }
    Ok(each_row::explained(&tokens, &there, tried, &held)?.unwrap_or(held))
}

/// Attention, in the first of `tried` that explains a few tokens of it and then all that are looked at.
pub fn attention(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    rows: AuditRows,
) -> Result<Held, Unknown> {
    let few = spread(there, TOKENS);
    let on_device = !tried.iter().all(Hypothesis::is_screened);
    if !on_device || there.len() <= 2 * few.len() {
        return sampled(tokens, sight, there, tried, rows);
    }
    let mut nearest: Option<(Hypothesis, f64)> = None;
    for one in tried {
        let held = tokens.judge(&few, None, &[*one])?;
        let mut over = held.over;
        if held.is_healthy() {
            let held = sampled(tokens, sight, there, &[*one], rows)?;
            if held.is_healthy() {
                let arithmetic = (one.name != tried[0].name).then_some(one.name);
                return Ok(Held { arithmetic, ..held });
            }
            over = held.over;
        }
        if !nearest.is_some_and(|(_, nearest)| !(over < nearest)) {
            nearest = Some((*one, over));
        }
    }
    let nearest = nearest.map_or(tried[0], |(one, _)| one);
    let held = match rows.are_followed() {
        true => tokens.whole(sight, &[nearest], None)?,
        false => tokens.judge(&few, None, &[nearest])?,
    };
    Ok(Held { arithmetic: None, computed_in: None, ..held })
}

/// Outputs of a few tokens that an arithmetic is tried on before it is followed through a whole product.
const TRIED_OUTPUTS: usize = 16;
/// Of so many of these more than one is unexplained in every arithmetic that is another one.
const ONE_OF: usize = 8;
/// How many times as much, squared, chance leaves of these: what products round of a row moves all of its outputs alike.
const ABOUT: f64 = 2.0;

/// What a few outputs of a few tokens show of what is tried.
enum Promising<'t> {
    /// What remains without the first ones, which do not explain most of them.
    Rest(&'t [Hypothesis]),
    /// What comes about as near as any, the likeliest first, where nothing explains most of them: then nothing explains the node.
    Nearest(&'t [Hypothesis]),
}

/// `None` where they rule nothing out.
fn promising<'t>(tokens: &Tokens<'_, '_>, there: &[usize], tried: &'t [Hypothesis]) -> Option<Promising<'t>> {
    let outputs = tokens.outputs(TRIED_OUTPUTS).filter(|_| tried.len() > 1 && !there.is_empty())?;
    let some = spread(there, TOKENS);
    let mut off: Vec<(f64, usize)> = Vec::new();
    for (at, one) in tried.iter().enumerate() {
        let Ok(held) = tokens.judge(&some, Some(&outputs), &[*one]) else { continue };
        if ONE_OF * held.beyond.len() <= some.len() * outputs.len() {
            return (at > 0).then(|| Promising::Rest(&tried[at..]));
        }
        off.push((held.squares[0], at));
    }
    let least = off.iter().map(|(off, _)| *off).fold(f64::INFINITY, f64::min);
    let (_, at) = off.into_iter().find(|(off, _)| *off <= ABOUT * least)?;
    Some(Promising::Nearest(&tried[at..=at]))
}

/// As [`sampled_in`], without following what a few outputs show not to be the arithmetic; what nothing explains then is tried
/// in all, unless they show that nothing will.
fn sampled(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    rows: AuditRows,
) -> Result<Held, Unknown> {
    match promising(tokens, there, tried) {
        Some(Promising::Nearest(nearest)) => sampled_in(tokens, sight, there, nearest, rows),
        Some(Promising::Rest(some)) => {
            let held = sampled_in(tokens, sight, there, some, rows.only())?;
            if held.is_healthy() {
                return Ok(named(held, tried));
            }
            sampled_in(tokens, sight, there, tried, rows)
        }
        None => sampled_in(tokens, sight, there, tried, rows),
    }
}

/// Judges a sample by the first hypothesis that explains it, and screens all others by that.
fn sampled_in(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    rows: AuditRows,
) -> Result<Held, Unknown> {
    let few = if tokens.rule.op == Op::FlashAttn { ATTENTION_MAX } else { PRODUCTS_ALL };
    let (count, n) = (rows.count(), tokens.count());
    if n <= few || there.is_empty() {
        return tokens.whole(sight, tried, None);
    }
    let is_whole = there.len() <= few.max(count);
    let sample = spread(there, if is_whole { TOKENS } else { count });
    let held = tokens.judge(&sample, None, tried)?;
    let followed = tried.iter().find(|one| held.under == Some(one.arithmetic));
    // What a narrow type rounds of a row of attention hides most in its sums.
    let is_narrow = followed.is_some_and(|one| is_narrow(&one.arithmetic));
    let hides = tokens.rule.op == Op::FlashAttn && is_narrow && n <= NARROW_ATTENTION_MAX;
    match followed.filter(|_| held.is_healthy() && !hides && !is_whole) {
        Some(one) => tokens.screened(held, sample, there, one, tried),
        None if held.is_healthy() || rows.are_followed() => {
            in_all(tokens, sight, there, tried, (held, sample))
        }
        None => Ok(held),
    }
}

/// All rows that were recorded, by the first hypothesis that explains them, where a few were judged. What does not explain
/// these does not explain all; rows that it leaves unexplained join the few by which the next is chosen. What nothing explains
/// is shown by what comes nearest.
fn in_all(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    (mut held, mut few): (Held, BTreeSet<usize>),
) -> Result<Held, Unknown> {
    let all: BTreeSet<usize> = there.iter().copied().collect();
    let mut left = tried;
    let mut nearest: Option<Held> = None;
    while let Some(at) = left.iter().position(|one| held.under == Some(one.arithmetic)) {
        let is_open = held.is_healthy();
        if !is_open && nearest.is_some() {
            break;
        }
        let one = &left[at..=at];
        let found = match all.len() == tokens.count() {
            true => tokens.whole(sight, one, None)?,
            false => tokens.judge(&all, None, one)?,
        };
        left = &left[at + 1..];
        if found.is_healthy() || !is_open {
            return Ok(named(found, tried));
        }
        let beyond: BTreeSet<usize> = found.beyond.iter().map(|element| element / tokens.inner()).collect();
        few.extend(spread(&beyond.into_iter().collect::<Vec<_>>(), TOKENS));
        if nearest.as_ref().is_none_or(|nearest| found.beyond.len() < nearest.beyond.len()) {
            nearest = Some(found);
        }
        if left.is_empty() {
            break;
        }
        held = tokens.judge(&few, None, left)?;
    }
    match nearest {
        Some(nearest) => Ok(named(nearest, tried)),
        None => tokens.whole(sight, tried, None),
    }
}

/// What was found in some of `tried`: what is not the usual one of all is said.
fn named(held: Held, tried: &[Hypothesis]) -> Held {
    let arithmetic = held.computed_in.filter(|name| *name != tried[0].name);
    Held { arithmetic, ..held }
}

/// A product on a device, in what it was likely computed in.
fn of_device(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    likely: &Likely,
    rows: AuditRows,
) -> Result<Held, Unknown> {
    let count = rows.count();
    let chosen = &likely.chosen;
    let all = match chosen.is_unordered() || tokens.is_followed_in_part(chosen) {
        true => UNORDERED_ALL.max(count),
        false if chosen.is_followed_by_steps() => usize::MAX,
        false => PRODUCTS_ALL.max(count),
    };
    let count = if all == UNORDERED_ALL { all } else { count };
    if there.len() <= all {
        return tokens.whole(sight, &[], Some(likely));
    }
    let sample = spread(there, count);
    let held = tokens.in_likely(&sample, likely)?;
    match held.is_healthy() {
        true => tokens.screened(held, sample, there, chosen, &[*chosen]),
        false if rows.are_followed() => tokens.whole(sight, &[], Some(likely)),
        false => Ok(held),
    }
}

/// Columns of the matrices of a product.
fn columns(args: &Args<'_, f64>) -> usize {
    args.get(0).map_or(1, |weight| weight.shape()[3])
}

/// Whether only a part of a product is followed step by step.
fn is_followed_in_part(args: &Args<'_, f64>, one: &Hypothesis) -> bool {
    one.is_followed_by_steps() && args.elements().saturating_mul(columns(args)) > FOLLOWED_MAX
}

/// What the whole of a node may be computed in again, of what is `tried` in a part of it; all of that where nothing may.
pub fn of_whole(args: &Args<'_, f64>, tried: &[Hypothesis]) -> Vec<Hypothesis> {
    let some: Vec<Hypothesis> = tried.iter().filter(|one| !is_followed_in_part(args, one)).copied().collect();
    if some.is_empty() { tried.to_vec() } else { some }
}

impl Tokens<'_, '_> {
    /// All that was looked at, in what is likely, or else in the first of `tried` that explains it.
    pub fn whole(
        &self,
        sight: &Sight<'_>,
        tried: &[Hypothesis],
        likely: Option<&Likely>,
    ) -> Result<Held, Unknown> {
        let Some(likely) = likely else {
            return judge_each(self.rule, self.args, self.recorded, sight, tried);
        };
        let held = self.in_likely(&self.looked_at(sight).into_iter().collect(), likely)?;
        match likely.nearest.filter(|nearest| !held.is_healthy() && !self.is_followed_in_part(nearest)) {
            // It is wrong in any case: what the nearest kernel says shows by how much.
            Some(nearest) => {
                let held = judge_each(self.rule, self.args, self.recorded, sight, &[nearest])?;
                Ok(Held { arithmetic: None, computed_in: None, ..held })
            }
            None => Ok(held),
        }
    }

    /// Some of the tokens in what is likely: of a large product whose sums are followed step by step a part is, and the
    /// whole is bounded.
    fn in_likely(&self, some: &BTreeSet<usize>, likely: &Likely) -> Result<Held, Unknown> {
        let chosen = likely.chosen;
        let mut held = if self.is_followed_in_part(&chosen) {
            let order: Vec<usize> = some.iter().copied().collect();
            let few = spread(&order, TOKENS);
            let outputs = self.outputs((FOLLOWED_OF_LARGER / (few.len() * self.columns()).max(1)).max(1));
            let followed = self.judge(&few, outputs.as_deref(), &[chosen])?;
            let arithmetic = Arithmetic { operands: Operands::Unordered, ..chosen.arithmetic };
            with_worst(followed, self.judge(some, None, &[Hypothesis { arithmetic, ..chosen }])?)
        } else {
            self.judge(some, None, &[chosen])?
        };
        held.arithmetic = (chosen.name != likely.usual).then_some(chosen.name).filter(|_| held.is_healthy());
        held.otherwise = likely.otherwise;
        Ok(held)
    }

    /// Columns of the matrices.
    fn columns(&self) -> usize {
        columns(self.args)
    }

    /// Whether only a part of a product is followed step by step.
    fn is_followed_in_part(&self, one: &Hypothesis) -> bool {
        is_followed_in_part(self.args, one)
    }

    /// Screens what is not in the sample, by what explains that, and judges what is suspicious with it.
    fn screened(
        &self,
        held: Held,
        mut sample: BTreeSet<usize>,
        there: &[usize],
        followed: &Hypothesis,
        tried: &[Hypothesis],
    ) -> Result<Held, Unknown> {
        let others: BTreeSet<usize> = there.iter().copied().filter(|token| !sample.contains(token)).collect();
        let (arithmetic, squares) = match followed.is_followed_by_steps() {
            // All others are held to exact sums, from which those that are followed are as far as any.
            true => {
                let arithmetic = Arithmetic { operands: Operands::Unordered, ..followed.arithmetic };
                let few = spread(&sample.iter().copied().collect::<Vec<_>>(), TOKENS);
                (arithmetic, self.judge(&few, None, &[Hypothesis { arithmetic, ..*followed }])?.squares)
            }
            false => (followed.arithmetic, held.squares),
        };
        let [errors, values, _] = squares;
        let off = (errors / values).sqrt();
        let suspects = screen::suspects(self, [&sample, &others], &arithmetic, off);
        let mut held = held;
        if !suspects.is_empty() {
            sample.extend(suspects);
            let named = held.arithmetic;
            let one = [Hypothesis { arithmetic, ..*followed }];
            let again = if followed.is_followed_by_steps() { &one } else { tried };
            held = Held { otherwise: held.otherwise, ..self.judge(&sample, None, again)? };
            held.arithmetic = held.arithmetic.or(named).filter(|_| held.is_healthy());
        }
        held.screened = there.len() - sample.len();
        Ok(held)
    }
}
