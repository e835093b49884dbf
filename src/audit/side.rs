//! One recording on its way through an audit: its arithmetic, its nodes, and which rows of them are looked at.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use indexmap::{IndexMap, IndexSet};
use rayon::prelude::*;

use super::case::{self, Case, Context, Missing};
use super::recorded::NodeAudit;
use super::{Audit, Options, audit_node, audit_nodes, declared, masked, screen};
use crate::audit::recorded::audit_rows;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::{Recording, UnfiniteRows};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::graph::Graph;

/// Suspicious rows of a node that are audited in full: where there are more, it is wrong everywhere.
const SUSPECTS_MAX: usize = 8;

/// Rows of each node that are audited at a time, where they cannot be screened: so many are in memory.
const LEFT_AT_ONCE: usize = 64;

/// One recording on its way.
pub struct Side<'a> {
    pub recording: &'a dyn Recording,
    /// See [`Context::fed`].
    pub fed: Option<&'a dyn Recording>,
    /// Unit of the type that values may have been rounded to only when they were recorded.
    pub stored_unit: f64,
    /// Where only some nodes are looked at: their rows.
    only: Option<IndexMap<Checkpoint, Vec<u32>>>,
    pub audit: Audit,
}

impl<'a> Side<'a> {
    pub fn new(recording: &'a dyn Recording, graph: &Graph, options: &Options<'_>) -> Self {
        let declared = declared::of(recording, options.positions);
        let audit = Audit {
            numerics: declared.numerics,
            inferred: declared.inferred,
            recorded_unit: 0.0,
            positions: options.positions.to_vec(),
            screened: 0,
            graph: graph_of(graph, recording, options.wants),
            contradicted: IndexMap::new(),
            unfinite: unfinite(recording),
            nodes: IndexMap::new(),
        };
        Side { recording, fed: None, stored_unit: declared.recorded_unit, only: None, audit }
    }

