//! The order in which the nodes of a step are computed: one by one, or several in one launch where they read the
//! same values, or where one follows the other.
//!
//! Whether a checkpoint is wanted plays no part here: traced and untraced steps launch the same kernels. Only where
//! a probe feeds values is every node launched by itself.

use std::collections::{HashMap, HashSet};

use super::calls::{self, LinearKernel, PARTS_MAX, TensorCores, Weight};
use super::layout::Value;
use super::plan::Key;
use super::ropes::Tables;
use super::weights::Weights;
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::fused::graph::{Anchor, Attention, Glu, Graph, Node, Norm, NormStyle, Op, Rope};
use crate::numerics::Storage;

/// Nodes that are looked at for more of the same: a layer has 25 at most.
const WINDOW: usize = 25;

/// What is launched at once; numbers are indices of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Products of the same input, with what comes before and after them.
    Linear(LinearTask),
    /// Rotations of the same kind.
    Rope(Vec<usize>),
    /// A kernel of its own.
    Single(usize),
    /// No kernel: the host computes it.
    Host(usize),
}

/// Products of the same input in one launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinearTask {
    /// The norm that gives the input.
    pub norm: Option<usize>,
    /// The products.
    pub parts: Vec<LinearNodes>,
    /// The gated activation of the two products.
    pub act: Option<usize>,
}

/// A product and what follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearNodes {
    /// The product.
    pub product: usize,
    /// Its bias or residual sum.
    pub sum: Option<usize>,
    /// The rotary embedding of that.
    pub rope: Option<usize>,
}

impl LinearNodes {
    /// The product, or what follows it last.
    pub fn last(&self) -> usize {
        self.rope.or(self.sum).unwrap_or(self.product)
    }
}

impl Task {
    /// All its nodes.
    pub fn nodes(&self) -> Vec<usize> {
        match self {
            Task::Linear(task) => {
                let parts = task.parts.iter().flat_map(|part| [Some(part.product), part.sum, part.rope]);
                [task.norm].into_iter().chain(parts).chain([task.act]).flatten().collect()
            }
            Task::Rope(nodes) => nodes.clone(),
            Task::Single(node) | Task::Host(node) => vec![*node],
        }
    }
}

/// What the GPU can compute.
pub struct Ability<'a> {
    /// Widths of the checkpoints.
    pub graph: &'a Graph,
    /// What is there before the first node, where the graph is a part of another.
    pub given: Option<Checkpoint>,
    /// Weights in device memory.
    pub weights: &'a Weights,
    /// Angles in device memory.
    pub ropes: &'a Tables,
}

/// The merged attention of a node that a kernel computes.
pub fn gpu_attention(node: &Node) -> Option<&Attention> {
    match &node.op {
        Op::Attention(op) if calls::has_attention(op) => Some(op),
        _ => None,
    }
}

/// The nodes of a step: attention is merged wherever the GPU computes it, which also stores what is wanted of
/// its inside; where the host must, it stays in three nodes if the inside is wanted.
///
/// Where values are fed, scores and probabilities that are wanted are fed too: no kernel reads those.
pub fn nodes(graph: &Graph, wants: impl Fn(Checkpoint) -> bool, fed: bool) -> Vec<Node> {
    let merged = graph.fused(|_| false);
    let on_gpu = |inside: Checkpoint| {
        merged.node(inside.sibling(Kind::AttnCtx)).is_some_and(|node| gpu_attention(node).is_some())
    };
    graph.fused(|checkpoint| wants(checkpoint) && (fed || !on_gpu(checkpoint))).nodes
}

