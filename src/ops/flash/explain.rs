//! What rounding explains of attention, and how errors of its sources are carried.

use rayon::prelude::*;

use super::super::bound::{CONFIDENCE, SUBNORMAL_F16, TINY_F32, UNIT_F16, UNIT_F32, accumulation};
use super::super::source::Args;
use super::row::{Attention, Part, QueryRow, Seen, minimum, round_f16};
use crate::arithmetic::Flash;
use crate::arithmetic::round::{Rounding, Tie, half_steps};
use crate::scalar::{in_lanes, vectorized};
use crate::tensor::Matrix;

/// exp in units of u: ggml's `ggml_v_expf` is within 1.95 ulp, an ulp is up to 2u. tanh is no worse.
const EXP_ROUNDINGS: f64 = 4.0;
/// A score is scaled, masked, and the maximum is subtracted from it.
const SCORE_ROUNDINGS: f64 = 3.0;
/// The slope, which a library's power gives within an ulp, its product with the mask, and the sum.
const BIAS_ROUNDINGS: f64 = 4.0;
/// The sum's inverse and the product with it.
const NORMALISE_ROUNDINGS: f64 = 3.0;
/// A value is multiplied by its weight and added, in one step or in two.
const TERM_ROUNDINGS: f64 = 2.0;
/// Threads that share a score on Vulkan.
const LANES_OF_A_SCORE: usize = 8;
/// Columns that a matrix unit adds up at a time.
const UNIT_COLUMNS: usize = 16;
/// A score that is less certain than this says nothing of its weight.
const UNKNOWN: f64 = 8.0;
/// The rounding of a value and of the same value moved a little: two errors in quadrature.
const TWO_ROUNDINGS: f64 = std::f64::consts::SQRT_2;

/// Of each element, absolute.
pub fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Ok(attention) = Attention::new(args) else { return vec![0.0; exact.len()] };
    each_row(args, &attention, exact, |row, exact| {
        let errors: Vec<f64> = row.seen.iter().map(|seen| score_error(&attention, row, seen)).collect();
        match attention.kind {
            Flash::Lanes(lanes) => attention.on_lanes(row, lanes, Some(&errors)).bound(exact),
            Flash::Units(units) => attention.on_units(row, units, Some(&errors)).bound(exact),
            _ if attention.is_narrow() => followed(&attention, row, &errors, exact),
            _ => unfollowed(&attention, row, &errors, exact),
        }
    })
}

/// `f` of every row of the result and its exact values, one behind the other.
fn each_row(
    args: &Args<'_, f64>,
    attention: &Attention<'_, '_, f64>,
    exact: &[f64],
    f: impl Fn(&QueryRow, &[f64]) -> Vec<f64> + Sync,
) -> Vec<f64> {
    let [_, n, heads, width] = args.shape;
    let rows: Vec<Vec<f64>> = exact
        .par_chunks(width.max(1))
        .enumerate()
        .map(|(index, exact)| {
            let row = attention.row(index / heads / n, index % heads, index / heads % n);
            f(&row, exact)
        })
        .collect();
    rows.concat()
}

/// Absolute error of a score: the product's, which may add up in f16, and that of its ties in the rounding of Q.
fn score_error(attention: &Attention<'_, '_, f64>, row: &QueryRow, seen: &Seen) -> f64 {
    let query = attention.query(row.at);
    let q = attention.q.row(query);
    let k = attention.key(row.at, seen.position);
    let terms = vectorized(
        #[inline(always)]
        || in_lanes(q, |q, i| (q * k[i]).powi(2)),
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
        let start = tie.col / attention.rounding.block() * attention.rounding.block();
        let of_sum = if tie.sum == 0.0 {
            0.0
        } else {
            tie.sum * minimum(&k[start..start + attention.rounding.block()])
        };
        scale * ((tie.value * k[tie.col]).abs() + of_sum.abs())
    };
    let tied: f64 = ties.map(tied).sum();
    let capped = if attention.cap == 0.0 { 0.0 } else { EXP_ROUNDINGS };
    let rounded = SCORE_ROUNDINGS * (seen.scaled.abs() + seen.z.abs())
        + capped * attention.cap.abs().min(seen.scaled.abs());
    summed + tied + UNIT_F32 * (rounded + BIAS_ROUNDINGS * seen.bias.abs())
}

/// Relative error of exp(z - max), where both scores have errors.
fn weight_error(error: f64, of_max: f64) -> f64 {
    (error + of_max + (EXP_ROUNDINGS + TERM_ROUNDINGS) * UNIT_F32).min(UNKNOWN).exp_m1()
}

