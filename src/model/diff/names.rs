//! What a report calls the nodes of a graph: by their checkpoints.

use std::fmt;

use parity_graph::{Graph, Op, known, label};

use crate::checkpoint::Checkpoint;

use super::wiring::{Node, Wiring};

/// A node's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Which layer, if any.
    pub layer: Option<u32>,
    /// Within it.
    pub name: String,
}

impl Name {
    /// The checkpoint that it is.
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        self.to_string().parse().ok()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blk.{layer}.{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// What the nodes of a graph are called, by their places in its wiring.
pub fn names(graph: &Graph, wiring: &Wiring) -> Vec<Name> {
    let (labels, layers) = (label::labels(graph), known::layers(graph));
    let name = |node: &Node| match labels[node.id] {
        Some(label) => Name { layer: label.layer_index(), name: label.kind().name().to_owned() },
        // What only moves values has no checkpoint: llama.cpp's name for it.
        None => {
            let given = &graph.get(node.id).name;
            let stem = given.rsplit_once('-').filter(|(_, layer)| layer.parse::<u32>().is_ok());
            Name { layer: layers[node.id], name: stem.map_or(given.as_str(), |(stem, _)| stem).to_owned() }
        }
    };
    let called = |node: &Node| match (&node.op, node.readers.as_slice()) {
        // A norm and its weight are two nodes and one checkpoint.
        (Op::RmsNorm | Op::Norm, [(reader, _)]) => {
            let reader = &wiring.nodes[*reader];
            let weight = reader.op == Op::Mul && reader.weights().next().is_some();
            name(if weight { reader } else { node })
        }
        _ => name(node),
    };
    wiring.nodes.iter().map(called).collect()
}

/// Several nodes of which one thing is said; where it is the same in all nodes of a layer, the layer is enough.
pub fn list(nodes: &[Name], of_layer: bool) -> String {
    let mut layers: Vec<u32> = nodes.iter().filter_map(|node| node.layer).collect();
    let alike = nodes.iter().all(|node| node.layer.is_some() && node.name == nodes[0].name);
    if layers.len() < nodes.len() || !(of_layer || alike) {
        return nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    }
    layers.sort_unstable();
    layers.dedup();
    let name = if of_layer { String::new() } else { format!(".{}", nodes[0].name) };
    let runs: Vec<String> = layers
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [one] => one.to_string(),
            _ => format!("{}..{}", run[0], run[run.len() - 1]),
        })
        .collect();
    format!("blk.{}{name}", runs.join(","))
}