impl Ability<'_> {
    fn width(&self, checkpoint: Checkpoint) -> usize {
        self.graph.dims.width(checkpoint.kind(), 0)
    }

    /// Whether there is a kernel for a node. Injected mistakes can wire nodes in ways that do not fit: the host
    /// says so.
    fn computes(&self, node: &Node) -> bool {
        let width = self.width(node.checkpoint);
        let inputs: Vec<usize> = node.inputs.iter().map(|input| self.width(*input)).collect();
        if node.checkpoint.kind().is_optional() {
            return false;
        }
        match &node.op {
            Op::Embed { table } => self.weights.matrix(table).is_some_and(|table| table.columns == width),
            Op::Norm(norm) => {
                let has_weight = self.weights.vector(&norm.weight, norm.width).is_some();
                let known = calls::norm_style(norm.style).is_some();
                has_weight && known && inputs == [width] && width.is_multiple_of(norm.width)
            }
            Op::Linear { weight, columns: None } => self
                .weights
                .matrix(weight)
                .is_some_and(|weight| weight.outputs == width && inputs == [weight.columns]),
            Op::Bias { bias, .. } => {
                let has_bias = bias.as_ref().is_none_or(|bias| self.weights.vector(bias, width).is_some());
                has_bias && inputs == [width]
            }
            Op::Rope(rope) => self.ropes.get(rope).is_some() && inputs == [width],
            Op::Attention(op) => {
                let (wide, narrow) = (op.heads * op.head_width, op.kv_heads * op.head_width);
                gpu_attention(node).is_some() && width == wide && inputs == [wide, narrow, narrow]
            }
            Op::Add { .. } => inputs == [width, width],
            Op::Glu(glu) => calls::glu_form(*glu).is_some() && inputs == [width, width],
            Op::Linear { .. } | Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => false,
        }
    }

    /// One launch for each node, in their order: each can be fed what it reads.
    pub fn apart(&self, nodes: &[Node]) -> Vec<Task> {
        let task = |(index, node): (usize, &Node)| match &node.op {
            _ if !self.computes(node) => Task::Host(index),
            Op::Linear { .. } => {
                let part = LinearNodes { product: index, ..LinearNodes::default() };
                Task::Linear(LinearTask { parts: vec![part], ..LinearTask::default() })
            }
            Op::Rope(_) => Task::Rope(vec![index]),
            _ => Task::Single(index),
        };
        nodes.iter().enumerate().map(task).collect()
    }

    /// Puts the nodes of a step of `rows` token rows into launches.
    pub fn schedule(&self, nodes: &[Node], rows: usize, storage: Storage, cores: TensorCores) -> Vec<Task> {
        let kernel = LinearKernel::for_step(rows, storage, false, cores);
        let few = matches!(kernel, LinearKernel::Few | LinearKernel::One);
        let (taken, computed) = (vec![false; nodes.len()], self.given.into_iter().collect());
        let (one, pairs) = (kernel == LinearKernel::One, few || kernel == LinearKernel::Warpgroup);
        let mut schedule = Schedule { ability: self, nodes, taken, computed, few, one, pairs };
        let mut tasks = Vec::new();
        for index in 0..nodes.len() {
            if !schedule.taken[index] {
                let task = schedule.task(index);
                for node in task.nodes() {
                    schedule.taken[node] = true;
                    schedule.computed.insert(nodes[node].checkpoint);
                }
                tasks.push(task);
            }
        }
        tasks
    }
}

struct Schedule<'a> {
    ability: &'a Ability<'a>,
    nodes: &'a [Node],
    taken: Vec<bool>,
    computed: HashSet<Checkpoint>,
    /// Whether products are computed by the kernel for few rows, which also computes from pairs of them.
    few: bool,
    /// Whether gate and up are multiplied at once: by that kernel, and that of warpgroups.
    pairs: bool,
    /// Whether it is the kernel for a single one, which norms its input, and multiplies with weights of two formats.
    one: bool,
}