/// The least and the largest values that a sum in f16 may have.
struct Range {
    part: Part,
    /// (DV,) each
    low: Vec<f64>,
    high: Vec<f64>,
    /// Error of the largest score.
    of_max: f64,
    /// Σ exp(z - max)·(relative error)
    errors: f64,
}

/// The sum in f16 is followed step by step. What f32 rounds on the way is a small interval, which most roundings to
/// f16 close again; where it reaches over the middle between two f16 numbers, both are followed.
fn followed(attention: &Attention<'_, '_, f64>, row: &QueryRow, errors: &[f64], exact: &[f64]) -> Vec<f64> {
    let ranges: Vec<Range> =
        attention.parts(row).into_iter().map(|range| interval(attention, row, errors, range)).collect();
    let largest = ranges.iter().map(|range| range.part.max).chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = row.sink.map_or(0.0, |sink| (sink - largest).exp());
    let mut wrong = 0.0;
    let of_largest = ranges.iter().find(|range| range.part.max == largest).map_or(0.0, |range| range.of_max);
    let (mut low, mut high) = (vec![0.0; exact.len()], vec![0.0; exact.len()]);
    let mut weights = vec![0.0; exact.len()];
    for range in ranges.iter().filter(|range| range.part.sum != 0.0) {
        let weight = (range.part.max - largest).exp();
        let own = if weight == 1.0 { 0.0 } else { weight_error(range.of_max, of_largest) };
        sum += weight * range.part.sum;
        wrong += weight * (range.errors + own * range.part.sum);
        for d in 0..exact.len() {
            low[d] += weight * range.low[d];
            high[d] += weight * range.high[d];
            weights[d] += weight * own * range.low[d].abs().max(range.high[d].abs());
        }
    }
    if sum == 0.0 {
        return vec![0.0; exact.len()];
    }
    if let Some(sink) = row.sink {
        wrong += (sink - largest).exp() * weight_error(0.0, of_largest);
    }
    let common = wrong / sum + accumulation(row.seen.len(), UNIT_F32) + NORMALISE_ROUNDINGS * UNIT_F32;
    let of = |d: usize| {
        let off = (high[d] / sum - exact[d]).max(exact[d] - low[d] / sum).max(0.0);
        off + weights[d] / sum + common * exact[d].abs() + TINY_F32
    };
    (0..exact.len()).map(of).collect()
}

fn interval(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    errors: &[f64],
    range: std::ops::Range<usize>,
) -> Range {
    let width = attention.v.shape()[3];
    let part = Part { max: f64::NEG_INFINITY, sum: 0.0, values: Vec::new() };
    let mut out = Range { part, low: vec![0.0; width], high: vec![0.0; width], of_max: 0.0, errors: 0.0 };
    for (seen, &error) in row.seen[range.clone()].iter().zip(&errors[range]) {
        let value = attention.value(row.at, seen.position);
        let max = out.part.max;
        // The same order of two scores is not certain where they are as near as their errors.
        let near = (seen.z - max).abs() <= error + out.of_max;
        let relative = weight_error(error, out.of_max);
        let (mut scale, mut p) = (1.0, 1.0);
        if seen.z > max {
            scale = (max - seen.z).exp();
            (out.part.max, out.of_max) = (seen.z, error);
        } else {
            p = (seen.z - max).exp();
        }
        let scaled = scale != 1.0 || near;
        let scales = (scale * (1.0 - relative).max(0.0), if near { 1.0 } else { scale * (1.0 + relative) });
        let weights = (p * (1.0 - relative).max(0.0), p * (1.0 + relative));
        out.part.sum = out.part.sum * scale + p;
        out.errors =
            (out.errors + out.part.sum * if scale == 1.0 { 0.0 } else { relative }) * scale + p * relative;
        vectorized(
            #[inline(always)]
            || {
                for ((low, high), v) in out.low.iter_mut().zip(&mut out.high).zip(value.iter()) {
                    if scaled {
                        *low = round_f16(least(*low * scales.0, *low * scales.1));
                        *high = round_f16(-least(-*high * scales.0, -*high * scales.1));
                    }
                    *low = round_f16(*low + least(v * weights.0, v * weights.1));
                    *high = round_f16(*high - least(-v * weights.0, -v * weights.1));
                }
            },
        );
    }
    out
}

