//! Which tensor of a llama.cpp graph is which of the fixed checkpoints: by weight, op and dataflow, never by the
//! node's own name, since names changed their meaning from release to release.

use std::collections::{BTreeSet, HashMap};

use parity_dump::{Checkpoint, Kind, usual_order};

use crate::attention;
use crate::graph::{Graph, Id};
use crate::op::Op;
use crate::weights::{self, BIAS, Name, WEIGHT, layer_weight};

/// What is known of a graph by its structure.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Tensor of each fixed checkpoint: the node that computes it, or a view into that node.
    pub found: HashMap<Checkpoint, Found>,
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

/// A tensor that holds a checkpoint.
#[derive(Clone, Debug)]
pub struct Found {
    /// The tensor.
    pub tensor: Id,
    /// Another node that holds it in the layout of `tensor`.
    pub within: Option<Id>,
    /// (heads, width) where rows are split into heads.
    pub heads: Option<(usize, usize)>,
}

impl Known {
    /// The fixed checkpoints in their usual order, each with what holds it.
    pub fn each(&self) -> impl Iterator<Item = (Checkpoint, &Found)> {
        usual_order(self.found.keys().copied()).into_iter().map(|id| (id, &self.found[&id]))
    }
}

/// Finds the fixed checkpoints of a graph. A graph that is no forward pass has none.
pub fn find(graph: &Graph) -> Known {
    let mut mapper = Mapper { graph, known: Known::default() };
    mapper.by_weight();
    mapper.after_weights();
    mapper.adapted();
    attention::find(&mut mapper);
    mapper.residuals();
    mapper.inputs();
    mapper.known
}

/// What is found while it grows.
pub(crate) struct Mapper<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) known: Known,
}

/// What a sum gets from a branch of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Branch {
    layer: u32,
    /// Attention's, or the feed-forward part's.
    attention: bool,
}

