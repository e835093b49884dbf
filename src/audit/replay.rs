//! What lies between the recorded nodes and a suspect, computed again with a mistake in it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};

use parity_graph::{Graph, Id, Op};

use super::best::NEARER;
use super::history::History;
use super::node::{Held, Hypothesis, nothing};
use super::suspect::Suspect;
use super::{Labelled, Steps, attentions, bridge, chosen_experts};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Carried, Conductor, Machine, Memory, Node, States, Unknown, Value, own};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::{Args, Rule};

/// What a replay is made of.
#[derive(Clone, Copy)]
pub struct Replayed<'a> {
    pub step: usize,
    pub steps: &'a dyn Steps,
    pub labelled: &'a Labelled,
    /// Those of all steps.
    pub graphs: &'a [(usize, &'a Labelled)],
    pub gguf: &'a Gguf,
    /// By tensor: the type that it is taken to be kept in.
    pub kept: &'a [Storage],
    /// What nodes that were not recorded are taken to be computed in.
    pub unseen: bridge::Unseen,
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
    /// What earlier steps left that is read on the way.
    history: Option<History<'a>>,
    tried: &'a [Hypothesis],
    /// Which of these came nearest to what was recorded, and how near that was.
    nearest: Cell<Option<(usize, f64)>>,
    /// How it is computed.
    how: How,
    /// The last node that something was wrong in, and what was computed before that one: it is the same with whatever is
    /// wrong in that node or in later ones.
    before: RefCell<BTreeMap<How, (Id, Memory<f64>)>>,
}

