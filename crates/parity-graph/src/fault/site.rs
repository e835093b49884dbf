//! A node, and what the families look at.

use std::collections::HashMap;
use std::sync::OnceLock;

use parity_dump::{Checkpoint, Kind};

use super::Made;
use crate::axis::token_axes;
use crate::graph::{Graph, Id, Tensor};
use crate::known::is_weight;
use crate::label::labels;
use crate::op::Op;
use crate::params::field;
use crate::rewrite::{Change, Edit};
use crate::weights::{Name, layer_weight};

/// A graph, with what is found in it at most once.
pub struct Scene<'g> {
    graph: &'g Graph,
    labels: OnceLock<Vec<Option<Checkpoint>>>,
    axes: OnceLock<Vec<Option<usize>>>,
    /// What a user calls nodes and leaves.
    names: OnceLock<HashMap<String, Id>>,
}

impl<'g> Scene<'g> {
    /// Of a graph.
    pub fn new(graph: &'g Graph) -> Self {
        Scene { graph, labels: OnceLock::new(), axes: OnceLock::new(), names: OnceLock::new() }
    }

    /// Elements of one token's row of a node, where the rows lie side by side.
    pub fn row(&self, id: Id) -> Option<usize> {
        self.site(id)?.row()
    }

    /// Elements of a head in the rows of a node, where what rotates them says so.
    pub fn head_width(&self, id: Id) -> Option<usize> {
        let mut site = self.site(id)?;
        for _ in 0..4 {
            match site.op() {
                Op::Rope => return Some(site.tensor().ne[0]),
                Op::FlashAttn => return None,
                _ => site = site.readers().next()?,
            }
        }
        None
    }

    /// A node that is computed.
    pub(crate) fn site<'s>(&'s self, id: Id) -> Option<Site<'s>> {
        let node = !self.graph.is_leaf(id) && self.graph.get(id).computed;
        node.then_some(Site { graph: self.graph, scene: self, id })
    }
}

/// A node and what the families look at.
#[derive(Clone, Copy)]
pub(crate) struct Site<'s> {
    pub graph: &'s Graph,
    scene: &'s Scene<'s>,
    pub id: Id,
}