impl Schedule<'_> {
    fn task(&self, index: usize) -> Task {
        let node = &self.nodes[index];
        if !self.ability.computes(node) {
            return Task::Host(index);
        }
        match &node.op {
            Op::Linear { .. } => Task::Linear(self.linear(index)),
            Op::Norm(norm) if self.one && self.is_plain(norm) && self.feeds_next(index) => {
                Task::Linear(LinearTask { norm: Some(index), ..self.linear(index + 1) })
            }
            Op::Rope(rope) => {
                let alike = |&i: &usize| {
                    matches!(&self.nodes[i].op, Op::Rope(other) if other == rope)
                        && self.nodes[i].inputs.iter().all(|input| self.computed.contains(input))
                        && self.ability.computes(&self.nodes[i])
                };
                Task::Rope([index].into_iter().chain(self.later(index).find(alike)).collect())
            }
            _ => Task::Single(index),
        }
    }

    /// The nodes after one that are not taken, as far as one layer goes.
    fn later(&self, index: usize) -> impl Iterator<Item = usize> {
        (index + 1..self.nodes.len().min(index + WINDOW)).filter(|&i| !self.taken[i])
    }

    /// Whether the kernel for few rows computes this norm.
    fn is_plain(&self, norm: &Norm) -> bool {
        norm.style == NormStyle::RMS
            && norm.width == self.ability.graph.dims.model
            && norm.width <= calls::NORM_COLUMNS_MAX
    }

    /// Whether the next node is a product of this one's value.
    fn feeds_next(&self, index: usize) -> bool {
        self.nodes.get(index + 1).is_some_and(|next| {
            matches!(next.op, Op::Linear { .. })
                && next.inputs == [self.nodes[index].checkpoint]
                && !self.taken[index + 1]
                && self.ability.computes(next)
        })
    }

    /// The product `index` and those like it, with what follows them.
    fn linear(&self, index: usize) -> LinearTask {
        let matrix = |i: usize| match &self.nodes[i].op {
            Op::Linear { weight, .. } => self.ability.weights.matrix(weight),
            _ => None,
        };
        let own = matrix(index);
        let alike = |&i: &usize| {
            let fits = |(own, other): (Weight, Weight)| {
                own.dtype == other.dtype || (self.one && calls::together(own, other))
            };
            own.zip(matrix(i)).is_some_and(fits)
                && self.nodes[i].inputs == self.nodes[index].inputs
                && self.ability.computes(&self.nodes[i])
        };
        let mut task = LinearTask::default();
        let mut turn = None;
        for product in [index].into_iter().chain(self.later(index).filter(alike)).take(PARTS_MAX) {
            let sum = self.follower(product);
            let rope =
                self.turned(sum.unwrap_or(product)).filter(|(_, rope)| *turn.get_or_insert(*rope) == *rope);
            task.parts.push(LinearNodes { product, sum, rope: rope.map(|(index, _)| index) });
        }
        let format = |weight: Option<Weight>| weight.map(|weight| weight.dtype);
        if task.parts.iter().all(|part| format(matrix(part.product)) == format(own)) {
            task.act = self.act(&task.parts);
        }
        task
    }

    /// The rotary embedding right behind a product or its bias, where one launch computes both.
    fn turned(&self, index: usize) -> Option<(usize, &Rope)> {
        let next = self.nodes.get(index + 1).filter(|next| self.few && self.ability.computes(next))?;
        let Op::Rope(rope) = &next.op else { return None };
        let whole = rope.dims == rope.head_width && rope.head_width.is_multiple_of(calls::PAIRS_OUTPUTS);
        let plain = rope.times == 1 && rope.position.first.from == Anchor::Start;
        let is_sum = matches!(self.nodes[index].op, Op::Add { .. });
        let behind = next.inputs == [self.nodes[index].checkpoint] && !is_sum;
        (whole && plain && behind).then_some((index + 1, rope))
    }

    /// The gated activation of two products that have nothing else behind them.
    fn act(&self, parts: &[LinearNodes]) -> Option<usize> {
        let [gate, up] = parts else { return None };
        let inputs = [gate, up].map(|part| self.nodes[part.product].checkpoint);
        let alone = [gate, up].iter().all(|part| part.sum.is_none() && part.rope.is_none());
        let is_act = |&i: &usize| {
            let node = &self.nodes[i];
            node.op == Op::Glu(Glu::SWIGLU) && node.inputs == inputs && self.ability.computes(node)
        };
        self.later(up.product).find(is_act).filter(|_| self.pairs && alone)
    }

    /// The bias or residual sum right behind a product.
    fn follower(&self, index: usize) -> Option<usize> {
        let next = self.nodes.get(index + 1).filter(|next| self.ability.computes(next))?;
        if next.inputs.first() != Some(&self.nodes[index].checkpoint) {
            return None;
        }
        let follows = match &next.op {
            Op::Bias { bias, .. } => bias.is_some(),
            Op::Add { .. } => self.computed.contains(&next.inputs[1]),
            _ => false,
        };
        follows.then_some(index + 1)
    }
}

/// The values of a step in the order of the graph, with the tasks that write and last read them.
pub fn values(
    graph: &Graph,
    nodes: &[Node],
    tasks: &[Task],
    key: &Key,
    wants: impl Fn(Checkpoint) -> bool,
) -> Vec<Value> {
    let mut written = vec![0; nodes.len()];
    let mut last_reader: HashMap<Checkpoint, usize> = HashMap::new();
    for (task, list) in tasks.iter().map(Task::nodes).enumerate() {
        for index in list {
            written[index] = task;
            for input in &nodes[index].inputs {
                last_reader.insert(*input, task);
            }
        }
    }
    let cached = key.cached.unwrap_or(0);
    let mut values = Vec::new();
    for (node, &task) in nodes.iter().zip(&written) {
        let mut push = |checkpoint: Checkpoint, wanted: bool| {
            // The logits of the last row alone, unless all are wanted.
            let rows = if checkpoint.kind() == Kind::Logits && !wanted { 1 } else { key.rows };
            let len = rows * graph.dims.width(checkpoint.kind(), cached);
            let life = (task, last_reader.get(&checkpoint).copied().unwrap_or(task));
            values.push(Value { checkpoint, len, wanted, life });
        };
        if gpu_attention(node).is_some() {
            let [scores, probs] =
                [Kind::AttnScores, Kind::AttnProbs].map(|kind| node.checkpoint.sibling(kind));
            // Probabilities are computed from stored scores.
            if wants(scores) || wants(probs) {
                push(scores, wants(scores));
            }
            if wants(probs) {
                push(probs, true);
            }
        } else if node.checkpoint.kind().is_optional() {
            continue; // computed, kept and shown by the host
        }
        push(node.checkpoint, wants(node.checkpoint));
    }
    values
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
