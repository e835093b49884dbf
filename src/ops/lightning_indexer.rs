//! LIGHTNING_INDEXER: `dst[s, t, m] = Σ_h max(0, q[s,t,h]·k[s,m]) · w[s,t,h] + mask[s mod s', t, m]`.
//!
//! s0 q (S, T, H, D), s1 k (S, M, 1, D), s2 weights (S, 1, T, H), s3 mask (s', 1, T, M); the result (S, 1, T, M). No
//! words, and no scale: the weights carry it. The CPU widens k to f32, does not round q, and adds up in f32
//! (ggml-cpu/ops.cpp).

use parity_graph::Op;
use rayon::prelude::*;

use super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::{Scalar, in_lanes, vectorized};

pub const RULE: Rule = Rule {
    op: Op::LightningIndexer,
    formula: "the weighted sum over heads of the positive part of query times key, plus the mask: Σ_h \
        max(0, q[h]·k)·w[h] + mask",
    explained: "the roundings of each head's product, all terms in quadrature, of the products with the \
        weights and of the sum over heads",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// What one query and one position come to.
struct Score<'a> {
    /// (H, D)
    q: &'a [f64],
    /// (D,)
    k: &'a [f64],
    /// (H,)
    w: &'a [f64],
    mask: f64,
    /// Where the four are in their sources.
    at: [usize; 4],
}

impl Score<'_> {
    /// Each head's query, its product with the key, and its weight.
    fn heads(&self) -> impl Iterator<Item = (&[f64], f64, f64)> {
        self.q.chunks(self.k.len().max(1)).zip(self.w).map(|(q, w)| {
            let dot = vectorized(
                #[inline(always)]
                || in_lanes(q, self.k, |q, k| q * k),
            );
            (q, dot, *w)
        })
    }

    fn value(&self) -> f64 {
        self.heads().map(|(_, dot, w)| dot.max(0.0) * w).sum::<f64>() + self.mask
    }
}

/// `f` of every element of the result, in order.
fn each<S: Scalar>(args: &Args<'_, S>, f: impl Fn(&Score<'_>) -> f64 + Sync) -> Result<Vec<f64>> {
    let mut shapes = [[0; 4]; 4];
    let mut values: [Vec<f64>; 4] = Default::default();
    for slot in 0..4 {
        let source = args.source(slot)?;
        shapes[slot] = source.shape();
        values[slot] = source.values().iter().map(|v| v.to_f64()).collect();
    }
    let ([s, t, h, d], m, repeated) = (shapes[0], shapes[1][1], shapes[3][0]);
    let fits = shapes[1] == [s, m, 1, d] && shapes[2] == [s, 1, t, h] && shapes[3] == [repeated, 1, t, m];
    if !fits || args.shape != [s, 1, t, m] || repeated == 0 {
        return Err(args.misfit("q (S, T, H, D), k (S, M, 1, D), weights (S, 1, T, H), a mask (s', 1, T, M)"));
    }
    let mut out = vec![0.0; args.elements()];
    out.par_chunks_mut(m.max(1)).enumerate().for_each(|(row, out)| {
        let sequence = row / t;
        for (position, out) in out.iter_mut().enumerate() {
            let mask = ((sequence % repeated) * t + row % t) * m + position;
            let at = [row * h * d, (sequence * m + position) * d, row * h, mask];
            *out = f(&Score {
                q: &values[0][at[0]..at[0] + h * d],
                k: &values[1][at[1]..at[1] + d],
                w: &values[2][at[2]..at[2] + h],
                mask: values[3][mask],
                at,
            });
        }
    });
    Ok(out)
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    Ok(each(args, |score| score.value())?.into_iter().map(S::from_f64).collect())
}

