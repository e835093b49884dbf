//! How closely the passes of a recording are looked at: node by node, or when they are computed.

use std::collections::HashSet;

use super::Recorder;
use super::seen::Seen;
use crate::api::{RawGraph, RawSched, RawTensor};
use crate::describe::{Described, Reader};
use crate::kept::{self, Observe};
use crate::map::map;
use crate::plan::{PassPlan, Planned};
use crate::region::Bytes;
use crate::store::LENT_FROM;
use parity_graph::{Graph, Id};

/// What is to be kept of the graph that was marked last: most graphs that get their memory are alike.
pub(super) struct Marked {
    graph: Graph,
    nodes: Vec<Id>,
}

/// When the values of a pass are read.
pub(super) enum Reading {
    /// Each node when it was computed.
    NodeByNode,
    /// All nodes when the graph was computed, but for those that later ones write over.
    Behind(HashSet<RawTensor>),
}

impl Reading {
    /// Whether a node is read as soon as it was computed.
    pub(super) fn asks_for(&self, node: RawTensor) -> bool {
        match self {
            Reading::NodeByNode => true,
            Reading::Behind(between) => between.contains(&node),
        }
    }
}

/// Bytes in words, for a line that says what was too much.
fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

impl Recorder {
    /// How closely is looked at what a scheduler computes: never `Auto`. A mistake that is injected needs the callback.
    ///
    /// # Safety
    /// The reader's library made `sched`.
    unsafe fn level(&self, reader: Reader<'_>, sched: RawSched) -> Observe {
        if self.options.inject.is_some() {
            return Observe::Nodes;
        }
        // SAFETY: by the caller's promise.
        kept::level(self.options.observe, reader, &unsafe { kept::backends(reader, sched) })
    }

    /// Marks what is wanted of a graph that is about to get its memory, where it is to be read when the graph is computed;
    /// what was marked.
    ///
    /// # Safety
    /// The reader's library made the scheduler and the graph.
    pub unsafe fn mark(&mut self, reader: Reader<'_>, sched: RawSched, graph: RawGraph) -> Vec<RawTensor> {
        // A run of which only hashes of its logits are noted is not touched.
        if self.stopped || self.options.dir.is_none() {
            return Vec::new();
        }
        // SAFETY: by the caller's promise.
        if unsafe { self.level(reader, sched) } != Observe::Outputs {
            return Vec::new();
        }
        // SAFETY: as above; a scheduler that has no graph yet is not asked which backend computes a node.
        let described = unsafe { reader.describe(std::ptr::null_mut(), graph) };
        let nodes = match &self.marked {
            Some(marked) if marked.graph == described.graph => marked.nodes.clone(),
            _ => self.choose_kept(&described.graph),
        };
        let nodes: Vec<RawTensor> = nodes.into_iter().map(|node| described.address[node]).collect();
        // SAFETY: tensors of the graph.
        let needed: u64 = nodes.iter().map(|&node| unsafe { (reader.api.nbytes)(node) } as u64).sum();
        // SAFETY: as above.
        let limits = || self.options.memory.into_iter().chain(unsafe { kept::room_on_cards(reader, sched) });
        // What was laid out already is there.
        let limit = if needed > self.laid_out { limits().min() } else { None };
        if let Some(limit) = limit.filter(|&limit| needed > limit) {
            let (needed, limit) = (gigabytes(needed), gigabytes(limit));
            self.say_once(&format!(
                "to keep all nodes of the largest batch takes {needed}, and {limit} may be taken: -ub N makes batches \
                 smaller, --layer and --checkpoint keep less"
            ));
            return Vec::new();
        }
        self.laid_out = needed.max(self.laid_out);
        // SAFETY: as above.
        unsafe { kept::mark(reader, &nodes) }
    }

    /// What is to be kept of a graph.
    fn choose_kept(&mut self, graph: &Graph) -> Vec<Id> {
        let mapping = map(graph);
        let (filter, layers) = (&self.options.filter, mapping.layers());
        let wanted = mapping.captures.iter().filter(|capture| filter.wants(capture.checkpoint, layers));
        let nodes: Vec<Id> =
            kept::memory(graph, wanted.map(|capture| capture.region.storage)).into_iter().collect();
        self.marked = Some(Marked { graph: graph.clone(), nodes: nodes.clone() });
        nodes
    }

    /// Says that a graph is computed node by node after all, and why.
    pub fn cannot_keep(&mut self, why: &str) {
        self.say_once(&format!("computed node by node: {why}"));
        self.looked_at(Observe::Nodes);
    }

    /// Notes how closely was looked; what was looked at more closely stays so.
    fn looked_at(&mut self, level: Observe) {
        if self.observed == Some(Observe::Nodes) || self.observed == Some(level) {
            return;
        }
        self.observed = Some(level);
        if let Some(store) = &mut self.store {
            store.edit(move |manifest| manifest.observed = Some(level.to_string()));
        }
    }

