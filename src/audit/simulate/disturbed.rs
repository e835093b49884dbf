//! One execution of a stretch: exact, or with each result disturbed by what rounding explains of it.

use std::cell::RefCell;
use std::collections::HashMap;

use indexmap::IndexSet;

use super::super::aside::Aside;
use super::super::possible::Mix;
use super::super::stored::Narrowed;
use super::super::tokens::axes;
use super::super::{Labelled, Steps, attentions, chosen_experts, lost_steps, storage_types};
use super::{Rows, Run};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Node, Unknown, Value, compute};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::CONFIDENCE;
use crate::ops::{Args, Check, Rule};
use crate::random;
use crate::watch;

/// Stands for the scale of a norm among the slots of sources that are disturbed.
const ROOT: usize = usize::MAX;
/// Stands for a recorded node itself, where what reads it reads a copy.
const COPY: usize = usize::MAX - 1;

/// What rounding explains of products with weights, by step and node, as the first disturbed execution has it: the others
/// multiply the same weight with the same values but for their roundings, and half of what an execution costs is this.
#[derive(Default)]
pub struct Bounds {
    known: HashMap<(usize, usize), Vec<f32>>,
    values: usize,
}

/// Values of bounds that are kept: a GiB.
const BOUNDS_MAX: usize = 1 << 28;

/// Goes on with what was recorded, and with disturbed values of what was not.
pub struct Disturbed<'a> {
    pub step: usize,
    pub steps: &'a dyn Steps,
    pub labelled: &'a Labelled,
    pub lost: &'a [std::ops::Range<u32>],
    pub arithmetic: Arithmetic,
    /// Which nodes alone round the operands of their products.
    pub mix: Option<&'a Mix>,
    /// The type that recorded values may be rounded to where they are read.
    pub copies: Option<Storage>,
    pub how: Run,
    pub aside: &'a Aside,
    pub bounds: Option<&'a RefCell<Bounds>>,
    pub open: &'a IndexSet<Checkpoint>,
    pub rows: &'a mut Rows,
}

impl Conductor<f64> for Disturbed<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let lost = lost_steps::read_by(self.lost, (self.steps, self.step), self.labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let Some(checkpoint) = self.labelled.labels.get(node.id).copied().flatten() else {
            return Ok(self.own(node, args, false).map(Into::into));
        };
        // Which experts were chosen is known: where scores are nearly alike, a disturbed choice would be another.
        watch::at(|| format!("{checkpoint}, whose rounding is simulated"), || None);
        let recorded = self.steps.tensor(self.step, checkpoint);
        let recorded =
            recorded.or_else(|| chosen_experts::order(self.steps, self.step, node, checkpoint, args));
        let arranged =
            recorded.as_ref().and_then(|recorded| self.labelled.arrange(node.id, checkpoint, recorded));
        let (Some(recorded), Some(arranged)) = (recorded, arranged) else {
            return Ok(self.own(node, args, true).map(Into::into));
        };
        if self.open.contains(&checkpoint)
            && let Ok(own) = self.own(node, args, true)
        {
            self.rows.insert((self.step, checkpoint), arranged.of_rows(&own));
        }
        let cut = std::cell::OnceCell::new();
        let own = || self.own(node, args, false).unwrap_or_default();
        let beyond = |element: usize| cut.get_or_init(own).get(element).copied().unwrap_or_default();
        let mut values = arranged.of_node(&recorded.values, beyond);
        if let (Run::Disturbed(seed), Some(kept)) = (self.how, self.copies) {
            let off = |i: usize, value: f64| {
                storage_types::rounding(kept, value) * self.draw(node.id, seed, COPY, i)
            };
            values.iter_mut().enumerate().for_each(|(i, value)| *value += off(i, *value));
        }
        Ok(Ok(values.into()))
    }
}

