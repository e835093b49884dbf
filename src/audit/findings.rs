//! What an audit found of all nodes together.

use std::collections::{HashMap, HashSet};

use indexmap::{IndexMap, IndexSet};

use super::Finding;
use crate::arithmetic::Storing;
use crate::checkpoint::Checkpoint;
use crate::dump::{Recording, Unfinite};
use crate::gguf::Loaded;
use crate::report::words::count;
use crate::watch::Known;

/// What an audit of a recording with its graph found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Ids in the order in which they are executed, of all graphs.
    pub order: Vec<Checkpoint>,
    /// By id.
    pub nodes: IndexMap<Checkpoint, Finding>,
    /// What the producer rounds as it loads it.
    pub loaded: Loaded,
    /// What becomes of values that it stores in a narrow type.
    pub storing: Storing,
    /// Products that read their source as it was before it was rounded to be kept.
    pub read_unrounded: IndexSet<Checkpoint>,
}

impl Findings {
    /// Whether nodes behind an id were judged across it.
    pub fn is_bridged(&self, checkpoint: Checkpoint) -> bool {
        self.nodes.values().any(|finding| finding.bridged.contains(&checkpoint))
    }

    /// NaN and Inf in all rows of a node, where those that were judged have some.
    pub fn unfinite(&self, checkpoint: Checkpoint, dump: &dyn Recording) -> Unfinite {
        let finding = self.nodes.get(&checkpoint);
        let some = finding.is_some_and(|finding| finding.explained_nonfinite > 0 || finding.has_nonfinite());
        if some { dump.unfinite(checkpoint).count } else { Unfinite::default() }
    }

    /// The nodes that rounding does not explain.
    pub(super) fn all_wrong(&self) -> HashSet<Checkpoint> {
        self.nodes.iter().filter(|(_, finding)| finding.is_wrong()).map(|(id, _)| *id).collect()
    }

    /// Of the nodes of which that is certain: whether they are wrong.
    pub(super) fn certain(&self) -> HashMap<Checkpoint, bool> {
        let sure = self.nodes.iter().filter(|(_, finding)| finding.is_certain());
        sure.map(|(id, finding)| (*id, finding.is_wrong())).collect()
    }

    /// How many of so many nodes are healthy, and how many wrong, as far as that is certain.
    pub(super) fn known(&self, of: usize) -> Known {
        let certain = || self.nodes.values().filter(|finding| finding.is_certain());
        let wrong = certain().filter(|finding| finding.is_wrong()).count();
        Known { of, healthy: certain().count() - wrong, wrong }
    }

    /// Takes back that nodes are wrong, where the time was over before everything was tried that may explain them.
    pub(super) fn doubt(&mut self, late: &'static str) {
        self.nodes.values_mut().filter(|finding| finding.is_wrong()).for_each(|finding| {
            finding.give_up("");
            (finding.undecided, finding.late) = (None, Some(late));
        });
    }

    /// Takes nodes for undecided that another arithmetic would explain, unless one of them has the name of a mistake.
    pub(super) fn doubt_unnamed(&mut self) {
        let open = || self.nodes.values().filter(|finding| finding.is_wrong() && finding.needs.is_some());
        if open().any(|finding| !finding.diagnosis().0.is_empty()) {
            return;
        }
        for finding in self.nodes.values_mut().filter(|finding| finding.is_wrong()) {
            if let Some(needs) = finding.needs {
                finding.give_up(needs);
            }
        }
    }

    /// How many nodes are wrong.
    pub(super) fn wrong(&self) -> usize {
        self.nodes.values().filter(|finding| finding.is_wrong()).count()
    }

    /// What follows for a side whose nodes these are, in words.
    pub fn by_itself(&self, side: &str) -> String {
        let there = || self.order.iter().filter_map(|id| Some((id, self.nodes.get(id)?)));
        let open = there().filter(|(_, one)| one.undecided.is_some()).count();
        let judged = there().filter(|(_, one)| one.judged > 0 && one.undecided.is_none()).count();
        match (there().find(|(_, one)| one.is_wrong()), judged, open) {
            (Some((id, _)), ..) => format!("by itself the {side} is wrong from {id} on"),
            (None, 0, _) => format!("of the {side} nothing could be judged by itself"),
            (None, n, 0) => format!("by itself the {side} is healthy, in all {}", count(n, "node")),
            (None, n, open) => {
                let judged = count(n, "node");
                format!("by itself the {side} is healthy in {judged}, and {open} more could not be judged")
            }
        }
    }

    pub(crate) fn at(&mut self, checkpoint: Checkpoint) -> &mut Finding {
        self.nodes.entry(checkpoint).or_default()
    }

    /// Token rows that were computed again, over all nodes, and those that were screened instead.
    pub fn rows(&self) -> [u64; 2] {
        let audited = self.nodes.values().filter_map(|node| Some(node.audit()?.local.rows)).sum();
        [audited, self.nodes.values().map(Finding::rows_screened).sum()]
    }
}
