//! Ids that the graph of a model has for nothing, of values that one of its nodes has.
//!
//! Who follows the vocabulary calls the norm before a feed-forward part `ffn_norm`, though files of gpt-oss name its weight
//! after attention and llama.cpp the node with it; and what a hook on `mlp` sees is `ffn_out`, though it be a mixture's sum.

use std::collections::{HashMap, HashSet};

use parity_dump::Dump;
use parity_graph::label::second_names;

use crate::audit::Graphs;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::gguf::Gguf;
use crate::model::refuse_other;

/// What llama.cpp calls what a router gives.
const LOGITS_OF_EXPERTS: &str = "ffn_moe_logits";
/// What no node is called: the weights of the chosen experts, and zeros for all others, as routers of old releases of
/// transformers give them.
const SCORES_OF_CHOSEN: &str = "router_scores";

/// Whether at least half of a tensor's last row is zero, and not all of it.
fn is_of_chosen(dump: &Dump, id: Checkpoint) -> bool {
    let last = Recording::positions(dump, id).last().copied();
    let row =
        last.and_then(|last| Recording::gather(dump, id, &[last])).map(|row| row.data).unwrap_or_default();
    let zeros = row.iter().filter(|x| **x == 0.0).count();
    2 * zeros >= row.len() && zeros < row.len()
}

/// Reads such ids as the nodes with their values, where these were not recorded; the note that a report then has. Dumps that
/// bring their graph are named by it.
pub fn settle(dump: &mut Dump, gguf: &Gguf) -> Option<String> {
    let is_own = !dump.manifest().graphs.is_empty();
    if is_own || refuse_other(gguf, dump.path(), &dump.manifest().model).is_err() {
        return None;
    }
    let graphs = Graphs::built(dump, gguf).ok()?;
    let recorded: HashSet<Checkpoint> = Recording::checkpoints(dump).into_iter().collect();
    let (_, labelled) = graphs.steps().first().copied()?;
    let known = second_names(&labelled.program.graph);
    let is_meant = |(id, node): &(Checkpoint, Checkpoint)| recorded.contains(id) && !recorded.contains(node);
    let mut meant: HashMap<Checkpoint, Checkpoint> = known.into_iter().filter(is_meant).collect();
    let scores =
        recorded.iter().filter(|id| id.kind().name() == LOGITS_OF_EXPERTS && is_of_chosen(dump, **id));
    meant.extend(scores.filter_map(|id| Some((*id, id.sibling(Kind::of(SCORES_OF_CHOSEN)?)))));
    dump.rename(|id| meant.get(&id).copied());
    // Two ids of the vocabulary with the same values are the same by what they mean.
    let told = meant.iter().filter(|(_, node)| !node.kind().is_fixed());
    let mut told: Vec<String> =
        told.map(|(id, node)| format!("{} as {}", id.kind().name(), node.kind().name())).collect();
    told.sort();
    told.dedup();
    let said = told.join(", ");
    (!said.is_empty()).then(|| format!("read as the nodes of this model that have these values: {said}"))
}
