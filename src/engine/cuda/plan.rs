//! One step as a list of kernel launches; what no kernel does, such as most planted mistakes, is marked for the
//! host.

use std::collections::HashMap;

use super::calls::{self, Address, AttentionData, Call, LinearKernel, NormShape};
use super::layout::{Layout, Place, Value, bytes_of};
use super::ropes::Tables;
use super::weights::Weights;
use crate::checkpoint::{Checkpoint, Kind};
use crate::model::graph::{Attention, Graph, Node, Op, WeightRef};
use crate::numerics::Numerics;

/// What a plan is made for. The same key gives the same plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// T
    pub rows: usize,
    /// S, where scores or probabilities are wanted: their shape depends on it.
    pub cached: Option<usize>,
    /// Which checkpoints the probe wants, by node of the unfused graph.
    pub wanted: Vec<bool>,
}

/// One thing to do.
pub enum Work {
    /// Launch a kernel.
    Launch(Call),
    /// Execute this node on the host.
    Host(usize),
}

/// A value that the probe wants.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// What it is.
    pub checkpoint: Checkpoint,
    /// Where it lies.
    pub place: Place,
    /// How much of the work is to be done before it is there.
    pub after: usize,
}

/// The launches of one step.
pub struct Plan {
    /// What it was made for.
    pub key: Key,
    /// Nodes as they are executed, attention merged where it runs on the GPU.
    pub nodes: Vec<Node>,
    /// In order.
    pub work: Vec<Work>,
    /// In the order of the arena.
    pub outputs: Vec<Output>,
    /// Where everything lies.
    pub layout: Layout,
    /// The logits row that is returned: f32, (V,).
    pub logits: Option<Address>,
}

/// What launches refer to.
pub struct Memory<'a> {
    /// The weights.
    pub weights: &'a Weights,
    /// Keys and values by the checkpoint they are computed at.
    pub cache: &'a HashMap<Checkpoint, Address>,
    /// RoPE angles of a node.
    pub ropes: &'a Tables,
    /// (1,) first position of the step, i32.
    pub first: Address,
    /// (T,) tokens, u32.
    pub tokens: Address,
    /// Start of the arena.
    pub arena: Address,
}

/// The nodes of a step: attention is merged wherever the GPU computes it, which also stores what is wanted of
/// its inside; where the host must, it stays in three nodes if the inside is wanted.
pub fn nodes(graph: &Graph, wants: impl Fn(Checkpoint) -> bool) -> Vec<Node> {
    let merged = graph.fused(|_| false);
    let on_gpu = |layer: Checkpoint| {
        merged
            .node(layer.sibling(Kind::AttnCtx))
            .is_some_and(|node| node.edits.is_empty() && gpu_attention(node).is_some())
    };
    graph.fused(|checkpoint| wants(checkpoint) && !on_gpu(checkpoint)).nodes
}

/// The merged attention of a node that a kernel computes.
fn gpu_attention(node: &Node) -> Option<&Attention> {
    match &node.op {
        Op::Attention(op) if node.edits.is_empty() && calls::has_attention(op) => Some(op),
        _ => None,
    }
}

/// The values of a step in execution order, the inside of GPU attention before its result.
pub fn values(graph: &Graph, nodes: &[Node], key: &Key, wants: impl Fn(Checkpoint) -> bool) -> Vec<Value> {
    let mut last_reader: HashMap<Checkpoint, usize> = HashMap::new();
    for (index, node) in nodes.iter().enumerate() {
        for input in &node.inputs {
            last_reader.insert(*input, index);
        }
    }
    let cached = key.cached.unwrap_or(0);
    let mut values = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let mut push = |checkpoint: Checkpoint, wanted: bool| {
            let rows = if checkpoint.kind() == Kind::Logits && !wanted { 1 } else { key.rows };
            let len = rows * graph.dims.width(checkpoint.kind(), cached);
            let life = (index, last_reader.get(&checkpoint).copied().unwrap_or(index));
            values.push(Value { checkpoint, len, wanted, life });
        };
        if gpu_attention(node).is_some() {
            let inside = [Kind::AttnScores, Kind::AttnProbs].map(|kind| node.checkpoint.sibling(kind));
            // Probabilities are computed from stored scores.
            if wants(inside[0]) || wants(inside[1]) {
                push(inside[0], wants(inside[0]));
            }
            if wants(inside[1]) {
                push(inside[1], true);
            }
        } else if node.checkpoint.kind().is_optional() {
            continue; // computed, kept and shown by the host
        }
        push(node.checkpoint, wants(node.checkpoint));
    }
    values
}

