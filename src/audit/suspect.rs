//! A node that rounding does not explain, and what was not recorded between it and the recorded ones before it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parity_graph::Id;

use super::Diagnose;
use super::further::{self, is_further};
use super::named::Names;
use super::node::{Held, Hypothesis, Sight, judge};
use super::replay::{Replay, Replayed};
use super::sample::{judge_sampled, of_whole};
use super::{Arrangement, Auditor};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Carried, Node};
use crate::gguf::Gguf;
use crate::ops::{Args, Rule};

/// How many times as far off a node may be in what most products are computed in as in what comes nearest to it: a coarser
/// arithmetic explains some of a small mistake, and none of its names.
const NEARER: f64 = 2.0;

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
    /// Of the nodes of the recording of which that is certain: whether they are wrong in any step.
    pub wrong: &'a HashMap<Checkpoint, bool>,
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
        replay.again_from(id)
    }

    /// What was recorded of it beside what it comes to with the newest rows of the state that `by` picks rows of; `None` where
    /// these are what was picked.
    pub fn with_newest(&self, by: Id) -> Option<Held> {
        let rows = (by, self.newest.get(&by)?.clone());
        let replay = Replay::through(self.node, BTreeSet::new(), Some(rows), self.replayed, self.tried)?;
        replay.held(self, &[by], &|_, _, _| None)
    }

    /// What was recorded of it beside what a rule makes of other sources, of which `carried` was computed again.
    pub fn judged(
        &self,
        rule: &Rule,
        args: &Args<'_, f64>,
        carried: &[Option<Carried>],
        tried: &[Hypothesis],
    ) -> Option<Held> {
        judge(rule, args, self.recorded, &Sight { carried, ..*self.sight }, tried).ok()
    }

    /// Whether an element was looked at, and is not of memory that the op never writes.
    pub fn looks_at(&self, element: usize) -> bool {
        let op = &self.node.program.graph.get(self.node.id).op;
        element < crate::ops::written(op, self.args) && (self.sight.looked_at)(element)
    }

    /// Whether more than `most` of the squared error is left in what it is tried in, which is all that is known then.
    pub(super) fn is_further(
        &self,
        rule: &Rule,
        args: &Args<'_, f64>,
        tried: &[Hypothesis],
        most: f64,
    ) -> bool {
        is_further(rule, args, (self.recorded, self.sight.looked_at), tried, most)
    }

    /// How far what was recorded is from what a rule makes of other sources: squares, of some of its values, in which of what is
    /// tried it comes nearest.
    pub(super) fn distance(&self, rule: &Rule, args: &Args<'_, f64>, tried: &[Hypothesis]) -> (usize, f64) {
        further::distance(rule, args, (self.recorded, self.sight.looked_at), tried)
    }

    /// Whether rounding explains what a mistake leaves.
    pub fn is_explained(&self, left: &Held) -> bool {
        left.nonfinite == 0
            && match self.allowed {
                None => left.is_healthy(),
                Some(allowed) => left.over.is_finite() && left.squares[0] <= allowed,
            }
    }

    /// What a diagnosis says of it. Where rounding was simulated a mistake is weighed against the same arithmetic without it;
    /// where this explains the step, one that has no effect there, such as what goes wrong in decode alone, would explain it
    /// as well.
    pub(super) fn names(self, diagnose: Diagnose<'_>) -> Names {
        let replay = self.replay.as_ref().filter(|_| self.allowed.is_some());
        let clean = replay.and_then(|replay| replay.held(&self, &[], &|_, _, _| None));
        if clean.as_ref().is_some_and(|clean| self.is_explained(clean)) {
            return Names { is_healthy: true, ..Names::default() };
        }
        diagnose(&Suspect { held: clean.as_ref().unwrap_or(self.held), ..self })
    }

    /// What another node of its graph is called in a dump.
    pub fn label(&self, id: Id) -> Option<Checkpoint> {
        self.replayed.labelled.labels.get(id).copied().flatten()
    }

    /// Of the recorded nodes that read another one of its graph, as it is or through nodes that were not recorded: how many are
    /// certainly wrong and how many certainly right, itself left out.
    pub fn others_that_read(&self, id: Id) -> (usize, usize) {
        let Replayed { step, steps, labelled, .. } = self.replayed;
        let graph = &labelled.program.graph;
        let mut reads = BTreeSet::from([id]);
        let (mut wrong, mut right) = (0, 0);
        for reader in (id + 1..graph.nodes).filter(|reader| *reader != self.node.id) {
            if !graph.sources(reader).any(|source| reads.contains(&source)) {
                continue;
            }
            match self.label(reader).filter(|label| steps.rows(step, *label).is_some()) {
                Some(label) => match self.wrong.get(&label) {
                    Some(true) => wrong += 1,
                    Some(false) => right += 1,
                    None => {}
                },
                None => _ = reads.insert(reader),
            }
        }
        (wrong, right)
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

impl Auditor<'_> {
    /// Names what is wrong with a node, where names are wanted and something is.
    pub(super) fn name(
        &mut self,
        node: &Node<'_>,
        checkpoint: Checkpoint,
        (rule, args): (&Rule, &Args<'_, f64>),
        (recorded, sight): (&[f64], &Sight<'_>),
        (held, tried): (&Held, &[Hypothesis]),
        arranged: &Arrangement,
    ) {
        let allowed = self.naming.and_then(|naming| naming.allowed(checkpoint, held));
        let is_wrong = allowed.map_or(!held.is_healthy(), |allowed| !(held.squares[0] <= allowed));
        let naming = self.naming.filter(|_| is_wrong);
        if naming.is_none() && self.look.is_none() {
            return;
        }
        let Auditor { step, steps, labelled, graphs, gguf, ref kept, assumed, .. } = *self;
        let tried = &of_whole(args, tried)[..];
        let by_usual = self.by_usual((rule, args), (recorded, sight), (held, tried));
        let held = by_usual.as_ref().unwrap_or(held);
        let replayed = Replayed { step, steps, labelled, graphs, gguf, kept, unseen: assumed.unseen };
        let replay = Replay::of(node, replayed, tried);
        let replay = replay.map(|replay| replay.in_exact_arithmetic(allowed.is_some()));
        let (others, newest) = (&|id: Id| labelled.values(steps, step, id), &self.newest);
        let finding = self.findings.at(checkpoint);
        let none = HashMap::new();
        let wrong = naming.map_or(&none, |naming| naming.wrong);
        let (known, is_known_out_of_sight) = (finding.spellings(), finding.is_named_out_of_sight());
        let was_healthy =
            finding.was_healthy || naming.is_some_and(|naming| naming.later.contains(&checkpoint));
        let position = &|element| arranged.position(element);
        // Mistakes are tried in what most products are computed in, or what comes nearest of all that it may have been.
        let arithmetic = held.under.as_ref().unwrap_or(args.arithmetic);
        let args = &Args { arithmetic, sources: args.sources.clone(), ..*args };
        let suspect = Suspect {
            node,
            args,
            recorded,
            known,
            is_known_out_of_sight,
            position,
            sight,
            was_healthy,
            wrong,
            held,
            allowed,
            tried,
            gguf,
            others,
            newest,
            replay,
            replayed,
        };
        if let Some(look) = self.look {
            look(step, checkpoint, &suspect);
        }
        let finding = self.findings.at(checkpoint);
        // What earlier steps left in a cache is not computed again: a name stands on the steps before that, but for what
        // every step but the first has.
        let is_whole = suspect.replay.as_ref().is_some_and(Replay::is_whole);
        if let Some(naming) = naming
            && (!is_known_out_of_sight || is_whole || was_healthy)
        {
            let names = suspect.names(naming.diagnose);
            match names.is_healthy {
                true => finding.was_healthy = true,
                false => finding.diagnosed(names),
            }
        }
    }

    /// A wrong product in what most others are computed in, where nothing comes much nearer to it.
    fn by_usual(
        &self,
        (rule, args): (&Rule, &Args<'_, f64>),
        (recorded, sight): (&[f64], &Sight<'_>),
        (held, tried): (&Held, &[Hypothesis]),
    ) -> Option<Held> {
        let usual = self.devices.usual(args, tried)?;
        let by_usual = judge_sampled(rule, args, recorded, sight, &[*usual], self.rows).ok()?;
        Some(by_usual).filter(|own| own.squares[0] <= NEARER.powi(2) * held.squares[0])
    }
}
