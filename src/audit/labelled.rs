//! A graph beside a dump: under which id each node is recorded, and how its rows lie there.

use std::collections::HashMap;

use parity_dump::checkpoint::Kind;
use parity_graph::{Graph, Id, Leaf, Op, axis, label};

use super::{Arrangement, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Node, Program};
use crate::error::Result;
use crate::numerics::Storage;

/// By node: the nodes that it reads, through whatever only moves values, and through memory that others write.
pub type Reads = HashMap<Checkpoint, Vec<Checkpoint>>;

/// What the nodes of several graphs read.
pub fn reads(graphs: &[(usize, &Labelled)]) -> Reads {
    let mut out = Reads::new();
    for (i, (_, labelled)) in graphs.iter().enumerate() {
        if !graphs[..i].iter().any(|(_, known)| std::ptr::eq(*known, *labelled)) {
            labelled.note_reads(&mut out);
        }
    }
    out
}

/// A graph with the names of its nodes in a dump.
pub struct Labelled {
    /// Ready to be executed.
    pub program: Program,
    /// By tensor: under which id it is recorded.
    pub labels: Vec<Option<Checkpoint>>,
    /// By tensor: along which axis its token rows lie.
    pub axes: Vec<Option<usize>>,
    /// By tensor: under which name it is recorded, of what no node computes.
    leaves: Vec<Option<String>>,
}

impl Labelled {
    /// Takes a graph and finds its labels and its token axes.
    ///
    /// # Errors
    /// A graph that does not fit together.
    pub fn new(graph: Graph) -> Result<Labelled> {
        let (labels, axes, leaves) =
            (label::labels(&graph), axis::token_axes(&graph), label::leaf_names(&graph));
        Labelled::of(graph, labels, axes, leaves)
    }

    pub(super) fn of(
        graph: Graph,
        labels: Vec<Option<Checkpoint>>,
        axes: Vec<Option<usize>>,
        leaves: Vec<Option<String>>,
    ) -> Result<Labelled> {
        let named = graph.tensors.iter().zip(&labels);
        let names =
            named.map(|(tensor, label)| label.map_or_else(|| tensor.name.clone(), |id| id.to_string()));
        let names = names.collect();
        Ok(Labelled { program: Program::new(graph, names)?, labels, axes, leaves })
    }

    /// The same names in a graph in which some nodes became several; `place` says where each tensor stands in that.
    ///
    /// # Errors
    /// A graph that does not fit together.
    pub(super) fn moved(&self, graph: Graph, place: &[Id]) -> Result<Labelled> {
        let all = graph.tensors.len();
        let (mut labels, mut leaves) = (vec![None; all], vec![None; all]);
        for (id, &at) in place.iter().enumerate() {
            (labels[at], leaves[at]) = (self.labels[id], self.leaves.get(id).cloned().flatten());
        }
        let axes = axis::token_axes(&graph);
        Labelled::of(graph, labels, axes, leaves)
    }

    /// Takes what is multiplied by the output's weight for the logits, without its bias.
    #[must_use]
    pub fn with_logits_before_bias(mut self) -> Labelled {
        let graph = &self.program.graph;
        let logits = Checkpoint::global(Kind::Logits);
        let sum = self.labels.iter().position(|label| *label == Some(logits));
        let product = sum.filter(|&sum| graph.get(sum).op == Op::Add).and_then(|sum| graph.src(sum, 0));
        if let (Some(sum), Some(product)) = (sum, product.filter(|&id| graph.get(id).op == Op::MulMat)) {
            self.labels[sum] = None;
            self.labels[product] = Some(logits);
        }
        self
    }

    /// What a recording holds of a leaf.
    pub fn input(&self, steps: &dyn Steps, step: usize, leaf: Id) -> Option<Vec<f64>> {
        steps.leaf(step, self.leaves.get(leaf)?.as_ref()?)
    }

    /// What a recording holds of any tensor: a node's values, NaN where they were cut, or a leaf's.
    pub fn values(&self, steps: &dyn Steps, step: usize, id: Id) -> Option<Vec<f64>> {
        let Some(label) = self.labels.get(id).copied().flatten() else { return self.input(steps, step, id) };
        let recorded = steps.tensor(step, label)?;
        Some(self.arrange(id, label, &recorded)?.of_node(&recorded.values, |_| f64::NAN))
    }

