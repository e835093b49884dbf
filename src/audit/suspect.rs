//! A node that rounding does not explain, and what was not recorded between it and the recorded ones before it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use parity_graph::{Id, Op};

use super::further::is_further;
use super::node::{Held, Hypothesis, Sight, judge, nothing};
use super::{Labelled, Steps, bridge, chosen_experts};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Carried, Conductor, Machine, Memory, Node, Unknown, Value, own};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::{Args, Rule};

/// A node that rounding does not explain, and everything that a diagnosis looks at.
pub struct Suspect<'a> {
    /// The node.
    pub node: &'a Node<'a>,
    /// What it read.
    pub args: &'a Args<'a, f64>,
    /// Its recorded values, contiguous in the shape of `args`.
    pub recorded: &'a [f64],
    /// What explains it in the steps before, as it is injected.
    pub known: Vec<String>,
    /// Whether those are mistakes in nodes before it that were not recorded.
    pub is_known_out_of_sight: bool,
    /// The position of the token that an element belongs to.
    pub position: &'a dyn Fn(usize) -> u32,
    /// See [`Sight`].
    pub sight: &'a Sight<'a>,
    /// Whether rounding explains it in the first step.
    pub was_healthy: bool,
    /// What was found.
    pub held: &'a Held,
    /// The squared error that rounding explains, where bounds are too wide to tell one mistake from another.
    pub allowed: Option<f64>,
    /// What it may have been computed in.
    pub tried: &'a [Hypothesis],
    /// The model.
    pub gguf: &'a Gguf,
    /// Values of another tensor of the graph, in its shape.
    pub others: &'a dyn Fn(Id) -> Option<Vec<f64>>,
    /// By node that picks rows of a state: those that it would have picked of the newest.
    pub newest: &'a BTreeMap<Id, Vec<f64>>,
    /// The nodes before it that were not recorded; `None` where there are none.
    pub replay: Option<Replay<'a>>,
    pub(super) replayed: Replayed<'a>,
}

impl<'a> Suspect<'a> {
    /// A recorded node before it, computed again as if it had not been recorded.
    pub fn again(&self, id: Id) -> Option<Replay<'a>> {
        let replay = Replay::through(self.node, BTreeSet::from([id]), None, self.replayed, self.tried)?;
        let replay = Some(replay).filter(|replay| replay.cached.is_empty())?;
        Some(Replay { again: Some(id), ..replay })
    }

    /// What was recorded of it beside what it comes to with the newest rows of the state that `by` picks rows of; `None` where
    /// these are what was picked.
    pub fn with_newest(&self, by: Id) -> Option<Held> {
        let rows = (by, self.newest.get(&by)?.clone());
        let replay = Replay::through(self.node, BTreeSet::new(), Some(rows), self.replayed, self.tried)?;
        replay.held(self, by, &|_, _, _| None)
    }

    /// What was recorded of it beside what a rule makes of other sources, of which `carried` was computed again.
    pub fn judged(
        &self,
        rule: &Rule,
        args: &Args<'_, f64>,
        carried: &[Option<Carried>],
        tried: &[Hypothesis],
    ) -> Option<Held> {
        let Sight { looked_at, row, .. } = *self.sight;
        judge(rule, args, self.recorded, &Sight { looked_at, carried, row }, tried).ok()
    }

    /// Whether an element was looked at, and is not of memory that the op never writes.
    pub fn looks_at(&self, element: usize) -> bool {
        let op = &self.node.program.graph.get(self.node.id).op;
        element < crate::ops::written(op, self.args) && (self.sight.looked_at)(element)
    }

    /// Whether more than `most` of the squared error is left in what it is tried in, which is all that is known then.
    fn is_further(&self, rule: &Rule, args: &Args<'_, f64>, tried: &[Hypothesis], most: f64) -> bool {
        is_further(rule, args, (self.recorded, self.sight.looked_at), tried, most)
    }

    /// Whether rounding explains what a mistake leaves.
    pub fn is_explained(&self, left: &Held) -> bool {
        left.nonfinite == 0
            && match self.allowed {
                None => left.is_healthy(),
                Some(allowed) => left.over.is_finite() && left.squares[0] <= allowed,
            }
    }

    /// What another node of its graph is called in a dump.
    pub fn label(&self, id: Id) -> Option<Checkpoint> {
        self.replayed.labelled.labels.get(id).copied().flatten()
    }

    /// That it is asked whether it is explained by a mistake.
    pub fn asked(&self, mistake: &str) -> String {
        let name =
            self.label(self.node.id).map_or_else(|| self.args.name.to_owned(), |label| label.to_string());
        format!("{name}: is it {mistake}?")
    }

    /// Of how many ranks of a tensor-parallel engine the recording was put together, where it was.
    pub fn ranks(&self) -> Option<usize> {
        self.replayed.steps.ranks()
    }
}

