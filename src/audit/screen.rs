//! Looks at every row that a sample leaves out, cheaply: which of them should be audited as well?
//!
//! Elementwise nodes are computed again in f32. A matmul Y = X·Wᵀ is checked by two signed sums of
//! its columns, Y·r = X·(Wᵀ·r) (R. Freivalds, "Probabilistic machines can use less running
//! time", 1977): Wᵀ·r is computed once, so that a row costs what one of its outputs does. The second r has factors
//! of many sizes, so that no two columns can be exchanged unseen. Attention is computed again in full where the
//! recording is short, as such a sum in f32 where it is long ([`super::screen_attention`]). A suspicion is no finding:
//! the row is audited.

use std::collections::BTreeSet;
use std::ops::Range;

use indexmap::IndexMap;
use rayon::prelude::*;

use super::bounds::{self, Units};
use super::case::{Context, gather};
use super::recorded::screen::ATTENTION_MAX;
use super::recorded::signed_sum::{Rounds, SignedSum, explained};
use super::{NODES_AT_ONCE, judge, local, screen_attention};
use crate::arithmetic::round::{self, Rounding, Tie};
use crate::checkpoint::Checkpoint;
use crate::dense::{self, Inputs, Rows};
use crate::error::Result;
use crate::model::graph::{Node, Op};
use crate::model::weights::Weight;
use crate::numerics::{Products, Storage};
use crate::scalar::{in_lanes, vectorized};
use crate::tensor::{Matrix, View};

/// Rows that are looked at together: small enough that those of the logits stay in a core's cache.
const ROWS_MAX: usize = 8;
/// Share of an elementwise result, and of its row's root mean square, that is seen: far above the roundings of
/// f32, far below a wrong exponent.
pub const SEEN: f32 = 1.0 / 1024.0;
/// The same in roundings of a producer that stores less than f32.
pub const SEEN_ROUNDINGS: f32 = 16.0;

/// What a screening saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Screened {
    /// Rows that were looked at.
    pub rows: u64,
    /// Positions whose rows rounding may not explain.
    pub suspects: BTreeSet<u32>,
    /// Positions whose rows could not be looked at: what they are computed from was not recorded.
    pub left: Vec<u32>,
}

impl Screened {
    pub fn new(rows: usize, suspects: BTreeSet<u32>) -> Screened {
        Screened { rows: rows as u64, suspects, left: Vec::new() }
    }

    fn merge(mut self, other: Screened) -> Screened {
        self.rows += other.rows;
        self.suspects.extend(other.suspects);
        self
    }
}

/// What the screening of each node saw, in execution order.
pub type ByNode = IndexMap<Checkpoint, Screened>;

/// Screens all rows of a recording that are not in `audited`, at the wanted checkpoints.
///
/// # Errors
/// A weight that cannot be read, or inputs that do not have the model's shape.
pub fn screen(
    context: &Context<'_>,
    audited: &[u32],
    wants: &(dyn Fn(Checkpoint) -> bool + Sync),
) -> Result<ByNode> {
    let nodes: Vec<&Node> = context.graph.nodes.iter().filter(|node| wants(node.checkpoint)).collect();
    let mut all = ByNode::new();
    for some in nodes.chunks(NODES_AT_ONCE) {
        let found = some.par_iter().map(|node| Ok((node.checkpoint, screen_node(context, audited, node)?)));
        all.extend(found.collect::<Result<Vec<_>>>()?);
    }
    Ok(all)
}

fn screen_node(context: &Context<'_>, audited: &[u32], node: &Node) -> Result<Screened> {
    let mut rows = context.recording.positions(node.checkpoint);
    rows.retain(|position| audited.binary_search(position).is_err());
    let inputs_there = node.inputs.iter().all(|input| {
        let there = context.of_input(*input).recording.positions(*input);
        rows.iter().all(|position| there.binary_search(position).is_ok())
    });
    if rows.is_empty() {
        return Ok(Screened::default());
    }
    let found = if inputs_there { look(context, node, &rows)? } else { Screened::default() };
    let is_left = found.rows < rows.len() as u64 && !context.recording.is_sample();
    let left = if is_left { rows } else { Vec::new() };
    Ok(Screened { left, ..found })
}

/// Rows of a node whose inputs were recorded.
fn look(context: &Context<'_>, node: &Node, rows: &[u32]) -> Result<Screened> {
    match &node.op {
        Op::Linear { weight, .. } => products(context, node, &Weight::find(context.gguf, weight)?, rows),
        Op::Attention(op) if context.recording.tokens().len() > ATTENTION_MAX => {
            Ok(screen_attention::screen(context, node, op, rows))
        }
        Op::Attention(_) | Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => {
            in_parts(rows, |part| exactly(context, node, part))
        }
        // How exact an angle is depends on the position: that is the audit's business.
        Op::Rope(_) => in_parts(rows, |part| exactly(context, node, part)),
        _ => in_parts(rows, |part| elementwise(context, node, part)),
    }
}

fn in_parts(rows: &[u32], look: impl Fn(&[u32]) -> Result<Screened> + Sync + Send) -> Result<Screened> {
    let parts = rows.par_chunks(ROWS_MAX).map(look);
    parts.try_reduce(Screened::default, |a, b| Ok(a.merge(b)))
}

