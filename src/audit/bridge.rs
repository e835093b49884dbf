//! Inputs that a recording lacks, computed from the nearest checkpoints that it has.
//!
//! Several nodes then stand as one. The rounding that the producer made inside of them is not known value by
//! value; its bound is carried on to where it is needed.

use super::bounds;
use super::case::{Case, Context, Input, Missing, output};
use super::judge;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::model::graph::{Node, Op};
use crate::tensor::Matrix;

/// Nodes that may stand as one: beyond, what rounding explains says little any more.
const BRIDGED_MAX: usize = 8;

/// Rows of `checkpoint`, recorded or computed. `bridged` grows by what was computed.
pub fn input(
    context: &Context<'_>,
    checkpoint: Checkpoint,
    positions: &[u32],
    cached: u32,
    bridged: &mut Vec<Checkpoint>,
) -> Result<std::result::Result<Input, Missing>> {
    let Some(node) = context.graph.node(checkpoint) else {
        return Ok(Err(Missing::Tensor(checkpoint)));
    };
    if let Some(value) = output(context, node, positions, cached) {
        let unit = context.recorded_unit;
        let bound = (unit > 0.0).then(|| bounds::map(&value, |x| unit * x.abs()));
        return Ok(Ok(Input { value, bound, independent: true }));
    }
    let spans_attention = matches!(node.op, Op::Attention(_) | Op::Softmax(_) | Op::Context(_));
    if spans_attention || bridged.len() >= BRIDGED_MAX {
        return Ok(Err(Missing::Rows(checkpoint, spell(positions))));
    }
    bridged.push(checkpoint);
    let case = match unrecorded(context, node, positions, cached, bridged)? {
        Ok(case) => case,
        Err(missing) => return Ok(Err(missing)),
    };
    let exact = judge::explain(context, &case)?.into_iter().next();
    let input = exact.map(|e| Input { value: e.exact, bound: Some(e.bound), independent: false });
    Ok(input.ok_or(Missing::Tensor(checkpoint)))
}

/// A node whose output is not looked at, with its inputs at `positions`, recorded or computed.
pub fn unrecorded(
    context: &Context<'_>,
    node: &Node,
    positions: &[u32],
    cached: u32,
    bridged: &mut Vec<Checkpoint>,
) -> Result<std::result::Result<Case, Missing>> {
    let mut inputs = Vec::with_capacity(node.inputs.len());
    let all: Vec<u32> = (0..cached).collect();
    for (index, &from) in node.inputs.iter().enumerate() {
        let wanted = if node.op.reads_cache(index) { &all } else { positions };
        match input(context, from, wanted, cached, bridged)? {
            Ok(input) => inputs.push(input),
            Err(missing) => return Ok(Err(missing)),
        }
    }
    let Some(tokens) =
        positions.iter().map(|&p| context.recording.tokens().get(p as usize).copied()).collect()
    else {
        return Ok(Err(Missing::Tokens));
    };
    Ok(Ok(Case {
        node: node.clone(),
        tokens,
        positions: positions.to_vec(),
        steps: positions.iter().map(|&position| context.recording.step(position)).collect(),
        inputs,
        recorded: Matrix::default(),
        bridged: Vec::new(),
    }))
}

/// What a bound of the inputs becomes at the output of an op but for matmuls and whole attention, to first order.
pub fn carried(context: &Context<'_>, case: &Case, exact: &Matrix<f64>) -> Option<Matrix<f64>> {
    let bound = |index: usize| case.inputs.get(index).and_then(|input| input.bound.as_ref());
    if (0..case.inputs.len()).all(|index| bound(index).is_none()) {
        return None;
    }
    let x = |index: usize| &case.inputs[index].value;
    let zero = |index: usize| Matrix::zeros(x(index).rows, x(index).cols);
    let own = |index: usize| bound(index).cloned().unwrap_or_else(|| zero(index));
    Some(match &case.node.op {
        Op::Bias { .. } => own(0),
        Op::Add { .. } => bounds::zip(&own(0), &own(1), |a, b| a + b),
        Op::Norm(norm) => through_norm(norm.width, x(0), &own(0), exact),
        Op::Rope(rope) => through_rotation(rope.head_width, &own(0)),
        Op::Glu(_) => {
            // |silu(x)| is at most |x|.
            let gate = bounds::zip(&own(0), x(1), |error, up| SILU_SLOPE * error * up.abs());
            let up = bounds::zip(&own(1), x(0), |error, gate| error * gate.abs());
            bounds::zip(&gate, &up, |a, b| a + b)
        }
        Op::Scores(_) | Op::Context(_) => return through_heads(context, case, &[own(0), own(1)]),
        Op::Softmax(op) => through_softmax(op.heads, op.scale, &own(0), exact),
        // Matmuls and whole attention have it in their own bounds; the embedding has no input.
        _ => return None,
    })
}

