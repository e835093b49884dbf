//! Which node of a llama.cpp graph is which checkpoint: by weight, op and dataflow, never by the node's
//! own name, since names changed their meaning from release to release.

use std::collections::{BTreeMap, BTreeSet};

use parity_dump::{Checkpoint, Element, Kind};

use crate::attention;
use crate::graph::{Graph, Id, Op};
use crate::region::Region;

/// What a graph holds for parity.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// Checkpoints in the order in which their nodes are computed.
    pub captures: Vec<Capture>,
    /// Computed nodes that belong to no checkpoint, `OP name`, each once.
    pub unmapped: Vec<String>,
    /// Leaf with the token ids, (T,) i32.
    pub tokens: Option<Id>,
    /// Leaf with the positions, (T,) i32; some models have further rows of them behind.
    pub positions: Option<Id>,
    /// Leaf with the attention mask, (T padded, S padded).
    pub mask: Option<Id>,
    /// T
    pub rows: usize,
    /// Whether attention is computed tile by tile.
    pub flash: bool,
    /// ggml types in which attention reads keys and values.
    pub cache_types: BTreeSet<String>,
    /// Node of the logits.
    pub logits: Option<Id>,
}

/// One checkpoint and where its values are.
#[derive(Clone, Debug)]
pub struct Capture {
    /// Its id.
    pub checkpoint: Checkpoint,
    /// Element type.
    pub element: Element,
    /// Shape by the checkpoint vocabulary, slowest axis first. Attention matrices stand here with all
    /// columns of the cache, used or not.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub region: Region,
    /// Leaf with the indices of the rows that were kept, where some were picked out.
    pub picked: Option<Id>,
}

/// Finds the checkpoints of a graph. A graph that is no forward pass has none.
pub fn map(graph: &Graph) -> Mapping {
    let mut mapper = Mapper { graph, found: BTreeMap::new(), mapping: Mapping::default() };
    mapper.by_weight();
    attention::find(&mut mapper);
    mapper.residuals();
    mapper.inputs();
    let picked = picked_rows(graph);
    mapper.finish(&picked)
}

/// The mapping while it grows.
pub(crate) struct Mapper<'g> {
    pub(crate) graph: &'g Graph,
    /// Tensor of each checkpoint: the node that computes it, or a view into that node.
    pub(crate) found: BTreeMap<Checkpoint, Found>,
    pub(crate) mapping: Mapping,
}

/// A tensor that holds a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) tensor: Id,
    /// Another node that holds it in the layout of `tensor`.
    pub(crate) within: Option<Id>,
    /// (heads, width) where rows are split into heads.
    pub(crate) heads: Option<(usize, usize)>,
}