    /// When the values of a pass are read.
    ///
    /// # Safety
    /// As for [`Recorder::begin`].
    pub(super) unsafe fn reading(
        &mut self,
        reader: Reader<'_>,
        sched: RawSched,
        seen: &Seen,
        plan: &PassPlan,
    ) -> Reading {
        // SAFETY: by the caller's promise.
        let level = unsafe { self.level(reader, sched) };
        if level == Observe::Nodes {
            self.looked_at(level);
            return Reading::NodeByNode;
        }
        // SAFETY: as above.
        let survives = unsafe { seen.survivors(reader) };
        let Described { graph, address, .. } = &seen.described;
        let lost = (0..graph.nodes).filter(|&id| !survives[id] && plan.wanted.contains_key(&address[id]));
        let (between, late): (Vec<Id>, Vec<Id>) =
            lost.partition(|&id| graph.writers(graph.root(id)).any(|writer| writer > id));
        if !late.is_empty() {
            self.cannot_keep("the memory of its graph was laid out without room for all of its nodes");
            return Reading::NodeByNode;
        }
        if !between.is_empty() {
            let names: Vec<&str> = between.iter().take(4).map(|&id| graph.get(id).name.as_str()).collect();
            let more = if between.len() > names.len() { ", …" } else { "" };
            self.say_once(&format!(
                "read as soon as they are computed, since later nodes write over them: {}{more}",
                names.join(", ")
            ));
        }
        self.looked_at(level);
        Reading::Behind(between.into_iter().map(|id| address[id]).collect())
    }

    /// Reads what was kept of the pass that has just been computed.
    ///
    /// # Safety
    /// As for [`Recorder::begin`], after the computation.
    pub(super) unsafe fn read_kept(&mut self, reader: Reader<'_>, sched: RawSched) {
        let Some(plan) = &self.plan else { return };
        let mut nodes: Vec<(usize, RawTensor)> =
            plan.wanted.iter().map(|(node, planned)| (planned.start, *node)).collect();
        nodes.sort_unstable_by_key(|(first, _)| *first);
        // SAFETY: by the caller's promise.
        unsafe { (reader.api.sched_synchronize)(sched) };
        // SAFETY: as above.
        unsafe {
            self.gather_kept(reader, &nodes);
            self.lend_kept(reader, &nodes);
        }
        for (_, node) in nodes {
            // SAFETY: as above; its memory was kept.
            unsafe { self.computed(reader, node) };
        }
    }

    /// Takes the values of those nodes of a pass that lie without gaps in memory of a card, all at once.
    ///
    /// # Safety
    /// As for [`Recorder::read_kept`], behind the synchronisation.
    unsafe fn gather_kept(&mut self, reader: Reader<'_>, nodes: &[(usize, RawTensor)]) {
        let (Some(store), Some(plan)) = (&mut self.store, &mut self.plan) else { return };
        if !self.gather.is_possible() {
            return;
        }
        // SAFETY: by the caller's promise.
        let whole =
            unsafe { without_gaps(reader, plan, nodes, |buffer, own| self.gather.reaches(buffer, own)) };
        let mut at = 0;
        let begins = whole.iter().map(|(index, own)| {
            let begin = (at, plan.planned[*index].announced());
            at += own.bytes;
            begin
        });
        let (begins, sources): (_, Vec<Bytes>) =
            (begins.collect(), whole.iter().map(|(_, own)| *own).collect());
        // SAFETY: each was computed, and its memory kept.
        let Some(piece) = (unsafe { self.gather.gather(&sources) }) else { return };
        store.gathered(piece, begins);
        plan.forget(&whole);
    }

    /// Writes those nodes of a pass from where they are that lie without gaps in the program's own memory, if these are many bytes.
    ///
    /// # Safety
    /// As for [`Recorder::read_kept`], behind the synchronisation.
    unsafe fn lend_kept(&mut self, reader: Reader<'_>, nodes: &[(usize, RawTensor)]) {
        let (Some(store), Some(plan)) = (&mut self.store, &mut self.plan) else { return };
        // SAFETY: by the caller's promise; the buffer of a tensor of the graph.
        let whole = unsafe { without_gaps(reader, plan, nodes, |buffer, _| reader.is_host(buffer)) };
        if whole.iter().map(|(_, own)| own.bytes).sum::<usize>() < LENT_FROM {
            return;
        }
        let tensors = whole.iter().map(|(index, own)| (plan.planned[*index].announced(), *own));
        // SAFETY: each was computed, its memory kept, and the program waits.
        unsafe { store.lend(tensors.collect()) };
        plan.forget(&whole);
    }
}

/// Of those `nodes` that are still wanted and whose values lie without gaps in buffers that can be reached: which tensors of the plan
/// each becomes, and where their bytes are.
///
/// # Safety
/// They are nodes of the graph, which has its memory.
unsafe fn without_gaps(
    reader: Reader<'_>,
    plan: &PassPlan,
    nodes: &[(usize, RawTensor)],
    mut reaches: impl FnMut(usize, Bytes) -> bool,
) -> Vec<(usize, Bytes)> {
    let mut whole = Vec::new();
    for (_, node) in nodes {
        let Some(indices) = plan.wanted.get(node) else { continue };
        // SAFETY: by the caller's promise.
        let Some((buffer, data, _)) = (unsafe { reader.place(*node) }) else { continue };
        let of = |index: usize| {
            let Planned { element, from_i32, ref region, .. } = plan.planned[index];
            let (offset, bytes) = region.without_gaps(element.size()).filter(|_| !from_i32)?;
            let own = Bytes { address: data + offset, bytes };
            reaches(buffer, own).then_some((index, own))
        };
        whole.extend(indices.clone().map(of).collect::<Option<Vec<_>>>().unwrap_or_default());
    }
    whole
}
