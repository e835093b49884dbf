//! Products with weights, and attention, of many tokens: a few tokens are computed again in full, all others are
//! screened (`screen.rs`), and a token that screening finds is judged like the sample: a suspicion alone is no finding.
//!
//! Sums that are followed step by step in f16 cost a hundred times as much as products. Of a large product some outputs of a
//! few tokens are; all others are bounded in any order.

use std::collections::BTreeSet;

use parity_graph::Op;

use super::audit_rows::AuditRows;
use super::likely::{Likely, likely};
use super::node::{Held, Hypothesis, Sight, judge_each, with_worst};
use super::screen::{self, ATTENTION_MAX};
use crate::arithmetic::{Arithmetic, Operands};
use crate::engine::op_by_op::Unknown;
use crate::gguf::TensorRef;
use crate::numerics::Storage;
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Strided};

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

/// Along which axis of the result its tokens lie, and of which sources along which axis: (slot, axis).
type Axes = (usize, &'static [(usize, usize)]);

/// The tokens of a product with a weight, or of attention; `None` of any other node.
pub fn axes(op: &Op, args: &Args<'_, f64>) -> Option<Axes> {
    let is_weight = || args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
    match op {
        Op::MulMat => is_weight().then_some((2, &[(1, 2)])),
        Op::MulMatId => is_weight().then_some((1, &[(1, 1), (2, 2)])),
        // The mask may have more rows than there are tokens.
        Op::FlashAttn => Some((1, &[(0, 2), (3, 2)])),
        _ => None,
    }
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
    let count = match rows {
        AuditRows::Sample(count) => count,
        AuditRows::All => usize::MAX,
    };
    if rule.op == Op::FlashAttn {
        return attention(&tokens, sight, &there, tried, count);
    }
    match likely(&tokens, &there, tried) {
        Some(likely) => of_device(&tokens, sight, &there, &likely, count),
        None => sampled(&tokens, sight, &there, tried, count),
    }
}

/// Attention, in the first of `tried` that explains a few tokens of it and then all that are looked at.
pub fn attention(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    count: usize,
) -> Result<Held, Unknown> {
    let few = spread(there, super::likely::TOKENS);
    let on_device = !tried.iter().all(Hypothesis::is_screened);
    if !on_device || there.len() <= 2 * few.len() {
        return sampled(tokens, sight, there, tried, count);
    }
    let mut nearest: Option<(Hypothesis, f64)> = None;
    for one in tried {
        let held = tokens.judge(&few, None, &[*one])?;
        let mut over = held.over;
        if held.is_healthy() {
            let held = sampled(tokens, sight, there, &[*one], count)?;
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
    let held = tokens.whole(sight, &[nearest], None)?;
    Ok(Held { arithmetic: None, computed_in: None, ..held })
}

/// So many of the tokens, evenly.
pub fn spread(there: &[usize], count: usize) -> BTreeSet<usize> {
    match there.len() {
        n if n <= count => there.iter().copied().collect(),
        n => (0..count).map(|i| there[i * (n - 1) / (count - 1).max(1)]).collect(),
    }
}

/// Outputs of a few tokens that an arithmetic is tried on before it is followed through a whole product.
const TRIED_OUTPUTS: usize = 16;
/// Of so many of these more than one is unexplained in every arithmetic that is another one.
const ONE_OF: usize = 8;

/// What remains of `tried` without the first ones, which do not explain most of a few outputs of a few tokens; `None` where
/// that is all, or nothing.
fn promising<'t>(
    tokens: &Tokens<'_, '_>,
    there: &[usize],
    tried: &'t [Hypothesis],
) -> Option<&'t [Hypothesis]> {
    let outputs = tokens.outputs(TRIED_OUTPUTS).filter(|_| tried.len() > 1)?;
    let some = spread(there, super::likely::TOKENS);
    let is_promising = |one: &Hypothesis| {
        let held = tokens.judge(&some, Some(&outputs), &[*one]);
        held.is_ok_and(|held| ONE_OF * held.beyond.len() <= some.len() * outputs.len())
    };
    let first = tried.iter().position(is_promising)?;
    (first > 0).then(|| &tried[first..])
}

/// As [`sampled_in`], without following what a few outputs show not to be the arithmetic; what nothing explains then is tried
/// in all.
fn sampled(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    count: usize,
) -> Result<Held, Unknown> {
    if let Some(some) = promising(tokens, there, tried) {
        let held = sampled_in(tokens, sight, there, some, count)?;
        if held.is_healthy() {
            let arithmetic = held.computed_in.filter(|name| *name != tried[0].name);
            return Ok(Held { arithmetic, ..held });
        }
    }
    sampled_in(tokens, sight, there, tried, count)
}

/// Judges a sample by the first hypothesis that explains it, and screens all others by that.
fn sampled_in(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    tried: &[Hypothesis],
    count: usize,
) -> Result<Held, Unknown> {
    let few = if tokens.rule.op == Op::FlashAttn { ATTENTION_MAX } else { PRODUCTS_ALL };
    let (all, n) = (few.max(count), tokens.count());
    let sample = spread(there, if there.len() <= all { all } else { count });
    if n <= all || sample.is_empty() {
        return tokens.whole(sight, tried, None);
    }
    let held = tokens.judge(&sample, None, tried)?;
    let followed = tried.iter().find(|one| held.under == Some(one.arithmetic));
    // What is wrong in the sample is looked at in all rows: a diagnosis wants to know which. What a narrow type rounds of a
    // row of attention hides most in its sums.
    let is_narrow = followed.is_some_and(|one| is_narrow(&one.arithmetic));
    let hides = tokens.rule.op == Op::FlashAttn && is_narrow && n <= NARROW_ATTENTION_MAX;
    match followed.filter(|_| held.is_healthy() && !hides) {
        Some(one) => tokens.screened(held, sample, there, one, tried),
        None => tokens.whole(sight, tried, None),
    }
}

/// A product on a device, in what it was likely computed in.
fn of_device(
    tokens: &Tokens<'_, '_>,
    sight: &Sight<'_>,
    there: &[usize],
    likely: &Likely,
    count: usize,
) -> Result<Held, Unknown> {
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
        false => tokens.whole(sight, &[], Some(likely)),
    }
}

