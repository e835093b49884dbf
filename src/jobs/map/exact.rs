//! What a model computes of given tokens, in f64: every node that has an id, in the order of a dump.

use parity_graph::Id;

use crate::arithmetic::Arithmetic;
use crate::audit::{Labelled, Prompt, Tensor};
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, own};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::ops::Args;

/// A node's exact values.
pub struct Exact {
    /// Which node.
    pub id: Checkpoint,
    /// Token rows first; of attention matrices (H, T, S).
    pub shape: Vec<usize>,
    /// In C order of the shape.
    pub values: Vec<f64>,
}

impl Exact {
    /// Whether the tokens stand behind the heads.
    pub fn is_matrix(&self) -> bool {
        self.id.kind().is_optional()
    }
}

/// Executes the model's graph on `tokens` at positions from 0.
///
/// # Errors
/// An architecture without a builder, a token beyond the vocabulary.
pub fn exact(gguf: &Gguf, tokens: &[u32]) -> Result<Vec<Exact>> {
    let prompt = Prompt::new(gguf, tokens, false, 0)?;
    let mut machine: Machine<'_, f64> = Machine::new(gguf, Arithmetic::EXACT);
    let mut found = Vec::new();
    for (step, labelled) in prompt.steps() {
        let mut kept = Kept { labelled, rows: tokens.len(), found: std::mem::take(&mut found) };
        machine.step(&labelled.program, &|id| labelled.input(&prompt, step, id), &mut kept)?;
        found = kept.found;
    }
    Ok(found)
}

/// Keeps what every node with an id comes to.
struct Kept<'a> {
    labelled: &'a Labelled,
    rows: usize,
    found: Vec<Exact>,
}

impl Kept<'_> {
    /// The values of a node in the order of a dump; `None` of what has no token rows.
    fn arranged(&self, node: Id, id: Checkpoint, values: &[f64]) -> Option<Exact> {
        let graph = &self.labelled.program.graph;
        let extents = graph.get(node).shape();
        let axis = self.labelled.axes.get(node).copied().flatten()?;
        let shape = match id.kind().is_optional() {
            true => vec![extents[1], self.rows, self.rows],
            false => {
                let rest = (0..4).filter(|&other| other != axis).map(|other| extents[other]);
                let rest: Vec<usize> = rest.skip_while(|extent| *extent == 1).collect();
                let rest = if rest.is_empty() { vec![1] } else { rest };
                [vec![self.rows], rest].concat()
            }
        };
        let count: usize = shape.iter().product();
        let positions = (0..self.rows as u32).collect();
        let wanted = Tensor { shape: shape.clone(), positions, values: vec![0.0; count] };
        let arranged = self.labelled.arrange(node, id, &wanted)?;
        Some(Exact { id, shape, values: arranged.of_rows(values) })
    }
}

impl Conductor<f64> for Kept<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let value = own(node, args);
        let id = self.labelled.labels.get(node.id).copied().flatten();
        if let (Some(id), Ok(values)) = (id, &value)
            && let Some(exact) = self.arranged(node.id, id, &values.data)
        {
            self.found.push(exact);
        }
        Ok(value)
    }
}

/// Whether a checkpoint is one of the vocabulary rather than of one graph.
pub fn is_plain(id: Checkpoint) -> bool {
    !matches!(id.kind(), Kind::Named(_))
}