/// What a replay is made of.
#[derive(Clone, Copy)]
pub struct Replayed<'a> {
    pub step: usize,
    pub steps: &'a dyn Steps,
    pub labelled: &'a Labelled,
    pub gguf: &'a Gguf,
    /// By tensor: the type that it is taken to be kept in.
    pub kept: &'a [Storage],
    /// What nodes that were not recorded are taken to be computed in.
    pub unseen: &'a bridge::Unseen,
}

/// The nodes between what was recorded and a suspect: computed again from the recorded values before them, with a
/// mistake in one or in several of them.
pub struct Replay<'a> {
    of: Replayed<'a>,
    suspect: Id,
    /// The nodes that are computed again, in order.
    pub through: Vec<Id>,
    /// The one of them that was recorded, if one was.
    again: Option<Id>,
    /// A node that picks rows of a state, and rows that are taken for its own.
    rows: Option<(Id, Vec<f64>)>,
    /// What is executed: these, what they read, and the suspect.
    some: BTreeSet<Id>,
    /// Slots of the suspect that read a cache in which earlier steps left something: they keep what they read, and what
    /// was written there in this step is none of what is computed again.
    cached: Vec<usize>,
    tried: &'a [Hypothesis],
    /// How it is computed.
    how: How,
    /// The last node that something was wrong in, and what was computed before that one: it is the same with whatever is
    /// wrong in that node or in later ones.
    before: RefCell<BTreeMap<How, (Id, Memory<f64>)>>,
}

/// How nodes are computed again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    /// With what rounding explains of them.
    Bounded,
    /// The same values alone, which is a tenth of the work.
    Alone,
    /// In exact arithmetic alone, where nobody asks what rounding explains.
    Exact,
}

/// A node that is computed again.
pub type Across<'a> = &'a dyn Fn(&Node<'_>, std::result::Result<&Args<'_, f64>, &Unknown>) -> Value<f64>;