impl Mapper<'_> {
    /// Notes the tensor of a checkpoint; the first one counts.
    pub(crate) fn note(&mut self, checkpoint: Checkpoint, tensor: Id) {
        self.found.entry(checkpoint).or_insert(Found { tensor, within: None, heads: None });
    }

    pub(crate) fn tensor_of(&self, kind: Kind, layer: u32) -> Option<Id> {
        self.found.get(&Checkpoint::layer(kind, layer)).map(|found| found.tensor)
    }

    /// Name of the weight that a node reads as source `index`.
    pub(crate) fn weight(&self, id: Id, index: usize) -> Option<&str> {
        let src = self.graph.src(id, index)?;
        let leaf = self.graph.is_leaf(src) && self.graph.get(src).op == Op::None;
        leaf.then_some(self.graph.get(src).name.as_str())
    }

    /// Nodes that read a weight of their own.
    fn by_weight(&mut self) {
        let graph = self.graph;
        for id in graph.computed() {
            // The weight is the first source of products and the second of everything else; norms and
            // biases are commutative, so either will do.
            let names = match graph.get(id).op {
                Op::MulMat | Op::GetRows => [self.weight(id, 0), None],
                Op::Mul | Op::Add => [self.weight(id, 1), self.weight(id, 0)],
                _ => continue,
            };
            let op = &graph.get(id).op;
            let known = names.into_iter().flatten().find_map(|name| checkpoint_of(op, name));
            if let Some(checkpoint) = known {
                self.note(checkpoint, id);
            }
        }
        let last = |layer: u32, kind: Kind| Checkpoint::layer(kind, layer);
        let downs: Vec<(u32, Id)> = self.layers_with(Kind::FfnOut).collect();
        for (layer, down) in downs {
            if let Some(input) = graph.src(down, 1) {
                self.note(last(layer, Kind::FfnAct), input);
            }
        }
        let outs: Vec<(u32, Id)> = self.layers_with(Kind::AttnOut).collect();
        for (layer, out) in outs {
            if let Some(input) = graph.src(out, 1) {
                self.note(last(layer, Kind::AttnCtx), input);
            }
        }
    }

    /// Layers that have a checkpoint of this kind, with its tensor.
    pub(crate) fn layers_with(&self, kind: Kind) -> impl Iterator<Item = (u32, Id)> + '_ {
        self.found.iter().filter_map(move |(checkpoint, found)| {
            (checkpoint.kind() == kind).then_some((checkpoint.layer_index()?, found.tensor))
        })
    }

    /// The two sums of each layer: what feeds them is followed from the products.
    fn residuals(&mut self) {
        let graph = self.graph;
        let mut carried: Vec<Option<Checkpoint>> = vec![None; graph.tensors.len()];
        for (checkpoint, found) in &self.found {
            if matches!(checkpoint.kind(), Kind::AttnOut | Kind::FfnOut) {
                carried[found.tensor] = Some(*checkpoint);
            }
        }
        for id in graph.computed() {
            let tensor = graph.get(id);
            let branch = tensor.srcs.iter().take(2).find_map(|&src| carried[src]);
            let own_weight = || (0..2).any(|index| self.weight(id, index).is_some());
            match (&tensor.op, branch) {
                (Op::Add, Some(product)) if !own_weight() => {
                    let sum =
                        if product.kind() == Kind::AttnOut { Kind::AttnResidual } else { Kind::LayerOut };
                    self.note(product.sibling(sum), id);
                }
                (Op::Add | Op::Mul | Op::Scale | Op::GetRows, Some(_)) if carried[id].is_none() => {
                    carried[id] = branch;
                }
                (op, Some(_)) if op.is_view() || op.is_copy() => carried[id] = branch,
                _ => {}
            }
        }
    }

    fn inputs(&mut self) {
        let graph = self.graph;
        if let Some(embed) = self.found.get(&Checkpoint::global(Kind::Embed)) {
            self.mapping.tokens = graph.src(embed.tensor, 1).map(|leaf| graph.storage(leaf));
            self.mapping.rows = graph.get(embed.tensor).ne[1];
        }
        let rope = self.layers_with(Kind::QRope).next();
        self.mapping.positions = rope.and_then(|(_, id)| graph.src(id, 1)).map(|leaf| graph.storage(leaf));
        self.mapping.logits = self.found.get(&Checkpoint::global(Kind::Logits)).map(|found| found.tensor);
    }

    fn finish(mut self, picked: &[Option<Id>]) -> Mapping {
        let graph = self.graph;
        let mut captures = Vec::new();
        for (checkpoint, found) in &self.found {
            match capture(graph, *checkpoint, found) {
                Some(mut capture) => {
                    capture.picked = picked[capture.region.storage];
                    captures.push(capture);
                }
                None => {
                    let tensor = graph.get(found.tensor);
                    let line = format!("{checkpoint}: {} {} {:?}", tensor.op, tensor.dtype, tensor.ne);
                    self.mapping.unmapped.push(line);
                }
            }
        }
        captures.sort_by_key(|capture| (capture.region.storage, capture.checkpoint));
        self.mapping.unmapped.extend(unmapped(graph, &captures));
        self.mapping.captures = captures;
        self.mapping
    }
}

/// The checkpoint that a node with this op and this weight computes.
fn checkpoint_of(op: &Op, weight: &str) -> Option<Checkpoint> {
    let global = match (op, weight) {
        (Op::GetRows, "token_embd.weight") => Some(Kind::Embed),
        (Op::Mul, "output_norm.weight") => Some(Kind::FinalNorm),
        (Op::MulMat, "output.weight" | "token_embd.weight") => Some(Kind::Logits),
        _ => None,
    };
    if let Some(kind) = global {
        return Some(Checkpoint::global(kind));
    }
    let (layer, rest) = layer_weight(weight)?;
    let kind = match (op, rest) {
        (Op::Mul, "attn_norm.weight") => Kind::AttnNorm,
        (Op::Mul, "ffn_norm.weight") => Kind::FfnNorm,
        (Op::Mul, "attn_q_norm.weight") => Kind::QNorm,
        (Op::Mul, "attn_k_norm.weight") => Kind::KNorm,
        (Op::MulMat, "attn_q.weight") => Kind::QProj,
        (Op::MulMat, "attn_k.weight") => Kind::KProj,
        (Op::MulMat, "attn_v.weight") => Kind::VProj,
        (Op::Add, "attn_q.bias") => Kind::Q,
        (Op::Add, "attn_k.bias") => Kind::K,
        (Op::Add, "attn_v.bias") => Kind::V,
        (Op::MulMat, "attn_output.weight") => Kind::AttnOut,
        (Op::MulMat, "ffn_gate.weight") => Kind::FfnGate,
        (Op::MulMat, "ffn_up.weight") => Kind::FfnUp,
        (Op::MulMat, "ffn_down.weight") => Kind::FfnOut,
        _ => return None,
    };
    Some(Checkpoint::layer(kind, layer))
}