    /// A side of the same recording, or of a part of it, at some rows of some nodes. The arithmetic is that of the
    /// whole, not what a few odd rows look like.
    fn narrowed<'b>(
        &'b self,
        recording: &'b dyn Recording,
        only: IndexMap<Checkpoint, Vec<u32>>,
        (graph, options): (&Graph, &Options<'_>),
    ) -> Side<'b> {
        let audit = Audit {
            numerics: self.audit.numerics,
            inferred: None,
            recorded_unit: self.audit.recorded_unit,
            positions: Vec::new(),
            screened: 0,
            graph: graph_of(graph, recording, options.wants),
            contradicted: IndexMap::new(),
            unfinite: HashMap::new(),
            nodes: IndexMap::new(),
        };
        Side { recording, fed: self.fed, stored_unit: self.stored_unit, only: Some(only), audit }
    }

    /// Screens the rows that were not audited, and audits those that rounding may not explain, or that cannot be screened.
    pub fn screen(&mut self, gguf: &Gguf, graph: &Graph, options: &Options<'_>) -> Result<()> {
        let screened = screen::screen(&self.context(gguf), options.positions, options.wants)?;
        self.audit.screened = screened.values().map(|node| node.rows).sum();
        let times = |node: &screen::Screened| node.left.len().div_ceil(LEFT_AT_ONCE);
        for time in 0..screened.values().map(times).max().unwrap_or(0) {
            let some = screened
                .iter()
                .filter_map(|(id, node)| Some((*id, node.left.chunks(LEFT_AT_ONCE).nth(time)?.to_vec())));
            let mut left = [self.narrowed(self.recording, some.collect(), (graph, options))];
            audit_nodes(&mut left, gguf, graph, options)?;
            let [left] = left;
            self.audit.add(left.audit);
        }
        let few = |suspects: &BTreeSet<u32>| {
            // Where there are many, some from everywhere.
            let apart = suspects.len().div_ceil(SUSPECTS_MAX).max(1);
            suspects.iter().copied().step_by(apart).collect::<Vec<u32>>()
        };
        let suspects = screened.into_iter().filter(|(_, node)| !node.suspects.is_empty());
        let suspects: IndexMap<Checkpoint, Vec<u32>> =
            suspects.map(|(checkpoint, node)| (checkpoint, few(&node.suspects))).collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let mut again = [self.narrowed(self.recording, suspects, (graph, options))];
        audit_nodes(&mut again, gguf, graph, options)?;
        let [again] = again;
        self.audit.merge(again.audit);
        Ok(())
    }

    /// Judges once more each faulty node that reads faulty ones, from what these should have been: an engine that
    /// goes on with other values than it recorded is not wrong twice.
    pub fn look_past_faults(&mut self, gguf: &Gguf, graph: &Graph, options: &Options<'_>) -> Result<()> {
        let faulty: IndexSet<Checkpoint> = self.audit.origins().collect();
        let mut healthy: Vec<(Checkpoint, NodeAudit)> = Vec::new();
        for &checkpoint in &faulty {
            let Some(node) = self.audit.graph.node(checkpoint) else { continue };
            let hidden: IndexSet<Checkpoint> =
                node.inputs.iter().copied().filter(|input| faulty.contains(input)).collect();
            let Some(Ok(found)) = self.audit.nodes.get(&checkpoint).filter(|_| !hidden.is_empty()) else {
                continue;
            };
            let mut rows = self.audit.positions.clone();
            rows.extend(&found.rows_beyond);
            rows.sort_unstable();
            rows.dedup();
            let masked = masked::Masked { recording: self.recording, hidden: &hidden };
            let only = IndexMap::from([(checkpoint, rows)]);
            let again = [self.narrowed(&masked, only, (graph, options))];
            let node = audit_node(&again, gguf, checkpoint)?;
            if let Some(Some(Ok(found))) = node.sides.into_iter().next()
                && found.is_healthy()
                && !found.nonfinite_inputs
            {
                healthy.push((checkpoint, found));
                self.audit.contradicted.extend(hidden.iter().map(|input| (*input, checkpoint)));
            }
        }
        self.audit.nodes.extend(healthy.into_iter().map(|(checkpoint, found)| (checkpoint, Ok(found))));
        Ok(())
    }

    pub fn context<'b>(&'b self, gguf: &'b Gguf) -> Context<'b> {
        let Audit { numerics, recorded_unit, .. } = self.audit;
        let Side { recording, fed, .. } = *self;
        Context { gguf, graph: &self.audit.graph, recording, numerics, recorded_unit, fed }
    }

    /// The node with this output and what is recorded of it; `None` where the output is not.
    pub fn case(
        &self,
        gguf: &Gguf,
        checkpoint: Checkpoint,
    ) -> Result<Option<std::result::Result<Case, Missing>>> {
        let recorded = self.recording.positions(checkpoint);
        let mut positions = match &self.only {
            Some(only) => only.get(&checkpoint).cloned().unwrap_or_default(),
            None => audit_rows::of_checkpoint(&self.audit.positions, &recorded),
        };
        positions.retain(|position| recorded.binary_search(position).is_ok());
        let Some(node) = self.audit.graph.node(checkpoint) else { return Ok(None) };
        if let Some(fed) = self.fed {
            // A step whose rows the fed recording lacks in part was computed from the producer's own.
            for input in &node.inputs {
                let there = fed.positions(*input);
                if there.is_empty() {
                    continue;
                }
                let whole = |step: Range<u32>| step.into_iter().all(|p| there.binary_search(&p).is_ok());
                positions.retain(|position| whole(self.recording.step(*position)));
            }
        }
        let node = Some(node).filter(|_| !positions.is_empty());
        node.map(|node| case::gather(&self.context(gguf), node, &positions)).transpose()
    }
}

/// NaN and Inf of all checkpoints that have some.
fn unfinite(recording: &dyn Recording) -> HashMap<Checkpoint, UnfiniteRows> {
    let found = recording.checkpoints().into_par_iter().map(|c| (c, recording.unfinite(c)));
    found.filter(|(_, rows)| !rows.positions.is_empty()).collect()
}

/// The healthy nodes of a recording. Attention is one node unless both its scores and its probabilities were recorded
/// and are looked at themselves: what a verdict rests on is judged. Where only one of them is, it is a node besides.
pub fn graph_of(graph: &Graph, recording: &dyn Recording, wants: &dyn Fn(Checkpoint) -> bool) -> Graph {
    let recorded: IndexSet<Checkpoint> =
        recording.checkpoints().into_iter().filter(|c| c.kind().is_optional() && wants(*c)).collect();
    let inside = |layer: Option<u32>| {
        let of_layer = |kind| recorded.iter().any(|c| c.kind() == kind && c.layer_index() == layer);
        (of_layer(Kind::AttnScores), of_layer(Kind::AttnProbs))
    };
    let fused = graph.fused(|checkpoint| inside(checkpoint.layer_index()) == (true, true));
    let mut nodes = fused.nodes;
    for node in graph.nodes.iter().filter(|node| node.checkpoint.kind().is_optional()) {
        let (scores, probs) = inside(node.checkpoint.layer_index());
        let needed = scores != probs && (probs || node.checkpoint.kind() == Kind::AttnScores);
        if needed && nodes.iter().all(|known| known.checkpoint != node.checkpoint) {
            nodes.push(node.clone());
        }
    }
    let places = graph.places();
    nodes.sort_by_key(|node| places.get(&node.checkpoint).copied());
    Graph { nodes, dims: graph.dims }
}
