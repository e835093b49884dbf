//! One node with what a recording holds of its inputs and output: what an audit judges, and what a diagnosis
//! tries faults on.

use std::fmt;
use std::ops::Range;

use super::bridge;
use crate::arithmetic::round;
use crate::checkpoint::Checkpoint;
use crate::dense::{Inputs, Rows};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::graph::{Graph, Node, Op};
use crate::numerics::Numerics;
use crate::tensor::{Matrix, View};

/// What a recording is looked at with.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The model's weights.
    pub gguf: &'a Gguf,
    /// Its healthy graph, attention split or fused as the recording has it.
    pub graph: &'a Graph,
    /// The recording.
    pub recording: &'a dyn Recording,
    /// Its producer's arithmetic.
    pub numerics: Numerics,
    /// Unit of the type that values were rounded to when they were recorded, where the producer may have
    /// computed on with more: 0 where the recorded values are those that it computed with.
    pub recorded_unit: f64,
    /// The recording that the inputs come from, where the producer was fed another one's values; it rounded them
    /// to what it stores.
    pub fed: Option<&'a dyn Recording>,
}

impl Context<'_> {
    /// As an input of a node is looked at: what cannot be fed is the producer's own.
    pub fn of_input(&self, checkpoint: Checkpoint) -> Self {
        let fed = self.fed.filter(|fed| !fed.positions(checkpoint).is_empty());
        Context { recording: fed.unwrap_or(self.recording), fed: None, ..*self }
    }
}

/// A node, its recorded inputs and output at some rows.
#[derive(Clone)]
pub struct Case {
    /// The healthy node.
    pub node: Node,
    /// (T,) token at each row.
    pub tokens: Vec<u32>,
    /// (T,) position of each row.
    pub positions: Vec<u32>,
    /// (T,) step of each row.
    pub steps: Vec<Range<u32>>,
    /// In the order of the node's inputs.
    pub inputs: Vec<Input>,
    /// (T, width) recorded output; of attention matrices (T, H·S), 0 where nothing is visible.
    pub recorded: Matrix<f64>,
    /// Nodes that stand in for inputs that were not recorded.
    pub bridged: Vec<Checkpoint>,
}

/// One input of a node.
#[derive(Clone)]
pub struct Input {
    /// (T, width), or (S, width) where the op reads the cache.
    pub value: Matrix<f64>,
    /// How far each value may be from what the producer had: `None` where it was recorded.
    pub bound: Option<Matrix<f64>>,
    /// Whether those distances are roundings of each value by itself, so that they add up in quadrature.
    pub independent: bool,
}

/// Why a node cannot be judged: what would be needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// A tensor.
    Tensor(Checkpoint),
    /// A tensor's rows at these positions.
    Rows(Checkpoint, String),
    /// Rows of the node itself.
    Own(Checkpoint),
    /// All that it is computed from.
    Before,
    /// The token of each row.
    Tokens,
    /// Anything that was found of it.
    Explanation,
}

impl Missing {
    /// The tensor whose recording would help.
    pub fn tensor(&self) -> Option<Checkpoint> {
        match self {
            Missing::Tensor(id) | Missing::Rows(id, _) => Some(*id),
            Missing::Own(_) | Missing::Before | Missing::Tokens | Missing::Explanation => None,
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Tensor(id) => write!(f, "{id}"),
            Missing::Rows(id, positions) => write!(f, "{id} at {positions}"),
            Missing::Own(id) => write!(f, "rows of {id}"),
            Missing::Before => f.write_str("the tensors before it"),
            Missing::Tokens => f.write_str("the token of each row"),
            Missing::Explanation => f.write_str("an explanation"),
        }
    }
}

