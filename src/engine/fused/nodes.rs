//! Executes one node of a graph, in f32 or f64.
//!
//! A node computes T token rows from the rows of its inputs; attention also reads the keys and values of
//! all cached positions. Nothing here keeps state.

use std::borrow::Cow;
use std::ops::Range;

use super::{attention, linear, norm, pointwise, rope};
use crate::checkpoint::Kind;
use crate::engine::fused::graph::{Node, Norm, Op};
use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorRef};
use crate::numerics::Numerics;
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// The token rows that a node computes.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// (T,) token of each row.
    pub tokens: &'a [u32],
    /// (T,) position of each row.
    pub positions: &'a [u32],
    /// (T,) positions of the step that each row is computed in.
    pub steps: &'a [Range<u32>],
}

impl<'a> Rows<'a> {
    /// Without the first `rows`.
    pub fn after(&self, rows: usize) -> Rows<'a> {
        Rows { tokens: &self.tokens[rows..], positions: &self.positions[rows..], steps: &self.steps[rows..] }
    }

    /// T
    pub(crate) fn len(&self) -> usize {
        self.positions.len()
    }
}

/// What a node is executed on.
#[derive(Clone, Copy)]
pub struct Inputs<'a, S> {
    /// The rows to compute.
    pub rows: Rows<'a>,
    /// In the order of the node's inputs: (T, width), or (S, width) of all positions 0 to S-1 where the op
    /// reads the cache ([`Op::reads_cache`]).
    pub values: &'a [View<'a, S>],
}

/// Computes the rows of one node, (T, width).
///
/// `numerics` says which roundings of the producer are followed; [`Numerics::default`] rounds nothing but
/// the scalar itself.
pub fn execute<S: Scalar>(
    node: &Node,
    gguf: &Gguf,
    inputs: Inputs<'_, S>,
    numerics: &Numerics,
) -> Result<Matrix<S>> {
    let values = inputs.values;
    check_shapes(node, gguf, values, inputs.rows)?;
    let rows = inputs.rows;
    Ok(match &node.op {
        Op::Embed { table } => embed(node, &gguf.weight(table)?, rows)?,
        Op::Norm(norm) => norm::execute(norm, &gguf.weight(&norm.weight)?, values[0]),
        Op::Linear { weight, columns } => {
            let at_once =
                if node.checkpoint.kind() == Kind::Logits { linear::LOGIT_ROWS } else { usize::MAX };
            linear::execute(&gguf.weight(weight)?, *columns, values[0], at_once, numerics)
        }
        Op::Bias { bias, times } => {
            let bias = bias.as_ref().map(|bias| gguf.weight(bias)).transpose()?;
            pointwise::bias(bias.as_ref(), *times, values[0])
        }
        Op::Rope(rope) => {
            let freqs = rope.freqs.as_ref().map(|freqs| gguf.weight(freqs)).transpose()?;
            rope::execute(rope, freqs.as_ref(), values[0], rows, numerics)
        }
        Op::Scores(op) => attention::scores(op, values[0], values[1], numerics),
        Op::Softmax(op) => attention::softmax(op, values[0], rows),
        Op::Context(op) => attention::context(op, values[0], values[1], numerics),
        Op::Attention(op) => attention::fused(op, values[0], values[1], values[2], rows, numerics),
        Op::Add { scale } => pointwise::add(*scale, values[0], values[1]),
        Op::Glu(glu) => pointwise::glu(*glu, values[0], values[1]),
    })
}

/// out[t] = table[token[t]]
fn embed<S: Scalar>(node: &Node, table: &TensorRef<'_>, rows: Rows<'_>) -> Result<Matrix<S>> {
    let mut out = Matrix::zeros(rows.len(), table.cols());
    for (t, &token) in rows.tokens.iter().enumerate() {
        let token = token as usize;
        if token >= table.rows() {
            return Err(Error::new(node.checkpoint, "a token beyond the vocabulary")
                .expected(format!("tokens below {}", table.rows()))
                .found(token)
                .hint("parity inspect MODEL -p TEXT --format json gives the tokens of a text"));
        }
        table.decode_rows(token..token + 1, out.row_mut(t));
    }
    Ok(out)
}

/// Values come from files: a wrong shape is an error, not a panic in the middle of a product.
fn check_shapes<S: Scalar>(node: &Node, gguf: &Gguf, values: &[View<'_, S>], rows: Rows<'_>) -> Result<()> {
    let weight_cols = match node.op.weight() {
        Some(weight) => gguf.weight(weight)?.cols(),
        None => 0,
    };
    let pair = values.get(1).map_or(0, |value| value.cols);
    let expected: Vec<usize> = match &node.op {
        Op::Embed { .. } => vec![],
        Op::Linear { .. } => vec![weight_cols],
        Op::Norm(norm) if weight_cols != norm.width => vec![weight_cols],
        Op::Bias { bias: Some(_), .. } => vec![weight_cols],
        Op::Norm(Norm { width, .. }) => vec![multiple(values, *width)],
        Op::Rope(rope) => vec![multiple(values, rope.head_width)],
        Op::Bias { bias: None, .. } => vec![multiple(values, 1)],
        Op::Softmax(op) => vec![multiple(values, op.heads)],
        Op::Add { .. } | Op::Glu(_) => vec![pair, pair],
        Op::Scores(op) => vec![op.heads * op.head_width, op.kv_heads * op.head_width],
        Op::Context(op) => vec![op.heads * values.get(1).map_or(0, |v| v.rows), op.kv_heads * op.head_width],
        Op::Attention(op) => {
            let kv = op.kv_heads * op.head_width;
            vec![op.heads * op.head_width, kv, kv]
        }
    };
    let found: Vec<usize> = values.iter().map(|value| value.cols).collect();
    let rows_fit = values.iter().enumerate().all(|(i, v)| node.op.reads_cache(i) || v.rows == rows.len());
    if found == expected && rows_fit {
        return Ok(());
    }
    Err(Error::new(node.checkpoint, "its inputs do not have the model's shape")
        .expected(format!("{} rows of {expected:?} columns", rows.len()))
        .found(format!("{:?} columns", found))
        .hint("is this the model that the dump was made with?"))
}

/// The first value's width where it is a multiple of `width`, else the nearest such.
fn multiple<S>(values: &[View<'_, S>], width: usize) -> usize {
    values.first().map_or(width, |value| value.cols.next_multiple_of(width.max(1)))
}

/// A weight vector decoded, or nothing.
pub(super) fn vector<S: Scalar>(weight: Option<&TensorRef<'_>>) -> Cow<'static, [S]> {
    weight.map_or(Cow::Borrowed(&[]), |weight| Cow::Owned(weight.decode()))
}
