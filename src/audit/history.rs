//! What earlier steps left in caches and states, where a stretch reads them that was not recorded: computed again from what was
//! recorded in those steps, with a mistake or without. A mistake of decode steps shows in them alone, and one in keys or values
//! in all that were cached.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};

use parity_graph::Id;

use super::bridge::Unseen;
use super::replay::{How, Replayed, work};
use super::{Labelled, lost_steps, needed};
use crate::engine::op_by_op::States;

/// The steps before the one that is computed again.
pub struct History<'a> {
    /// In their order, each with the nodes that leave something which is read later.
    pub steps: Vec<(Replayed<'a>, Vec<bool>)>,
    /// What they leave without a mistake in any of them.
    pub clean: RefCell<BTreeMap<How, States<f64>>>,
}

impl<'a> History<'a> {
    /// What the steps before `of` leave under these keys; `None` where steps are lost, or where their graphs have other nodes,
    /// so that nobody can say which of them a mistake is in.
    pub fn of(of: Replayed<'a>, keys: HashSet<&'a str>) -> Option<History<'a>> {
        let before: Vec<(usize, &Labelled)> =
            of.graphs.iter().copied().filter(|(step, _)| *step < of.step).collect();
        let nodes = |labelled: &'a Labelled| {
            let tensors = &labelled.program.graph.tensors;
            tensors.iter().zip(&labelled.labels).map(|(tensor, label)| (&tensor.op, *label))
        };
        let is_alike = |labelled: &'a Labelled| nodes(labelled).eq(nodes(of.labelled));
        if !lost_steps::before(of.steps, of.step).is_empty() || !before.iter().all(|(_, one)| is_alike(one)) {
            return None;
        }
        let needed = needed::leaving(of.steps, &before, keys);
        let steps = before.into_iter().zip(needed);
        let steps =
            steps.map(|((step, labelled), needed)| (Replayed { step, labelled, ..of }, needed)).collect();
        Some(History { steps, clean: RefCell::default() })
    }

    /// The same in another attention.
    pub fn with(&self, unseen: Unseen) -> History<'a> {
        let steps =
            self.steps.iter().map(|(of, needed)| (Replayed { unseen, ..*of }, needed.clone())).collect();
        History { steps, clean: RefCell::default() }
    }

    /// Multiplications of it.
    pub fn work(&self) -> usize {
        let of = |(of, needed): &(Replayed<'_>, Vec<bool>)| {
            let graph = &of.labelled.program.graph;
            let some = graph.computed().filter(|&id| needed[id]);
            some.map(|id| work(graph, id)).fold(0, usize::saturating_add)
        };
        self.steps.iter().map(of).fold(0, usize::saturating_add)
    }

    /// Whether any of some nodes leaves something in a step before.
    pub fn touches(&self, nodes: &[Id]) -> bool {
        self.steps.iter().any(|(_, needed)| nodes.iter().any(|&id| needed.get(id) == Some(&true)))
    }
}