/// What a node of a replay comes to; `None` where nothing is wrong in it.
pub type Injected<'a> = &'a dyn Fn(&Node<'_>, &Args<'_, f64>, Across<'_>) -> Option<Value<f64>>;

/// What is said of the suspect with what it reads.
pub type Said<'a> = &'a dyn Fn(&Rule, &Args<'_, f64>, &[Option<Carried>]) -> Option<Held>;

/// What is said of the suspect, or of what a mistake makes of it.
pub type Judging<'a> = &'a dyn Fn(&Node<'_>, &Args<'_, f64>, Said<'_>) -> Option<Held>;

impl<'a> Replay<'a> {
    /// What lies between the recorded nodes and `node`, which may have been computed in `tried`. `None` where everything
    /// that it reads was recorded, and where a cache or a state that it does not read itself lies between in which earlier
    /// steps left something.
    pub(super) fn of(node: &Node<'_>, of: Replayed<'a>, tried: &'a [Hypothesis]) -> Option<Replay<'a>> {
        let through: BTreeSet<Id> =
            node.carried.iter().flatten().flat_map(|carried| carried.through.iter().copied()).collect();
        // What was recorded in part is nobody's to compute with a mistake.
        let whole = through.iter().all(|&id| of.recorded(id).is_none());
        if !whole {
            return None;
        }
        Replay::through(node, through, None, of, tried).filter(|replay| !replay.through.is_empty())
    }

    fn through(
        node: &Node<'_>,
        through: BTreeSet<Id>,
        rows: Option<(Id, Vec<f64>)>,
        of: Replayed<'a>,
        tried: &'a [Hypothesis],
    ) -> Option<Replay<'a>> {
        let program = &of.labelled.program;
        let (mut some, mut open) = (BTreeSet::from([node.id]), vec![node.id]);
        let reads_cache = |source: &Option<Id>| {
            of.step > 0 && source.is_some_and(|source| program.is_written(program.graph.root(source)))
        };
        let slots = program.graph.get(node.id).srcs.iter().enumerate();
        let cached: Vec<usize> =
            slots.filter(|(_, source)| reads_cache(source)).map(|(slot, _)| slot).collect();
        while let Some(id) = open.pop() {
            for source in program.graph.sources(id).filter(|&source| source != id) {
                let root = program.graph.root(source);
                if program.is_written(root) {
                    if of.step > 0 && id == node.id {
                        continue;
                    }
                    if of.step > 0 {
                        return None;
                    }
                    open.extend(program.writers(root).filter(|&id| id < node.id && some.insert(id)));
                }
                let is_picked = rows.as_ref().is_some_and(|(by, _)| *by == source);
                let is_given = is_picked || !through.contains(&source) && of.recorded(source).is_some();
                if !program.graph.is_leaf(source) && some.insert(source) && !is_given {
                    open.push(source);
                }
            }
        }
        let through = through.into_iter().filter(|id| some.contains(id)).collect();
        let (how, before) = (How::Bounded, RefCell::default());
        Some(Replay { of, suspect: node.id, through, again: None, rows, some, cached, tried, how, before })
    }

    /// The same in exact arithmetic alone, where that is enough.
    #[must_use]
    pub(super) fn in_exact_arithmetic(self, exact: bool) -> Replay<'a> {
        Replay { how: if exact { How::Exact } else { How::Bounded }, ..self }
    }

    /// Whether all that it reads is computed again, what earlier steps left in a cache too.
    pub fn is_whole(&self) -> bool {
        self.cached.is_empty()
    }

    /// Along which axis of the suspect, slowest first, its token rows lie.
    pub fn token_axis(&self) -> Option<usize> {
        self.of.labelled.axes.get(self.suspect).copied().flatten()
    }

    /// What a node of it is called in a dump.
    pub fn name(&self, id: Id) -> Option<Checkpoint> {
        self.of.labelled.labels.get(id).copied().flatten()
    }

    /// Multiplications of the products and of attention that are computed again.
    pub fn work(&self) -> usize {
        let graph = &self.of.labelled.program.graph;
        let extent =
            |id: Id, slot: usize, axis: usize| graph.src(id, slot).map_or(1, |src| graph.get(src).ne[axis]);
        let work = |&id: &Id| match graph.get(id).op {
            Op::MulMat | Op::MulMatId => graph.get(id).elements().saturating_mul(extent(id, 0, 0)),
            Op::FlashAttn => graph.get(id).elements().saturating_mul(extent(id, 1, 1)),
            _ => graph.get(id).elements(),
        };
        self.through.iter().map(work).fold(0, usize::saturating_add)
    }

    /// The suspect beside what it comes to with a mistake in what is computed again, the `first` node of it and later ones;
    /// `None` where that is not known.
    pub fn held(&self, suspect: &Suspect<'_>, first: Id, injected: Injected<'_>) -> Option<Held> {
        self.held_by(suspect, (first, f64::INFINITY), injected, &|node, args, said| {
            said(node.rule?, args, &node.carried)
        })
    }

    /// As [`Replay::held`], where something may be wrong in the suspect too; `None` also where more than `most` of the
    /// squared error is left.
    pub fn held_by(
        &self,
        suspect: &Suspect<'_>,
        (first, most): (Id, f64),
        injected: Injected<'_>,
        judging: Judging<'_>,
    ) -> Option<Held> {
        let near = |rule: &Rule, args: &Args<'_, f64>, _: &[Option<Carried>]| {
            (!suspect.is_further(rule, args, self.tried, most)).then(nothing)
        };
        if self.how == How::Bounded && most.is_finite() {
            self.run(How::Alone, suspect, first, injected, &|node, args| judging(node, args, &near))?;
        }
        let is_known_near = self.how == How::Bounded || !most.is_finite();
        let judged = |rule: &Rule, args: &Args<'_, f64>, carried: &[Option<Carried>]| {
            let is_near = is_known_near || near(rule, args, carried).is_some();
            is_near.then(|| suspect.judged(rule, args, carried, self.tried))?
        };
        self.run(self.how, suspect, first, injected, &|node, args| judging(node, args, &judged))
    }

    /// One execution, which goes on from what the last one like it computed before the `first` wrong node.
    fn run(
        &self,
        how: How,
        suspect: &Suspect<'_>,
        first: Id,
        injected: Injected<'_>,
        judging: &dyn Fn(&Node<'_>, &Args<'_, f64>) -> Option<Held>,
    ) -> Option<Held> {
        let Replayed { step, steps, labelled, gguf, .. } = self.of;
        let arithmetic = if how == How::Exact { Arithmetic::EXACT } else { Arithmetic::LLAMA_CPU };
        let mut machine: Machine<'_, f64> = Machine::new(gguf, arithmetic).rounding(steps.is_own_graph());
        let inputs = |id| labelled.input(steps, step, id);
        let mut conductor = Replayer { replay: self, how, suspect, injected, judging, held: None };
        let program = &labelled.program;
        let known = self.before.borrow_mut().remove(&how).filter(|(at, _)| *at <= first);
        let (at, mut memory) = known.unwrap_or_else(|| (0, program.memory()));
        let mut go_on = |nodes: std::ops::Range<Id>, memory: &mut Memory<f64>| {
            let some = |id| nodes.contains(&id) && self.some.contains(&id);
            machine.go_on(program, &some, &inputs, &mut conductor, memory).ok()
        };
        go_on(at..first, &mut memory)?;
        self.before.borrow_mut().insert(how, (first, memory.clone()));
        go_on(first..self.suspect + 1, &mut memory)?;
        conductor.held
    }
}

