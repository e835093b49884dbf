//! What ARGSORT and TOP_K share: indices in the order of the values, and whether recorded ones are such.

use std::cmp::Ordering;

use super::source::rows;
use super::{Args, Choice};
use crate::scalar::Scalar;

/// The indices of a row in order; equal values in the order of their indices, NaN as the largest.
pub fn sorted<S: Scalar>(row: &[S], descending: bool) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..row.len()).collect();
    indices.sort_by(|a, b| {
        let order = compare(row[*a].to_f64(), row[*b].to_f64());
        if descending { order.reverse() } else { order }
    });
    indices
}

fn compare(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// The rows of a recorded choice (…, chosen) among the rows of source 0 that are not the exact one. `places` puts the
/// chosen values of a row in the order of the exact ones, which it is given.
///
/// The scores are the recorded ones, and comparing rounds nothing: only equal values may change places, `near` is 0.
/// Where a caller only knows the scores within an error, it has to allow for twice that error instead.
pub fn choices(
    args: &Args<'_, f64>,
    recorded: &[f64],
    exact: impl Fn(&[f64]) -> Vec<f64>,
    places: impl Fn(&mut Vec<f64>),
) -> Vec<Choice> {
    let (Some(scores), width) = (args.get(0), args.shape[3].max(1)) else { return Vec::new() };
    let mut out = Vec::new();
    for (row, recorded) in rows(args.shape).zip(recorded.chunks(width)) {
        let scores = scores.row(row);
        let margin = match distinct(recorded, scores.len()) {
            None => f64::NAN,
            // Comparisons with NaN are undefined behaviour of the producer: any order.
            Some(_) if scores.iter().any(|score| score.is_nan()) => 0.0,
            Some(chosen) => {
                let mut chosen: Vec<f64> = chosen.into_iter().map(|index| scores[index]).collect();
                places(&mut chosen);
                let off = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
                exact(&scores).iter().zip(&chosen).map(off).fold(0.0, f64::max)
            }
        };
        if margin != 0.0 {
            out.push(Choice { row, margin, near: 0.0 });
        }
    }
    out
}

/// Whole numbers below `limit`, none of them twice.
fn distinct(recorded: &[f64], limit: usize) -> Option<Vec<usize>> {
    let mut seen = vec![false; limit];
    let take = |value: &f64| {
        let index =
            (*value >= 0.0 && *value < limit as f64 && value.fract() == 0.0).then_some(*value as usize)?;
        (!std::mem::replace(&mut seen[index], true)).then_some(index)
    };
    recorded.iter().map(take).collect()
}