impl Case {
    /// The rows, for an op.
    pub fn rows(&self) -> Rows<'_> {
        Rows { tokens: &self.tokens, positions: &self.positions, steps: &self.steps }
    }

    /// The input values, for an op.
    pub fn views(&self) -> Vec<View<'_, f64>> {
        self.inputs.iter().map(|input| input.value.view()).collect()
    }

    /// Executes a node, this one or one with a fault in it, on the recorded inputs.
    pub fn execute(&self, node: &Node, gguf: &Gguf, numerics: &Numerics) -> Result<Matrix<f64>> {
        let values = self.views();
        let mut out =
            crate::dense::execute(node, gguf, Inputs { rows: self.rows(), values: &values }, numerics)?;
        self.hide_unseen(&mut out);
        Ok(out)
    }

    /// Clears what an attention matrix has beyond the row's own position: recordings do not hold it.
    fn hide_unseen(&self, out: &mut Matrix<f64>) {
        let (Op::Scores(op) | Op::Softmax(op)) = &self.node.op else { return };
        let cached = out.cols / op.heads.max(1);
        for t in 0..out.rows {
            let seen = (self.positions[t] as usize + 1).min(cached);
            out.row_mut(t).chunks_exact_mut(cached.max(1)).for_each(|head| head[seen..].fill(0.0));
        }
    }
}

/// Gathers one node at some positions, which are recorded of its output.
///
/// # Errors
/// A weight that cannot be read. What the recording lacks is no error but [`Missing`].
pub fn gather(
    context: &Context<'_>,
    node: &Node,
    positions: &[u32],
) -> Result<std::result::Result<Case, Missing>> {
    let tokens = context.recording.tokens();
    let Some(tokens) = positions.iter().map(|&p| tokens.get(p as usize).copied()).collect() else {
        return Ok(Err(Missing::Tokens));
    };
    let recording = context.recording;
    let cached = positions.iter().max().map_or(0, |&last| last + 1);
    let Some(recorded) = output(context, node, positions, cached) else {
        return Ok(Err(Missing::Own(node.checkpoint)));
    };
    let mut case = Case {
        node: node.clone(),
        tokens,
        positions: positions.to_vec(),
        steps: positions.iter().map(|&position| recording.step(position)).collect(),
        inputs: Vec::with_capacity(node.inputs.len()),
        recorded,
        bridged: Vec::new(),
    };
    for (index, &checkpoint) in node.inputs.iter().enumerate() {
        let all: Vec<u32> = (0..cached).collect();
        let wanted = if node.op.reads_cache(index) { &all } else { positions };
        match bridge::input(&context.of_input(checkpoint), checkpoint, wanted, cached, &mut case.bridged)? {
            Ok(mut input) => {
                if context.fed.is_some() {
                    let storage = context.numerics.storage_of(checkpoint.kind());
                    input.value = round::stored(storage, input.value.view());
                }
                case.inputs.push(input);
            }
            Err(missing) => return Ok(Err(missing)),
        }
    }
    Ok(Ok(case))
}

/// Rows of a checkpoint in f64; `cached` positions wide where it is an attention matrix.
pub fn output(context: &Context<'_>, node: &Node, positions: &[u32], cached: u32) -> Option<Matrix<f64>> {
    if node.checkpoint.kind().is_optional() {
        return attention_matrix(context, node.checkpoint, positions, cached as usize);
    }
    let rows = context.recording.gather(node.checkpoint, positions)?;
    if rows.cols != context.graph.dims.width(node.checkpoint.kind(), 0) {
        return None;
    }
    Some(Matrix::new(rows.rows, rows.cols, rows.data.iter().map(|&x| f64::from(x)).collect()))
}

/// (T, H·S) of rows that are recorded as (H, position + 1).
fn attention_matrix(
    context: &Context<'_>,
    checkpoint: Checkpoint,
    positions: &[u32],
    cached: usize,
) -> Option<Matrix<f64>> {
    let heads = context.graph.dims.heads;
    let mut out = Matrix::zeros(positions.len(), heads * cached);
    let mut row = Vec::new();
    for (t, &position) in positions.iter().enumerate() {
        let row = context.recording.row(checkpoint, position, &mut row)?;
        if row.len() % heads != 0 {
            return None;
        }
        let seen = (row.len() / heads).min(cached);
        for (head, values) in row.chunks_exact((row.len() / heads).max(1)).enumerate() {
            let target = &mut out.row_mut(t)[head * cached..head * cached + seen];
            target.iter_mut().zip(values).for_each(|(out, &value)| *out = f64::from(value));
        }
    }
    Some(out)
}