/// A node whose tokens can be told apart.
pub struct Tokens<'b, 'a> {
    /// What it computes.
    pub rule: &'b Rule,
    /// What it reads.
    pub args: &'b Args<'a, f64>,
    /// Its values: a token's lie side by side, one token behind the other.
    pub recorded: &'b [f64],
    axis: usize,
    slots: &'static [(usize, usize)],
}

impl<'b, 'a> Tokens<'b, 'a> {
    /// Those of a product with a weight, or of attention; `None` of any other node.
    pub fn of(rule: &'b Rule, args: &'b Args<'a, f64>, recorded: &'b [f64]) -> Option<Tokens<'b, 'a>> {
        let (axis, slots) = axes(&rule.op, args)?;
        let alone = args.shape[..axis].iter().product::<usize>() == 1;
        alone.then_some(Tokens { rule, args, recorded, axis, slots })
    }

    /// Those of a node that is judged, of which nothing is read that was computed again.
    pub(super) fn judged(
        rule: &'b Rule,
        args: &'b Args<'a, f64>,
        recorded: &'b [f64],
        sight: &Sight<'_>,
    ) -> Option<Tokens<'b, 'a>> {
        let fits = recorded.len() == args.elements() && sight.carried.iter().all(Option::is_none);
        Tokens::of(rule, args, recorded).filter(|_| fits)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.args.shape[self.axis]
    }

    /// Elements of the result that belong to one token.
    pub fn inner(&self) -> usize {
        self.args.shape[self.axis + 1..].iter().product()
    }

    /// Tokens that were recorded.
    pub fn looked_at(&self, sight: &Sight<'_>) -> Vec<usize> {
        (0..self.args.shape[self.axis]).filter(|token| (sight.looked_at)(token * self.inner())).collect()
    }

