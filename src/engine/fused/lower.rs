//! The nodes that engines execute, from the graph that is built of a model file.
//!
//! An engine's node is one checkpoint: a norm with its weight, a matmul, a bias, a rotation, attention, a gate. The
//! wiring is the built graph's alone. What these nodes cannot express (experts, windows, scaled RoPE, …) is refused
//! here, and executed op by op by the machine instead.

use std::collections::{BTreeMap, BTreeSet};

use parity_graph::known::{self, Known};
use parity_graph::params::field;
use parity_graph::reads::reads;
use parity_graph::{self as built, Id, Op as Computed};

use super::config::Config;
use super::graph::{
    Attention, BySteps, Glu, Graph, Mask, Node, Norm, NormStyle, Op, Pairing, Position, Rope, ScoreLimit,
};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::builders::{self, Built, Cache, Shape};

/// The order in which engines compute a layer: queries, then keys, then values, each with what follows it, so that the
/// GPU computes them in one launch. A step begins with the embedding and ends with the head.
const ORDER: [Kind; 25] = [
    Kind::Embed,
    Kind::AttnNorm,
    Kind::QProj,
    Kind::Q,
    Kind::QNorm,
    Kind::QRope,
    Kind::KProj,
    Kind::K,
    Kind::KNorm,
    Kind::KRope,
    Kind::VProj,
    Kind::V,
    Kind::AttnScores,
    Kind::AttnProbs,
    Kind::AttnCtx,
    Kind::AttnOut,
    Kind::AttnResidual,
    Kind::FfnNorm,
    Kind::FfnGate,
    Kind::FfnUp,
    Kind::FfnAct,
    Kind::FfnOut,
    Kind::LayerOut,
    Kind::FinalNorm,
    Kind::Logits,
];

/// The nodes of one model; every weight is checked to be there with its shape, and none is left over.
///
/// # Errors
/// What the builder refuses, a type that is not decoded, an op that engines have no node for.
pub fn graph(gguf: &Gguf) -> Result<(Config, Graph)> {
    if let Some(adapter) = gguf.adapters().next() {
        return Err(Error::file(adapter.path(), "an adapter is executed op by op"));
    }
    // Attention in its parts, and a first step of one token: neither changes the wiring.
    let Built { graph: built, facts, .. } = builders::build(gguf, Shape::step(0, 1, 1, false, Cache::F32))?;
    let config = Config::new(gguf, &facts)?;
    let known = known::find(&built);
    let mut lowering = Lowering { gguf, names: names(&built, &known), built: &built, taken: BTreeSet::new() };
    let mut nodes = Vec::with_capacity(known.found.len());
    for (checkpoint, found) in known.each() {
        nodes.push(lowering.node(checkpoint, found.tensor)?);
    }
    let left = built.computed().find(|&id| built.is_arithmetic(id) && !lowering.taken.contains(&id));
    if let Some(left) = left {
        return Err(lowering.refused(left));
    }
    let order = |node: &Node| {
        let place = ORDER.iter().position(|kind| *kind == node.checkpoint.kind());
        let layer = match node.checkpoint.kind() {
            Kind::Embed => None,
            _ => Some(node.checkpoint.layer_index().unwrap_or(u32::MAX)),
        };
        (layer, place)
    };
    nodes.sort_by_key(order);
    let dims = config.dims;
    Ok((config, Graph { nodes, dims }))
}

/// By node of the graph, the last checkpoint that it is: queries of a model without biases are their product.
fn names(built: &built::Graph, known: &Known) -> BTreeMap<Id, Checkpoint> {
    known.each().map(|(checkpoint, found)| (built.origin(found.tensor), checkpoint)).collect()
}

struct Lowering<'a> {
    gguf: &'a Gguf,
    built: &'a built::Graph,
    names: BTreeMap<Id, Checkpoint>,
    /// Nodes of the built graph that a node of the engines computes.
    taken: BTreeSet<Id>,
}

