//! What rounding explains of attention.

use rayon::prelude::*;

use super::super::bound::{
    CONFIDENCE, SUBNORMAL_F16, TINY_F32, UNIT_F16, UNIT_F32, accumulation, least_of, unit_of,
};
use super::super::source::Args;
use super::ALONE_MAX;
use super::row::{Attention, QueryRow, Seen};
use super::running::followed;
use super::sums::Off;
use crate::arithmetic::round::{NORMAL_F16, Rounding, Tie};
use crate::arithmetic::{Flash, Narrow, Weights};
use crate::scalar::{in_lanes, vectorized};

/// exp in units of u: ggml's `ggml_v_expf` is within 1.95 ulp, an ulp is up to 2u. tanh is no worse.
pub(super) const EXP_ROUNDINGS: f64 = 4.0;
/// A score is scaled, masked, and the maximum is subtracted from it.
const SCORE_ROUNDINGS: f64 = 3.0;
/// The slope, which a library's power gives within an ulp, its product with the mask, and the sum.
const BIAS_ROUNDINGS: f64 = 4.0;
/// The sum's inverse and the product with it.
pub(super) const NORMALISE_ROUNDINGS: f64 = 3.0;
/// Threads that share a score on Vulkan.
const LANES_OF_A_SCORE: usize = 8;
/// Columns that a matrix unit adds up at a time.
const UNIT_COLUMNS: usize = 16;
/// A score that is less certain than this says nothing of its weight.
pub(super) const UNKNOWN: f64 = 8.0;
/// The rounding of a value and of the same value moved a little: two errors in quadrature.
pub const TWO_ROUNDINGS: f64 = std::f64::consts::SQRT_2;

/// Of each element, absolute.
pub fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Ok(attention) = Attention::new(args) else { return vec![0.0; exact.len()] };
    each_row(args, &attention, exact, |row, exact| {
        let errors = score_errors(&attention, row);
        match in_half(&attention, row, Off { scores: &errors, values: &|_| Vec::new() }, exact) {
            Some(bound) => bound,
            None if attention.is_narrow() => followed(&attention, row, &errors, exact),
            None => unfollowed(&attention, row, &errors, exact),
        }
    })
}

/// Of kernels of devices that keep sums in f16: how far a row may be from its exact values.
pub(super) fn in_half(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    off: Off<'_>,
    exact: &[f64],
) -> Option<Vec<f64>> {
    match attention.kind {
        Flash::Lanes(lanes) => Some(attention.on_lanes(row, lanes, Some(off)).bound(exact)),
        Flash::Units(units) => Some(attention.on_units(row, units, Some(off)).bound(exact)),
        _ => None,
    }
}

/// Absolute error of the score of each seen position.
pub(super) fn score_errors(attention: &Attention<'_, '_, f64>, row: &QueryRow) -> Vec<f64> {
    row.seen.iter().map(|seen| score_error(attention, row, seen)).collect()
}

/// `f` of every row of the result and its exact values, one behind the other.
pub fn each_row(
    args: &Args<'_, f64>,
    attention: &Attention<'_, '_, f64>,
    exact: &[f64],
    f: impl Fn(&QueryRow, &[f64]) -> Vec<f64> + Sync,
) -> Vec<f64> {
    let [_, n, heads, width] = args.shape;
    let each = |(index, exact): (usize, &[f64])| {
        let row = attention.row(index / heads / n, index % heads, index / heads % n);
        f(&row, exact)
    };
    let rows: Vec<Vec<f64>> = match args.elements().saturating_mul(attention.k.shape()[2]) {
        ..=ALONE_MAX => exact.chunks(width.max(1)).enumerate().map(each).collect(),
        _ => exact.par_chunks(width.max(1)).enumerate().map(each).collect(),
    };
    rows.concat()
}