/// How nodes are computed again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
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
    /// that it reads was recorded, and where a cache or a state lies between of which nobody knows what earlier steps left in
    /// it.
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

    pub(super) fn through(
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
        let mut keys = HashSet::new();
        while let Some(id) = open.pop() {
            for source in program.graph.sources(id).filter(|&source| source != id) {
                let root = program.graph.root(source);
                if program.is_written(root) {
                    if of.step > 0 && id == node.id {
                        continue;
                    }
                    keys.insert(program.key(root));
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
        let history = match of.step > 0 && !keys.is_empty() {
            true => Some(History::of(of, keys)?),
            false => None,
        };
        let (how, before) = (How::Bounded, RefCell::default());
        Some(Replay {
            of,
            suspect: node.id,
            through,
            again: None,
            rows,
            some,
            cached,
            history,
            tried,
            nearest: Cell::default(),
            how,
            before,
        })
    }

    /// The same where attention that was not recorded, if any is computed again, has its keys and values in each of the other
    /// types that an engine may cache them in.
    pub fn with_other_caches(&self) -> Vec<Replay<'a>> {
        let graph = &self.of.labelled.program.graph;
        let attends = |id: &Id| matches!(graph.get(*id).op, Op::FlashAttn | Op::SoftMax);
        let own = self.of.unseen.attention;
        if self.how == How::Exact || own != attentions::cached(own.cache) || !self.through.iter().any(attends)
        {
            return Vec::new();
        }
        let others = attentions::caches(self.of.steps).into_iter().filter(|cache| *cache != own.cache);
        let with = |cache: Storage| {
            let unseen = bridge::Unseen { attention: attentions::cached(cache), ..self.of.unseen };
            let of = Replayed { unseen, ..self.of };
            let history = self.history.as_ref().map(|history| history.with(unseen));
            let (through, some, cached) = (self.through.clone(), self.some.clone(), self.cached.clone());
            let (rows, before) = (self.rows.clone(), RefCell::default());
            let nearest = Cell::default();
            Replay { of, through, some, cached, rows, history, nearest, before, ..*self }
        };
        others.map(with).collect()
    }

    /// The same with a recorded node that is computed again, where nothing of earlier steps is read.
    pub(super) fn again_from(self, id: Id) -> Option<Replay<'a>> {
        let is_alone = self.cached.is_empty() && self.history.is_none();
        is_alone.then_some(Replay { again: Some(id), ..self })
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

    /// Multiplications of the products and of attention that are computed again with a mistake in these nodes: what lies before the
    /// first of them is known from others.
    pub fn work(&self, nodes: &[Id]) -> usize {
        let first = nodes.iter().copied().min().unwrap_or(0);
        let behind = self.through.iter().filter(|id| **id >= first);
        let here = behind.map(|&id| work(&self.of.labelled.program.graph, id));
        let before = self.history.iter().filter(|history| history.touches(nodes)).map(History::work);
        here.chain(before).fold(0, usize::saturating_add)
    }

    /// The suspect beside what it comes to with a mistake in these `nodes`, of what is computed again; `None` where that is not
    /// known.
    pub fn held(&self, suspect: &Suspect<'_>, nodes: &[Id], injected: Injected<'_>) -> Option<Held> {
        self.held_by(suspect, (nodes, f64::INFINITY), injected, &|node, args, said| {
            said(node.rule?, args, &node.carried)
        })
    }

    /// As [`Replay::held`], where something may be wrong in the suspect too; `None` also where more than `most` of the
    /// squared error is left.
    pub fn held_by(
        &self,
        suspect: &Suspect<'_>,
        (nodes, most): (&[Id], f64),
        injected: Injected<'_>,
        judging: Judging<'_>,
    ) -> Option<Held> {
        let near = |rule: &Rule, args: &Args<'_, f64>, _: &[Option<Carried>]| {
            (!suspect.is_further(rule, args, self.tried, most)).then(nothing)
        };
        if self.how == How::Bounded && most.is_finite() {
            self.run(How::Alone, suspect, nodes, injected, &|node, args| judging(node, args, &near))?;
        }
        let is_known_near = self.how == How::Bounded || !most.is_finite();
        let judged = |rule: &Rule, args: &Args<'_, f64>, carried: &[Option<Carried>]| {
            let is_near = is_known_near || near(rule, args, carried).is_some();
            is_near.then(|| suspect.judged(rule, args, carried, self.tried))?
        };
        self.run(self.how, suspect, nodes, injected, &|node, args| judging(node, args, &judged))
    }

    /// How far what was recorded of the suspect is from what it comes to with a mistake in these `nodes`: squares, of some of its
    /// values; infinite where that is not known.
    pub fn distance(&self, suspect: &Suspect<'_>, nodes: &[Id], injected: Injected<'_>) -> f64 {
        let how = if self.how == How::Bounded { How::Alone } else { self.how };
        let found = Cell::new(f64::INFINITY);
        self.run(how, suspect, nodes, injected, &|node, args| {
            found.set(self.nearest(suspect, node.rule?, args));
            Some(nothing())
        });
        found.get()
    }

    /// The distance in that of what the suspect is tried in that comes nearest: as it did for the last mistake, unless this one
    /// leaves so much less that another may. A search for a number asks this many times, of attention in dozens of forms.
    fn nearest(&self, suspect: &Suspect<'_>, rule: &Rule, args: &Args<'_, f64>) -> f64 {
        let known = self.nearest.get();
        let of_known = known.map(|(number, _)| suspect.distance(rule, args, &self.tried[number..=number]).1);
        match of_known.zip(known) {
            Some((distance, (_, least))) if NEARER * distance >= least => distance,
            _ => {
                let found = suspect.distance(rule, args, self.tried);
                self.nearest.set(Some(found).filter(|_| !self.tried.is_empty()));
                found.1
            }
        }
    }

    /// One execution, which goes on from what the last one like it computed before the first of the wrong `nodes`.
    fn run(
        &self,
        how: How,
        suspect: &Suspect<'_>,
        nodes: &[Id],
        injected: Injected<'_>,
        judging: Judges<'_>,
    ) -> Option<Held> {
        let Replayed { step, steps, labelled, .. } = self.of;
        let mut machine = self.machine(how);
        let mut conductor = Replayer {
            replay: self,
            of: self.of,
            how,
            suspect,
            injected,
            judging: Some(judging),
            held: None,
        };
        let touched = self.history.as_ref().is_some_and(|history| history.touches(nodes));
        if let Some(history) = &self.history {
            machine = machine.after(self.left(history, how, touched, &mut conductor)?);
        }
        let inputs = |id| labelled.input(steps, step, id);
        let program = &labelled.program;
        let first = nodes.iter().copied().min().unwrap_or(self.suspect);
        // With something wrong in earlier steps memory is none that others go on from.
        let known = self.before.borrow_mut().remove(&how).filter(|(at, _)| *at <= first && !touched);
        let (at, mut memory) = known.unwrap_or_else(|| (0, program.memory()));
        let mut go_on = |nodes: std::ops::Range<Id>, memory: &mut Memory<f64>| {
            let some = |id| nodes.contains(&id) && self.some.contains(&id);
            machine.go_on(program, &some, &inputs, &mut conductor, memory).ok()
        };
        go_on(at..first, &mut memory)?;
        if !touched {
            self.before.borrow_mut().insert(how, (first, memory.clone()));
        }
        go_on(first..self.suspect + 1, &mut memory)?;
        conductor.held
    }

    fn machine(&self, how: How) -> Machine<'a, f64> {
        let arithmetic = if how == How::Exact { Arithmetic::EXACT } else { Arithmetic::LLAMA_CPU };
        Machine::new(self.of.gguf, arithmetic).rounding(self.of.steps.is_own_graph())
    }

    /// What earlier steps left, which is the same for all mistakes that they are not `touched` by.
    fn left(
        &self,
        history: &History<'a>,
        how: How,
        touched: bool,
        conductor: &mut Replayer<'_, 'a>,
    ) -> Option<States<f64>> {
        if let Some(known) = history.clean.borrow().get(&how).filter(|_| !touched) {
            return Some(known.clone());
        }
        let mut machine = self.machine(how);
        for (of, needed) in &history.steps {
            let Replayed { step, steps, labelled, .. } = *of;
            let inputs = |id| labelled.input(steps, step, id);
            let mut before = Replayer { of: *of, judging: None, held: None, ..*conductor };
            machine.step_of(&labelled.program, &|id| needed[id], &inputs, &mut before).ok()?;
        }
        let states = machine.into_states();
        if !touched {
            history.clean.borrow_mut().insert(how, states.clone());
        }
        Some(states)
    }
}