/// A part of the rows of an elementwise node, computed again as an engine does.
fn elementwise(context: &Context<'_>, node: &Node, rows: &[u32]) -> Result<Screened> {
    let recording = context.recording;
    let tokens: Option<Vec<u32>> =
        rows.iter().map(|&position| recording.tokens().get(position as usize).copied()).collect();
    let inputs: Option<Vec<Matrix<f32>>> =
        node.inputs.iter().map(|input| context.of_input(*input).recording.gather(*input, rows)).collect();
    let recorded = recording.gather(node.checkpoint, rows);
    let (Some(tokens), Some(inputs), Some(recorded)) = (tokens, inputs, recorded) else {
        return Ok(Screened::default());
    };
    let steps: Vec<Range<u32>> = rows.iter().map(|&position| recording.step(position)).collect();
    let values: Vec<View<'_, f32>> = inputs.iter().map(Matrix::view).collect();
    let inputs = Inputs { rows: Rows { tokens: &tokens, positions: rows, steps: &steps }, values: &values };
    let again = dense::execute(node, context.gguf, inputs, &context.numerics)?;
    let unit = Units::of(&context.numerics).storage.max(context.recorded_unit) as f32;
    let share = SEEN.max(SEEN_ROUNDINGS * unit);
    let odd = |t: &usize| {
        let (a, b) = (recorded.row(*t), again.row(*t));
        a.len() != b.len()
            || vectorized(
                #[inline(always)]
                || differs(a, b, share),
            )
    };
    let suspects = (0..recorded.rows).filter(odd).map(|t| rows[t]).collect();
    Ok(Screened::new(rows.len(), suspects))
}

/// Whether an element is further away than a share of what it should be and of the row's root mean square.
#[inline(always)]
fn differs(a: &[f32], b: &[f32], share: f32) -> bool {
    let rms = (in_lanes(b, |b, _| f64::from(b) * f64::from(b)) / b.len().max(1) as f64).sqrt() as f32;
    let mut within = rms.is_finite();
    for (a, b) in a.iter().zip(b) {
        within &= (a - b).abs() <= share * (b.abs() + rms) + f32::MIN_POSITIVE;
    }
    // A NaN is not within.
    !within
}

/// A part of the rows of a node, computed again as an audit does.
fn exactly(context: &Context<'_>, node: &Node, rows: &[u32]) -> Result<Screened> {
    let Ok(case) = gather(context, node, rows)? else { return Ok(Screened::default()) };
    let explained = judge::explain(context, &case)?;
    let audit = local::judge(&case, &explained, None, &[case.recorded.cols]);
    let suspects = audit.into_iter().flat_map(|audit| audit.rows_beyond).collect();
    Ok(Screened::new(rows.len(), suspects))
}

/// The rows of a matmul. Where the producer's rounding of its inputs can be followed it is, else it is allowed for.
fn products(context: &Context<'_>, node: &Node, weight: &Weight<'_>, rows: &[u32]) -> Result<Screened> {
    let products = context.numerics.products;
    let mut sums = vec![SignedSum::all(weight.stored(), 0..weight.rows(), round::weight_storage(products))];
    if round::may_scale_sums(products, weight.dtype()) {
        sums.push(SignedSum::all(weight.stored(), 0..weight.rows(), Storage::F32));
    }
    let declared = Rounding::of(products, weight.dtype());
    let follows = context.recorded_unit == 0.0 && products != Products::LlamaCuda;
    let rounding = if follows { declared } else { Rounding::None };
    let rounds = Rounds::of(context.numerics.storage);
    in_parts(rows, |part| {
        let x = context.of_input(node.inputs[0]).recording.gather(node.inputs[0], part);
        let Some(x) = x.filter(|x| x.cols == weight.cols()) else { return Ok(Screened::default()) };
        let rounded = round::activations(rounding, x.view());
        let steps = if follows { None } else { Some(steps(context, weight, &x)) };
        let mut buffer = Vec::new();
        let mut suspicious = |t: &usize| {
            let recorded = context.recording.row(node.checkpoint, part[*t], &mut buffer);
            let steps = steps.as_ref().map_or(&[][..], |steps| steps.row(*t));
            let excess = if rounded.sums.cols > 0 { rounded.sums.row(*t) } else { &[] };
            let ties: Vec<&Tie> = rounded.ties.iter().filter(|tie| tie.row == *t).collect();
            let x = rounded.values.row(*t);
            !recorded.is_some_and(|recorded| {
                sums.iter().any(|sums| explained(sums, x, excess, &ties, recorded, steps, &rounds))
            })
        };
        let suspects = (0..part.len()).filter(&mut suspicious).map(|t| part[t]).collect();
        Ok(Screened::new(part.len(), suspects))
    })
}

/// By how much each activation (T, I) may be off from what the producer multiplied.
fn steps(context: &Context<'_>, weight: &Weight<'_>, x: &Matrix<f32>) -> Matrix<f64> {
    let wide = Matrix::new(x.rows, x.cols, x.data.iter().map(|&x| f64::from(x)).collect());
    let recorded = bounds::map(&wide, |x| context.recorded_unit * x.abs());
    match judge::half_steps_unfollowed(context.numerics.products, weight.dtype(), &wide) {
        Some(steps) => bounds::zip(&recorded, &steps, |a, b| a + b),
        None => recorded,
    }
}
