//! Which nodes of a step have to be computed: those that are judged, and what lies between them and what was recorded.
//!
//! What was recorded takes the place of what was computed, so nothing before it is needed for what follows. A node that
//! nobody asked for and that no unrecorded stretch leads through costs nothing, however long the model is.

use std::collections::HashSet;

use parity_graph::Id;

use super::{Labelled, Steps};
use crate::checkpoint::Checkpoint;

/// By graph of `graphs`, in their order: by tensor, whether it has to be computed so that every recorded node that `wants`
/// names can be judged.
pub fn needed(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    wants: &dyn Fn(Checkpoint) -> bool,
) -> Vec<Vec<bool>> {
    found(steps, graphs, wants, HashSet::new())
}

/// The same so that what steps leave under some keys is known.
pub fn leaving<'a>(
    steps: &dyn Steps,
    graphs: &[(usize, &'a Labelled)],
    states: HashSet<&'a str>,
) -> Vec<Vec<bool>> {
    found(steps, graphs, &|_| false, states)
}

fn found<'a>(
    steps: &dyn Steps,
    graphs: &[(usize, &'a Labelled)],
    wants: &dyn Fn(Checkpoint) -> bool,
    mut states: HashSet<&'a str>,
) -> Vec<Vec<bool>> {
    loop {
        let known = states.len();
        let found: Vec<Vec<bool>> = graphs
            .iter()
            .map(|&(step, labelled)| of_step(steps, step, labelled, wants, &mut states))
            .collect();
        // What a later step reads of a cache or a state an earlier one wrote.
        if states.len() == known {
            return found;
        }
    }
}

/// One step; `states` are the caches and states that any step reads, by their keys.
fn of_step<'a>(
    steps: &dyn Steps,
    step: usize,
    labelled: &'a Labelled,
    wants: &dyn Fn(Checkpoint) -> bool,
    states: &mut HashSet<&'a str>,
) -> Vec<bool> {
    let (program, graph) = (&labelled.program, &labelled.program.graph);
    let mut needed = vec![false; graph.tensors.len()];
    // By memory: the nodes that write into it.
    let mut writers: Vec<Vec<Id>> = vec![Vec::new(); graph.tensors.len()];
    program.executed().for_each(|id| writers[graph.root(id)].push(id));
    let is_judged = |id: Checkpoint| wants(id) && steps.rows(step, id).is_some();
    let judged = labelled.nodes().filter(|(_, id)| is_judged(*id)).map(|(node, _)| node);
    let is_read = |root: Id| program.is_written(root) && states.contains(program.key(root));
    let writes = program.executed().filter(|&id| is_read(graph.root(id)));
    let mut open: Vec<Id> = judged.chain(writes).collect();
    while let Some(id) = open.pop() {
        if std::mem::replace(&mut needed[id], true) {
            continue;
        }
        if !labelled.labels[id].is_some_and(wants) && is_given(steps, step, labelled, id) {
            continue;
        }
        for root in graph.sources(id).filter(|&source| source != id).map(|source| graph.root(source)) {
            if program.is_written(root) {
                states.insert(program.key(root));
            }
            open.extend(writers[root].iter().take_while(|&&writer| writer < id));
        }
    }
    needed
}

/// Whether a node's values are those that were recorded, whatever it reads: all of its rows are there, and it is no
/// attention matrix, of which what is masked is not recorded.
fn is_given(steps: &dyn Steps, step: usize, labelled: &Labelled, id: Id) -> bool {
    let Some(checkpoint) = labelled.labels[id] else { return false };
    let all = labelled.axes[id].map_or(0, |axis| labelled.program.graph.get(id).shape()[axis]);
    !checkpoint.kind().is_optional() && steps.rows(step, checkpoint).is_some_and(|rows| rows >= all)
}
