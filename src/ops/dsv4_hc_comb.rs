//! DSV4_HC_COMB: the doubly stochastic mixing weights of hyper-connections (Xie et al., "mHC", arXiv 2512.24880).
//!
//! s0 mixes (T, 24), s1 scale (3 or more), s2 base (24), 24 = (2 + 4)·4; the result (T, 4 of the source, 4 of the
//! result). Words: eps, n_iter. `L[i,j] = mixes[t, 8+4i+j]·scale[2] + base[8+4i+j]`; C is the softmax of each row i of L
//! plus eps; then n_iter times columns are divided by eps plus their sum, and in between rows are. The first eight mixes
//! and the first two scales are other nodes'. The CPU computes in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Dsv4HcComb,
    formula: "the doubly stochastic weights that mix the streams of hyper-connections: a softmax of each \
        row, then columns and rows divided by their sums in turn",
    explained: "the error of each softmax, and the roundings of each sum and quotient of all the turns",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// Streams.
const STREAMS: usize = 4;
/// Where the weights are in a row of mixes, and in the base.
const FIRST: usize = 2 * STREAMS;
const MIXES: usize = (2 + STREAMS) * STREAMS;
/// Which of the scales is theirs.
const SCALE: usize = 2;
/// Product and sum of a logarithm.
const LOGIT_ROUNDINGS: f64 = 2.0;
/// The maximum is subtracted, exp is within 2 ulp, the sum of four, the quotient, the sum with eps.
const SOFTMAX_ROUNDINGS: f64 = 10.0;
/// The sum of four and eps, the quotient, perhaps as a product with the inverse.
const NORMALISE_ROUNDINGS: f64 = 6.0;
/// Larger errors of a logarithm say nothing of its exponential.
const UNKNOWN: f64 = 8.0;

/// The logarithms of one token.
struct Logits<'a> {
    mixes: &'a [f64],
    base: &'a [f64],
    scale: f64,
}

