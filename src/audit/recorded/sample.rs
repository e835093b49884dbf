//! Products with weights, and attention, of many tokens: a few tokens are computed again in full, all others are
//! screened (`screen.rs`), and a token that screening finds is judged like the sample: a suspicion alone is no finding.

use std::collections::BTreeSet;

use parity_graph::Op;

use super::audit_rows::AuditRows;
use super::node::{Held, Hypothesis, Sight, judge};
use super::screen::{self, ATTENTION_MAX};
use crate::arithmetic::Arithmetic;
use crate::engine::machine::Unknown;
use crate::numerics::Storage;
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Strided};

/// Tokens of a product up to which all are judged: fewer are as cheap as screening them.
const PRODUCTS_ALL: usize = 16;

/// Tokens up to which all rows of attention in a narrow type are judged.
const NARROW_ATTENTION_MAX: usize = 4 * ATTENTION_MAX;

/// Whether values of a type narrower than f32 are kept, or were recorded.
fn is_narrow(arithmetic: &Arithmetic) -> bool {
    arithmetic.narrow != Storage::F32 || arithmetic.recorded.is_some_and(|kept| kept != Storage::F32)
}

/// Along which axis of the result its tokens lie, and of which sources along which axis: (slot, axis).
type Axes = (usize, &'static [(usize, usize)]);

/// The tokens of a product with a weight, or of attention, and up to how many all are judged; `None` of any other node.
fn axes(op: &Op, args: &Args<'_, f64>) -> Option<(Axes, usize)> {
    let weight = || matches!(args.get(0)?.data, Data::Weight(_)).then_some(PRODUCTS_ALL);
    match op {
        Op::MulMat => Some(((2, &[(1, 2)]), weight()?)),
        Op::MulMatId => Some(((1, &[(1, 1), (2, 2)]), weight()?)),
        // The mask may have more rows than there are tokens.
        Op::FlashAttn => Some(((1, &[(0, 2), (3, 2)]), ATTENTION_MAX)),
        _ => None,
    }
}

/// As [`judge`], by a sample of so many `rows` where the node is a product with a weight, or attention, of many tokens.
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
    let AuditRows::Sample(count) = rows else { return judge(rule, args, recorded, sight, tried) };
    let carried = sight.carried.iter().any(Option::is_some) || !tried.iter().all(Hypothesis::is_screened);
    let (Some(((axis, slots), few)), false) = (axes(&rule.op, args), carried) else {
        return judge(rule, args, recorded, sight, tried);
    };
    let all = few.max(count);
    let before: usize = args.shape[..axis].iter().product();
    let n = args.shape[axis];
    if before != 1 || n <= all || recorded.len() != args.elements() {
        return judge(rule, args, recorded, sight, tried);
    }
    let tokens = Tokens { rule, args, recorded, axis, slots };
    let inner = tokens.inner();
    let there: Vec<usize> = (0..n).filter(|token| (sight.looked_at)(token * inner)).collect();
    let mut sample: BTreeSet<usize> = match there.len() {
        n if n <= all => there.iter().copied().collect(),
        n => (0..count).map(|i| there[i * (n - 1) / (count - 1).max(1)]).collect(),
    };
    if sample.is_empty() {
        return judge(rule, args, recorded, sight, tried);
    }
    let mut held = tokens.judge(&sample, tried)?;
    if !held.is_healthy() {
        // What is wrong in the sample is looked at in all rows: a diagnosis wants to know which.
        return judge(rule, args, recorded, sight, tried);
    }
    let followed = tried.iter().find(|one| held.arithmetic.is_none_or(|name| name == one.name));
    // What a narrow type rounds of a row of attention hides most in its sums.
    let is_narrow = followed.is_some_and(|one| is_narrow(&one.arithmetic));
    if rule.op == Op::FlashAttn && is_narrow && n <= NARROW_ATTENTION_MAX {
        return judge(rule, args, recorded, sight, tried);
    }
    let others: BTreeSet<usize> = there.iter().copied().filter(|token| !sample.contains(token)).collect();
    let suspects = followed.map(|one| screen::suspects(&tokens, [&sample, &others], one)).unwrap_or_default();
    if !suspects.is_empty() {
        sample.extend(suspects);
        held = tokens.judge(&sample, tried)?;
    }
    held.screened = there.len() - sample.len();
    Ok(held)
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
        let ((axis, slots), _) = axes(&rule.op, args)?;
        let alone = args.shape[..axis].iter().product::<usize>() == 1;
        alone.then_some(Tokens { rule, args, recorded, axis, slots })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.args.shape[self.axis]
    }
}

impl Tokens<'_, '_> {
    /// Elements of the result that belong to one token.
    pub fn inner(&self) -> usize {
        self.args.shape[self.axis + 1..].iter().product()
    }

    /// What `f` makes of the node with some of the tokens alone.
    pub fn with<R>(&self, some: &BTreeSet<usize>, f: impl FnOnce(&Args<'_, f64>) -> R) -> R {
        let picked: Vec<Option<(Vec<f64>, [usize; 4])>> =
            (0..self.args.sources.len()).map(|slot| self.pick(slot, some)).collect();
        let sources = self.args.replaced(|slot| {
            let (values, shape) = picked[slot].as_ref()?;
            Some(Strided::whole(values, *shape))
        });
        let mut shape = self.args.shape;
        shape[self.axis] = some.len();
        f(&Args { sources, shape, ..*self.args })
    }

    /// Judges some of the tokens, as if there were no others.
    fn judge(&self, some: &BTreeSet<usize>, tried: &[Hypothesis]) -> Result<Held, Unknown> {
        let inner = self.inner();
        let recorded: Vec<f64> =
            some.iter().flat_map(|token| &self.recorded[token * inner..][..inner]).copied().collect();
        let sight = Sight { looked_at: &|_| true, carried: &[], row: Some(inner) };
        let mut held = self.with(some, |args| judge(self.rule, args, &recorded, &sight, tried))?;
        let order: Vec<usize> = some.iter().copied().collect();
        let whole = |element: usize| order[element / inner] * inner + element % inner;
        held.worst = whole(held.worst);
        held.beyond.iter_mut().for_each(|element| *element = whole(*element));
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
