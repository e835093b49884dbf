//! One step as a list of kernel launches; what no kernel does, such as some injected mistakes, is marked for the
//! host.

use std::collections::HashMap;

use super::calls::{
    self, Address, AttentionData, AttentionKernel, Call, NormShape, RopeData, RopePart, TensorCores,
};
use super::layout::{Layout, Place, bytes_of};
use super::ropes::Tables;
use super::schedule::{Task, gpu_attention};
use super::weights::Weights;
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::fused::graph::{Attention, Graph, Node, Op};
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
    /// Which of them are compared on the device.
    pub compared: Vec<bool>,
    /// Whether the probe feeds values: every node is then a launch of its own.
    pub fed: bool,
}

/// One thing to do.
#[expect(clippy::large_enum_variant, reason = "a plan is a few hundred entries, made once")]
pub enum Work {
    /// Launch a kernel.
    Launch(Call),
    /// Execute this node on the host.
    Host(usize),
}

/// A value that the probe wants.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// By node: how much of the work is to be done before its value is there.
    pub ends: Vec<usize>,
    /// What goes to the host, in the order of the arena.
    pub outputs: Vec<Output>,
    /// What is compared on the device, likewise.
    pub compared: Vec<Output>,
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
    /// RoPE angles.
    pub ropes: &'a Tables,
    /// (1,) first position of the step, i32.
    pub first: Address,
    /// (T,) tokens, u32.
    pub tokens: Address,
    /// Start of the arena.
    pub arena: Address,
    /// Room for the sums of attention, and the positions that it and the cache are for.
    pub attention: (Address, usize),
    /// Bytes of shared memory that a block may have.
    pub shared_max: usize,
    /// What tensor cores can do.
    pub cores: TensorCores,
    /// Room for the decoded weights of one launch: see [`super::products::scratch_bytes`].
    pub scratch: Address,
}

impl Plan {
    /// Turns tasks into launches; `wanted` is what the probe wants, and what of it is compared on the device.
    pub fn new(
        graph: &Graph,
        (nodes, tasks): (Vec<Node>, &[Task]),
        (key, layout): (Key, Layout),
        (wanted, on_device): (&[Checkpoint], &[Checkpoint]),
        numerics: &Numerics,
        memory: &Memory<'_>,
    ) -> Plan {
        let builder = Builder { graph, nodes: &nodes, layout: &layout, numerics, memory, rows: key.rows };
        let (mut work, mut outputs) = (Vec::new(), Vec::new());
        let mut ends = vec![0; nodes.len()];
        for (index, task) in tasks.iter().enumerate() {
            builder.work(task, &tasks[index + 1..], &mut work);
            for index in task.nodes() {
                ends[index] = work.len();
                for checkpoint in shown(&nodes[index]).filter(|checkpoint| wanted.contains(checkpoint)) {
                    if let Some(&place) = layout.places.get(&checkpoint) {
                        outputs.push(Output { checkpoint, place, after: work.len() });
                    }
                }
            }
        }
        outputs.sort_by_key(|output: &Output| output.place.offset);
        let (compared, outputs) = outputs.into_iter().partition(|o| on_device.contains(&o.checkpoint));
        let logits = layout.places.get(&Checkpoint::global(Kind::Logits)).map(|place| {
            let last_row = place.bytes() - graph.dims.vocab * bytes_of(place.storage);
            memory.arena + (place.offset + last_row) as Address
        });
        Plan { key, nodes, work, ends, outputs, compared, layout, logits }
    }

    /// Whether everything is a kernel launch.
    pub fn is_all_gpu(&self) -> bool {
        self.work.iter().all(|work| matches!(work, Work::Launch(_)))
    }
}

/// What a node computes in the arena: its checkpoint, and the inside of GPU attention.
fn shown(node: &Node) -> impl Iterator<Item = Checkpoint> {
    let inside = gpu_attention(node)
        .map(|_| [Kind::AttnScores, Kind::AttnProbs].map(|kind| node.checkpoint.sibling(kind)));
    inside.into_iter().flatten().chain([node.checkpoint])
}

pub(super) struct Builder<'a> {
    pub(super) graph: &'a Graph,
    pub(super) nodes: &'a [Node],
    pub(super) layout: &'a Layout,
    pub(super) numerics: &'a Numerics,
    pub(super) memory: &'a Memory<'a>,
    pub(super) rows: usize,
}

