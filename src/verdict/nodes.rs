//! What each checkpoint of a report is computed by and from.

use std::collections::{HashMap, HashSet};

use crate::audit::recorded::Graphs;
use crate::checkpoint::Checkpoint;
use crate::model::graph::{Graph, Op};
use crate::report::Report;

/// Notes op and inputs of every checkpoint of the report that is a node of the model's graph.
pub fn describe(report: &mut Report, graph: &Graph) {
    let shown: HashSet<Checkpoint> = report.checkpoints.iter().map(|entry| entry.id).collect();
    let graph = graph.fused(|checkpoint| shown.contains(&checkpoint));
    for entry in &mut report.checkpoints {
        if let Some(node) = graph.node(entry.id) {
            entry.op = Some(ggml_name(&node.op).to_owned());
            entry.inputs.clone_from(&node.inputs);
        }
    }
}

/// The same of recorded graphs, through views and whatever else only moves values; of each checkpoint in the first
/// graph that has it.
pub fn describe_recorded(report: &mut Report, graphs: &Graphs) {
    let mut known: HashMap<Checkpoint, (String, Vec<Checkpoint>)> = HashMap::new();
    for labelled in graphs.steps().into_iter().map(|(_, labelled)| labelled) {
        for (id, checkpoint) in labelled.nodes() {
            let op = || labelled.program.graph.get(id).op.to_string();
            known.entry(checkpoint).or_insert_with(|| (op(), labelled.inputs(checkpoint)));
        }
    }
    for entry in &mut report.checkpoints {
        if let Some((op, inputs)) = known.remove(&entry.id) {
            (entry.op, entry.inputs) = (Some(op), inputs);
        }
    }
}

/// The op in ggml's words.
fn ggml_name(op: &Op) -> &'static str {
    match op {
        Op::Embed { .. } => "GET_ROWS",
        Op::Norm(_) => "RMS_NORM",
        Op::Linear { .. } | Op::Scores(_) | Op::Context(_) => "MUL_MAT",
        Op::Bias { .. } | Op::Add { .. } => "ADD",
        Op::Rope(_) => "ROPE",
        Op::Softmax(_) => "SOFT_MAX",
        Op::Attention(_) => "ATTENTION",
        Op::Glu(_) => "SWIGLU",
    }
}
