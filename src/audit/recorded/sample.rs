//! Products with weights of many tokens: a few tokens are computed again in full, all others are screened.
//!
//! A row of a product costs as much as all of its outputs, and to see what rounding explains of it costs that once
//! more; a signed sum of its outputs (`audit/signed_sum.rs`) costs one output. So a sample of the tokens is judged,
//! the signed sums of all others are held to what the same arithmetic explains, and a token whose sums it does not
//! explain is judged like the sample: a suspicion alone is no finding.

use std::collections::BTreeSet;

use parity_graph::Op;
use rayon::prelude::*;

use super::node::{Held, Hypothesis, Sight, judge};
use crate::arithmetic::round::Tie;
use crate::audit::bounds::Units;
use crate::audit::signed_sum::{SignedSum, explained};
use crate::engine::machine::Unknown;
use crate::gguf::TensorRef;
use crate::numerics::Numerics;
use crate::ops::source::Data;
use crate::ops::{Args, Problem, Rule, Strided};

/// Tokens of a product that are judged whatever screening says: both ends, and two between them.
const SAMPLE: usize = 4;
/// Tokens up to which all are judged: fewer are as cheap as screening them.
const ALL: usize = 16;

/// Along which axis of the result its tokens lie, and of which sources along which axis: (slot, axis).
type Axes = (usize, &'static [(usize, usize)]);

/// The tokens of a product; `None` of any other op.
fn axes(op: &Op) -> Option<Axes> {
    match op {
        Op::MulMat => Some((2, &[(1, 2)])),
        Op::MulMatId => Some((1, &[(1, 1), (2, 2)])),
        _ => None,
    }
}

/// As [`judge`], by a sample where the node is a product with a weight of many tokens.
///
/// # Errors
/// What the rule refuses.
pub fn judge_sampled(
    rule: &Rule,
    args: &Args<'_, f64>,
    recorded: &[f64],
    sight: &Sight<'_>,
    tried: &[Hypothesis],
) -> Result<Held, Unknown> {
    let weight = args.get(0).and_then(|source| match source.data {
        Data::Weight(weight) => Some(weight),
        Data::Values(_) => None,
    });
    let carried = sight.carried.iter().any(Option::is_some) || !tried.iter().all(Hypothesis::is_screened);
    let (Some((axis, slots)), Some(weight), false) = (axes(&rule.op), weight, carried) else {
        return judge(rule, args, recorded, sight, tried);
    };
    let before: usize = args.shape[..axis].iter().product();
    let n = args.shape[axis];
    if before != 1 || n <= ALL || recorded.len() != args.elements() {
        return judge(rule, args, recorded, sight, tried);
    }
    let tokens = Tokens { rule, args, recorded, axis, slots };
    let inner = tokens.inner();
    let there: Vec<usize> = (0..n).filter(|token| (sight.looked_at)(token * inner)).collect();
    let mut sample: BTreeSet<usize> = match there.len() {
        0..=ALL => there.iter().copied().collect(),
        n => (0..SAMPLE).map(|i| there[i * (n - 1) / (SAMPLE - 1)]).collect(),
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
    let others: BTreeSet<usize> = there.iter().copied().filter(|token| !sample.contains(token)).collect();
    let suspects = followed.map(|one| tokens.screen(weight, &others, one)).unwrap_or_default();
    if !suspects.is_empty() {
        sample.extend(suspects);
        held = tokens.judge(&sample, tried)?;
    }
    held.screened = there.len() - sample.len();
    Ok(held)
}

/// A product whose tokens can be told apart.
struct Tokens<'b, 'a> {
    rule: &'b Rule,
    args: &'b Args<'a, f64>,
    recorded: &'b [f64],
    axis: usize,
    slots: &'static [(usize, usize)],
}

impl Tokens<'_, '_> {
    /// Elements of the result that belong to one token.
    fn inner(&self) -> usize {
        self.args.shape[self.axis + 1..].iter().product()
    }

    /// Judges some of the tokens, as if there were no others.
    fn judge(&self, some: &BTreeSet<usize>, tried: &[Hypothesis]) -> Result<Held, Unknown> {
        let picked: Vec<Option<(Vec<f64>, [usize; 4])>> =
            (0..self.args.sources.len()).map(|slot| self.pick(slot, some)).collect();
        let sources = self.args.replaced(|slot| {
            let (values, shape) = picked[slot].as_ref()?;
            Some(Strided::whole(values, *shape))
        });
        let mut shape = self.args.shape;
        shape[self.axis] = some.len();
        let args = Args { sources, shape, ..*self.args };
        let inner = self.inner();
        let recorded: Vec<f64> =
            some.iter().flat_map(|token| &self.recorded[token * inner..][..inner]).copied().collect();
        let sight = Sight { looked_at: &|_| true, carried: &[] };
        let mut held = judge(self.rule, &args, &recorded, &sight, tried)?;
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
        let inner: usize = shape[axis + 1..].iter().product();
        let values = some.iter().flat_map(|token| &values[token * inner..][..inner]).copied().collect();
        shape[axis] = some.len();
        Some((values, shape))
    }

    /// Those of `some` tokens whose signed sums an arithmetic does not explain.
    fn screen(&self, weight: TensorRef<'_>, some: &BTreeSet<usize>, followed: &Hypothesis) -> Vec<usize> {
        let args =
            Args { arithmetic: &followed.arithmetic, sources: self.args.sources.clone(), ..*self.args };
        let Ok(problem) = crate::ops::problem(&self.rule.op, &args) else {
            return some.iter().copied().collect();
        };
        let m = self.args.shape[3];
        let rows_of_token = self.inner() / m.max(1);
        let kept = followed.arithmetic.narrow;
        let units = Units::of(&Numerics { storage: kept, ..Numerics::default() });
        let mut suspects = BTreeSet::new();
        for meeting in &problem.meetings {
            let pairs: Vec<(usize, usize)> = meeting
                .pairs
                .iter()
                .copied()
                .filter(|(_, row)| some.contains(&(row / rows_of_token)))
                .collect();
            if pairs.is_empty() {
                continue;
            }
            let sums = SignedSum::all(weight, meeting.matrix * m..(meeting.matrix + 1) * m, kept);
            let odd = pairs.par_iter().filter(|(x, row)| {
                !self.is_explained(&problem, &sums, *x, &self.recorded[row * m..][..m], &units)
            });
            suspects.extend(odd.map(|(_, row)| row / rows_of_token).collect::<Vec<_>>());
        }
        suspects.into_iter().collect()
    }

    fn is_explained(
        &self,
        problem: &Problem<'_, '_, f64>,
        sums: &[SignedSum],
        x: usize,
        recorded: &[f64],
        units: &Units,
    ) -> bool {
        let single = |values: &[f64]| -> Vec<f32> { values.iter().map(|&value| value as f32).collect() };
        let rounded = &problem.x;
        let excess = if rounded.sums.cols > 0 { single(rounded.sums.row(x)) } else { Vec::new() };
        let ties: Vec<&Tie> = rounded.ties.iter().filter(|tie| tie.row == x).collect();
        explained(sums, &single(rounded.values.row(x)), &excess, &ties, &single(recorded), &[], units)
    }
}