impl Replayed<'_> {
    /// What was recorded of a node.
    fn recorded(&self, id: Id) -> Option<super::Tensor> {
        self.steps.tensor(self.step, self.labelled.labels.get(id).copied().flatten()?)
    }
}

struct Replayer<'b, 'a> {
    replay: &'b Replay<'a>,
    how: How,
    suspect: &'b Suspect<'b>,
    injected: Injected<'b>,
    judging: &'b dyn Fn(&Node<'_>, &Args<'_, f64>) -> Option<Held>,
    held: Option<Held>,
}

impl Replayer<'_, '_> {
    fn judged(&self, node: &Node<'_>, args: &Args<'_, f64>) -> Option<Held> {
        let (mut sources, mut carried) = (args.sources.clone(), node.carried.clone());
        for &slot in &self.replay.cached {
            *sources.get_mut(slot)? = self.suspect.args.sources.get(slot)?.clone();
            *carried.get_mut(slot)? = self.suspect.sight.carried.get(slot)?.clone();
        }
        let Node { id, program, rule, .. } = *node;
        (self.judging)(&Node { id, program, rule, carried }, &Args { sources, ..*args })
    }

    /// What was recorded of a node that is not computed again: itself, or the experts that were chosen by it.
    fn given(
        &self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Option<Vec<f64>> {
        let Replayed { step, steps, labelled, .. } = self.replay.of;
        let checkpoint = labelled.labels.get(node.id).copied().flatten()?;
        if self.replay.again == Some(node.id) {
            return None;
        }
        let recorded = steps.tensor(step, checkpoint);
        let recorded = recorded.or_else(|| chosen_experts::order(steps, step, node, checkpoint, args))?;
        Some(labelled.arrange(node.id, checkpoint, &recorded)?.of_node(&recorded.values, |_| f64::NAN))
    }
}

impl Conductor<f64> for Replayer<'_, '_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let Replay { of, suspect, .. } = self.replay;
        if node.id == *suspect {
            self.held = args.ok().and_then(|args| self.judged(node, args));
            return Ok(Err(Unknown::new(of.labelled.program.names[node.id].as_str())));
        }
        let rows = self.replay.rows.iter().find(|(by, _)| *by == node.id).map(|(_, rows)| rows.clone());
        if let Some(values) = rows.or_else(|| self.given(node, args)) {
            return Ok(Ok(values.into()));
        }
        if self.replay.name(node.id).is_none() {
            return Ok(bridge::moved(node, args));
        }
        let across = |node: &Node<'_>, args: std::result::Result<&Args<'_, f64>, &Unknown>| match self.how {
            How::Exact => own(node, args),
            how => bridge::across(of.steps, node, args, (of.kept[node.id], of.unseen, how == How::Alone)),
        };
        let injected = args.ok().and_then(|args| (self.injected)(node, args, &across));
        Ok(injected.unwrap_or_else(|| across(node, args)))
    }
}
