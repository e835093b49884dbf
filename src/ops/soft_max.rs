//! SOFT_MAX: `dst[m] = e^(z_m - M) / (Σ e^(z - M) + e^(sink_h - M))`, `z = scale·s0 + slope_h·mask`, M the maximum of z
//! and sink.
//!
//! s0 (B, H, T, S) scores; s1 mask (b, h, >= T, S) in F16 or F32, or none: repeated modulo over B and H; s2 sinks (H,), or
//! none, with or without a mask. The result has s0's shape. Words: scale, max_bias: above 0, ALiBi's slopes, else 1
//! (Press et al., arXiv 2108.12409). A row of which everything is -inf gives NaN. The CPU has an f32 vector exponential,
//! adds groups of 16 in f32 and these in f64, and multiplies by the rounded inverse (ggml-cpu/ops.cpp, vec.cpp).

use parity_graph::Op;

use super::bound::{GROUP, NORMALISE_ROUNDINGS, TINY_F32, UNIT_F32, exponential, finite, row_sum, storage};
use super::convert::convert;
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::SoftMax,
    formula: "the softmax of scaled scores with mask and sinks: e^(z - M) / Σ e^(z - M), z = scale·x + \
        mask, M the largest z",
    explained: "the error of each exponential, that of its share of all, and the roundings of the sum, its \
        inverse and the product with it, relative to the result",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// One row of scores with what belongs to it.
struct ScoreRow<S> {
    /// scale·score + slope·mask, (S,)
    z: Vec<S>,
    /// slope·mask, (S,), or nothing.
    mask: Vec<S>,
    /// The sink of its head.
    sink: Option<S>,
}

impl<S: Scalar> ScoreRow<S> {
    /// The maximum, NaN where there is one.
    fn max(&self) -> S {
        let start = self.sink.unwrap_or(S::from_f32(f32::NEG_INFINITY));
        self.z.iter().fold(start, |max, &z| max.max_nan(z))
    }
}

fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
    let [b, h, t, s] = args.shape;
    let mask = args.get(1).is_none_or(|mask| {
        let [mb, mh, mt, ms] = mask.shape();
        mb > 0 && mh > 0 && b.is_multiple_of(mb) && h.is_multiple_of(mh) && mt >= t && ms == s
    });
    let sinks = args.get(2).is_none_or(|sinks| sinks.shape() == [1, 1, 1, h]);
    if args.source(0)?.shape() == args.shape && mask && sinks {
        return Ok(());
    }
    Err(args.misfit("scores (B, H, T, S), a mask (b, h, T, S) or none, and sinks (H,) or none"))
}

/// ALiBi's slope of head `h` of `heads`, in f32 as ggml has it.
pub(super) fn slope(max_bias: f32, h: usize, heads: usize) -> f64 {
    if max_bias <= 0.0 || heads == 0 {
        return 1.0;
    }
    let rounded = |value: f64| f64::from(value as f32);
    let power = 1usize << heads.ilog2();
    let base = |bias: f32| rounded(f64::exp2(f64::from(-bias / power as f32)));
    let value = match h < power {
        true => base(max_bias).powi(h as i32 + 1),
        false => base(max_bias / 2.0).powi((2 * (h - power) + 1) as i32),
    };
    rounded(value)
}

/// Which row of the mask belongs to a row of scores.
fn mask_row(mask: [usize; 4], [b, h, t]: [usize; 3]) -> [usize; 3] {
    [b % mask[0].max(1), h % mask[1].max(1), t]
}

fn row<S: Scalar>(args: &Args<'_, S>, at: [usize; 3]) -> Result<ScoreRow<S>> {
    let scale = S::from_f32(args.params.float(0));
    let slope = S::from_f64(slope(args.params.float(1), at[1], args.shape[1]));
    let mask: Vec<S> = args.get(1).map_or_else(Vec::new, |mask| {
        mask.row(mask_row(mask.shape(), at)).iter().map(|&mask| slope * mask).collect()
    });
    let mut z: Vec<S> = args.source(0)?.row(at).iter().map(|&score| score * scale).collect();
    z.iter_mut().zip(&mask).for_each(|(z, &mask)| *z += mask);
    args.arithmetic.softmax.scores.store(&mut z);
    let sink = args.get(2).map(|sinks| sinks.at([0, 0, 0, at[1]]));
    Ok(ScoreRow { z, mask, sink })
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    check(args)?;
    let mut out = Vec::with_capacity(args.elements());
    for at in rows(args.shape) {
        let row = row(args, at)?;
        let max = row.max();
        let start = out.len();
        out.extend(row.z.iter().map(|&z| (z - max).exp()));
        let sink = row.sink.map_or(0.0, |sink| (sink - max).exp().to_f64());
        let sum = out[start..].iter().map(|p| p.to_f64()).sum::<f64>() + sink;
        let inverse = S::from_f64(1.0 / sum);
        out[start..].iter_mut().for_each(|p| *p = convert(args.dtype, *p * inverse));
        args.arithmetic.softmax.weights.store(&mut out[start..]);
    }
    Ok(out)
}

