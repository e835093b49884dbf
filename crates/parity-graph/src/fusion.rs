//! Ops that nobody here knows, taken for several known ones at once: other builds of ggml fuse what llama.cpp computes one
//! by one. Which of these readings gives what was recorded is for others to find out.

use crate::graph::contiguous;
use crate::params::Params;
use crate::{Graph, Id, Op, Tensor, View};

/// What a part of a fused op reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// The fused op's source in a slot.
    Slot(usize),
    /// The part before.
    Before,
}

/// One of the ops that a fused op is made of.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    op: Op,
    params: Params,
    sources: Vec<From>,
    ne: [usize; 4],
}

/// A way to read fused ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// A norm without weight and its multiplication: y = norm(s0)·s1, with the epsilon in the first word.
    Norm(Norm),
    /// A gated activation of two results: y = act(s0)·s1, or with both exchanged.
    Gate(Gate, bool),
    /// The sum of all sources.
    Sum,
}

/// Norms without weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMS norm.
    Rms,
    /// Layer norm.
    Layer,
}

/// Gated activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// SiLU.
    Swiglu,
    /// GELU by tanh.
    Geglu,
    /// GELU with the error function.
    GegluErf,
    /// ReLU.
    Reglu,
}

/// All of them, those of one shape of sources behind one another.
pub const READINGS: [Reading; 11] = [
    Reading::Norm(Norm::Rms),
    Reading::Norm(Norm::Layer),
    Reading::Gate(Gate::Swiglu, false),
    Reading::Gate(Gate::Swiglu, true),
    Reading::Gate(Gate::Geglu, false),
    Reading::Gate(Gate::Geglu, true),
    Reading::Gate(Gate::GegluErf, false),
    Reading::Gate(Gate::GegluErf, true),
    Reading::Gate(Gate::Reglu, false),
    Reading::Gate(Gate::Reglu, true),
    Reading::Sum,
];

impl Reading {
    /// The parts of a node, in order; `None` where its sources do not have the shapes.
    fn parts(self, graph: &Graph, id: Id) -> Option<Vec<Part>> {
        let tensor = graph.get(id);
        let sources: Vec<Id> = tensor.srcs.iter().copied().collect::<Option<_>>()?;
        let is_alike =
            |slot: usize| sources.get(slot).is_some_and(|&source| graph.get(source).ne == tensor.ne);
        let part = |op: Op, params: Params, sources: Vec<From>| Part { op, params, sources, ne: tensor.ne };
        let none = Params::default();
        match self {
            Reading::Norm(norm) => {
                let [x, w] = sources[..] else { return None };
                let is_row = graph.get(w).ne == [tensor.ne[0], 1, 1, 1] && graph.is_leaf(w);
                if graph.get(x).ne != tensor.ne || !is_row {
                    return None;
                }
                let op = if norm == Norm::Rms { Op::RmsNorm } else { Op::Norm };
                let mut eps = Params::default();
                eps.set_int(0, tensor.params.int(0));
                Some(vec![
                    part(op, eps, vec![From::Slot(0)]),
                    part(Op::Mul, none, vec![From::Before, From::Slot(1)]),
                ])
            }
            Reading::Gate(gate, exchanged) => {
                if sources.len() != 2 || !is_alike(0) || !is_alike(1) {
                    return None;
                }
                let op = match gate {
                    Gate::Swiglu => Op::Swiglu,
                    Gate::Geglu => Op::Geglu,
                    Gate::GegluErf => Op::GegluErf,
                    Gate::Reglu => Op::Reglu,
                };
                let slots = if exchanged { [1, 0] } else { [0, 1] };
                Some(vec![part(op, none, slots.map(From::Slot).to_vec())])
            }
            Reading::Sum => {
                if sources.len() < 2 || !(0..sources.len()).all(is_alike) {
                    return None;
                }
                let first = part(Op::Add, none, vec![From::Slot(0), From::Slot(1)]);
                let more =
                    (2..sources.len()).map(|slot| part(Op::Add, none, vec![From::Before, From::Slot(slot)]));
                Some(std::iter::once(first).chain(more).collect())
            }
        }
    }

    /// The ops of a node that is read so, by their names; `None` where it cannot be.
    pub fn ops(self, graph: &Graph, id: Id) -> Option<Vec<String>> {
        Some(self.parts(graph, id)?.into_iter().map(|part| part.op.name().to_owned()).collect())
    }
}