    /// The matrix, where there is one alone.
    fn matrix(&self) -> Option<TensorRef<'a>> {
        match self.args.get(0)?.data {
            Data::Weight(weight) if self.rule.op == Op::MulMat => Some(weight),
            _ => None,
        }
    }

    /// So many outputs, evenly; `None` where all are meant.
    pub fn outputs(&self, count: usize) -> Option<Vec<usize>> {
        let m = self.matrix()?.rows();
        (count < m).then(|| (0..count).map(|i| i * m / count).collect())
    }

    /// What `f` makes of the node with some of the tokens alone.
    pub fn with<R>(&self, some: &BTreeSet<usize>, f: impl FnOnce(&Args<'_, f64>) -> R) -> R {
        self.with_outputs(some, None, f)
    }

    /// The same with some of their outputs alone.
    pub(super) fn with_outputs<R>(
        &self,
        some: &BTreeSet<usize>,
        outputs: Option<&[usize]>,
        f: impl FnOnce(&Args<'_, f64>) -> R,
    ) -> R {
        let picked: Vec<Option<(Vec<f64>, [usize; 4])>> =
            (0..self.args.sources.len()).map(|slot| self.pick(slot, some)).collect();
        let mut sources = self.args.replaced(|slot| {
            let (values, shape) = picked[slot].as_ref()?;
            Some(Strided::whole(values, *shape))
        });
        let mut shape = self.args.shape;
        shape[self.axis] = some.len();
        let gathered = outputs.zip(self.matrix()).map(|(outputs, matrix)| matrix.gathered(outputs));
        if let (Some((info, bytes)), Some(Some(source))) = (&gathered, sources.first_mut()) {
            source.data = Data::Weight(TensorRef { info, bytes });
            shape[3] = info.rows();
        }
        let order: Vec<usize> = some.iter().copied().collect();
        let tokens = Some((&order[..], self.args.shape[self.axis]));
        f(&Args { sources, shape, tokens, ..*self.args })
    }

    /// Judges some of the tokens, and some of their outputs, as if there were no others.
    pub fn judge(
        &self,
        some: &BTreeSet<usize>,
        outputs: Option<&[usize]>,
        tried: &[Hypothesis],
    ) -> Result<Held, Unknown> {
        let (inner, own) = (self.inner(), outputs.map_or(self.inner(), <[usize]>::len));
        let order: Vec<usize> = some.iter().copied().collect();
        let column = |element: usize| outputs.map_or(element % own, |outputs| outputs[element % own]);
        let whole = |element: usize| order[element / own] * inner + column(element);
        let recorded: Vec<f64> = (0..order.len() * own).map(|i| self.recorded[whole(i)]).collect();
        let sight = Sight { looked_at: &|_| true, carried: &[], row: Some(own) };
        let mut held =
            self.with_outputs(some, outputs, |args| judge_each(self.rule, args, &recorded, &sight, tried))?;
        held.worst = whole(held.worst);
        held.beyond.iter_mut().for_each(|element| *element = whole(*element));
        Ok(held)
    }

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
            let few = spread(&order, super::likely::TOKENS);
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
        self.args.get(0).map_or(1, |weight| weight.shape()[3])
    }

    /// Whether only a part of a product is followed step by step.
    fn is_followed_in_part(&self, one: &Hypothesis) -> bool {
        let work = self.args.elements().saturating_mul(self.columns());
        one.is_followed_by_steps() && work > FOLLOWED_MAX
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
        let arithmetic = match followed.is_followed_by_steps() {
            true => Arithmetic { operands: Operands::Unordered, ..followed.arithmetic },
            false => followed.arithmetic,
        };
        let [errors, values, _] = held.squares;
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

    /// The part of a source that belongs to some of the tokens; `None` of one that belongs to all.
    fn pick(&self, slot: usize, some: &BTreeSet<usize>) -> Option<(Vec<f64>, [usize; 4])> {
        let (_, axis) = *self.slots.iter().find(|(known, _)| *known == slot)?;
        let source = self.args.get(slot)?;
        let (values, mut shape) = (source.values(), source.shape());
        let (outer, inner): (usize, usize) =
            (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
        let at = |outer: usize, token: usize| (outer * shape[axis] + token) * inner;
        let rows = (0..outer).flat_map(|outer| some.iter().map(move |token| (outer, *token)));
        let values = rows.flat_map(|(outer, token)| &values[at(outer, token)..][..inner]).copied().collect();
        shape[axis] = some.len();
        Some((values, shape))
    }
}
