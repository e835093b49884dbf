//! Looks at every row that a sample leaves out, cheaply: which of them should be audited as well?
//!
//! Elementwise nodes are computed again in f32. A product Y = X·Wᵀ is checked by a signed sum of
//! its columns, Y·r = X·(Wᵀ·r) with r of ±1 (R. Freivalds, "Probabilistic machines can use less running
//! time", 1977): Wᵀ·r is computed once, so that a row costs what one of its outputs does. Attention is computed
//! again where the recording is short; in a long one, a value that was damaged after it was computed shows in
//! what reads it, and one that was computed wrong does not. A suspicion is no finding: the row is audited.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;

use super::bounds::{self, Units};
use super::case::{Context, gather};
use super::{NODES_AT_ONCE, judge, local};
use crate::arithmetic::product::group_sums;
use crate::arithmetic::round::{self, Rounded, Rounding, Tie};
use crate::checkpoint::Checkpoint;
use crate::dense::{self, Inputs, Rows};
use crate::error::Result;
use crate::gguf;
use crate::model::graph::{Node, Op};
use crate::model::weights::Weight;
use crate::numerics::Products;
use crate::scalar::{Scalar, in_lanes, vectorized};
use crate::tensor::{Matrix, View};

/// Rows that are looked at together: small enough that those of the logits stay in a core's cache.
const ROWS_MAX: usize = 8;
/// Outputs that one signed sum is taken over: one that is wrong stands out of the roundings of so many by as
/// many times as it exceeds the root of this times its own bound.
const OUTPUTS: usize = 2048;
/// Share of an elementwise result, and of its row's root mean square, that is seen: far above the roundings of
/// f32, far below a wrong exponent.
const SEEN: f32 = 1.0 / 1024.0;
/// The same in roundings of a producer that stores less than f32.
const SEEN_ROUNDINGS: f32 = 16.0;
/// Tokens up to which attention is computed again: its cost grows with their square.
const ATTENTION_MAX: usize = 128;
/// Rows of a weight that are added up in f32: what that rounds is far below what a sum of products does.
const ADDED: usize = 16;
/// Ties of a row whose sides are all tried.
const TIES_MAX: usize = 6;

/// What a screening saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Screened {
    /// Rows that were looked at, over all nodes.
    pub rows: u64,
    /// Positions whose rows rounding may not explain.
    pub suspects: BTreeSet<u32>,
}

impl Screened {
    fn merge(mut self, other: Screened) -> Screened {
        self.rows += other.rows;
        self.suspects.extend(other.suspects);
        self
    }
}