/// The absolute error of z, which is the relative error of e^z: of the product with the scale, the one with the
/// slope and the power that the slope is, and the sum of both; and what the exponential adds of its own. The
/// maximum that is subtracted is the same for all, but z - M is rounded.
fn score_error(args: &Args<'_, f64>, row: &ScoreRow<f64>, i: usize, max: f64, head: usize) -> f64 {
    let z = row.z[i];
    let mask = row.mask.get(i).map_or(0.0, |&mask| {
        let powers = if args.params.float(1) > 0.0 { head as f64 + 2.0 } else { 0.0 };
        (powers + 1.0) * mask.abs() + (z - mask).abs()
    });
    UNIT_F32 * (z.abs() + mask + (z - max).abs()) + exponential(args.arithmetic, z - max)
}

/// dp = p·(δ - Σ p·δ), to first order; e^(δ + Σ p·δ) - 1 holds beyond. No probability is off by more than 1.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let nothing = vec![0.0; exact.len()];
    let width = args.shape[3].max(1);
    let normalise = row_sum(args.arithmetic, width, GROUP) + NORMALISE_ROUNDINGS * UNIT_F32;
    let mut out = Vec::with_capacity(exact.len());
    for (at, p) in rows(args.shape).zip(exact.chunks(width)) {
        let Ok(row) = row(args, at) else { return nothing };
        let max = row.max();
        let own: Vec<f64> = (0..p.len())
            .map(|i| if row.z[i] == f64::NEG_INFINITY { 0.0 } else { score_error(args, &row, i, max, at[1]) })
            .collect();
        let sink = row.sink.map_or(0.0, |sink| {
            let share = 1.0 - p.iter().sum::<f64>();
            share * (UNIT_F32 * (sink - max).abs() + exponential(args.arithmetic, sink - max))
        });
        let mean = own.iter().zip(p).map(|(e, p)| e * p).sum::<f64>() + sink.max(0.0);
        out.extend(own.iter().zip(p).map(|(e, &p)| {
            let bound = (p * (e + mean + normalise).exp_m1()).min(1.0) + TINY_F32;
            finite(p, bound + storage(args.dtype, p))
        }));
    }
    out
}

/// As of [`bound`], with the errors of scores, mask or sinks for the roundings.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let nothing = vec![0.0; exact.len()];
    let [_, heads, _, width] = args.shape;
    let Some(source) = args.get(slot).filter(|_| slot < 3) else { return nothing };
    let [_, b, c, d] = source.shape();
    let scale = f64::from(args.params.float(0)).abs();
    let mut out = Vec::with_capacity(exact.len());
    for (at, p) in rows(args.shape).zip(exact.chunks(width.max(1))) {
        let start = |[i, j, k]: [usize; 3]| ((i * b + j) * c + k) * d;
        let (own, factor) = match slot {
            0 => (&error[start(at)..][..width], scale),
            1 => {
                let slope = slope(args.params.float(1), at[1], heads);
                (&error[start(mask_row(source.shape(), at))..][..width], slope)
            }
            _ => (&[][..], 0.0),
        };
        let common = match slot {
            2 => (1.0 - p.iter().sum::<f64>()).max(0.0) * error[at[1]],
            _ => own.iter().zip(p).map(|(e, p)| e * p).sum::<f64>() * factor,
        };
        out.extend(p.iter().enumerate().map(|(i, &p)| {
            let total = own.get(i).map_or(0.0, |e| e * factor) + common;
            finite(p, (p * total.exp_m1()).min(1.0))
        }));
    }
    out
}