impl Mapper<'_> {
    /// Notes the tensor of a checkpoint; the first one counts.
    pub(crate) fn note(&mut self, checkpoint: Checkpoint, tensor: Id) {
        self.known.found.entry(checkpoint).or_insert(Found { tensor, within: None, heads: None });
    }

    pub(crate) fn tensor_of(&self, kind: Kind, layer: u32) -> Option<Id> {
        self.known.found.get(&Checkpoint::layer(kind, layer)).map(|found| found.tensor)
    }

    /// Name of the weight that a node reads in slot `slot`.
    pub(crate) fn weight(&self, id: Id, slot: usize) -> Option<&str> {
        weight(self.graph, id, slot)
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
            let shift = names.into_iter().flatten().find_map(shifted_norm).filter(|_| *op == Op::Add);
            if let Some(checkpoint) = known {
                self.note(checkpoint, id);
            } else if let Some(checkpoint) = shift {
                // A norm with a bias is done when the bias is added.
                if let Some(found) = self.known.found.get_mut(&checkpoint)
                    && graph.sources(id).any(|src| graph.origin(src) == found.tensor)
                {
                    found.tensor = id;
                }
            }
        }
    }

    /// What is told by a node that reads a weight: its input, or what is done with its output.
    fn after_weights(&mut self) {
        let graph = self.graph;
        for (of, input) in [(Kind::FfnOut, Kind::FfnAct), (Kind::AttnOut, Kind::AttnCtx)] {
            let products: Vec<(u32, Id)> = self.layers_with(of).collect();
            for (layer, product) in products {
                let src = graph.src(product, 1).filter(|src| !graph.is_leaf(*src));
                // What has an id of its own, as a norm between, is not the input's usual meaning.
                let taken = src.is_some_and(|src| self.known.found.values().any(|found| found.tensor == src));
                if let Some(src) = src.filter(|_| !taken) {
                    self.note(Checkpoint::layer(input, layer), src);
                }
            }
        }
        // A bias, a scale or a soft cap belongs to the logits.
        if let Some(logits) = self.known.found.get_mut(&Checkpoint::global(Kind::Logits)) {
            let width = graph.get(logits.tensor).ne[0];
            for id in graph.computed().filter(|&id| graph.get(id).ne[0] == width) {
                let pointwise = matches!(
                    graph.get(id).op,
                    Op::Add | Op::Mul | Op::Div | Op::Scale | Op::Tanh | Op::Clamp
                );
                let reads = |slot| graph.src(id, slot).is_some_and(|src| graph.origin(src) == logits.tensor);
                if pointwise && id > logits.tensor && (reads(0) || reads(1)) {
                    logits.tensor = id;
                }
            }
        }
    }

    /// What an adapter adds to belongs to it: a product is the sum of both.
    fn adapted(&mut self) {
        let graph = self.graph;
        for id in graph.computed() {
            let base = adapter_sum(graph, id).map(|sum| sum.base);
            for found in self.known.found.values_mut().filter(|found| Some(found.tensor) == base) {
                found.tensor = id;
            }
        }
    }

    /// Layers that have a checkpoint of this kind, with its tensor.
    pub(crate) fn layers_with(&self, kind: Kind) -> impl Iterator<Item = (u32, Id)> + '_ {
        self.known.each().filter_map(move |(checkpoint, found)| {
            (checkpoint.kind() == kind).then_some((checkpoint.layer_index()?, found.tensor))
        })
    }

    /// The two sums of each layer: what feeds them is followed from the products.
    fn residuals(&mut self) {
        let graph = self.graph;
        let mut carried: Vec<Option<Branch>> = vec![None; graph.tensors.len()];
        for id in graph.computed() {
            let tensor = graph.get(id);
            if let Some(branch) = self.branch(id) {
                carried[id] = Some(branch);
                continue;
            }
            let mut of = [0, 1].map(|slot| graph.src(id, slot).and_then(|src| carried[src]));
            if matches!(tensor.op, Op::AddId | Op::GetRows) {
                of[1] = None;
            }
            let branch = of[0].or(of[1]);
            let own_weight = || (0..2).any(|slot| self.weight(id, slot).is_some());
            match (&tensor.op, branch) {
                (Op::Add, Some(_)) if adapter_sum(graph, id).is_some() => carried[id] = branch,
                (Op::Add, Some(branch)) if of.contains(&None) && !own_weight() => self.note_sum(branch, id),
                (
                    Op::Add
                    | Op::AddId
                    | Op::Mul
                    | Op::Div
                    | Op::Scale
                    | Op::GetRows
                    | Op::RmsNorm
                    | Op::L2Norm
                    | Op::Norm,
                    Some(_),
                ) => carried[id] = branch,
                (op, Some(_)) if op.is_view() || op.is_copy() => carried[id] = branch,
                _ => {}
            }
        }
    }

    /// The branch that ends in this product.
    fn branch(&self, id: Id) -> Option<Branch> {
        if !matches!(self.graph.get(id).op, Op::MulMat | Op::MulMatId) {
            return None;
        }
        let Name { layer: Some(layer), part, kind: WEIGHT } = Name::of(self.weight(id, 0)?) else {
            return None;
        };
        let attention = part == weights::ATTN_OUTPUT;
        let down = matches!(part, weights::FFN_DOWN | weights::FFN_DOWN_EXPS | weights::FFN_DOWN_SHEXP);
        (attention || down).then_some(Branch { layer, attention })
    }

    /// Notes the sum of a branch and what went around it.
    fn note_sum(&mut self, branch: Branch, id: Id) {
        if branch.attention {
            return self.note(Checkpoint::layer(Kind::AttnResidual, branch.layer), id);
        }
        // With two feed-forward parts, one behind the other, the second sum reads the first.
        let checkpoint = Checkpoint::layer(Kind::LayerOut, branch.layer);
        let graph = self.graph;
        let reads = |known: Id| graph.sources(id).any(|src| graph.origin(src) == known);
        match self.known.found.get_mut(&checkpoint) {
            Some(found) if reads(found.tensor) => found.tensor = id,
            _ => self.note(checkpoint, id),
        }
    }

    fn inputs(&mut self) {
        let (graph, known) = (self.graph, &mut self.known);
        if let Some(embed) = known.found.get(&Checkpoint::global(Kind::Embed)) {
            known.tokens = graph.src(embed.tensor, 1).map(|leaf| graph.storage(leaf));
            known.rows = graph.get(embed.tensor).ne[1];
        }
        // Some kinds of positions have several rows; those of a RoPE begin with the plain ones.
        let ropes = graph.computed().filter(|&id| graph.get(id).op == Op::Rope);
        let leaves = ropes.filter_map(|id| graph.src(id, 1)).map(|leaf| graph.storage(leaf));
        known.positions = leaves.into_iter().find(|&leaf| graph.is_leaf(leaf));
        known.logits = known.found.get(&Checkpoint::global(Kind::Logits)).map(|found| found.tensor);
    }
}

/// A sum that adds what an adapter says.
pub(crate) struct AdapterSum {
    /// The product without it.
    pub base: Id,
    /// The node that scales B·A.
    pub scale: Id,
    /// Columns of B.
    pub rank: usize,
}

/// W·x + scale·(B·(A·x)), as llama.cpp's `build_lora_mm` draws it.
pub(crate) fn adapter_sum(graph: &Graph, id: Id) -> Option<AdapterSum> {
    let [base, scale] = [graph.src(id, 0)?, graph.src(id, 1)?];
    (graph.get(id).op == Op::Add).then_some(())?;
    Some(AdapterSum { base, scale, rank: adapter_rank(graph, scale)? })
}