/// Screens all rows of a recording that are not in `audited`, at the wanted checkpoints.
///
/// # Errors
/// A weight that cannot be read, or inputs that do not have the model's shape.
pub fn screen(
    context: &Context<'_>,
    audited: &[u32],
    wants: &(dyn Fn(Checkpoint) -> bool + Sync),
) -> Result<Screened> {
    let nodes: Vec<&Node> = context.graph.nodes.iter().filter(|node| wants(node.checkpoint)).collect();
    let mut all = Screened::default();
    for some in nodes.chunks(NODES_AT_ONCE) {
        let found = some.par_iter().map(|node| screen_node(context, audited, node));
        all = all.merge(found.try_reduce(Screened::default, |a, b| Ok(a.merge(b)))?);
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
    if rows.is_empty() || !inputs_there {
        return Ok(Screened::default());
    }
    match &node.op {
        Op::Linear { weight, .. } => products(context, node, &Weight::find(context.gguf, weight)?, &rows),
        Op::Attention(_) if recording_is_short(context) => {
            in_parts(&rows, |part| exactly(context, node, part))
        }
        Op::Attention(_) | Op::Scores(_) | Op::Softmax(_) | Op::Context(_) => Ok(Screened::default()),
        // How exact an angle is depends on the position: that is the audit's business.
        Op::Rope(_) => in_parts(&rows, |part| exactly(context, node, part)),
        _ => in_parts(&rows, |part| elementwise(context, node, part)),
    }
}

fn recording_is_short(context: &Context<'_>) -> bool {
    context.recording.tokens().len() <= ATTENTION_MAX
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
    Ok(Screened { rows: rows.len() as u64, suspects })
}

/// Whether an element is further away than a share of what it should be and of the row's root mean square.
#[inline(always)]
fn differs(a: &[f32], b: &[f32], share: f32) -> bool {
    let rms = (in_lanes(b, |b, _| f64::from(b) * f64::from(b)) / b.len().max(1) as f64).sqrt() as f32;
    let mut within = rms.is_finite();
    for (a, b) in a.iter().zip(b) {
        within &= (a - b).abs() <= share * (b.abs() + rms);
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
    Ok(Screened { rows: rows.len() as u64, suspects })
}

/// The rows of a product, where the producer's rounding of its inputs can be followed.
fn products(context: &Context<'_>, node: &Node, weight: &Weight<'_>, rows: &[u32]) -> Result<Screened> {
    let products = context.numerics.products;
    let follows = matches!(products, Products::F32 | Products::F64 | Products::LlamaCpu);
    if !follows || context.recorded_unit > 0.0 {
        return Ok(Screened::default());
    }
    let sums = SignedSum::all(weight);
    let rounding = Rounding::of(products, weight.dtype());
    let units = Units::of(&context.numerics);
    in_parts(rows, |part| {
        let x = context.of_input(node.inputs[0]).recording.gather(node.inputs[0], part);
        let Some(x) = x.filter(|x| x.cols == weight.cols()) else { return Ok(Screened::default()) };
        let rounded = round::activations(rounding, x.view());
        let mut buffer = Vec::new();
        let mut suspicious = |t: &usize| {
            let recorded = context.recording.row(node.checkpoint, part[*t], &mut buffer);
            !recorded.is_some_and(|recorded| explained(&sums, &rounded, *t, recorded, &units))
        };
        let suspects = (0..part.len()).filter(&mut suspicious).map(|t| part[t]).collect();
        Ok(Screened { rows: part.len() as u64, suspects })
    })
}

/// Whether rounding explains the signed sums of the recorded outputs of row t of the activations.
fn explained(sums: &[SignedSum], x: &Rounded<f32>, t: usize, recorded: &[f32], units: &Units) -> bool {
    let ties: Vec<&Tie> = x.ties.iter().filter(|tie| tie.row == t).collect();
    if ties.len() > TIES_MAX || recorded.len() != sums.last().map_or(0, |sum| sum.outputs.end) {
        return false;
    }
    let excess = if x.sums.cols > 0 { x.sums.row(t) } else { &[] };
    let x = x.values.row(t);
    let errors: Vec<f64> = sums.iter().map(|sum| sum.off(x, excess, recorded)).collect();
    // Some choice of sides explains all the sums.
    (0..1u32 << ties.len()).any(|sides| {
        let chosen: Vec<&Tie> =
            ties.iter().enumerate().filter(|(i, _)| sides >> i & 1 == 1).map(|(_, tie)| *tie).collect();
        sums.iter().zip(&errors).all(|(sum, error)| {
            let moved: f64 = chosen.iter().map(|tie| sum.moved(tie)).sum();
            sum.explains((error - moved).abs(), units, x, recorded)
        })
    })
}

/// The signed sum of some rows of a weight.
struct SignedSum {
    /// The weight's rows: outputs of the product.
    outputs: Range<usize>,
    /// (outputs,) r: 1 or -1.
    signs: Vec<f32>,
    /// (I,) Σ_o r[o]·w[o, i]
    weights: Vec<f32>,
    /// (I,) Σ_o w[o, i]²
    squares: Vec<f32>,
    /// (I/group,) Σ_o r[o]·minimum[o, b], where blocks have minima.
    minima: Vec<f64>,
    /// (I/group,) Σ_o minimum[o, b]²
    minima_squares: Vec<f64>,
    /// Columns that share a minimum; 0 where there are none.
    group: usize,
}

impl SignedSum {
    /// All of a weight's, in one pass over it.
    fn all(weight: &Weight<'_>) -> Vec<SignedSum> {
        let starts: Vec<usize> = (0..weight.rows()).step_by(OUTPUTS).collect();
        let end = |start: usize| (start + OUTPUTS).min(weight.rows());
        starts.into_par_iter().map(|start| SignedSum::new(weight, start..end(start))).collect()
    }

    fn new(weight: &Weight<'_>, outputs: Range<usize>) -> SignedSum {
        let cols = weight.cols();
        let group = gguf::minimum_group(weight.dtype()).unwrap_or(0);
        let mut sum = SignedSum {
            outputs: outputs.clone(),
            signs: outputs.clone().map(sign).collect(),
            weights: Vec::new(),
            squares: vec![0.0; cols],
            minima: Vec::new(),
            minima_squares: Vec::new(),
            group,
        };
        let mut weights = vec![0f64; cols];
        f32::with_scratch(ADDED * cols, |rows| {
            for (start, signs) in outputs.clone().step_by(ADDED).zip(sum.signs.chunks(ADDED)) {
                let rows = &mut rows[..signs.len() * cols];
                weight.decode_rows(start..start + signs.len(), rows);
                vectorized(
                    #[inline(always)]
                    || add_rows(rows, signs, &mut weights, &mut sum.squares),
                );
            }
        });
        sum.weights = weights.iter().map(|&w| w as f32).collect();
        if let Some(groups) = cols.checked_div(group) {
            sum.minima = vec![0.0; groups];
            sum.minima_squares = vec![0.0; groups];
            let minima: Vec<f64> = gguf::minima(weight.dtype(), weight.stored().row_bytes(outputs.clone()));
            for (sign, minima) in sum.signs.iter().zip(minima.chunks_exact(groups.max(1))) {
                for (b, minimum) in minima.iter().enumerate() {
                    sum.minima[b] += f64::from(*sign) * minimum;
                    sum.minima_squares[b] += minimum * minimum;
                }
            }
        }
        sum
    }

    /// By how much that of a row of recorded outputs is off: x (I,) rounded activations, `excess` what meets the
    /// minima, or nothing.
    fn off(&self, x: &[f32], excess: &[f32], recorded: &[f32]) -> f64 {
        let met: f64 = self.minima.iter().zip(excess).map(|(minimum, x)| minimum * f64::from(*x)).sum();
        dot(&self.signs, &recorded[self.outputs.clone()]) - dot(&self.weights, x) - met
    }

    /// What the exact one changes by where a tie is rounded to the other side.
    fn moved(&self, tie: &Tie) -> f64 {
        let minimum = tie.col.checked_div(self.group).map_or(0.0, |group| self.minima[group]);
        f64::from(self.weights[tie.col]) * tie.value + minimum * tie.sum
    }

    /// Whether rounding explains an error: the bounds of the outputs, [`bounds::linear`], in quadrature, since each
    /// is as many standard deviations of an independent error.
    fn explains(&self, error: f64, units: &Units, x: &[f32], recorded: &[f32]) -> bool {
        let outputs = &recorded[self.outputs.clone()];
        let squares = vectorized(
            #[inline(always)]
            || in_lanes(outputs, |y, _| f64::from(y) * f64::from(y)),
        );
        let factor = bounds::accumulation(x.len(), units.accumulator);
        let of_size = (factor + units.storage) * squares.sqrt();
        // What is infinite explains nothing. The terms need not be looked at where what the outputs allow is enough.
        let within = |bound: f64| bound.is_finite() && error <= bound;
        within(of_size) || within(of_size + factor * self.terms(x))
    }

    /// All terms of the outputs in quadrature, and what cancels between minima and quants.
    fn terms(&self, x: &[f32]) -> f64 {
        let x = Matrix::new(1, x.len(), x.iter().map(|&x| f64::from(x)).collect());
        let met = if self.group > 0 { group_sums(&x, self.group).data } else { Vec::new() };
        let cancelled: f64 = self.minima_squares.iter().zip(&met).map(|(w, met)| w * met * met).sum();
        let terms: f64 = self.squares.iter().zip(&x.data).map(|(w, x)| f64::from(*w) * x * x).sum();
        (terms + cancelled).sqrt()
    }
}

/// Σ a·b: so few products in f32 that what they round is far below what a sum of all does, the others in f64.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            const LANES: usize = 8;
            const ADDED: usize = 8;
            let mut sums = [0f64; LANES];
            let ((chunks_a, rest_a), (chunks_b, rest_b)) =
                (a.as_chunks::<{ LANES * ADDED }>(), b.as_chunks::<{ LANES * ADDED }>());
            for (a, b) in chunks_a.iter().zip(chunks_b) {
                let mut some = [0f32; LANES];
                for i in 0..ADDED {
                    for lane in 0..LANES {
                        some[lane] += a[i * LANES + lane] * b[i * LANES + lane];
                    }
                }
                for lane in 0..LANES {
                    sums[lane] += f64::from(some[lane]);
                }
            }
            let rest: f64 = rest_a.iter().zip(rest_b).map(|(a, b)| f64::from(a * b)).sum();
            sums.iter().sum::<f64>() + rest
        },
    )
}

