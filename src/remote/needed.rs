//! What of a dump must be fetched for a selection: what is selected, and what that is computed from.

use std::collections::HashSet;

use parity_dump::{Checkpoint, Kind};
use parity_graph::{Graph, label};

use crate::select::Selection;

/// The checkpoints of `there` that a command needs which looks at a selection. With graphs these are the recorded nodes that
/// the selected ones are computed from, through nodes that were not recorded; without, the selected ones' layers and the
/// output of the layer before each.
pub fn needed(there: &HashSet<Checkpoint>, graphs: &[Graph], selection: &Selection) -> HashSet<Checkpoint> {
    if selection.is_all() {
        return there.clone();
    }
    let mut wanted: HashSet<Checkpoint> = selection.among(there.iter().copied()).into_iter().collect();
    if graphs.is_empty() {
        around(there, &mut wanted);
    }
    for graph in graphs {
        before(graph, there, &mut wanted);
    }
    wanted
}

/// Adds the rest of the layers, and the outputs of those before; where such an output was not recorded, that whole layer.
fn around(there: &HashSet<Checkpoint>, wanted: &mut HashSet<Checkpoint>) {
    let layers: HashSet<u32> = wanted.iter().filter_map(|id| id.layer_index()).collect();
    let last = there.iter().filter_map(|id| id.layer_index()).max();
    // The head reads the last layer.
    let head = wanted.iter().any(|id| id.layer_index().is_none() && id.kind() != Kind::Embed);
    let earlier = layers.iter().filter_map(|layer| layer.checked_sub(1)).chain(last.filter(|_| head));
    let (mut whole, mut outputs) = (layers.clone(), HashSet::new());
    for layer in earlier {
        let output = Checkpoint::layer(Kind::LayerOut, layer);
        if there.contains(&output) {
            outputs.insert(output)
        } else {
            whole.insert(layer)
        };
    }
    let is_near = |id: &&Checkpoint| match id.layer_index() {
        Some(layer) => whole.contains(&layer) || outputs.contains(id),
        // The embedding is what the first layer reads, and final_norm what logits are computed from.
        None => id.kind() != Kind::Logits && (head || layers.contains(&0)),
    };
    wanted.extend(there.iter().filter(is_near).copied());
}

/// Adds the recorded nodes of a graph that the wanted ones are computed from.
fn before(graph: &Graph, there: &HashSet<Checkpoint>, wanted: &mut HashSet<Checkpoint>) {
    let mut names: Vec<Vec<Checkpoint>> = vec![Vec::new(); graph.tensors.len()];
    for (id, label) in label::labels(graph).into_iter().enumerate() {
        names[id].extend(label);
    }
    for (checkpoint, found) in label::aliases(graph) {
        for id in std::iter::once(found.tensor).chain(found.within) {
            names[id].push(checkpoint);
        }
    }
    let is_wanted = |id: usize| names[id].iter().any(|name| wanted.contains(name));
    let mut open: Vec<usize> = (0..graph.tensors.len()).filter(|id| is_wanted(*id)).collect();
    let mut seen: HashSet<usize> = HashSet::new();
    let mut also = HashSet::new();
    while let Some(id) = open.pop() {
        for source in graph.sources(id) {
            // What is read of a cache or a state is what was written into it.
            let root = graph.root(source);
            for source in std::iter::once(source).chain([root]).chain(graph.writers(root)) {
                if !seen.insert(source) {
                    continue;
                }
                let recorded: Vec<Checkpoint> =
                    names[source].iter().copied().filter(|name| there.contains(name)).collect();
                // A recorded value stands for all before it.
                if recorded.is_empty() {
                    open.push(source);
                }
                also.extend(recorded);
            }
        }
    }
    wanted.extend(also);
}
