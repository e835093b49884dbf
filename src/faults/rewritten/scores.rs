//! Attention with scores that something happens to.

use parity_graph::Op;
use parity_graph::rewrite::Scores;

use super::Rewritten;
use crate::engine::op_by_op::{Number, Unknown};
use crate::ops::Args;
use crate::scalar::Scalar;

impl<S: Number> Rewritten<'_, S> {
    /// Attention, or its softmax, with scores that something happens to.
    pub(super) fn of_scores(&self, like: &Args<'_, S>, scores: Scores) -> Result<Vec<S>, Unknown> {
        let args = self.args(like);
        let slots = |slot: usize| {
            args.get(slot).ok_or_else(|| Unknown::new(format!("source {slot} of {}", like.name)))
        };
        let flash = self.op == Op::FlashAttn;
        let (mask, scale) = (slots(if flash { 3 } else { 1 })?, S::from_f64(f64::from(self.params.float(0))));
        let weigh = |row: &mut Vec<S>, mask: &[S]| {
            for (score, mask) in row.iter_mut().zip(mask) {
                *score =
                    if mask.to_f64().is_finite() { limited(*score * scale, scores) } else { hidden(scores) };
            }
            if scores != Scores::NoSoftmax {
                softmax(row);
            }
        };
        let mut out = Vec::with_capacity(like.elements());
        if !flash {
            let x = slots(0)?;
            let [n, heads, rows, _] = x.shape();
            for (b, h, t) in
                (0..n).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |t| (b, h, t))))
            {
                let mut row = x.row([b, h, t]).into_owned();
                weigh(&mut row, &mask.row([0, 0, t]));
                out.extend(row);
            }
            return Ok(out);
        }
        let (q, k, v) = (slots(0)?, slots(1)?, slots(2)?);
        let ([_, heads, rows, _], [_, kv, places, _]) = (q.shape(), k.shape());
        let group = (heads / kv.max(1)).max(1);
        for t in 0..rows {
            let mask = mask.row([0, 0, t]);
            for h in 0..heads {
                let query = q.row([0, h, t]);
                let known = self.products.map(|products| products.row(h * rows + t));
                let dot = |c: usize| {
                    let key = || k.row([0, h / group, c]);
                    let summed = || query.iter().zip(key().iter()).fold(S::ZERO, |sum, (a, b)| sum + *a * *b);
                    known.map_or_else(summed, |known| S::from_f64(known[c]))
                };
                let mut row: Vec<S> = (0..places).map(dot).collect();
                weigh(&mut row, &mask);
                let mut sum = vec![S::ZERO; v.shape()[3]];
                for (c, weight) in row.iter().enumerate().filter(|(_, weight)| weight.to_f64() != 0.0) {
                    let value = v.row([0, h / group, c]);
                    sum.iter_mut().zip(value.iter()).for_each(|(sum, value)| *sum += *weight * *value);
                }
                out.extend(sum);
            }
        }
        Ok(out)
    }
}

fn limited<S: Scalar>(score: S, scores: Scores) -> S {
    match scores {
        Scores::NoSoftmax => score,
        Scores::Clamp(limit) => S::from_f64(score.to_f64().clamp(-f64::from(limit), f64::from(limit))),
    }
}

/// A score that is not seen: no weight, or none behind the softmax.
fn hidden<S: Scalar>(scores: Scores) -> S {
    match scores {
        Scores::NoSoftmax => S::ZERO,
        Scores::Clamp(_) => S::from_f64(f64::NEG_INFINITY),
    }
}

fn softmax<S: Scalar>(row: &mut [S]) {
    let largest = row.iter().map(|score| score.to_f64()).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = row.iter().map(|score| (score.to_f64() - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    row.iter_mut().zip(weights).for_each(|(score, weight)| *score = S::from_f64(weight / sum));
}