#[inline(always)]
fn least(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// Normalised weights, (seen,), and that of the sink.
fn weights(row: &QueryRow) -> (Vec<f64>, f64) {
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
        let moved = p * error;
        vectorized(
            #[inline(always)]
            || {
                let sums = spread.iter_mut().zip(&mut terms);
                for ((spread, terms), (v, exact)) in sums.zip(value.iter().zip(exact)) {
                    *spread += moved * (v - exact).abs() + TINY_F32 * v.abs();
                    *terms += (p * v).powi(2);
                }
            },
        );
    }
    let native = attention.kind == Flash::NativeF16 && attention.v.dtype == crate::gguf::DType::F16;
    let narrow = if native { narrow_sums(attention, row, &p) } else { vec![0.0; exact.len()] };
    let factor = accumulation(row.seen.len(), UNIT_F32);
    let of = |d: usize| {
        let summed = factor * (f64::sqrt(terms[d]) + 2.0 * exact[d].abs());
        spread[d] + summed + narrow[d] + NORMALISE_ROUNDINGS * UNIT_F32 * exact[d].abs()
    };
    (0..exact.len()).map(of).collect()
}

/// What rounding the weights, and the sum after every position, to f16 may move an output by, in quadrature.
fn narrow_sums(attention: &Attention<'_, '_, f64>, row: &QueryRow, p: &[f64]) -> Vec<f64> {
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

/// First order in the errors of the scores, times what exponentials of larger ones add. Where the kernel rounds to
/// f16, everything that is moved may be rounded to the other side.
pub fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let (Ok(attention), Some(source)) = (Attention::new(args), args.get(slot)) else {
        return vec![0.0; exact.len()];
    };
    let [_, sh, sn, width] = source.shape();
    let of_row = |[b, h, n]: [usize; 3]| &error[((b * sh + h) * sn + n) * width..][..width];
    let steps = query_steps(args, &attention);
    each_row(args, &attention, exact, |row, exact| {
        let (p, sink) = weights(row);
        let [b, h, n] = row.at;
        let moves: Vec<f64> = row
            .seen
            .iter()
            .map(|seen| match slot {
                0 | 1 => moved_score(&attention, row, seen, slot, &of_row, &steps),
                3 => {
                    let [mb, mh, _, _] = source.shape();
                    attention.slope(h) * of_row([b % mb, h % mh, n])[seen.position]
                }
                _ => 0.0,
            })
            .collect();
        let of_sink = if slot == 4 { error[h] } else { 0.0 };
        let largest = moves.iter().copied().fold(of_sink, f64::max);
        let beyond = (2.0 * largest).min(UNKNOWN).exp();
        let mut out: Vec<f64> = exact.iter().map(|y| sink * of_sink * y.abs() * beyond).collect();
        for ((seen, p), moved) in row.seen.iter().zip(&p).zip(&moves) {
            let value = attention.value(row.at, seen.position);
            let own = (slot == 2).then(|| of_row(attention.cached(attention.v, row.at, seen.position)));
            for (d, v) in value.iter().enumerate() {
                out[d] += p * moved * beyond * (v - exact[d]).abs() + own.map_or(0.0, |own| p * own[d]);
            }
        }
        if attention.is_narrow() && out.iter().any(|moved| *moved > 0.0) {
            let narrow = narrow_sums(&attention, row, &p);
            out.iter_mut().zip(narrow).for_each(|(out, narrow)| *out += TWO_ROUNDINGS * narrow);
        }
        out
    })
}

/// Half a step of the rounding of each query, (B·H·N, DK); nothing where they are not rounded.
fn query_steps(args: &Args<'_, f64>, attention: &Attention<'_, '_, f64>) -> Option<Matrix<f64>> {
    let query = args.get(0).filter(|_| attention.rounding != Rounding::None)?;
    let (rows, width) = (attention.q.rows, attention.q.cols);
    Some(half_steps(attention.rounding, &Matrix::new(rows, width, query.values().into_owned())))
}

/// How far a score moves with an error of Q or K.
fn moved_score<'e>(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    seen: &Seen,
    slot: usize,
    of_row: &impl Fn([usize; 3]) -> &'e [f64],
    steps: &Option<Matrix<f64>>,
) -> f64 {
    let query = attention.query(row.at);
    let place = attention.cached(attention.k, row.at, seen.position);
    let (q, k) = (attention.q.row(query), attention.k.row(place));
    let along = |error: &[f64], other: &[f64]| error.iter().zip(other).map(|(e, x)| e * x.abs()).sum::<f64>();
    let scale = attention.scale.abs();
    if slot == 1 {
        return scale * along(of_row(place), q);
    }
    let error = of_row(row.at);
    let rounded = match steps {
        Some(steps) if error.iter().any(|e| *e > 0.0) => {
            let squares = steps.row(query).iter().zip(k.iter()).map(|(step, k)| (step * k).powi(2));
            CONFIDENCE * TWO_ROUNDINGS * squares.sum::<f64>().sqrt()
        }
        _ => 0.0,
    };
    scale * (along(error, &k) + rounded)
}