/// The products' sums, the sum over the heads, and that with the mask. What is masked is exactly so.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let of = |score: &Score<'_>| {
        if !score.mask.is_finite() {
            return 0.0;
        }
        let factor = accumulation(score.k.len(), UNIT_F32);
        let (mut spread, mut square, mut sum) = (0.0, 0.0, 0.0);
        for (q, dot, w) in score.heads() {
            let terms = q.iter().zip(score.k).map(|(q, k)| (q * k).powi(2)).sum::<f64>().sqrt();
            let error = factor * (terms + dot.abs());
            if dot > -error {
                // Independent from head to head but for the key: their sum at its worst.
                spread += w.abs() * error;
                let term = dot.max(0.0) * w;
                (square, sum) = (square + term * term, sum + term);
            }
        }
        let summed = accumulation(score.w.len(), UNIT_F32) * (f64::sqrt(square) + f64::abs(sum));
        spread + summed + UNIT_F32 * (sum.abs() + (sum + score.mask).abs()) + TINY_F32
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let of = |score: &Score<'_>| {
        let d = score.k.len();
        let along = |a: &[f64], e: &[f64]| a.iter().zip(e).map(|(a, e)| a.abs() * e).sum::<f64>();
        let at = score.at[slot.min(3)];
        match slot {
            3 => error[at],
            0..=2 if score.mask.is_finite() => score
                .heads()
                .enumerate()
                .map(|(head, (q, dot, w))| {
                    if slot == 2 {
                        return dot.max(0.0) * error[at + head];
                    }
                    let moved = match slot {
                        0 => along(score.k, &error[at + head * d..at + (head + 1) * d]),
                        _ => along(q, &error[at..at + d]),
                    };
                    // Below zero nothing moves until it is above.
                    w.abs() * moved.min((dot + moved).max(0.0))
                })
                .sum(),
            _ => 0.0,
        }
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Numbers, Trial};

    fn trial() -> Trial {
        let mut numbers = Numbers::new(4);
        let (s, t, m, h, d) = (2, 3, 7, 5, 64);
        let mask = (0..t * m).map(|i| if i % 5 == 4 { f64::NEG_INFINITY } else { 0.0 }).collect();
        let given = vec![
            Some(Given::random(&mut numbers, [s, t, h, d]).laid_out([0, 2, 1, 3])),
            Some(Given::random(&mut numbers, [s, m, 1, d])),
            Some(Given::random(&mut numbers, [s, 1, t, h]).laid_out([0, 1, 3, 2])),
            Some(Given::new([1, 1, t, m], mask)),
        ];
        Trial::new(Op::LightningIndexer, given, [s, 1, t, m])
    }

    /// In f32, one term after the other.
    fn kernel(trial: &Trial) -> Vec<f64> {
        let [q, k, w, mask] = [0, 1, 2, 3].map(|slot| trial.given[slot].as_ref().unwrap().to_vec());
        let of = |i: usize| {
            let (s, t, m) = (i / 21, i / 7 % 3, i % 7);
            let mut sum = 0f32;
            for h in 0..5 {
                let q = &q[((s * 3 + t) * 5 + h) * 64..][..64];
                let k = &k[(s * 7 + m) * 64..][..64];
                let dot = q.iter().zip(k).fold(0f32, |dot, (q, k)| dot + *q as f32 * *k as f32);
                sum += dot.max(0.0) * w[(s * 3 + t) * 5 + h] as f32;
            }
            f64::from(sum + mask[t * 7 + m] as f32)
        };
        (0..42).map(of).collect()
    }

    #[test]
    fn the_kernel_is_explained() {
        let own = trial();
        let excess = own.excess(&kernel(&own));
        assert!(excess <= 1.0, "{excess}");
        own.assert_single_within_bound();
        let exact = own.double();
        assert!(exact.contains(&f64::NEG_INFINITY) && exact.iter().all(|y| !y.is_nan()));
        assert!(own.bound(&exact).iter().all(|b| *b < 1e-4));
        // Without the positive part it is another number.
        let mut linear = own.clone();
        let negated: Vec<f64> = own.given[0].as_ref().unwrap().to_vec().iter().map(|q| -q).collect();
        linear.given[0] = Some(own.given[0].as_ref().unwrap().with(&negated));
        assert!(linear.excess(&exact) > 100.0);
    }

    #[test]
    fn errors_are_carried() {
        let own = trial();
        for slot in 0..3 {
            own.assert_carries(slot, 1e-3, 12.0);
        }
    }
}