impl Builder<'_> {
    /// The launches of one task. What cannot be launched after all is left to the host.
    fn work(&self, task: &Task, later: &[Task], work: &mut Vec<Work>) {
        let calls = match task {
            Task::Linear(task) => self.linear(task, self.next_weights(later)),
            Task::Rope(nodes) => self.rope(nodes).map(|call| vec![call]),
            Task::Single(node) => self.single(&self.nodes[*node]).map(|call| vec![call]),
            Task::Host(_) => None,
        };
        let appends_itself = calls.is_some() && matches!(task, Task::Linear(_) | Task::Rope(_));
        match calls {
            Some(calls) => work.extend(calls.into_iter().map(Work::Launch)),
            None => work.extend(task.nodes().into_iter().map(Work::Host)),
        }
        for index in task.nodes() {
            let checkpoint = self.nodes[index].checkpoint;
            if let (Some(&cache), Some(x)) = (self.memory.cache.get(&checkpoint), self.address(checkpoint))
                && !(appends_itself && self.is_last(task, index))
            {
                let shape = [self.rows, self.width(checkpoint)];
                let (storage, kv) = (self.numerics.storage, self.numerics.kv);
                work.push(Work::Launch(calls::cache([x, cache, self.memory.first], shape, storage, kv)));
            }
        }
    }

    /// Whether a node gives the last result of its part of a task, which the kernel appends to the cache.
    fn is_last(&self, task: &Task, index: usize) -> bool {
        match task {
            Task::Linear(task) => task.parts.iter().any(|part| part.last() == index),
            _ => true,
        }
    }

    pub(super) fn address(&self, checkpoint: Checkpoint) -> Option<Address> {
        self.layout.places.get(&checkpoint).map(|place| self.memory.arena + place.offset as Address)
    }

    /// Columns of one row of a checkpoint that does not depend on S.
    fn width(&self, checkpoint: Checkpoint) -> usize {
        self.graph.dims.width(checkpoint.kind(), 0)
    }

    pub(super) fn cache(&self, checkpoint: Checkpoint) -> Address {
        self.memory.cache.get(&checkpoint).copied().unwrap_or(0)
    }

    pub(super) fn input(&self, node: &Node, index: usize) -> Option<Address> {
        self.address(*node.inputs.get(index)?)
    }

    fn single(&self, node: &Node) -> Option<Call> {
        let (rows, storage) = (self.rows, self.numerics.storage);
        let out = self.address(node.checkpoint)?;
        let width = self.width(node.checkpoint);
        let x = || self.input(node, 0);
        let other = || self.input(node, 1);
        match &node.op {
            Op::Embed { table } => {
                let table = self.memory.weights.matrix(table)?;
                Some(calls::embed(&table, self.memory.tokens, out, rows, storage))
            }
            Op::Norm(norm) => {
                let weight = self.memory.weights.vector(&norm.weight, norm.width)?;
                let groups = rows * width / norm.width;
                let style = calls::norm_style(norm.style)?;
                let shape = NormShape { groups, width: norm.width, eps: norm.eps, style };
                Some(calls::norm(x()?, weight, out, shape, storage))
            }
            Op::Bias { bias, times } => {
                let bias = match bias {
                    Some(bias) => self.memory.weights.vector(bias, width)?,
                    None => 0,
                };
                Some(calls::bias(x()?, bias, out, [rows, width], *times, storage))
            }
            Op::Attention(op) => self.attention(node, op, out),
            Op::Add { scale } => Some(calls::add([x()?, other()?, out], rows * width, *scale, storage)),
            Op::Glu(glu) => calls::glu(*glu, [x()?, other()?, out], rows * width, storage),
            Op::Linear { .. } | Op::Rope(_) | Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => None,
        }
    }

    fn rope(&self, nodes: &[usize]) -> Option<Call> {
        let Op::Rope(rope) = &self.nodes[*nodes.first()?].op else { return None };
        let part = |index: &usize| {
            let node = &self.nodes[*index];
            Some(RopePart {
                x: self.input(node, 0)?,
                out: self.address(node.checkpoint)?,
                cache: self.cache(node.checkpoint),
                heads: (self.width(node.checkpoint) / rope.head_width) as i64,
            })
        };
        let parts: Vec<RopePart> = nodes.iter().map(part).collect::<Option<_>>()?;
        let data = RopeData {
            table: self.memory.ropes.get(rope)?,
            first: self.memory.first,
            rows: self.rows,
            storage: self.numerics.storage,
            kv: self.numerics.kv,
        };
        Some(calls::rope(rope, &parts, data))
    }

    fn attention(&self, node: &Node, op: &Attention, out: Address) -> Option<Call> {
        let inside = |kind| self.address(node.checkpoint.sibling(kind)).unwrap_or(0);
        let data = AttentionData {
            q: self.input(node, 0)?,
            k: *self.memory.cache.get(node.inputs.get(1)?)?,
            v: *self.memory.cache.get(node.inputs.get(2)?)?,
            out,
            scores: inside(Kind::AttnScores),
            probs: inside(Kind::AttnProbs),
            first: self.memory.first,
            room: self.memory.attention.0,
            capacity: self.memory.attention.1,
        };
        let types = [self.numerics.storage, self.numerics.kv];
        let kernel = AttentionKernel::for_step(op, self.rows, types);
        calls::attention(op, data, kernel, self.rows, types)
    }
}
