//! What each checkpoint of a report is computed by and from.

use std::collections::HashMap;

use crate::audit::Graphs;
use crate::checkpoint::Checkpoint;
use crate::report::Report;

/// Notes op and inputs of every checkpoint of the report that is a node of the graphs, through views and whatever else only moves values; of each checkpoint in the first
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
