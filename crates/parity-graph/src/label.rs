//! The checkpoint id of everything that a graph computes.
//!
//! Ids of the vocabulary are given by structure ([`crate::known`]). Everything else is called `blk.N.<name>` after
//! llama.cpp's own name for it, or, where it has none, after its weight or op, with `#2`, `#3` where a name comes
//! again. Outside of layers there is no `blk.N`. The graph alone decides, so that two recordings of one model, and a
//! graph that is built from the model file, have the same names.

use std::collections::{HashMap, HashSet};

use parity_dump::{Checkpoint, Kind};

use crate::graph::{Graph, Id, Leaf};
use crate::known::{Found, Known, find, is_weight, layers, weight};
use crate::op::Op;
use crate::weights::{FFN_GATE, FFN_GATE_INP, FFN_UP, Name, WEIGHT, in_adapter, layer_weight, of_adapter};

/// Bytes of a name that are kept; the longest of ggml have 63, and an op and a number may be added.
const NAME_KEPT: usize = 60;

/// For each tensor, the id under which its values are recorded: of every arithmetic node, and of nothing else.
pub fn labels(graph: &Graph) -> Vec<Option<Checkpoint>> {
    labels_of(graph, &find(graph))
}

/// [`labels`] where the fixed ids have been found already.
pub fn labels_of(graph: &Graph, known: &Known) -> Vec<Option<Checkpoint>> {
    let mut labels: Vec<Option<Checkpoint>> = vec![None; graph.tensors.len()];
    for (checkpoint, found) in known.each() {
        let node = graph.origin(found.tensor);
        let whole =
            found.within.is_none() && graph.get(node).elements() == graph.get(found.tensor).elements();
        if whole && graph.is_arithmetic(node) && labels[node].is_none() {
            labels[node] = Some(checkpoint);
        }
    }
    let layer_of = layers(graph);
    let behind = behind_layers(graph, &labels);
    let mut used: HashMap<(Option<u32>, String), usize> = HashMap::new();
    for id in (0..graph.nodes).filter(|&id| graph.is_arithmetic(id)) {
        if labels[id].is_some() {
            continue;
        }
        let (layer, name) = name(graph, id, layer_of[id].filter(|_| !behind[id]));
        let count = used.entry((layer, name.clone())).or_insert(0);
        *count += 1;
        let full = if *count == 1 { name } else { format!("{name}#{count}") };
        labels[id] = Kind::of(&full).map(|kind| match layer {
            Some(layer) => Checkpoint::layer(kind, layer),
            None => Checkpoint::global(kind),
        });
    }
    labels
}

/// Fixed ids of tensors that are no node with that label: a second name of the same values (`q` of a model without
/// biases is its `q_proj`), a copy in another order of axes, or a window into a node.
pub fn aliases(graph: &Graph) -> Vec<(Checkpoint, Found)> {
    let known = find(graph);
    let labels = labels_of(graph, &known);
    let is_alias = |(id, found): &(Checkpoint, &Found)| labels[found.tensor] != Some(*id);
    known.each().filter(is_alias).map(|(id, found)| (id, found.clone())).collect()
}

/// What engines call by a fixed id that is none of this graph's nodes, and the node that has these values: `q` of a model
/// without biases is its `q_proj`; the feed-forward part's result is a mixture's sum (`ffn_moe_out`), and what it reads may be
/// a norm that files name after attention (`attn_post_norm` of gpt-oss).
pub fn second_names(graph: &Graph) -> Vec<(Checkpoint, Checkpoint)> {
    let known = find(graph);
    let labels = labels_of(graph, &known);
    let label = |tensor: Id| labels[graph.origin(tensor)];
    let is_whole = |found: &Found| {
        let elements = |id: Id| graph.get(id).elements();
        found.within.is_none() && elements(graph.origin(found.tensor)) == elements(found.tensor)
    };
    let mut out: Vec<(Checkpoint, Checkpoint)> = known
        .each()
        .filter(|(_, found)| is_whole(found))
        .filter_map(|(id, found)| Some((id, label(found.tensor)?)))
        .collect();
    for (id, found) in known.each().filter(|(id, _)| id.kind() == Kind::LayerOut) {
        let residual =
            known.found.get(&id.sibling(Kind::AttnResidual)).map(|found| graph.origin(found.tensor));
        let is_residual = |source: &Id| Some(graph.origin(*source)) == residual;
        let (around, branch): (Vec<Id>, Vec<Id>) = graph.sources(found.tensor).partition(is_residual);
        // What a norm follows is not what the feed-forward part itself gives.
        let summand = branch.first().filter(|node| around.len() == 1 && !is_normed(graph, **node));
        out.extend(summand.and_then(|node| Some((id.sibling(Kind::FfnOut), label(*node)?))));
    }
    for product in graph.computed().filter(|id| graph.get(*id).op == Op::MulMat) {
        let Name { layer: Some(layer), part, kind: WEIGHT } =
            Name::of(weight(graph, product, 0).unwrap_or_default())
        else {
            continue;
        };
        let reads = graph.src(product, 1).filter(|_| [FFN_GATE, FFN_UP, FFN_GATE_INP].contains(&part));
        let normed = reads.filter(|node| is_normed(graph, *node)).and_then(label);
        let id = Checkpoint::layer(Kind::FfnNorm, layer);
        out.extend(normed.filter(|node| !node.kind().is_fixed()).map(|node| (id, node)));
    }
    let nodes: HashSet<Checkpoint> = labels.iter().flatten().copied().collect();
    let mut named = HashSet::new();
    out.retain(|(id, _)| !nodes.contains(id) && named.insert(*id));
    out
}

