//! DSV4_HC_PRE: `dst[t, d] = scale · Σ_h x[t, h, d] · w[t, h]`, the streams of hyper-connections into a layer's input.
//!
//! s0 x (T, hc, D), s1 weights (T, hc), or where `gated` (T, hc, D), each replaced by its sigmoid; the result (T, D).
//! Words: scale, gated. The CPU computes in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Dsv4HcPre,
    formula: "the weighted sum of the streams of hyper-connections: scale · Σ_h x[h]·w[h]",
    explained: "the roundings of the products and of their sum, in quadrature, and of the sigmoid where the \
        weights go through one",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// exp in units of u (within 2 ulp), the sum with 1 and the quotient.
const SIGMOID_ROUNDINGS: f64 = 6.0;
/// The weight's share of the scale, and the product with it.
const SCALE_ROUNDINGS: f64 = 2.0;
/// A sigmoid is nowhere steeper.
const STEEPEST: f64 = 0.25;

/// `f` of the values of x, their weights as they were given, and where both are, for every element of the result.
fn each<S: Scalar>(args: &Args<'_, S>, f: impl Fn(&[[f64; 2]], &[[usize; 2]]) -> f64) -> Result<Vec<f64>> {
    let (x, w) = (args.source(0)?, args.source(1)?);
    let [one, t, hc, d] = x.shape();
    let expected = if is_gated(args) { [1, t, hc, d] } else { [1, 1, t, hc] };
    if one != 1 || w.shape() != expected || args.shape != [1, 1, t, d] {
        return Err(args.misfit("x (T, hc, D) and weights (T, hc), gated (T, hc, D), for a result (T, D)"));
    }
    let (x, w) = (x.values(), w.values());
    let mut out = Vec::with_capacity(t * d);
    let (mut pairs, mut places) = (vec![[0.0; 2]; hc], vec![[0; 2]; hc]);
    for i in 0..t * d {
        for h in 0..hc {
            let at = (i / d * hc + h) * d + i % d;
            places[h] = [at, if is_gated(args) { at } else { i / d * hc + h }];
            pairs[h] = [x[at].to_f64(), w[places[h][1]].to_f64()];
        }
        out.push(f(&pairs, &places));
    }
    Ok(out)
}

fn is_gated<S>(args: &Args<'_, S>) -> bool {
    args.params.int(1) != 0
}

fn scale<S>(args: &Args<'_, S>) -> f64 {
    f64::from(args.params.float(0))
}

/// What a stream is multiplied by.
fn weight(gated: bool, w: f64) -> f64 {
    if gated { 1.0 / (1.0 + (-w).exp()) } else { w }
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (gated, scale) = (is_gated(args), scale(args));
    let out = each(args, |pairs, _| scale * pairs.iter().map(|[x, w]| x * weight(gated, *w)).sum::<f64>())?;
    Ok(out.into_iter().map(S::from_f64).collect())
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let (gated, scale) = (is_gated(args), scale(args).abs());
    let own = SCALE_ROUNDINGS + if gated { SIGMOID_ROUNDINGS } else { 0.0 };
    let of = |pairs: &[[f64; 2]], _: &[[usize; 2]]| {
        let terms = pairs.iter().map(|[x, w]| x * weight(gated, *w));
        let (sum, magnitude) = (terms.clone().sum::<f64>(), terms.clone().map(f64::abs).sum::<f64>());
        let square = terms.map(|term| term * term).sum::<f64>().sqrt();
        let summed = accumulation(pairs.len(), UNIT_F32) * (square + sum.abs());
        scale * (summed + UNIT_F32 * (own * magnitude + sum.abs())) + TINY_F32
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let (gated, scale) = (is_gated(args), scale(args).abs());
    let of = |pairs: &[[f64; 2]], places: &[[usize; 2]]| {
        let moved = pairs.iter().zip(places).map(|([x, w], [x_at, w_at])| match slot {
            0 => error[*x_at] * weight(gated, *w).abs(),
            1 => {
                let e = error[*w_at];
                let w = weight(gated, *w);
                // The slope of a sigmoid changes by no more than the factor e^error.
                let steepness = if gated { (w * (1.0 - w) * e.min(1.0).exp()).min(STEEPEST) } else { 1.0 };
                x.abs() * steepness * e
            }
            _ => 0.0,
        });
        scale * moved.sum::<f64>()
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Numbers, Trial};

    fn trial(gated: bool) -> Trial {
        let mut numbers = Numbers::new(5);
        let (t, hc, d) = (3, 4, 6);
        let weights = if gated { [1, t, hc, d] } else { [1, 1, t, hc] };
        let given = vec![
            Some(Given::random(&mut numbers, [1, t, hc, d]).laid_out([0, 2, 1, 3])),
            Some(Given::random(&mut numbers, weights).laid_out([0, 1, 3, 2])),
        ];
        let mut trial = Trial::new(Op::Dsv4HcPre, given, [1, 1, t, d]);
        trial.params.set_float(0, if gated { 0.25 } else { 1.0 });
        trial.params.set_int(1, i32::from(gated));
        trial
    }

    #[test]
    fn streams_are_weighted() {
        for gated in [false, true] {
            let own = trial(gated);
            let (x, w) = (own.given[0].as_ref().unwrap().to_vec(), own.given[1].as_ref().unwrap().to_vec());
            let of = |i: usize| {
                let (t, d) = (i / 6, i % 6);
                let sum = (0..4).fold(0f32, |sum, h| {
                    let at = (t * 4 + h) * 6 + d;
                    let w = if gated { 1.0 / (1.0 + (-w[at] as f32).exp()) } else { w[t * 4 + h] as f32 };
                    sum + x[at] as f32 * w
                });
                f64::from(if gated { sum * 0.25 } else { sum })
            };
            let recorded: Vec<f64> = (0..18).map(of).collect();
            let excess = own.excess(&recorded);
            assert!(excess <= 1.0, "{excess}");
            own.assert_single_within_bound();
            assert!(own.bound(&own.double()).iter().all(|b| *b < 4e-6));
        }
    }

    #[test]
    fn errors_are_carried() {
        for gated in [false, true] {
            for slot in [0, 1] {
                trial(gated).assert_carries(slot, 1e-3, 4.0);
            }
        }
    }
}