/// Absolute error of a score: the product's, which may add up in f16, and that of its ties in the rounding of Q.
fn score_error(attention: &Attention<'_, '_, f64>, row: &QueryRow, seen: &Seen) -> f64 {
    let query = attention.query(row.at);
    let q = attention.q.row(query);
    let k = attention.key(row.at, seen.position);
    let terms = vectorized(
        #[inline(always)]
        || in_lanes(q, &k, |q, k| (q * k).powi(2)),
    );
    let native = attention.kind == Flash::NativeF16 && attention.rounding == Rounding::F16;
    let unit = if native { UNIT_F16 } else { UNIT_F32 };
    let scale = attention.scale.abs();
    // As many sums one after the other as a kernel has.
    let steps = match attention.kind {
        Flash::Lanes(_) => q.len() / LANES_OF_A_SCORE + LANES_OF_A_SCORE.ilog2() as usize,
        Flash::Units(_) => q.len() / UNIT_COLUMNS + 1,
        _ => q.len(),
    };
    let summed = accumulation(steps, unit) * (terms.sqrt() * scale + seen.scaled.abs());
    let first = attention.ties.partition_point(|tie| tie.row < query);
    let ties = attention.ties[first..].iter().take_while(|tie| tie.row == query);
    let tied = |tie: &Tie| {
        let block = attention.rounding.block(q.len());
        let start = tie.col / block * block;
        let of_sum = if tie.sum == 0.0 { 0.0 } else { tie.sum * attention.minimum(&k[start..start + block]) };
        scale * ((tie.value * k[tie.col]).abs() + of_sum.abs())
    };
    let of_key = || attention.k.row(attention.cached(attention.k, row.at, seen.position));
    let of_keys =
        if attention.before.any() { attention.before.tied_keys(attention.kind, &of_key(), q) } else { 0.0 };
    let tied = ties.map(tied).sum::<f64>() + scale * of_keys;
    let capped = if attention.cap == 0.0 { 0.0 } else { EXP_ROUNDINGS };
    let rounded = SCORE_ROUNDINGS * (seen.scaled.abs() + seen.z.abs())
        + capped * attention.cap.abs().min(seen.scaled.abs());
    let error = summed
        + tied
        + attention.of_integers(query, &k)
        + UNIT_F32 * (rounded + BIAS_ROUNDINGS * seen.bias.abs());
    if attention.rounds_scores() { between_roundings(attention, seen, error) } else { error }
}

/// How far a score that is rounded to a narrow type may be off: what lies between two of its numbers but for an `error` may be
/// rounded to either.
fn between_roundings(attention: &Attention<'_, '_, f64>, seen: &Seen, error: f64) -> f64 {
    let off = error / attention.scale.abs().max(TINY_F32);
    let ends = [seen.product - off, seen.product + off].map(|product| attention.score(product, seen.bias).1);
    ends.into_iter().map(|end| (end - seen.z).abs()).fold(0.0, f64::max)
}

/// Normalised weights, (seen,), and that of the sink.
pub fn weights(row: &QueryRow) -> (Vec<f64>, f64) {
    let max = row.seen.iter().map(|seen| seen.z).chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = row.seen.iter().map(|seen| (seen.z - max).exp()).collect();
    let sink = row.sink.map_or(0.0, |sink| (sink - max).exp());
    let sum = weights.iter().sum::<f64>() + sink;
    if sum == 0.0 || row.seen.is_empty() {
        return (vec![0.0; weights.len()], 0.0);
    }
    (weights.into_iter().map(|p| p / sum).collect(), sink / sum)
}