/// Multiplications of a product or of attention; elements of what else there is.
pub(super) fn work(graph: &Graph, id: Id) -> usize {
    let extent = |slot: usize, axis: usize| graph.src(id, slot).map_or(1, |src| graph.get(src).ne[axis]);
    let each = match graph.get(id).op {
        Op::MulMat | Op::MulMatId => extent(0, 0),
        Op::FlashAttn => extent(1, 1),
        _ => 1,
    };
    graph.get(id).elements().saturating_mul(each)
}

impl Replayed<'_> {
    /// What was recorded of a node.
    fn recorded(&self, id: Id) -> Option<super::Tensor> {
        self.steps.tensor(self.step, self.labelled.labels.get(id).copied().flatten()?)
    }
}

/// What is said of the suspect as it is computed.
type Judges<'a> = &'a dyn Fn(&Node<'_>, &Args<'_, f64>) -> Option<Held>;

struct Replayer<'b, 'a> {
    replay: &'b Replay<'a>,
    /// The step: that of the replay, or one before.
    of: Replayed<'a>,
    how: How,
    suspect: &'b Suspect<'b>,
    injected: Injected<'b>,
    /// Nothing in a step before.
    judging: Option<Judges<'b>>,
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
        self.judging?(&Node { id, program, rule, carried }, &Args { sources, ..*args })
    }

    /// What was recorded of a node that is not computed again: itself, or the experts that were chosen by it.
    fn given(
        &self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Option<Vec<f64>> {
        let Replayed { step, steps, labelled, .. } = self.of;
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
        let (of, replay) = (self.of, self.replay);
        if node.id == replay.suspect && self.judging.is_some() {
            self.held = args.ok().and_then(|args| self.judged(node, args));
            return Ok(Err(Unknown::new(of.labelled.program.names[node.id].as_str())));
        }
        let rows = replay.rows.iter().find(|(by, _)| *by == node.id).map(|(_, rows)| rows.clone());
        if let Some(values) = rows.or_else(|| self.given(node, args)) {
            return Ok(Ok(values.into()));
        }
        if replay.name(node.id).is_none() {
            return Ok(bridge::moved(node, args));
        }
        let across = |node: &Node<'_>, args: std::result::Result<&Args<'_, f64>, &Unknown>| match self.how {
            How::Exact => own(node, args),
            how => bridge::across(of.steps, node, args, (of.kept[node.id], &of.unseen, how == How::Alone)),
        };
        let injected = args.ok().and_then(|args| (self.injected)(node, args, &across));
        Ok(injected.unwrap_or_else(|| across(node, args)))
    }
}