/// Whether a tensor is a norm's result: multiplied by a vector of the file.
fn is_normed(graph: &Graph, tensor: Id) -> bool {
    let node = graph.origin(tensor);
    graph.get(node).op == Op::Mul && (0..2).any(|slot| weight(graph, node, slot).is_some_and(is_weight))
}

/// For each leaf that is an input or a state, the name that it is kept under: its own, with `#2`, `#3` where
/// several have it.
pub fn leaf_names(graph: &Graph) -> Vec<Option<String>> {
    let mut used: HashMap<String, usize> = HashMap::new();
    let mut names = vec![None; graph.tensors.len()];
    for (id, out) in names.iter_mut().enumerate().skip(graph.nodes) {
        if matches!(graph.leaf(id), Some(Leaf::Input | Leaf::State)) {
            let name = plain(&graph.get(id).name);
            let count = used.entry(name.clone()).or_insert(0);
            *count += 1;
            *out = Some(if *count == 1 { name } else { format!("{name}#{count}") });
        }
    }
    names
}

/// Whether a node comes behind the layers: computed from the last norm or the logits.
fn behind_layers(graph: &Graph, labels: &[Option<Checkpoint>]) -> Vec<bool> {
    let mut behind = vec![false; graph.tensors.len()];
    for id in 0..graph.nodes {
        let head = labels[id].is_some_and(|label| matches!(label.kind(), Kind::FinalNorm | Kind::Logits));
        behind[id] = head || graph.sources(id).any(|src| behind[src]);
    }
    behind
}

/// Layer and name of a node that has no fixed id; `layer` is that of its weight or sources.
fn name(graph: &Graph, id: Id, layer: Option<u32>) -> (Option<u32>, String) {
    let tensor = graph.get(id);
    let op = tensor.op.name().to_ascii_lowercase();
    // Views that are computed in place keep their source's name, with what was done in brackets.
    let own = tensor.name.split(" (").next().unwrap_or_default().trim();
    let (own, own_layer) =
        match own.rsplit_once('-').and_then(|(name, n)| Some((name, n.parse::<u32>().ok()?))) {
            Some((name, layer)) => (name, Some(layer)),
            // A cache, which a shift writes to where it lies; states that a pass copies keep the names that dumps have them under.
            None => match own.rsplit_once("_l").and_then(|(name, n)| Some((name, n.parse::<u32>().ok()?))) {
                Some((name, layer)) if name.starts_with("cache_") && graph.is_shift() => (name, Some(layer)),
                _ => (own, None),
            },
        };
    let numbered = own.strip_prefix("node_").or(own.strip_prefix("leaf_"));
    let unnamed = own.is_empty() || numbered.is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let own_weight =
        [0, 1].into_iter().find_map(|slot| weight(graph, id, slot).filter(|name| is_weight(name)));
    let weight_layer = own_weight.and_then(layer_weight).map(|(layer, _)| layer);
    let (layer, name) = if !unnamed {
        (own_layer.or(weight_layer), plain(own))
    } else if let Some(weight) = own_weight {
        let stem = layer_weight(weight).map_or(weight, |(_, rest)| rest);
        // Nodes of several adapters are called alike, as llama.cpp calls their matrices.
        let stem = &of_adapter(stem).map_or(stem.to_owned(), |(of, kind, _)| in_adapter(of, kind, 0));
        (weight_layer.or(layer), plain(stem.strip_suffix(".weight").unwrap_or(stem)))
    } else {
        (layer, plain(&op))
    };
    // A fixed id that the structure did not find is not that id, whatever the program calls it.
    let fixed = Kind::of(&name).is_none_or(Kind::is_fixed);
    (layer.filter(|layer| *layer < u32::MAX), if fixed { format!("{name}.{}", plain(&op)) } else { name })
}

/// A name of the grammar, which is neither an id with a layer nor a leaf's.
fn plain(name: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let mut out: String = name.chars().take(NAME_KEPT).map(|c| if allowed(c) { c } else { '_' }).collect();
    if out.starts_with("blk.") || out.starts_with("leaf.") {
        out = out.replace('.', "_");
    }
    if out.is_empty() { "unnamed".to_owned() } else { out }
}

/// Whether a tensor's op is one whose output has the extents of its first source, element by element.
pub(crate) fn is_pointwise(op: &Op) -> bool {
    matches!(
        op,
        Op::Add
            | Op::AddId
            | Op::Sub
            | Op::Mul
            | Op::Div
            | Op::Scale
            | Op::Clamp
            | Op::Sqr
            | Op::Sqrt
            | Op::Abs
            | Op::Sgn
            | Op::Tanh
            | Op::Relu
            | Op::Sigmoid
            | Op::Gelu
            | Op::GeluErf
            | Op::Silu
            | Op::Exp
            | Op::Softplus
            | Op::Norm
            | Op::RmsNorm
            | Op::L2Norm
            | Op::SoftMax
            | Op::Argsort
            | Op::Rope
            | Op::RopeBack
            | Op::Fill
    )
}