/// Adds rows (signs, I) to Σ sign·w and Σ w²: up to [`ADDED`] of them in f32.
#[inline(always)]
fn add_rows(rows: &[f32], signs: &[f32], sums: &mut [f64], squares: &mut [f32]) {
    const LANES: usize = 16;
    let cols = sums.len();
    for start in (0..cols).step_by(LANES) {
        let width = LANES.min(cols - start);
        let (mut sum, mut square) = ([0f32; LANES], [0f32; LANES]);
        for (row, sign) in rows.chunks_exact(cols).zip(signs) {
            if let Some(w) = row[start..].first_chunk::<LANES>() {
                for lane in 0..LANES {
                    sum[lane] += sign * w[lane];
                    square[lane] += w[lane] * w[lane];
                }
            } else {
                for lane in 0..width {
                    sum[lane] += sign * row[start + lane];
                    square[lane] += row[start + lane] * row[start + lane];
                }
            }
        }
        for lane in 0..width {
            sums[start + lane] += f64::from(sum[lane]);
            squares[start + lane] += square[lane];
        }
    }
}

/// r[o]: a bit of SplitMix64 (Steele and others, OOPSLA 2014).
fn sign(o: usize) -> f32 {
    let mut z = (o as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    if (z ^ (z >> 31)) >> 63 == 1 { 1.0 } else { -1.0 }
}