/// The rank of an adapter whose product a node scales.
pub fn adapter_rank(graph: &Graph, scale: Id) -> Option<usize> {
    (graph.get(scale).op == Op::Scale).then_some(())?;
    let product = graph.src(scale, 0)?;
    let is_b = Name::of(weight(graph, product, 0)?).kind == weights::LORA_B;
    is_b.then(|| graph.src(product, 0).map(|b| graph.get(b).ne[0])).flatten()
}

/// Name of the weight that a node reads in slot `slot`.
pub(crate) fn weight(graph: &Graph, id: Id, slot: usize) -> Option<&str> {
    let src = graph.src(id, slot)?;
    let leaf = graph.is_leaf(src) && graph.get(src).op == Op::None;
    leaf.then_some(graph.get(src).name.as_str())
}

/// The checkpoint that a node with this op and this weight computes.
fn checkpoint_of(op: &Op, weight: &str) -> Option<Checkpoint> {
    let Name { layer, part, kind } = Name::of(weight);
    let Some(layer) = layer else {
        return match (op, part, kind) {
            (Op::GetRows, weights::TOKEN_EMBD, WEIGHT) => Some(Checkpoint::global(Kind::Embed)),
            (Op::Mul, weights::OUTPUT_NORM, WEIGHT) => Some(Checkpoint::global(Kind::FinalNorm)),
            (Op::MulMat, weights::OUTPUT | weights::TOKEN_EMBD, WEIGHT) => {
                Some(Checkpoint::global(Kind::Logits))
            }
            _ => None,
        };
    };
    let kind = match (op, part, kind) {
        (Op::Mul, weights::ATTN_NORM, WEIGHT) => Kind::AttnNorm,
        (Op::Mul, weights::FFN_NORM, WEIGHT) => Kind::FfnNorm,
        (Op::Mul, weights::ATTN_Q_NORM, WEIGHT) => Kind::QNorm,
        (Op::Mul, weights::ATTN_K_NORM, WEIGHT) => Kind::KNorm,
        (Op::MulMat, weights::ATTN_Q, WEIGHT) => Kind::QProj,
        (Op::MulMat, weights::ATTN_K, WEIGHT) => Kind::KProj,
        (Op::MulMat, weights::ATTN_V, WEIGHT) => Kind::VProj,
        (Op::Add, weights::ATTN_Q, BIAS) => Kind::Q,
        (Op::Add, weights::ATTN_K, BIAS) => Kind::K,
        (Op::Add, weights::ATTN_V, BIAS) => Kind::V,
        (Op::MulMat, weights::ATTN_OUTPUT, WEIGHT) => Kind::AttnOut,
        (Op::MulMat, weights::FFN_GATE, WEIGHT) => Kind::FfnGate,
        (Op::MulMat, weights::FFN_UP, WEIGHT) => Kind::FfnUp,
        (Op::MulMat, weights::FFN_DOWN, WEIGHT) => Kind::FfnOut,
        _ => return None,
    };
    Some(Checkpoint::layer(kind, layer))
}

/// Whether a leaf is a tensor of the model file: their names have a dot (`blk.0.attn_q.weight`), those of inputs, caches
/// and states have none.
pub fn is_weight(name: &str) -> bool {
    name.contains('.')
}

/// The norm that this bias belongs to.
fn shifted_norm(weight: &str) -> Option<Checkpoint> {
    match Name::of(weight) {
        Name { layer: None, part: weights::OUTPUT_NORM, kind: BIAS } => {
            Some(Checkpoint::global(Kind::FinalNorm))
        }
        Name { layer: Some(layer), part, kind: BIAS } => {
            let kind = match part {
                weights::ATTN_NORM => Kind::AttnNorm,
                weights::FFN_NORM => Kind::FfnNorm,
                weights::ATTN_Q_NORM => Kind::QNorm,
                weights::ATTN_K_NORM => Kind::KNorm,
                _ => return None,
            };
            Some(Checkpoint::layer(kind, layer))
        }
        _ => None,
    }
}

/// The layer that each node belongs to: that of its weight, or else the last of its sources' layers.
pub fn layers(graph: &Graph) -> Vec<Option<u32>> {
    let mut layers: Vec<Option<u32>> = vec![None; graph.tensors.len()];
    for id in 0..graph.nodes {
        let mut sources = graph
            .sources(id)
            .map(|src| match graph.is_leaf(src) {
                true => (layer_weight(&graph.get(src).name).map(|(layer, _)| layer), true),
                false => (layers[src], false),
            })
            .collect::<Vec<_>>();
        sources.retain(|(layer, _)| layer.is_some());
        let own = sources.iter().filter(|(_, weight)| *weight).filter_map(|(layer, _)| *layer).max();
        layers[id] = own.or(sources.iter().filter_map(|(layer, _)| *layer).max());
    }
    layers
}
