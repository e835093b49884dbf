//! What rounding explains of sums in f16 that are rounded after every cached position, as llama.cpp's CPU kernels have
//! them.

use super::super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::explain::{EXP_ROUNDINGS, NORMALISE_ROUNDINGS, UNKNOWN};
use super::narrow::round_f16;
use super::row::{Attention, Part, QueryRow};
use crate::scalar::vectorized;

/// A value is multiplied by its weight and added, in one step or in two.
const TERM_ROUNDINGS: f64 = 2.0;

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
pub fn followed(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    errors: &[f64],
    exact: &[f64],
) -> Vec<f64> {
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