impl Plan {
    /// Turns nodes into launches.
    pub fn new(
        graph: &Graph,
        nodes: Vec<Node>,
        key: Key,
        layout: Layout,
        wanted: &[Checkpoint],
        numerics: &Numerics,
        memory: &Memory<'_>,
    ) -> Plan {
        let builder = Builder { graph, layout: &layout, numerics, memory, rows: key.rows };
        let (mut work, mut outputs) = (Vec::new(), Vec::new());
        for (index, node) in nodes.iter().enumerate() {
            match builder.call(node) {
                Some(call) => work.push(Work::Launch(call)),
                None => work.push(Work::Host(index)),
            }
            if let Some(&cache) = memory.cache.get(&node.checkpoint) {
                work.push(Work::Launch(builder.append(node.checkpoint, cache)));
            }
            let inside = [Kind::AttnScores, Kind::AttnProbs].map(|kind| node.checkpoint.sibling_of(kind));
            let shown = inside.into_iter().flatten().filter(|_| gpu_attention(node).is_some());
            for checkpoint in shown.chain([node.checkpoint]).filter(|checkpoint| wanted.contains(checkpoint))
            {
                if let Some(&place) = layout.places.get(&checkpoint) {
                    outputs.push(Output { checkpoint, place, after: work.len() });
                }
            }
        }
        let logits = layout.places.get(&Checkpoint::global(Kind::Logits)).map(|place| {
            let last_row = place.bytes() - graph.dims.vocab * bytes_of(place.storage);
            memory.arena + (place.offset + last_row) as Address
        });
        Plan { key, nodes, work, outputs, layout, logits }
    }

    /// Whether everything is a kernel launch.
    pub fn is_all_gpu(&self) -> bool {
        self.work.iter().all(|work| matches!(work, Work::Launch(_)))
    }
}

trait SiblingOf {
    /// The same layer, another kind; `None` outside the layers.
    fn sibling_of(self, kind: Kind) -> Option<Checkpoint>;
}

impl SiblingOf for Checkpoint {
    fn sibling_of(self, kind: Kind) -> Option<Checkpoint> {
        self.layer_index().map(|_| self.sibling(kind))
    }
}

struct Builder<'a> {
    graph: &'a Graph,
    layout: &'a Layout,
    numerics: &'a Numerics,
    memory: &'a Memory<'a>,
    rows: usize,
}