/// `blk.7.attn_q.weight` as 7 and `attn_q.weight`.
pub(crate) fn layer_weight(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

fn capture(graph: &Graph, checkpoint: Checkpoint, found: &Found) -> Option<Capture> {
    let mut region = Region::of(graph, found.tensor)?;
    if let Some(storage) = found.within {
        region = region.within(storage);
    }
    let element = match graph.get(region.storage).dtype.as_str() {
        "f32" => Element::F32,
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        _ => return None,
    };
    let matrix = matches!(checkpoint.kind(), Kind::AttnScores | Kind::AttnProbs);
    let shape = if matrix {
        // (H, T, S); with several sequences in the cache there would be a fourth axis.
        (region.extents.len() <= 3).then(|| three(&region.extents))?
    } else {
        let width: usize = region.extents[1..].iter().product();
        match found.heads {
            // In a decode step a (1, H, E) tensor looks like (H, E): the heads tell them apart.
            Some((heads, head_width)) => {
                let row = heads * head_width;
                (row > 0 && region.elements() % row == 0)
                    .then(|| vec![region.elements() / row, heads, head_width])?
            }
            None => vec![region.extents[0], width],
        }
    };
    if matrix {
        region.strides = [vec![0; 3 - region.extents.len()], region.strides].concat();
        region.extents = shape.clone();
    }
    Some(Capture { checkpoint, element, shape, region, picked: None })
}

/// Extents with axes of extent 1 put in front.
fn three(extents: &[usize]) -> Vec<usize> {
    [vec![1; 3 - extents.len()], extents.to_vec()].concat()
}

/// For each tensor, the leaf whose indices say which rows were picked on the way to it.
fn picked_rows(graph: &Graph) -> Vec<Option<Id>> {
    let mut picked: Vec<Option<Id>> = vec![None; graph.tensors.len()];
    for id in 0..graph.nodes {
        let tensor = graph.get(id);
        let own = (tensor.op == Op::GetRows)
            .then(|| Some((graph.src(id, 0)?, graph.src(id, 1)?)))
            .flatten()
            .filter(|&(table, indices)| !graph.is_leaf(table) && graph.is_leaf(graph.storage(indices)))
            .map(|(_, indices)| graph.storage(indices));
        picked[id] = own.or_else(|| tensor.srcs.iter().find_map(|&src| picked[src]));
    }
    picked
}

/// Computed nodes that are no checkpoint, nor a step within the computation of one.
fn unmapped(graph: &Graph, captures: &[Capture]) -> Vec<String> {
    let taken: BTreeSet<Id> = captures.iter().map(|capture| capture.region.storage).collect();
    let mut within: BTreeSet<Id> = BTreeSet::new();
    for &id in &taken {
        for &src in &graph.get(id).srcs {
            let src = graph.origin(src);
            // The norm before its weight; silu(gate) before it is multiplied by up; probabilities times
            // values before the heads are put side by side.
            let inner = matches!(&graph.get(src).op, Op::RmsNorm | Op::Other(_) | Op::SoftMax);
            if inner && !taken.contains(&src) {
                within.insert(src);
            }
        }
        if graph.get(id).op.is_copy() {
            within.insert(graph.origin(id));
        }
    }
    let mut lines = Vec::new();
    for id in graph.computed() {
        let op = &graph.get(id).op;
        let moved = op.is_view() || op.is_copy() || matches!(op, Op::SetRows | Op::GetRows | Op::None);
        if !moved && !taken.contains(&id) && !within.contains(&id) {
            let line = format!("{op} {}", graph.get(id).name);
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    lines
}
