//! The order in which the nodes of a step are computed: one by one, or several in one launch where they read the
//! same values, or where one follows the other.
//!
//! Whether a checkpoint is wanted plays no part here: traced and untraced steps launch the same kernels. Only where
//! a probe feeds values is every node launched by itself.

use std::collections::{HashMap, HashSet};

use super::calls::{self, PARTS_MAX};
use super::layout::Value;
use super::plan::Key;
use super::ropes::Tables;
use super::weights::Weights;
use crate::checkpoint::{Checkpoint, Kind};
use crate::model::graph::{Attention, Graph, Node, Op};

/// Nodes that are looked at for more of the same: a layer has 25 at most.
const WINDOW: usize = 25;

/// What is launched at once; numbers are indices of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Products of the same input, each with its bias or residual sum.
    Linear(Vec<(usize, Option<usize>)>),
    /// Rotations of the same kind.
    Rope(Vec<usize>),
    /// A kernel of its own.
    Single(usize),
    /// No kernel: the host computes it.
    Host(usize),
}

impl Task {
    /// All its nodes.
    pub fn nodes(&self) -> Vec<usize> {
        match self {
            Task::Linear(parts) => {
                parts.iter().flat_map(|(node, follower)| [Some(*node), *follower]).flatten().collect()
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
    /// Weights in device memory.
    pub weights: &'a Weights,
    /// Angles in device memory.
    pub ropes: &'a Tables,
}

/// The merged attention of a node that a kernel computes.
pub fn gpu_attention(node: &Node) -> Option<&Attention> {
    match &node.op {
        Op::Attention(op) if node.edits.is_empty() && calls::has_attention(op) => Some(op),
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

    /// Whether there is a kernel for a node. Planted mistakes can wire nodes in ways that do not fit: the host
    /// says so.
    fn computes(&self, node: &Node) -> bool {
        let width = self.width(node.checkpoint);
        let inputs: Vec<usize> = node.inputs.iter().map(|input| self.width(*input)).collect();
        if !node.edits.is_empty() || node.checkpoint.kind().is_optional() {
            return false;
        }
        match &node.op {
            Op::Embed { table } => self.weights.matrix(table).is_some_and(|table| table.columns == width),
            Op::Norm(norm) => {
                let has_weight = self.weights.vector(&norm.weight, norm.width).is_some();
                has_weight && inputs == [width] && width.is_multiple_of(norm.width)
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
            Op::Add { .. } | Op::Glu(_) => inputs == [width, width],
            Op::Linear { .. } | Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => false,
        }
    }

    /// One launch for each node, in their order: each can be fed what it reads.
    pub fn apart(&self, nodes: &[Node]) -> Vec<Task> {
        let task = |(index, node): (usize, &Node)| match &node.op {
            _ if !self.computes(node) => Task::Host(index),
            Op::Linear { .. } => Task::Linear(vec![(index, None)]),
            Op::Rope(_) => Task::Rope(vec![index]),
            _ => Task::Single(index),
        };
        nodes.iter().enumerate().map(task).collect()
    }

    /// Puts the nodes into launches.
    pub fn schedule(&self, nodes: &[Node]) -> Vec<Task> {
        let mut schedule =
            Schedule { ability: self, nodes, taken: vec![false; nodes.len()], computed: HashSet::new() };
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
}

impl Schedule<'_> {
    fn task(&self, index: usize) -> Task {
        let node = &self.nodes[index];
        if !self.ability.computes(node) {
            return Task::Host(index);
        }
        let later = || (index + 1..self.nodes.len().min(index + WINDOW)).filter(|&i| !self.taken[i]);
        match &node.op {
            Op::Linear { weight, .. } => {
                let dtype = self.ability.weights.matrix(weight).map(|weight| weight.dtype);
                let alike = |&i: &usize| match &self.nodes[i].op {
                    Op::Linear { weight, .. } => {
                        let matrix = self.ability.weights.matrix(weight);
                        self.nodes[i].inputs == node.inputs
                            && matrix.map(|weight| weight.dtype) == dtype
                            && self.ability.computes(&self.nodes[i])
                    }
                    _ => false,
                };
                let parts = [index].into_iter().chain(later().filter(alike)).take(PARTS_MAX);
                Task::Linear(parts.map(|i| (i, self.follower(i))).collect())
            }
            Op::Rope(rope) => {
                let alike = |&i: &usize| {
                    matches!(&self.nodes[i].op, Op::Rope(other) if other == rope)
                        && self.nodes[i].inputs.iter().all(|input| self.computed.contains(input))
                        && self.ability.computes(&self.nodes[i])
                };
                Task::Rope([index].into_iter().chain(later().find(alike)).collect())
            }
            _ => Task::Single(index),
        }
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
