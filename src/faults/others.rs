//! What a node computed with a mistake reads besides its own sources: other tensors of its graph.

use parity_graph::{Graph, Id};

use crate::engine::op_by_op::Number;
use crate::gguf::{Gguf, TensorRef};

/// What a rewrite reads besides the node's own sources.
pub enum Other<'a, S> {
    /// A weight of the model file.
    Weight(TensorRef<'a>),
    /// Values, in this shape.
    Values(Vec<S>, [usize; 4]),
}

impl<S: Number> Other<'_, S> {
    /// Its values, decoded.
    pub fn values(self) -> Vec<S> {
        match self {
            Other::Values(values, _) => values,
            Other::Weight(weight) => weight.decode(),
        }
    }
}

/// Finds what a rewrite reads besides the node's own sources.
pub type Others<'f, 'a, S> = &'f dyn Fn(Id) -> Option<Other<'a, S>>;

/// A tensor of the same graph that a node does not read; `values` has those of what is no weight.
pub fn other<'a, S>(
    graph: &Graph,
    gguf: &'a Gguf,
    id: Id,
    values: &dyn Fn(Id) -> Option<Vec<S>>,
) -> Option<Other<'a, S>> {
    let origin = graph.origin(id);
    if let Some(weight) = gguf.tensor(&graph.get(origin).name) {
        return (origin == id).then_some(Other::Weight(weight));
    }
    let same = graph.get(origin).elements() == graph.get(id).elements();
    values(origin).filter(|_| same).map(|values| Other::Values(values, graph.get(id).shape()))
}