impl Lowering<'_> {
    fn refused(&self, id: Id) -> Error {
        let tensor = self.built.get(id);
        Error::file(self.gguf.path(), "a part of the model that parity's engines have no node for")
            .expected("a decoder with a feed-forward part, causal attention and plain RoPE")
            .found(format!("{} ({})", tensor.name, tensor.op))
    }

    /// The engine's node of one checkpoint, which `tensor` holds.
    fn node(&mut self, checkpoint: Checkpoint, tensor: Id) -> Result<Node> {
        let id = self.built.origin(tensor);
        let found = match checkpoint.kind() {
            Kind::Q | Kind::K | Kind::V if self.built.get(id).op == Computed::MulMat => {
                Some((Op::Bias { bias: None, times: 1 }, checkpoint.sibling(product_of(checkpoint.kind()))))
            }
            _ => None,
        };
        if let Some((op, input)) = found {
            return Ok(Node { checkpoint, op, inputs: vec![input] });
        }
        let whole = self.built.get(id).elements() == self.built.get(tensor).elements();
        let op = self.op(checkpoint.kind(), id).filter(|_| whole).ok_or_else(|| self.refused(id))?;
        if let Some(weight) = op.weight() {
            self.decodable(weight)?;
        }
        self.taken.insert(id);
        let inputs = self.inputs(id, &op).ok_or_else(|| self.refused(id))?;
        Ok(Node { checkpoint, op, inputs })
    }

    /// What a node computes, with all of its parameters; `None` where engines have no such node.
    fn op(&mut self, kind: Kind, id: Id) -> Option<Op> {
        let tensor = self.built.get(id);
        Some(match (kind, &tensor.op) {
            (Kind::Embed, Computed::GetRows) => Op::Embed { table: self.weight(id, 0)? },
            (_, Computed::Mul) => Op::Norm(self.norm(id)?),
            (Kind::AttnScores, Computed::MulMat) => Op::Scores(self.attention(id)?),
            (Kind::AttnProbs, Computed::SoftMax) => Op::Softmax(self.attention(self.read(id, 0)?)?),
            (Kind::AttnCtx, Computed::MulMat) => {
                let probs = self.read(id, 1)?;
                Op::Context(self.attention(self.read(probs, 0)?)?)
            }
            (_, Computed::MulMat) => Op::Linear { weight: self.weight(id, 0)?, columns: None },
            (Kind::Q | Kind::K | Kind::V, Computed::Add) => {
                Op::Bias { bias: Some(self.weight(id, 1)?), times: 1 }
            }
            (Kind::AttnResidual | Kind::LayerOut, Computed::Add) => Op::Add { scale: [1.0, 1.0] },
            (Kind::QRope | Kind::KRope, Computed::Rope) => Op::Rope(self.rope(id)?),
            (Kind::FfnAct, Computed::Swiglu) if self.int(id, "swapped") == 0 => Op::Glu(Glu::SWIGLU),
            _ => return None,
        })
    }

    /// The checkpoints that a node reads, in the order that its op has them.
    fn inputs(&self, id: Id, op: &Op) -> Option<Vec<Checkpoint>> {
        let mut from = id;
        if let Op::Norm(_) = op {
            from = self.built.src(id, 0)?;
        }
        let read = reads(self.built, from);
        let mut inputs: Vec<Checkpoint> = read
            .iter()
            .filter(|&&id| !self.built.is_leaf(id))
            .map(|id| self.names.get(id).copied())
            .collect::<Option<_>>()?;
        // ggml multiplies keys by queries, and values by probabilities.
        if matches!(op, Op::Scores(_) | Op::Context(_)) {
            inputs.reverse();
        }
        let expected = match op {
            Op::Embed { .. } => 0,
            Op::Scores(_) | Op::Context(_) | Op::Add { .. } | Op::Glu(_) => 2,
            Op::Attention(_) => 3,
            Op::Norm(_) | Op::Linear { .. } | Op::Bias { .. } | Op::Rope(_) | Op::Softmax(_) => 1,
        };
        (inputs.len() == expected).then_some(inputs)
    }

    /// The node that computes a source, through what only moves values.
    fn read(&self, id: Id, slot: usize) -> Option<Id> {
        self.built.src(id, slot).map(|src| self.built.origin(src))
    }

    fn float(&self, id: Id, name: &str) -> f32 {
        let tensor = self.built.get(id);
        field(&tensor.op, name).map_or(0.0, |field| tensor.params.float(field.word))
    }

    fn int(&self, id: Id, name: &str) -> i32 {
        let tensor = self.built.get(id);
        field(&tensor.op, name).map_or(0, |field| tensor.params.int(field.word))
    }

    /// A weight of the file in a slot.
    fn weight(&self, id: Id, slot: usize) -> Option<String> {
        let weight = self.built.src(id, slot).filter(|&src| self.built.is_leaf(src))?;
        let name = &self.built.get(weight).name;
        self.gguf.tensor(name).map(|_| name.clone())
    }

    fn decodable(&self, name: &str) -> Result<()> {
        match self.gguf.tensor(name).filter(|tensor| !tensor.info.dtype.is_decodable()) {
            None => Ok(()),
            Some(tensor) => {
                Err(Error::file(self.gguf.path(), format!("{name} has a type that parity does not decode"))
                    .expected("F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K..Q6_K, IQ4_NL or IQ4_XS")
                    .found(tensor.info.dtype.name())
                    .hint("llama-quantize makes a file of another type"))
            }
        }
    }

    /// An RMS norm times its weight.
    fn norm(&mut self, id: Id) -> Option<Norm> {
        let norm = self.built.src(id, 0).filter(|&src| self.built.get(src).op == Computed::RmsNorm)?;
        self.taken.insert(norm);
        let (eps, width) = (f64::from(self.float(norm, "eps")), self.built.get(norm).ne[0]);
        Some(Norm { weight: self.weight(id, 1)?, eps, width, style: NormStyle::RMS })
    }

    /// RoPE of whole heads by their own positions, unscaled.
    fn rope(&self, id: Id) -> Option<Rope> {
        let plain = self.float(id, "freq_scale") == 1.0
            && self.float(id, "ext_factor") == 0.0
            && self.float(id, "attn_factor") == 1.0
            && self.int(id, "offset") == 0;
        let pairing = match self.int(id, "mode") {
            0 if plain => Pairing::Interleaved,
            2 if plain => Pairing::Half,
            _ => return None,
        };
        let freqs = match self.built.src(id, 2) {
            Some(_) => Some(self.weight(id, 2)?),
            None => None,
        };
        Some(Rope {
            base: f64::from(self.float(id, "freq_base")),
            head_width: self.built.get(id).ne[0],
            dims: usize::try_from(self.int(id, "n_dims")).ok()?,
            pairing,
            freqs,
            position: BySteps::all(Position::OWN),
            sign: 1,
            times: 1,
        })
    }

    /// The attention that a node of scores belongs to.
    fn attention(&self, scores: Id) -> Option<Attention> {
        let of = |slot: usize| Some(self.built.get(self.built.src(scores, slot)?).ne);
        // Heads stand behind tokens and cells: (K, S, E) and (H, T, E).
        let ([_, _, kv_heads, _], [head_width, _, heads, _]) = (of(0)?, of(1)?);
        let softmax = self
            .built
            .computed()
            .find(|&id| self.built.get(id).op == Computed::SoftMax && self.read(id, 0) == Some(scores))?;
        let mask = self.built.src(softmax, 1).map(|mask| &self.built.get(mask).name)?;
        let causal = mask == builders::CAUSAL_MASK && self.built.src(softmax, 2).is_none();
        let scale = exact_scale(self.float(softmax, "scale"), head_width);
        let group = heads.checked_div(kv_heads).filter(|group| group * kv_heads == heads)?;
        (causal && self.float(softmax, "max_bias") == 0.0).then_some(Attention {
            heads,
            kv_heads,
            head_width,
            scale,
            group,
            mask: BySteps::all(Mask::CAUSAL),
            softmax: true,
            limit: ScoreLimit::None,
        })
    }
}

/// The factor that an f32 of a graph stands for: 1/sqrt(E), where that is what it is a rounding of.
fn exact_scale(word: f32, head_width: usize) -> f64 {
    let exact = 1.0 / (head_width as f64).sqrt();
    let own = 1.0 / (head_width as f32).sqrt();
    if word == own { exact } else { f64::from(word) }
}

/// The product that queries, keys or values are before their bias.
fn product_of(kind: Kind) -> Kind {
    match kind {
        Kind::Q => Kind::QProj,
        Kind::K => Kind::KProj,
        _ => Kind::VProj,
    }
}
