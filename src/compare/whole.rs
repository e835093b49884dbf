//! Tensors that belong to a step and not to its tokens: a scan's output and state in one, a state that is cleared.
//!
//! Such a tensor is one row of its step, and its width may depend on how many tokens the step has. In a run of other
//! steps it is another tensor, however healthy both are.

use std::collections::HashMap;

use crate::checkpoint::Checkpoint;
use crate::dump::{Graphs, Recording};
use parity_dump::Dump;
use parity_graph::{Graph, Op, axis, known, label};

/// Which tensors of two recordings belong to their steps, as their graphs tell.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    candidate: Side,
    reference: Side,
}

/// The steps of one recording.
#[derive(Clone, Debug, Default)]
struct Side {
    /// By step: its positions.
    steps: Vec<Vec<u32>>,
    /// By position: the last step that computed it.
    step_of: HashMap<u32, usize>,
    /// By step: the nodes without token rows.
    nodes: Vec<HashMap<Checkpoint, Elements>>,
    /// The ops of nodes that llama.cpp named itself.
    ops: HashMap<Checkpoint, Op>,
}

/// How many elements a graph gives a tensor without token rows.
#[derive(Clone, Copy, Debug)]
struct Elements {
    all: usize,
    /// Of a scan: those of its output, without those of its state.
    of_outputs: Option<usize>,
}

impl Whole {
    /// Of two dumps; nothing of a dump without a graph that can be read.
    pub fn of(candidate: &Dump, reference: &Dump) -> Whole {
        Whole { candidate: Side::of(candidate), reference: Side::of(reference) }
    }

    /// Whether a checkpoint has no token rows in some step of either side.
    pub fn has(&self, checkpoint: Checkpoint) -> bool {
        let sides = [&self.candidate, &self.reference];
        sides.iter().any(|side| side.nodes.iter().any(|nodes| nodes.contains_key(&checkpoint)))
    }

    /// Whether a name stands for other ops on the two sides: releases have given one name to other nodes.
    pub fn is_another_node(&self, checkpoint: Checkpoint) -> bool {
        let [ours, theirs] = [&self.candidate, &self.reference].map(|side| side.ops.get(&checkpoint));
        !checkpoint.kind().is_fixed() && ours.zip(theirs).is_some_and(|(ours, theirs)| ours != theirs)
    }

    /// Whether rows of such different widths at `position` are two forms of one computation: each side's is as wide as its own
    /// graph says, if that says anything of it.
    pub fn is_in_another_form(
        &self,
        checkpoint: Checkpoint,
        position: u32,
        widths: [Option<usize>; 2],
    ) -> bool {
        let sides = [&self.candidate, &self.reference];
        sides.iter().zip(widths).all(|(side, width)| {
            let step = side.step_of.get(&position);
            let said = step.and_then(|step| side.nodes[*step].get(&checkpoint));
            said.is_none_or(|said| width == Some(said.all))
        })
    }

    /// Whether what either side has of a checkpoint at `position` is a tensor of a step that the other side has not.
    /// `rows` are the positions that each side has recorded: what a side computed and did not record is missing. So is a scan's
    /// output without the state, from a side that has no graph; `widths` are those of the rows at `position`.
    pub fn is_apart(
        &self,
        checkpoint: Checkpoint,
        position: u32,
        rows: [&[u32]; 2],
        widths: [Option<usize>; 2],
    ) -> bool {
        let sides = [&self.candidate, &self.reference];
        let steps = sides.map(|side| side.step_of.get(&position).copied());
        let [Some(ours), Some(theirs)] = steps else { return false };
        let lacks_state = |one: usize, [step, of_other]: [usize; 2]| {
            let (side, other) = (sides[one], sides[1 - one]);
            let outputs = other.nodes[of_other].get(&checkpoint).and_then(|elements| elements.of_outputs);
            let tokens = side.steps[step].len();
            let held = widths[one].map(|width| width * tokens);
            side.nodes[step].is_empty() && outputs.is_some() && held == outputs
        };
        if lacks_state(0, [ours, theirs]) || lacks_state(1, [theirs, ours]) {
            return true;
        }
        if self.candidate.steps[ours] == self.reference.steps[theirs] {
            return false;
        }
        let of_step = sides.iter().zip([ours, theirs]).zip(rows);
        let whole = of_step.filter(|((side, step), _)| side.nodes[*step].contains_key(&checkpoint));
        let alone: Vec<bool> = whole.map(|((side, step), rows)| side.is_one_row(step, rows)).collect();
        !alone.is_empty() && alone.iter().all(|alone| *alone)
    }
}

impl Side {
    fn of(dump: &Dump) -> Side {
        // A graph that cannot be read tells nothing here; who needs it says so.
        let graphs = Graphs::read(dump).unwrap_or_default();
        let of_graph: Vec<HashMap<Checkpoint, Elements>> = graphs.all().iter().map(nodes).collect();
        let mut side = Side { ops: graphs.all().iter().flat_map(ops).collect(), ..Side::default() };
        for (number, step) in Recording::manifest(dump).steps.iter().enumerate() {
            side.step_of.extend(step.positions.iter().map(|&position| (position, number)));
            side.steps.push(step.positions.clone());
            let graph = graphs.index_of_step(number).and_then(|graph| of_graph.get(graph));
            side.nodes.push(graph.cloned().unwrap_or_default());
        }
        side
    }

    /// Whether of a step the row of its last token is recorded, and no other.
    fn is_one_row(&self, step: usize, rows: &[u32]) -> bool {
        let positions = &self.steps[step];
        let recorded = positions.iter().filter(|position| rows.binary_search(position).is_ok());
        recorded.eq(positions.iter().max())
    }
}

/// The ops of the nodes that have a name.
fn ops(graph: &Graph) -> Vec<(Checkpoint, Op)> {
    let labels = label::labels(graph);
    graph.computed().filter_map(|id| Some((labels[id]?, graph.get(id).op.clone()))).collect()
}

/// The nodes of a graph that have a name of its own and no token rows, as [`Side::nodes`] has them.
fn nodes(graph: &Graph) -> HashMap<Checkpoint, Elements> {
    let known = known::find(graph);
    let (labels, axes) = (label::labels_of(graph, &known), axis::token_axes_of(graph, &known));
    let without_rows = graph.computed().filter(|&id| axes[id].is_none());
    let elements = |id: usize| Elements {
        all: graph.tensors[id].ne.iter().product(),
        of_outputs: axis::outputs_of_scan(graph, id),
    };
    let named = without_rows.filter_map(|id| Some((labels[id]?, elements(id))));
    named.filter(|(label, _)| !label.kind().is_fixed()).collect()
}
