//! Mistakes that people make, as rewrites of a node: what is injected into a graph, and what is tried on a node
//! whose output is wrong.
//!
//! A fault is found from the graph alone: the node's op, its parameters, where its sources come from. The families
//! are those of the names before the dot.

mod attention;
mod linear;
mod moe;
mod norm;
mod pointwise;
mod rope;
mod state;

pub use linear::other_layers;

use crate::graph::{Graph, Id, Tensor};
use crate::known::is_weight;
use crate::op::Op;
use crate::params::field;
use crate::rewrite::{Change, Edit, Rewrite};
use crate::weights::layer_weight;

/// One mistake at one node.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Its name in the catalogue, e.g. `rope.base`.
    pub name: &'static str,
    /// What is wrong, in a sentence: `RoPE base is 10000, the graph says 1000000`.
    pub text: String,
    /// The node computed wrongly.
    pub rewrite: Rewrite,
}

/// A node and what the families look at.
#[derive(Clone, Copy)]
pub(crate) struct Site<'g> {
    pub graph: &'g Graph,
    pub id: Id,
}

/// The mistakes that can be made at a node, the likeliest first.
pub fn at(graph: &Graph, id: Id) -> Vec<Fault> {
    let site = Site { graph, id };
    if graph.is_leaf(id) || !site.tensor().computed {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for family in [
        norm::faults,
        linear::faults,
        rope::faults,
        attention::faults,
        moe::faults,
        pointwise::faults,
        state::faults,
    ] {
        family(site, &mut faults);
    }
    faults
}

impl<'g> Site<'g> {
    pub fn tensor(self) -> &'g Tensor {
        self.graph.get(self.id)
    }

    pub fn op(self) -> &'g Op {
        &self.tensor().op
    }

    /// The tensor in a slot.
    pub fn src(self, slot: usize) -> Option<&'g Tensor> {
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

    /// Where the values of a slot come from: views and copies are walked through.
    pub fn origin(self, slot: usize) -> Option<Id> {
        self.graph.src(self.id, slot).map(|id| self.graph.origin(id))
    }

    /// The op that computed the values of a slot.
    pub fn origin_op(self, slot: usize) -> Option<&'g Op> {
        self.origin(slot).map(|id| &self.graph.get(id).op)
    }

    pub fn fault(self, name: &'static str, text: impl Into<String>, change: Change) -> Fault {
        Fault { name, text: text.into(), rewrite: Rewrite { node: self.id, change } }
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
        let word = field(self.op(), name).map_or(0, |field| field.word);
        Change::Words(vec![(word, value.to_bits())])
    }

    /// Another value of an integer parameter.
    pub fn with_int(self, name: &str, value: i32) -> Change {
        let word = field(self.op(), name).map_or(0, |field| field.word);
        Change::Words(vec![(word, value as u32)])
    }

    /// A source edited before it is read.
    pub fn edit(self, slot: usize, edit: Edit) -> Change {
        Change::SourceEdit { slot, edit }
    }

    /// Whether the llama.cpp name of the node or of its first source speaks of this.
    pub fn is_called(self, part: &str) -> bool {
        self.tensor().name.contains(part)
    }
}

/// Other layers' weights of the same kind, type and shape: `blk.1.attn_q.weight` for `blk.0.attn_q.weight`.
pub(crate) fn weights_of_other_layers(graph: &Graph, weight: Id) -> impl Iterator<Item = Id> + '_ {
    let own = graph.get(weight);
    let place = layer_weight(&own.name);
    let same = move |other: &Tensor| {
        let there = place.zip(layer_weight(&other.name));
        there.is_some_and(|((layer, rest), (number, name))| number != layer && name == rest)
            && other.ne == own.ne
            && other.dtype == own.dtype
    };
    (graph.nodes..graph.tensors.len()).filter(move |&id| same(graph.get(id)))
}
