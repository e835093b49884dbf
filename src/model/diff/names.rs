//! What a report calls the nodes of a graph: a checkpoint's name where it is one, else llama.cpp's own.

use std::fmt;

use parity_graph::{Graph, Op};

use crate::checkpoint::Kind;

use super::wiring::{Node, Wiring};

/// A node's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Which layer, if any.
    pub layer: Option<usize>,
    /// Within it.
    pub name: String,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blk.{layer}.{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// What node `place` of a graph is called.
pub fn name(graph: &Graph, wiring: &Wiring, place: usize) -> Name {
    let node = &wiring.nodes[place];
    // A norm and its weight are two nodes and one checkpoint.
    if let (Op::RmsNorm | Op::Norm, [(reader, _)]) = (&node.op, node.readers.as_slice()) {
        let reader = &wiring.nodes[*reader];
        if reader.op == Op::Mul && reader.weights().next().is_some() {
            return own(graph, reader);
        }
    }
    let name = own(graph, node);
    if name.layer.is_some() || !name.name.starts_with("node_") {
        return name;
    }
    // llama.cpp has no name for it: that of its op, in the layer of what it reads.
    let source = node.sources.iter().flatten().find_map(|source| match &source.from {
        super::wiring::From::Node(node) => own(graph, &wiring.nodes[*node]).layer,
        super::wiring::From::Weight(name) => layer_of_weight(name),
        super::wiring::From::Input(_) => None,
    });
    let name = match node.op {
        Op::FlashAttn => Kind::AttnCtx.name().to_owned(),
        ref op => op.name().to_ascii_lowercase(),
    };
    Name { layer: source, name }
}

fn layer_of_weight(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

fn own(graph: &Graph, node: &Node) -> Name {
    let given = &graph.get(node.id).name;
    let (stem, layer) = match given.rsplit_once('-').map(|(stem, layer)| (stem, layer.parse().ok())) {
        Some((stem, Some(layer))) => (stem, Some(layer)),
        _ => (given.as_str(), None),
    };
    let kind = match (stem, &node.op) {
        ("embd", _) => Some(Kind::Embed),
        ("Qcur", Op::MulMat) => Some(Kind::QProj),
        ("Kcur", Op::MulMat) => Some(Kind::KProj),
        ("Vcur", Op::MulMat) => Some(Kind::VProj),
        ("Qcur", Op::Rope) => Some(Kind::QRope),
        ("Kcur", Op::Rope) => Some(Kind::KRope),
        ("Qcur", Op::Add) => Some(Kind::Q),
        ("Kcur", Op::Add) => Some(Kind::K),
        ("Vcur", Op::Add) => Some(Kind::V),
        ("Qcur_normed", _) => Some(Kind::QNorm),
        ("Kcur_normed", _) => Some(Kind::KNorm),
        ("kqv" | "kqv_out", _) => Some(Kind::AttnCtx),
        ("ffn_inp" | "sa_out", _) => Some(Kind::AttnResidual),
        ("ffn_swiglu" | "ffn_geglu", _) => Some(Kind::FfnAct),
        ("l_out", _) => Some(Kind::LayerOut),
        ("result_norm", _) => Some(Kind::FinalNorm),
        ("result_output", Op::MulMat) => Some(Kind::Logits),
        _ => None,
    };
    Name { layer, name: kind.map_or(stem.to_owned(), |kind| kind.name().to_owned()) }
}

/// Several nodes of which one thing is said. Numbers of RoPE and of attention belong to the layer: it is enough.
pub fn list(nodes: &[&Name], text: &str) -> String {
    let of_layer =
        ["@: RoPE", "@: YaRN", "@: attention", "@: ALiBi"].iter().any(|start| text.starts_with(start));
    let mut layers: Vec<usize> = nodes.iter().filter_map(|node| node.layer).collect();
    layers.dedup();
    let first = nodes[0];
    let alike = nodes.iter().all(|node| node.layer.is_some() && node.name == first.name);
    if !nodes.iter().all(|node| node.layer.is_some()) || !(of_layer || alike) {
        return nodes.iter().map(|node| node.to_string()).collect::<Vec<_>>().join(", ");
    }
    layers.sort_unstable();
    layers.dedup();
    let name = if of_layer { String::new() } else { format!(".{}", first.name) };
    let runs: Vec<String> = layers
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [one] => one.to_string(),
            _ => format!("{}..{}", run[0], run[run.len() - 1]),
        })
        .collect();
    format!("blk.{}{name}", runs.join(","))
}
