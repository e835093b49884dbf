//! The token rows of a node, of which some can be judged as if there were no others.

use std::collections::BTreeSet;

use parity_graph::Op;

use super::node::{Held, Hypothesis, Sight, judge_each};
use crate::engine::op_by_op::Unknown;
use crate::gguf::TensorRef;
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Strided};

/// So many of the tokens, or of what else is there, evenly.
pub fn spread<T: Copy + Ord>(there: &[T], count: usize) -> BTreeSet<T> {
    match there.len() {
        n if n <= count => there.iter().copied().collect(),
        n => (0..count).map(|i| there[i * (n - 1) / (count - 1).max(1)]).collect(),
    }
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
    pub fn with_outputs<R>(
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
        let mut recorded: Vec<f64> = Vec::with_capacity(order.len() * own);
        for token in &order {
            let row = &self.recorded[token * inner..][..inner];
            match outputs {
                None => recorded.extend_from_slice(row),
                Some(outputs) => recorded.extend(outputs.iter().map(|output| row[*output])),
            }
        }
        let sight = Sight { looked_at: &|_| true, carried: &[], row: Some(own), norm: None };
        let mut held =
            self.with_outputs(some, outputs, |args| judge_each(self.rule, args, &recorded, &sight, tried))?;
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