/// Σ p·error·|v - out| for the scores, the accumulation of the values and of the weights that they are divided by,
/// and in quadrature what an engine with f16 arithmetic rounds on the way.
fn unfollowed(attention: &Attention<'_, '_, f64>, row: &QueryRow, errors: &[f64], exact: &[f64]) -> Vec<f64> {
    let (p, sink) = weights(row);
    let mut spread: Vec<f64> = exact.iter().map(|y| sink * EXP_ROUNDINGS * UNIT_F32 * y.abs()).collect();
    let mut terms = vec![0.0; exact.len()];
    for ((seen, p), error) in row.seen.iter().zip(&p).zip(errors) {
        let error = (error + EXP_ROUNDINGS * UNIT_F32).min(UNKNOWN).exp_m1();
        let value = attention.value(row.at, seen.position);
        let (p, moved, value) = (*p, p * error, &value[..]);
        let (spread, terms) = (&mut spread[..], &mut terms[..]);
        // What is moved into a closure may be read by nothing else: else the loop becomes no vector instructions.
        vectorized(
            #[inline(always)]
            move || {
                let sums = spread.iter_mut().zip(terms);
                for ((spread, terms), (v, exact)) in sums.zip(value.iter().zip(exact)) {
                    *spread += moved * (v - exact).abs() + TINY_F32 * v.abs();
                    *terms += (p * v).powi(2);
                }
            },
        );
    }
    let native = attention.kind == Flash::NativeF16 && attention.v.dtype == crate::gguf::DType::F16;
    let narrow = match attention.kind {
        _ if native => narrow_sums(attention, row, &p),
        Flash::Rounded(narrow, of, _) if of.weights != Weights::Kept => {
            rounded_weights(attention, row, narrow, &p)
        }
        _ => vec![0.0; exact.len()],
    };
    let factor = accumulation(row.seen.len(), UNIT_F32);
    let of = |d: usize| {
        let summed = factor * (f64::sqrt(terms[d]) + 2.0 * exact[d].abs());
        spread[d] + summed + narrow[d] + NORMALISE_ROUNDINGS * UNIT_F32 * exact[d].abs()
    };
    (0..exact.len()).map(of).collect()
}

/// What rounding the weights, and the sum after every position, to f16 may move an output by, in quadrature.
pub fn narrow_sums(attention: &Attention<'_, '_, f64>, row: &QueryRow, p: &[f64]) -> Vec<f64> {
    let width = attention.v.shape()[3];
    let (mut running, mut square) = (vec![0.0; width], vec![0.0; width]);
    let sum = row.seen.iter().map(|seen| seen.z).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.seen.iter().map(|seen| (seen.z - sum).exp()).sum();
    let subnormal = SUBNORMAL_F16 / sum.max(1.0);
    let mut max = f64::NEG_INFINITY;
    for (seen, p) in row.seen.iter().zip(p) {
        // Added to, and where the maximum moved multiplied by a factor that is rounded too.
        let times = if seen.z > max { 3.0 } else { 1.0 };
        max = max.max(seen.z);
        for (d, v) in attention.value(row.at, seen.position).iter().enumerate() {
            running[d] += p * v;
            square[d] += (UNIT_F16 * p * v).powi(2) + times * (UNIT_F16 * running[d]).powi(2);
            square[d] += (subnormal * v).powi(2) + subnormal.powi(2);
        }
    }
    square.into_iter().map(|square| CONFIDENCE * square.sqrt()).collect()
}

/// What rounding the weights, before or after they are divided by their sum, may move an output by: two roundings in
/// quadrature, or one where both cut off what they lose on the same side.
pub fn rounded_weights(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    narrow: Narrow,
    p: &[f64],
) -> Vec<f64> {
    let width = attention.v.shape()[3];
    let (unit, least) = (unit_of(narrow), least_of(narrow));
    // Where numbers that are not normal are 0, the least normal one may be as well.
    let is_open = |p: f64| attention.flushes && (p / NORMAL_F16 - 1.0).abs() <= 2.0 * unit;
    let (mut sum, mut square) = (vec![0.0; width], vec![0.0; width]);
    for (seen, p) in row.seen.iter().zip(p) {
        let value = attention.value(row.at, seen.position);
        let of_weight = unit * p + least + if is_open(*p) { *p } else { 0.0 };
        for ((sum, square), v) in sum.iter_mut().zip(&mut square).zip(value.iter()) {
            let off = of_weight * v.abs();
            *sum += off;
            *square += off * off;
        }
    }
    match narrow {
        Narrow::Tf32Cut => sum,
        _ => square.into_iter().map(|square| CONFIDENCE * TWO_ROUNDINGS * square.sqrt()).collect(),
    }
}