    /// The nodes that are executed and have an id, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (Id, Checkpoint)> + '_ {
        self.program.executed().filter_map(|id| Some((id, *self.labels.get(id)?.as_ref()?)))
    }

    /// The nodes that are products with weights, and what they are called.
    pub fn products(&self) -> impl Iterator<Item = (Id, Checkpoint)> + '_ {
        let is_product = |id: Id| self.program.graph.get(id).op == Op::MulMat && self.multiplies_weight(id);
        self.nodes().filter(move |(id, _)| is_product(*id))
    }

    /// Whether a node multiplies with a weight, which may be that of an expert.
    pub fn multiplies_weight(&self, id: Id) -> bool {
        let graph = &self.program.graph;
        let is_weight = |weight| graph.leaf(weight) == Some(Leaf::Weight);
        matches!(graph.get(id).op, Op::MulMat | Op::MulMatId) && graph.src(id, 0).is_some_and(is_weight)
    }

    /// The ids that a node reads, through views and whatever else only moves values.
    pub fn inputs(&self, checkpoint: Checkpoint) -> Vec<Checkpoint> {
        let Some((id, _)) = self.nodes().find(|(_, known)| *known == checkpoint) else { return Vec::new() };
        let graph = &self.program.graph;
        let (mut out, mut seen, mut open) = (Vec::new(), vec![false; graph.tensors.len()], vec![id]);
        while let Some(user) = open.pop() {
            for source in graph.sources(user).filter(|&source| source != user) {
                match self.labels.get(source).copied().flatten() {
                    Some(label) if !out.contains(&label) => out.push(label),
                    None if !std::mem::replace(&mut seen[source], true) => open.push(source),
                    _ => {}
                }
            }
        }
        out
    }

    /// Adds what each node reads.
    fn note_reads(&self, out: &mut Reads) {
        let graph = &self.program.graph;
        // By tensor: the nodes whose values it holds. By memory: those whose values nodes wrote into it so far.
        let mut holds: Vec<Vec<Checkpoint>> = vec![Vec::new(); graph.tensors.len()];
        for id in graph.computed() {
            let mut read: Vec<Checkpoint> = Vec::new();
            for source in graph.sources(id).filter(|&source| source != id) {
                let written = holds[source].iter().chain(&holds[graph.root(source)]);
                for from in written {
                    if !read.contains(from) {
                        read.push(*from);
                    }
                }
            }
            let own = match self.labels.get(id).copied().flatten() {
                Some(label) => {
                    let known = out.entry(label).or_default();
                    for from in read {
                        if from != label && !known.contains(&from) {
                            known.push(from);
                        }
                    }
                    vec![label]
                }
                None => read,
            };
            let root = graph.root(id);
            if root != id && !graph.get(id).op.is_view() {
                let more: Vec<Checkpoint> =
                    own.iter().filter(|from| !holds[root].contains(from)).copied().collect();
                holds[root].extend(more);
            }
            holds[id] = own;
        }
    }

    /// Elements of a token's row of a node, where they lie side by side in it.
    pub(super) fn row_of(&self, id: Id) -> Option<usize> {
        let (axis, shape) = (self.axes.get(id).copied().flatten()?, self.program.graph.get(id).shape());
        (shape[..axis].iter().product::<usize>() == 1).then(|| shape[axis + 1..].iter().product())
    }

    /// What a norm is kept in that was not recorded, of values that were, where a node multiplies it with a weight: the narrow type
    /// that each node is `kept` in.
    pub(super) fn norm_before(&self, node: &Node<'_>, kept: &[Storage]) -> Option<Storage> {
        let graph = &self.program.graph;
        let (id, carried) = graph.src(node.id, 0).zip(node.carried.first()?.as_ref())?;
        let is_of_norm = graph.get(node.id).op == Op::Mul && graph.get(id).op == Op::RmsNorm;
        (is_of_norm && carried.through == [id] && kept[id] != Storage::F32).then_some(kept[id])
    }

    /// Arranges what was recorded of a node.
    pub fn arrange(&self, id: Id, checkpoint: Checkpoint, recorded: &Tensor) -> Option<Arrangement> {
        let shape = self.program.graph.get(id).shape();
        let axis = self.axes.get(id).copied().flatten();
        // Attention in one node has its heads behind its rows.
        let plain = self.program.graph.get(id).op == Op::MulMat && checkpoint.kind() == Kind::AttnCtx;
        let streams = plain && axis.is_none() && shape[0] > 1;
        if streams && let Some(arrangement) = Arrangement::of_streams(shape, recorded) {
            return Some(arrangement);
        }
        let whole = Arrangement::new(shape, axis, checkpoint.kind().is_optional(), recorded);
        whole.or_else(|| {
            let graph = &self.program.graph;
            Arrangement::of_outputs(shape, axis::outputs_of_scan(graph, id)?, recorded)
        })
    }
}