/// `f` of every token, (T·16).
fn each<S: Scalar>(
    args: &Args<'_, S>,
    mut f: impl FnMut(usize, &Logits<'_>) -> [f64; 16],
) -> Result<Vec<f64>> {
    let [mixes, scale, base] = [args.source(0)?, args.source(1)?, args.source(2)?];
    let numbers = |values: &[S]| values.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
    let (rows, t) = (mixes.shape(), mixes.shape()[2]);
    let (mixes, scale, base) = (numbers(&mixes.values()), numbers(&scale.values()), numbers(&base.values()));
    let fits = rows == [1, 1, t, MIXES] && scale.len() > SCALE && base.len() == MIXES;
    if !fits || args.shape != [1, t, STREAMS, STREAMS] {
        return Err(args.misfit("mixes (T, 24), three scales, a base (24), for a result (T, 4, 4)"));
    }
    let own = |values| Logits { mixes: values, base: &base[FIRST..], scale: scale[SCALE] };
    Ok(mixes.chunks(MIXES).enumerate().flat_map(|(t, row)| f(t, &own(&row[FIRST..]))).collect())
}

/// How often is normalised: columns first and last.
fn normalisations<S>(args: &Args<'_, S>) -> usize {
    (2 * args.params.int(1).max(1) - 1) as usize
}

fn mixing(logits: &Logits<'_>, eps: f64, normalisations: usize) -> [f64; 16] {
    let mut c = [0.0; STREAMS * STREAMS];
    for (i, row) in c.chunks_mut(STREAMS).enumerate() {
        let at = i * STREAMS;
        for (j, c) in row.iter_mut().enumerate() {
            *c = logits.mixes[at + j] * logits.scale + logits.base[at + j];
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|c| *c = (*c - max).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|c| *c = *c / sum + eps);
    }
    for step in 0..normalisations {
        for line in 0..STREAMS {
            let place = |along: usize| match step % 2 {
                0 => along * STREAMS + line,
                _ => line * STREAMS + along,
            };
            let sum = eps + (0..STREAMS).map(|along| c[place(along)]).sum::<f64>();
            (0..STREAMS).for_each(|along| c[place(along)] /= sum);
        }
    }
    c
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (eps, normalisations) = (f64::from(args.params.float(0)), normalisations(args));
    let out = each(args, |_, logits| mixing(logits, eps, normalisations))?;
    Ok(out.into_iter().map(S::from_f64).collect())
}

/// A relative error of up to e of all weights moves the factor of a line by no more than that of the crossing lines
/// before it and e again: after n normalisations weights are off by up to (2n + 1)·e.
fn after(normalisations: usize) -> f64 {
    (2 * normalisations + 1) as f64
}

/// The relative error that errors of the logarithms, absolute, make of a softmax.
fn of_softmax(largest: f64) -> f64 {
    (2.0 * largest).min(UNKNOWN).exp_m1()
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let n = normalisations(args);
    let rounded = each(args, |_, logits| {
        let sizes = logits.mixes.iter().zip(logits.base).map(|(mix, base)| {
            let product = mix * logits.scale;
            product.abs() + (product + base).abs()
        });
        let largest = sizes.fold(0.0, f64::max);
        let softmax = of_softmax(LOGIT_ROUNDINGS * UNIT_F32 * largest) + SOFTMAX_ROUNDINGS * UNIT_F32;
        // What each normalisation rounds passes through those after it.
        let steps: f64 = (0..n).map(|step| after(n - 1 - step) * NORMALISE_ROUNDINGS * UNIT_F32).sum();
        [after(n) * softmax + steps; STREAMS * STREAMS]
    });
    let relative = rounded.unwrap_or_else(|_| vec![0.0; exact.len()]);
    relative.iter().zip(exact).map(|(relative, y)| relative * y.abs() + TINY_F32).collect()
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let n = normalisations(args);
    let moved = each(args, |t, logits| {
        let of = |i: usize| match slot {
            0 => error[t * MIXES + FIRST + i] * logits.scale.abs(),
            1 => logits.mixes[i].abs() * error[SCALE],
            2 => error[FIRST + i],
            _ => 0.0,
        };
        let largest = (0..STREAMS * STREAMS).map(of).fold(0.0, f64::max);
        [(after(n) * of_softmax(largest)).min(UNKNOWN).exp_m1(); STREAMS * STREAMS]
    });
    let relative = moved.unwrap_or_else(|_| vec![0.0; exact.len()]);
    relative.iter().zip(exact).map(|(relative, y)| relative * y.abs()).collect()
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Numbers, Trial};

    fn trial(n_iter: i32) -> Trial {
        let mut numbers = Numbers::new(7);
        let given = vec![
            Some(Given::random(&mut numbers, [1, 1, 5, 24]).laid_out([0, 1, 3, 2])),
            Some(Given::new([1, 1, 1, 3], vec![f64::NAN, f64::NAN, 1.75])),
            Some(Given::random(&mut numbers, [1, 1, 1, 24])),
        ];
        let mut trial = Trial::new(Op::Dsv4HcComb, given, [1, 5, 4, 4]);
        trial.params.set_float(0, 1e-6);
        trial.params.set_int(1, n_iter);
        trial
    }

    /// In f32, step by step.
    fn kernel(trial: &Trial) -> Vec<f64> {
        let [mixes, scale, base] = [0, 1, 2].map(|slot| trial.given[slot].as_ref().unwrap().to_vec());
        let (eps, n_iter) = (trial.params.float(0), trial.params.int(1));
        let mut out = Vec::new();
        for mixes in mixes.chunks(24) {
            let mut c = [[0f32; 4]; 4];
            for (i, row) in c.iter_mut().enumerate() {
                for (j, c) in row.iter_mut().enumerate() {
                    let at = 8 + 4 * i + j;
                    *c = mixes[at] as f32 * scale[2] as f32 + base[at] as f32;
                }
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                row.iter_mut().for_each(|c| *c = (*c - max).exp());
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|c| *c = *c / sum + eps);
            }
            for iteration in 0..n_iter {
                if iteration > 0 {
                    for row in &mut c {
                        let sum = eps + row.iter().sum::<f32>();
                        row.iter_mut().for_each(|c| *c /= sum);
                    }
                }
                for j in 0..4 {
                    let sum = eps + c.iter().map(|row| row[j]).sum::<f32>();
                    c.iter_mut().for_each(|row| row[j] /= sum);
                }
            }
            out.extend(c.iter().flatten().map(|c| f64::from(*c)));
        }
        out
    }

    #[test]
    fn the_kernel_is_explained() {
        for n_iter in [1, 2, 20] {
            let mut own = trial(n_iter);
            let recorded = kernel(&own);
            let excess = own.excess(&recorded);
            assert!(excess <= 1.0, "{n_iter}: {excess}");
            own.assert_single_within_bound();
            for column in recorded.chunks(16) {
                assert!((0..4).all(|j| ((0..4).map(|i| column[4 * i + j]).sum::<f64>() - 1.0).abs() < 1e-5));
            }
            if n_iter == 2 {
                assert!(own.bound(&own.double()).iter().all(|b| *b < 2e-5));
                own.params.set_int(1, 3);
                assert!(own.excess(&recorded) > 10.0);
                own.params.set_int(1, 2);
                own.params.set_float(0, 1e-3);
                assert!(own.excess(&recorded) > 10.0);
            }
        }
    }

    #[test]
    fn errors_are_carried() {
        let mut own = trial(2);
        own.given[1] = Some(Given::new([1, 1, 1, 3], vec![0.5, 0.25, 1.75]));
        for slot in 0..3 {
            own.assert_carries(slot, 1e-4, 40.0);
        }
    }
}