/// A graph in which some nodes are several, and where each of its tensors stands in that: a node that became several is
/// the last of them.
pub fn unfolded(graph: &Graph, reading: impl Fn(Id) -> Option<Reading>) -> (Graph, Vec<Id>) {
    let parts: Vec<Option<Vec<Part>>> =
        (0..graph.nodes).map(|id| reading(id).and_then(|reading| reading.parts(graph, id))).collect();
    let mut before = 0;
    let place = |id: Id| {
        before += parts.get(id).and_then(Option::as_ref).map_or(0, |parts| parts.len() - 1);
        id + before
    };
    let place: Vec<Id> = (0..graph.tensors.len()).map(place).collect();
    let mut tensors: Vec<Tensor> = Vec::with_capacity(graph.tensors.len() + before);
    for (id, tensor) in graph.tensors.iter().enumerate() {
        let view = tensor.view.map(|view| View { root: place[view.root], ..view });
        let srcs: Vec<Option<Id>> = tensor.srcs.iter().map(|src| src.map(|src| place[src])).collect();
        let own = Tensor { srcs, view, ..tensor.clone() };
        let Some(parts) = parts.get(id).and_then(Option::as_ref) else {
            tensors.push(own);
            continue;
        };
        for (number, part) in parts.iter().enumerate() {
            let at = tensors.len();
            let source = |from: &From| match from {
                From::Slot(slot) => own.srcs[*slot],
                From::Before => at.checked_sub(1),
            };
            let made = Tensor {
                op: part.op.clone(),
                params: part.params,
                srcs: part.sources.iter().map(source).collect(),
                ..own.clone()
            };
            tensors.push(match number + 1 == parts.len() {
                true => made,
                false => Tensor {
                    name: String::new(),
                    ne: part.ne,
                    nb: contiguous(&made.dtype, part.ne),
                    view: None,
                    ..made
                },
            });
        }
    }
    (Graph { tensors, nodes: graph.nodes + before }, place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    const FUSED: &str = "graph 3 of 6 on=CPU\n\
        FUSED_NORM f32 8,5 w0=0x358637bd < 3 4 : norm\n\
        OTHER f32 8,5 < 0 3 : act\n\
        ADD f32 8,5 < 1 5 : out\n\
        NONE f32 8,5 : inp\n\
        NONE f32 8 : blk.0.attn_norm.weight\n\
        NONE f32 8,5 : inp2\n";

    #[test]
    fn a_fused_norm_is_a_norm_and_a_multiplication_and_its_readers_read_the_last() {
        let Ok(graphs) = text::read(FUSED) else { panic!("{:?}", text::read(FUSED)) };
        let graph = &graphs[0];
        let (unfolded, place) = unfolded(graph, |id| (id == 0).then_some(Reading::Norm(Norm::Rms)));
        assert_eq!((unfolded.nodes, &place[..]), (4, &[1, 2, 3, 4, 5, 6][..]));
        let ops: Vec<&str> = unfolded.tensors[..4].iter().map(|tensor| tensor.op.name()).collect();
        assert_eq!(ops, ["RMS_NORM", "MUL", "OTHER", "ADD"]);
        assert_eq!(unfolded.get(0).params.float(0).to_bits(), 0x3586_37bd);
        assert_eq!(unfolded.get(0).srcs, [Some(4)]);
        assert_eq!(unfolded.get(1).srcs, [Some(0), Some(5)]);
        assert_eq!(unfolded.get(2).srcs, [Some(1), Some(4)]);
        assert_eq!((unfolded.get(0).name.as_str(), unfolded.get(1).name.as_str()), ("", "norm"));
    }

    #[test]
    fn what_does_not_have_the_shapes_is_not_read_so() {
        let Ok(graphs) = text::read(FUSED) else { panic!("{:?}", text::read(FUSED)) };
        let graph = &graphs[0];
        assert_eq!(Reading::Gate(Gate::Swiglu, false).ops(graph, 0), None);
        assert_eq!(Reading::Norm(Norm::Rms).ops(graph, 1), None);
        assert_eq!(Reading::Gate(Gate::Swiglu, true).ops(graph, 1), Some(vec!["SWIGLU".to_owned()]));
        assert_eq!(Reading::Sum.ops(graph, 1), Some(vec!["ADD".to_owned()]));
        assert_eq!(unfolded(graph, |_| Some(Reading::Norm(Norm::Layer))).0.nodes, 4);
    }
}