/// Scores and context are linear in both inputs: what errors of one of them meet of the other.
fn through_heads(context: &Context<'_>, case: &Case, own: &[Matrix<f64>; 2]) -> Option<Matrix<f64>> {
    let size: Vec<Matrix<f64>> =
        case.inputs.iter().map(|input| bounds::map(&input.value, f64::abs)).collect();
    let met = |a: &Matrix<f64>, b: &Matrix<f64>| {
        let values = [a.view(), b.view()];
        let inputs = crate::dense::Inputs { rows: case.rows(), values: &values };
        crate::dense::execute(&case.node, context.gguf, inputs, &judge::PLAIN).ok()
    };
    let [first, second] = [met(&own[0], &size[1])?, met(&size[0], &own[1])?];
    Some(bounds::zip(&first, &second, |a, b| a + b))
}

/// p = softmax(scale·z): an error e of a score moves its probability by p·e, and all of them by p·Σ p·e.
fn through_softmax(heads: usize, scale: f64, own: &Matrix<f64>, p: &Matrix<f64>) -> Matrix<f64> {
    let mut out = Matrix::zeros(p.rows, p.cols);
    let cached = (p.cols / heads.max(1)).max(1);
    let of_heads = out.data.chunks_exact_mut(cached).zip(own.data.chunks_exact(cached));
    for ((out, own), p) in of_heads.zip(p.data.chunks_exact(cached)) {
        let common: f64 = own.iter().zip(p).map(|(e, p)| scale * e * p).sum();
        for ((out, e), p) in out.iter_mut().zip(own).zip(p) {
            *out = (scale * e + common) * p;
        }
    }
    out
}

/// The largest |silu'|: silu'(x) = σ(x)·(1 + x·(1 - σ(x))) has its maximum, 1.09984, at x = 2.3994.
const SILU_SLOPE: f64 = 1.1;

/// y = s·w·x with s = 1/rms(x): an error of x shows at its own place and, through s, in proportion to y.
fn through_norm(width: usize, x: &Matrix<f64>, bound: &Matrix<f64>, y: &Matrix<f64>) -> Matrix<f64> {
    let mut out = Matrix::zeros(y.rows, y.cols);
    let groups = out.data.chunks_exact_mut(width).zip(x.data.chunks_exact(width));
    for ((out, x), (bound, y)) in groups.zip(bound.data.chunks_exact(width).zip(y.data.chunks_exact(width))) {
        let square: f64 = x.iter().map(|x| x * x).sum();
        let moved: f64 = x.iter().zip(bound).map(|(x, b)| x.abs() * b).sum();
        let common = moved / square.max(f64::MIN_POSITIVE);
        for (((out, x), b), y) in out.iter_mut().zip(x).zip(bound).zip(y) {
            let own = if *x != 0.0 { b * (y / x).abs() } else { 0.0 };
            *out = own + common * y.abs();
        }
    }
    out
}

/// A turn mixes two columns of a head, whichever they are: each gets at most the sum over the head's largest two.
fn through_rotation(head_width: usize, bound: &Matrix<f64>) -> Matrix<f64> {
    let mut out = bound.clone();
    for head in out.data.chunks_exact_mut(head_width.max(1)) {
        let largest = head.iter().fold(0.0f64, |max, b| max.max(*b));
        head.fill(2.0 * largest);
    }
    out
}

/// Positions in words.
fn spell(positions: &[u32]) -> String {
    match positions {
        [] => "no position".to_owned(),
        [one] => format!("position {one}"),
        [first, .., last] => format!("positions {first} to {last}"),
    }
}
