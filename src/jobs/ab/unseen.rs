//! Whether rounding explains the logits of a run that nobody looked at, and what is wrong in it: the nodes whose observation
//! heals it are left alone then, and all others are recorded and judged.

use std::collections::HashSet;

use parity_dump::Dump;
use parity_graph::{Graph, Id, Op, label};

use crate::audit::{OwnDistance, carried};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Graphs;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::jobs::diff::numerics_of;
use crate::jobs::graphs::ByGraph;
use crate::watch;

/// How many times further from exact arithmetic than the run that was looked at, and is healthy node by node, another run
/// may be: its roundings are others, of the same sizes.
const OTHER_ROUNDINGS: f64 = 2.0;

/// How far the logits of `unseen` are from exact arithmetic, over what rounding explains of that on the graphs and inputs of
/// `seen`, the same run recorded and found healthy; `None` where that cannot be said: rounding decides a choice of experts,
/// or an op has no rule.
///
/// # Errors
/// A graph that cannot be read.
pub fn over_rounding(seen: &Dump, unseen: &Dump, file: &ModelFile) -> Result<Option<OwnDistance>> {
    let by = ByGraph::of_dumps(file, &[seen, unseen])?;
    let graphs = by.graphs(seen)?;
    let logits = Checkpoint::global(Kind::Logits);
    let distance = |values: &Dump| -> Result<Option<OwnDistance>> {
        let (judged, numerics) = (graphs.judged(values, seen), [numerics_of(seen)]);
        let ids = HashSet::from([logits]);
        let found = carried(&judged, &graphs.steps(), by.gguf, &numerics, &ids)?;
        // Of a simulation that was ended early nothing can be said.
        Ok(found.get(&logits).and_then(|found| found.candidate).filter(|_| !watch::is_over()))
    };
    let Some(own) = distance(unseen)? else { return Ok(None) };
    if own.over <= 1.0 {
        return Ok(Some(own));
    }
    // A band that a healthy run leaves is too narrow for its device.
    let band = distance(seen)?.map_or(own.band, |seen| own.band.max(OTHER_ROUNDINGS * seen.distance));
    Ok(Some(OwnDistance { band, over: own.distance / band, ..own }))
}

/// The nodes of one group: those that a backend may compute in one kernel where nobody looks between them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// Ops of the node, of what it alone reads and of what alone reads it, in order.
    pub ops: Vec<String>,
    /// The nodes of that op in that place, in all layers.
    pub alike: HashSet<Checkpoint>,
}

/// The group of a node whose observation changes what is computed.
///
/// # Errors
/// A graph that cannot be read.
pub fn group(dump: &Dump, node: Checkpoint) -> Result<Group> {
    let mut group = Group::default();
    for graph in Graphs::read(dump)?.all() {
        let labels = label::labels(graph);
        let Some(id) = graph.computed().find(|id| labels[*id] == Some(node)) else { continue };
        if group.ops.is_empty() {
            let before = graph
                .sources(id)
                .map(|src| graph.storage(src))
                .find(|src| !graph.is_leaf(*src) && readers(graph, *src).len() == 1);
            let chain = before.into_iter().chain([id]).chain(only_reader(graph, id));
            group.ops = chain.map(|id| graph.get(id).op.name().to_owned()).collect();
        }
        let place =
            |id: Id| (graph.get(id).op.clone(), only_reader(graph, id).map(|id| graph.get(id).op.clone()));
        let own: (Op, Option<Op>) = place(id);
        group.alike.extend(graph.computed().filter(|id| place(*id) == own).filter_map(|id| labels[id]));
    }
    Ok(group)
}

/// The node that alone computes something of what a node computed.
fn only_reader(graph: &Graph, node: Id) -> Option<Id> {
    Some(readers(graph, node)).filter(|readers| readers.len() == 1).map(|readers| readers[0])
}

/// The nodes that compute something of what a node computed.
fn readers(graph: &Graph, node: Id) -> Vec<Id> {
    let reads = |reader: &Id| {
        !graph.get(*reader).op.is_view() && graph.sources(*reader).any(|src| graph.storage(src) == node)
    };
    graph.computed().filter(reads).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn mistakes(name: &str) -> Dump {
        Dump::open(&Path::new("tests/data/mistakes").join(name)).unwrap()
    }

    fn file() -> ModelFile {
        ModelFile::open(Path::new("reference-dumps/models/qwen2-tiny-py-F16.gguf")).unwrap()
    }

    #[test]
    fn logits_of_a_run_that_is_healed_by_looking_are_beyond_rounding_and_those_of_a_healthy_one_are_not() {
        let (seen, unseen) = (mistakes("early-seen"), mistakes("early-unseen"));
        let own = over_rounding(&seen, &unseen, &file()).unwrap().unwrap();
        assert!(own.over > 10.0 && own.distance > 0.1, "{own:?}");
        let own = over_rounding(&seen, &seen, &file()).unwrap().unwrap();
        assert!(own.over <= 1.0 && own.band < 0.01, "{own:?}");
    }

    #[test]
    fn a_group_is_a_node_with_its_only_reader_in_every_layer() {
        let group = group(&mistakes("early-seen"), "blk.0.norm".parse().unwrap()).unwrap();
        assert_eq!(group.ops, ["RMS_NORM", "MUL"]);
        let mut alike: Vec<String> = group.alike.iter().map(ToString::to_string).collect();
        alike.sort();
        // Two in each of four layers, and the last.
        assert_eq!((alike.len(), alike[0].as_str(), alike[1].as_str()), (9, "blk.0.norm", "blk.0.norm#2"));
    }
}
