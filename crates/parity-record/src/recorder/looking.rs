//! How closely the passes of a recording are looked at: node by node, or when they are computed.

use super::Recorder;
use crate::api::{RawGraph, RawSched, RawTensor};
use crate::describe::{Described, Reader};
use crate::kept::{self, Observe};
use crate::map::map;
use crate::plan::PassPlan;

impl Recorder {
    /// Marks what is wanted of a graph that is about to get its memory, where it is to be read when the graph is computed;
    /// what was marked.
    ///
    /// # Safety
    /// The reader's library made the graph.
    pub unsafe fn mark(&mut self, reader: Reader<'_>, graph: RawGraph) -> Vec<RawTensor> {
        if self.options.observe != Observe::Outputs || self.options.inject.is_some() || self.stopped {
            return Vec::new();
        }
        // SAFETY: by the caller's promise; a scheduler that has no graph yet is not asked for backends.
        let described = unsafe { reader.describe(std::ptr::null_mut(), graph) };
        let mapping = map(&described.graph);
        let (filter, layers) = (&self.options.filter, mapping.layers());
        let wanted = |index: usize| filter.wants(mapping.captures[index].checkpoint, layers);
        // SAFETY: as above.
        unsafe { kept::mark(reader, &described, &mapping, &wanted) }
    }

    /// Says that a graph is computed node by node after all, and why.
    pub fn cannot_keep(&mut self, why: &str) {
        self.say_once(&format!("computed node by node: {why}"));
        self.status("observed", &Observe::Nodes.to_string());
        if let Some(store) = &mut self.store {
            store.edit(|manifest| manifest.observed = Some(Observe::Nodes.to_string()));
        }
    }

    /// Whether all that is wanted of a pass can be read when it is computed.
    ///
    /// # Safety
    /// As for [`Recorder::begin`].
    pub(super) unsafe fn can_keep(
        &mut self,
        reader: Reader<'_>,
        described: &Described,
        plan: &PassPlan,
    ) -> bool {
        if self.options.observe == Observe::Nodes || self.options.inject.is_some() {
            return false;
        }
        let nodes =
            || (0..described.graph.nodes).filter(|&id| plan.wanted.contains_key(&described.address[id]));
        let Some(memory) = kept::memory(&described.graph, nodes()) else {
            self.cannot_keep("a node is written over by a later one, so that it can only be read in between");
            return false;
        };
        // SAFETY: tensors of the graph.
        let is_kept = |id: &usize| unsafe { kept::is_kept(reader, described.address[*id]) };
        let all = memory.iter().all(is_kept);
        if !all {
            self.cannot_keep("the memory of its graph was laid out before its nodes could be kept");
        }
        all
    }

    /// Reads what was kept of the pass that has just been computed.
    ///
    /// # Safety
    /// As for [`Recorder::begin`], after the computation.
    pub(super) unsafe fn read_kept(&mut self, reader: Reader<'_>, sched: RawSched) {
        let Some(plan) = &self.plan else { return };
        let mut nodes: Vec<(usize, RawTensor)> =
            plan.wanted.iter().filter_map(|(node, planned)| Some((*planned.first()?, *node))).collect();
        nodes.sort_unstable_by_key(|(first, _)| *first);
        // SAFETY: by the caller's promise.
        unsafe { (reader.api.sched_synchronize)(sched) };
        for (_, node) in nodes {
            // SAFETY: as above; its memory was kept.
            unsafe { self.computed(reader, node) };
        }
    }
}