impl Builder<'_> {
    fn address(&self, checkpoint: Checkpoint) -> Option<Address> {
        self.layout.places.get(&checkpoint).map(|place| self.memory.arena + place.offset as Address)
    }

    /// Columns of one row of a checkpoint that does not depend on S.
    fn width(&self, checkpoint: Checkpoint) -> usize {
        self.graph.dims.width(checkpoint.kind(), 0)
    }

    /// The kernel of a node; `None` where there is none for it.
    fn call(&self, node: &Node) -> Option<Call> {
        if !node.edits.is_empty() {
            return None;
        }
        let (rows, storage) = (self.rows, self.numerics.storage);
        let out = self.address(node.checkpoint)?;
        let width = self.width(node.checkpoint);
        let x = || self.address(*node.inputs.first()?);
        // Planted mistakes can wire nodes in ways whose widths do not fit: the host says so.
        let same_width = |count: usize| {
            node.inputs.len() == count && node.inputs.iter().all(|input| self.width(*input) == width)
        };
        match &node.op {
            Op::Embed { table } => {
                let table = self.memory.weights.matrix(table).filter(|table| table.columns == width)?;
                Some(calls::embed(&table, self.memory.tokens, out, rows, storage))
            }
            Op::Norm(norm) => {
                let weight = self.memory.weights.vector(&norm.weight, norm.width)?;
                if !same_width(1) || !width.is_multiple_of(norm.width) {
                    return None;
                }
                let groups = rows * width / norm.width;
                let shape = NormShape { groups, width: norm.width, eps: norm.eps, style: norm.style };
                Some(calls::norm(x()?, weight, out, shape, storage))
            }
            Op::Linear { weight, columns: None } => self.linear(node, weight),
            Op::Linear { columns: Some(_), .. } => None,
            Op::Bias { bias, times } => {
                let bias = match bias {
                    Some(bias) => self.memory.weights.vector(bias, width)?,
                    None => 0,
                };
                same_width(1).then_some(())?;
                Some(calls::bias(x()?, bias, out, [rows, width], *times, storage))
            }
            Op::Rope(rope) => {
                same_width(1).then_some(())?;
                let table = self.memory.ropes.get(rope)?;
                let heads = width / rope.head_width;
                Some(calls::rope(rope, [x()?, table, self.memory.first, out], [rows, heads], storage))
            }
            Op::Attention(op) => self.attention(node, op, out),
            Op::Add { scale } => {
                same_width(2).then_some(())?;
                let residual = self.address(node.inputs[1])?;
                Some(calls::add([x()?, residual, out], rows * width, *scale, storage))
            }
            Op::Glu(glu) => {
                same_width(2).then_some(())?;
                let up = self.address(node.inputs[1])?;
                Some(calls::glu(*glu, [x()?, up, out], rows * width, storage))
            }
            Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => None,
        }
    }

    fn linear(&self, node: &Node, weight: &WeightRef) -> Option<Call> {
        let storage = self.numerics.storage;
        let input = *node.inputs.first()?;
        let fits = |weight: &calls::Weight| {
            weight.columns == self.width(input) && weight.outputs == self.width(node.checkpoint)
        };
        let weight = self.memory.weights.matrix(weight).filter(fits)?;
        let place = self.layout.places.get(&node.checkpoint)?;
        // The logits of the last row alone, unless all are wanted: same kernel, same bits.
        let rows = place.len / weight.outputs;
        let skipped = (self.rows - rows) * weight.columns * bytes_of(storage);
        let (x, out) = (self.address(input)? + skipped as Address, self.address(node.checkpoint)?);
        let out_f32 = node.checkpoint.kind() == Kind::Logits;
        let kernel = LinearKernel::for_step(self.rows);
        Some(calls::linear(kernel, &weight, [x, out], rows, storage, out_f32))
    }

    fn attention(&self, node: &Node, op: &Attention, out: Address) -> Option<Call> {
        let [q, k, v] = node.inputs[..] else { return None };
        let (wide, narrow) = (op.heads * op.head_width, op.kv_heads * op.head_width);
        let widths = [(node.checkpoint, wide), (q, wide), (k, narrow), (v, narrow)];
        if widths.iter().any(|(checkpoint, width)| self.width(*checkpoint) != *width) {
            return None;
        }
        let inside = |kind| self.address(node.checkpoint.sibling(kind)).unwrap_or(0);
        let data = AttentionData {
            q: self.address(q)?,
            k: *self.memory.cache.get(&k)?,
            v: *self.memory.cache.get(&v)?,
            out,
            scores: inside(Kind::AttnScores),
            probs: inside(Kind::AttnProbs),
            first: self.memory.first,
        };
        calls::attention(op, data, self.rows, self.numerics.storage, self.numerics.kv)
    }

    /// The launch that appends rows to the cache.
    fn append(&self, checkpoint: Checkpoint, cache: Address) -> Call {
        let x = self.address(checkpoint).expect("cached values are placed");
        let shape = [self.rows, self.width(checkpoint)];
        calls::cache([x, cache, self.memory.first], shape, self.numerics.storage, self.numerics.kv)
    }
}

/// Checkpoints that attention reads from the cache.
pub fn cached(graph: &Graph) -> Vec<Checkpoint> {
    let mut cached = Vec::new();
    for node in &graph.nodes {
        for (index, input) in node.inputs.iter().enumerate() {
            if node.op.reads_cache(index) && !cached.contains(input) {
                cached.push(*input);
            }
        }
    }
    cached
}
