//! SSM_CONV: `dst[s, t, c] = Σ_j s0[s, c, t + j] · s1[c, j]`, a short convolution along the tokens.
//!
//! s0 (S, C, K-1+T), the past K-1 columns first; s1 (C, K); the result (S, T, C). No words, no bias, no activation. The
//! CPU adds up in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::SsmConv,
    formula: "a short causal convolution along the tokens, channel by channel: y[t] = Σ_j w[j]·x[t + j]",
    explained: "the roundings of the products and of their sum, all terms in quadrature",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (x, w) = (args.source(0)?, args.source(1)?);
    let ([one, s, c, columns], [wa, wb, wc, k]) = (x.shape(), w.shape());
    let t = args.shape[2];
    if [one, wa, wb, wc] != [1, 1, 1, c] || args.shape != [1, s, t, c] || columns + 1 != k + t {
        return Err(args.misfit("(S, C, K-1+T) and (C, K) for a result (S, T, C)"));
    }
    Ok(convolve(args, &x.values(), &w.values(), k))
}

/// x (S, C, K-1+T), w (C, K)
fn convolve<S: Scalar, T>(args: &Args<'_, T>, x: &[S], w: &[S], k: usize) -> Vec<S> {
    let [_, s, t, c] = args.shape;
    let columns = k + t - 1;
    let mut out = Vec::with_capacity(s * t * c);
    for i in 0..s * t {
        for channel in 0..c {
            let from = (i / t * c + channel) * columns + i % t;
            let pairs = x[from..from + k].iter().zip(&w[channel * k..(channel + 1) * k]);
            out.push(pairs.map(|(&x, &w)| x * w).sum());
        }
    }
    out
}

fn squares(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v * v).collect()
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let (Some(x), Some(w)) = (args.get(0), args.get(1)) else { return vec![0.0; exact.len()] };
    let k = w.shape()[3];
    let terms = convolve(args, &squares(&x.values()), &squares(&w.values()), k);
    let factor = accumulation(k, UNIT_F32);
    let of = |(square, y): (f64, &f64)| factor * (square.sqrt() + y.abs()) + UNIT_F32 * y.abs() + TINY_F32;
    terms.into_iter().zip(exact).map(of).collect()
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let (Some(x), Some(w)) = (args.get(0), args.get(1)) else { return vec![0.0; exact.len()] };
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<f64>>();
    let k = w.shape()[3];
    match slot {
        0 => convolve(args, error, &magnitudes(&w.values()), k),
        1 => convolve(args, &magnitudes(&x.values()), error, k),
        _ => vec![0.0; exact.len()],
    }
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Numbers, Trial};

    fn trial() -> Trial {
        let mut numbers = Numbers::new(1);
        let given = vec![
            Some(Given::random(&mut numbers, [1, 2, 5, 3 + 6]).laid_out([0, 1, 3, 2])),
            Some(Given::random(&mut numbers, [1, 1, 5, 4])),
        ];
        Trial::new(Op::SsmConv, given, [1, 2, 6, 5])
    }

    #[test]
    fn a_window_meets_the_channels_weights() {
        let own = trial();
        let (x, w) = (own.given[0].as_ref().unwrap().to_vec(), own.given[1].as_ref().unwrap().to_vec());
        let expected = (0..60).map(|i| {
            let (s, t, c) = (i / 30, i / 5 % 6, i % 5);
            (0..4).map(|j| x[(s * 5 + c) * 9 + t + j] * w[c * 4 + j]).sum::<f64>()
        });
        assert_eq!(own.double(), expected.collect::<Vec<f64>>());
        own.assert_single_within_bound();
        assert!(own.bound(&own.double()).iter().all(|b| *b < 4e-6));
    }

    #[test]
    fn errors_are_carried() {
        let own = trial();
        own.assert_carries(0, 1e-3, 4.0);
        own.assert_carries(1, 1e-3, 4.0);
    }
}