impl Disturbed<'_> {
    /// A node's own values, disturbed where that is asked for.
    pub fn own(
        &self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
        disturb: bool,
    ) -> std::result::Result<Vec<f64>, Unknown> {
        if let Some(late) = watch::over() {
            return Err(Unknown::new(late));
        }
        let args = args.map_err(Clone::clone)?;
        let rule =
            node.rule.ok_or_else(|| Unknown::no_rule(args.name, &node.program.graph.get(node.id).op))?;
        let Some(mix) = self.mix else { return self.computed((node, rule), args, self.arithmetic, disturb) };
        let kind = self.labelled.labels[node.id].map(|id| id.kind());
        let rounds = mix.rounds(kind, &self.steps.positions(self.step));
        let plain = Mix::plain(self.arithmetic);
        if !rounds.contains(&true) {
            return self.computed((node, rule), args, plain, disturb);
        }
        let mut values = self.computed((node, rule), args, self.arithmetic, disturb)?;
        if let Some((axis, _)) = axes(&rule.op, args).filter(|_| rounds.contains(&false)) {
            let others = self.computed((node, rule), args, plain, disturb)?;
            // Of the last rows alone where that is all that is computed.
            let rows = &rounds[rounds.len().saturating_sub(args.shape[axis])..];
            let each = args.shape[axis + 1..].iter().product::<usize>().max(1);
            let parts = values.chunks_mut(each).zip(others.chunks(each)).zip(rows);
            let unrounded = parts.filter(|(_, rounds)| !**rounds);
            unrounded.for_each(|((values, others), _)| values.copy_from_slice(others));
        }
        Ok(values)
    }

    /// The same in one arithmetic.
    fn computed(
        &self,
        (node, rule): (&Node<'_>, &Rule),
        args: &Args<'_, f64>,
        arithmetic: Arithmetic,
        disturb: bool,
    ) -> std::result::Result<Vec<f64>, Unknown> {
        let mut narrowed = Narrowed::of(&rule.op, args, &arithmetic);
        let seed = match self.how {
            Run::Disturbed(seed) if disturb => Some(seed),
            _ => None,
        };
        self.aside.note((self.step, node.id), self.how, (&rule.op, args, &arithmetic), &mut narrowed);
        let key = |seed: u64, slot: usize, i: usize| self.draw(node.id, seed, slot, i);
        if let Some(seed) = seed {
            narrowed.scatter(&rule.op, args, &arithmetic, |slot, i| key(seed, slot + 1, i));
            narrowed.disturb(&rule.op, args, self.arithmetic.narrow, |slot, i| key(seed, slot + 1, i));
        }
        let arithmetic = attentions::of_product(&arithmetic, &rule.op, args);
        let args = Args { arithmetic: &arithmetic, sources: narrowed.sources(args), ..*args };
        let mut values = compute::<f64>(rule, &args)?;
        let bound = match &rule.check {
            Check::Bound(bound) | Check::Settled { bound, .. } => Some(bound),
            Check::Exact | Check::Choice(_) => None,
        };
        if let Some((seed, bound)) = seed.zip(bound) {
            let explained = self.bound(node.id, rule, &args, &|| bound(&args, &values));
            for (i, (value, explained)) in values.iter_mut().zip(explained).enumerate() {
                let rounded = storage_types::rounding(self.arithmetic.narrow, *value);
                *value += (explained / CONFIDENCE + rounded) * key(seed, 0, i);
            }
            let roots = storage_types::roots(self.arithmetic.narrow, &rule.op, &args).into_iter().flatten();
            for (row, (values, off)) in values.chunks_mut(args.shape[3].max(1)).zip(roots).enumerate() {
                let factor = 1.0 + off * key(seed, ROOT, row);
                values.iter_mut().for_each(|value| *value *= factor);
            }
        }
        Ok(values)
    }

    /// A number in [-1, 1), the same for the same place: an element of a slot of a node.
    fn draw(&self, node: usize, seed: u64, slot: usize, i: usize) -> f64 {
        let mut z = 0u64;
        for word in [seed, self.step as u64, node as u64, slot as u64, i as u64] {
            z = random::mixed((z ^ word).wrapping_add(random::GAMMA));
        }
        random::unit(z)
    }

    /// What rounding explains of a node, which of a product with a weight is computed once.
    fn bound(
        &self,
        node: usize,
        rule: &Rule,
        args: &Args<'_, f64>,
        computed: &dyn Fn() -> Vec<f64>,
    ) -> Vec<f64> {
        let Some(bounds) = self.bounds.filter(|_| storage_types::is_product(&rule.op, args)) else {
            return computed();
        };
        if let Some(known) = bounds.borrow().known.get(&(self.step, node)) {
            return known.iter().copied().map(f64::from).collect();
        }
        let own = computed();
        let mut bounds = bounds.borrow_mut();
        if bounds.values + own.len() <= BOUNDS_MAX {
            bounds.values += own.len();
            bounds.known.insert((self.step, node), own.iter().map(|bound| *bound as f32).collect());
        }
        own
    }
}