impl<'s> Site<'s> {
    /// Another node of the same graph.
    pub fn other(self, id: Id) -> Site<'s> {
        Site { id, ..self }
    }

    pub fn tensor(self) -> &'s Tensor {
        self.graph.get(self.id)
    }

    pub fn op(self) -> &'s Op {
        &self.tensor().op
    }

    /// The tensor in a slot.
    pub fn src(self, slot: usize) -> Option<&'s Tensor> {
        self.graph.src(self.id, slot).map(|id| self.graph.get(id))
    }

    /// The slot whose tensor is a weight, seen through views and copies, with the weight's name.
    pub fn weight(self) -> Option<(usize, Id)> {
        (0..self.tensor().srcs.len()).find_map(|slot| {
            let origin = self.graph.origin(self.graph.src(self.id, slot)?);
            let leaf = self.graph.is_leaf(origin) && is_weight(&self.graph.get(origin).name);
            leaf.then_some((slot, origin))
        })
    }

    /// The name of its weight taken apart.
    pub fn weight_name(self) -> Option<Name<'s>> {
        self.weight().map(|(_, weight)| Name::of(&self.graph.get(weight).name))
    }

    /// Whether it multiplies with a weight of one of these parts.
    pub fn is_product_with(self, parts: &[&str]) -> bool {
        *self.op() == Op::MulMat && self.weight_name().is_some_and(|name| parts.contains(&name.part))
    }

    /// Where the values of a slot come from: views and copies are walked through.
    pub fn origin(self, slot: usize) -> Option<Id> {
        self.graph.src(self.id, slot).map(|id| self.graph.origin(id))
    }

    /// The op that computed the values of a slot.
    pub fn origin_op(self, slot: usize) -> Option<&'s Op> {
        self.origin(slot).map(|id| &self.graph.get(id).op)
    }

    /// The nodes that read its values, through views and copies too.
    pub fn readers(self) -> impl Iterator<Item = Site<'s>> {
        let reads = move |id: &Id| self.graph.sources(*id).any(|src| self.graph.origin(src) == self.id);
        self.graph
            .computed()
            .filter(move |&id| id > self.id && !self.graph.get(id).op.is_movement())
            .filter(reads)
            .map(move |id| self.other(id))
    }

    /// A float parameter by its name.
    pub fn float(self, name: &str) -> f32 {
        field(self.op(), name).map_or(0.0, |field| self.tensor().params.float(field.word))
    }

    /// An integer parameter by its name.
    pub fn int(self, name: &str) -> i32 {
        field(self.op(), name).map_or(0, |field| self.tensor().params.int(field.word))
    }

    /// Another value of a float parameter.
    pub fn with_float(self, name: &str, value: f32) -> Change {
        Change::Words(self.words(name, value.to_bits()))
    }

    /// Another value of an integer parameter.
    pub fn with_int(self, name: &str, value: i32) -> Change {
        Change::Words(self.words(name, value as u32))
    }

    pub fn words(self, name: &str, bits: u32) -> Vec<(usize, u32)> {
        field(self.op(), name).map(|field| (field.word, bits)).into_iter().collect()
    }

    /// Whether the llama.cpp name of the node or of its first source speaks of this.
    pub fn is_called(self, part: &str) -> bool {
        self.tensor().name.contains(part)
    }

    /// What a tensor is called in a dump, or else in the graph.
    pub fn name_of(self, id: Id) -> String {
        let origin = self.graph.origin(id);
        let label = self.scene.labels.get_or_init(|| labels(self.graph))[origin];
        label.map_or_else(|| self.graph.get(origin).name.clone(), |label| label.to_string())
    }

    /// What it is in the vocabulary of checkpoints.
    pub fn kind(self) -> Option<Kind> {
        self.label().map(|label| label.kind())
    }

    pub fn label(self) -> Option<Checkpoint> {
        self.scene.labels.get_or_init(|| labels(self.graph))[self.id]
    }

    /// The node, or the weight, that a user calls so.
    pub fn called(self, name: &str) -> Option<Id> {
        let names = self.scene.names.get_or_init(|| {
            let labels = self.scene.labels.get_or_init(|| labels(self.graph));
            let nodes =
                labels.iter().enumerate().filter_map(|(id, label)| Some((label.as_ref()?.to_string(), id)));
            let leaves = self.graph.nodes..self.graph.tensors.len();
            let leaves = leaves.map(|id| (self.graph.get(id).name.clone(), id));
            // The first of a name is meant, of nodes before leaves.
            let mut all: Vec<(String, Id)> = nodes.chain(leaves).collect();
            all.reverse();
            all.into_iter().collect()
        });
        names.get(name).copied()
    }

    /// Elements of one token's row, where the rows lie side by side.
    pub fn row(self) -> Option<usize> {
        let axes = self.scene.axes.get_or_init(|| token_axes(self.graph));
        let (ne, axis) = (self.tensor().ne, 3 - axes[self.id]?);
        let outer: usize = ne[axis + 1..].iter().product();
        (outer == 1 && axis > 0).then(|| ne[..axis].iter().product())
    }

    /// Number of token rows.
    pub fn rows(self) -> usize {
        self.row().map_or(0, |row| self.tensor().elements() / row.max(1))
    }
}

/// A source edited before it is read.
pub(super) fn edit(slot: usize, edit: Edit) -> Change {
    Change::SourceEdit { slot, edit }
}

/// A change with its sentence.
pub(super) fn made(change: Change, text: impl Into<String>) -> Made {
    Some((change, text.into()))
}

/// Other layers' weights of the same kind, type and shape, with the layer: `blk.1.attn_q.weight` for
/// `blk.0.attn_q.weight`.
pub(super) fn weights_of_other_layers(graph: &Graph, weight: Id) -> impl Iterator<Item = (u32, Id)> + '_ {
    let own = graph.get(weight);
    let place = layer_weight(&own.name);
    (graph.nodes..graph.tensors.len()).filter_map(move |id| {
        let other = graph.get(id);
        let ((layer, rest), (number, name)) = place.zip(layer_weight(&other.name))?;
        let same = number != layer && name == rest && other.ne == own.ne && other.dtype == own.dtype;
        same.then_some((number, id))
    })
}
