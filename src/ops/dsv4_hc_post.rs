//! DSV4_HC_POST: `dst[t, j, d] = x[t, d] · post[t, j] + Σ_i residual[t, i, d] · comb[t, i, j]`, a layer's output into the
//! streams of hyper-connections.
//!
//! s0 x (T, D), s1 residual (T, hc, D), s2 post (T, hc), s3 comb (T, hc of the source, hc of the result), or nothing, and
//! then the sum is residual[t, j, d]; the result (T, hc, D). No words. The CPU computes in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{TINY_F32, UNIT_F32, accumulation};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Dsv4HcPost,
    formula: "a layer's output spread over the streams of hyper-connections, which are mixed: y[j] = \
        x·post[j] + Σ_i residual[i]·comb[i, j]",
    explained: "the roundings of the products and of their sum, in quadrature",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(bound),
    carry,
};

/// Two factors of a term, and the slot and place of each.
type Term = [(f64, usize, usize); 2];

/// `f` of the terms of every element of the result. A residual that is not mixed is multiplied by 1 of no source.
fn each<S: Scalar>(args: &Args<'_, S>, f: impl Fn(&[Term]) -> f64) -> Result<Vec<f64>> {
    let [x, residual, post] = [args.source(0)?, args.source(1)?, args.source(2)?];
    let comb = args.get(3);
    let [one, t, hc, d] = residual.shape();
    let fits = one == 1
        && x.shape() == [1, 1, t, d]
        && post.shape() == [1, 1, t, hc]
        && comb.is_none_or(|comb| comb.shape() == [1, t, hc, hc]);
    if !fits || args.shape != [1, t, hc, d] {
        return Err(args.misfit("x (T, D), residual (T, hc, D), post (T, hc), comb (T, hc, hc) or nothing"));
    }
    let (x, residual, post, comb) = (x.values(), residual.values(), post.values(), comb.map(|c| c.values()));
    let mut terms: Vec<Term> = Vec::with_capacity(hc + 1);
    let mut out = Vec::with_capacity(t * hc * d);
    for i in 0..t * hc * d {
        let (t, j, d_at) = (i / (hc * d), i / d % hc, i % d);
        let (x_at, post_at) = (t * d + d_at, t * hc + j);
        terms.clear();
        terms.push([(x[x_at].to_f64(), 0, x_at), (post[post_at].to_f64(), 2, post_at)]);
        match &comb {
            None => terms.push([(residual[i].to_f64(), 1, i), (1.0, usize::MAX, 0)]),
            Some(comb) => terms.extend((0..hc).map(|from| {
                let (at, comb_at) = ((t * hc + from) * d + d_at, (t * hc + from) * hc + j);
                [(residual[at].to_f64(), 1, at), (comb[comb_at].to_f64(), 3, comb_at)]
            })),
        }
        out.push(f(&terms));
    }
    Ok(out)
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let out = each(args, |terms| terms.iter().map(|[a, b]| a.0 * b.0).sum())?;
    Ok(out.into_iter().map(S::from_f64).collect())
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let of = |terms: &[Term]| {
        let products = terms.iter().map(|[a, b]| a.0 * b.0);
        let square = products.clone().map(|p| p * p).sum::<f64>().sqrt();
        let sum = products.sum::<f64>().abs();
        accumulation(terms.len(), UNIT_F32) * (square + sum) + UNIT_F32 * sum + TINY_F32
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let of = |terms: &[Term]| {
        let moved = |(own, other): (&(f64, usize, usize), &(f64, usize, usize))| {
            if own.1 == slot { error[own.2] * other.0.abs() } else { 0.0 }
        };
        terms.iter().map(|[a, b]| moved((a, b)) + moved((b, a))).sum()
    };
    each(args, of).unwrap_or_else(|_| vec![0.0; exact.len()])
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Numbers, Trial};

    fn trial(mixed: bool) -> Trial {
        let mut numbers = Numbers::new(6);
        let (t, hc, d) = (3, 4, 6);
        let given = vec![
            Some(Given::random(&mut numbers, [1, 1, t, d]).laid_out([0, 1, 2, 3])),
            Some(Given::random(&mut numbers, [1, t, hc, d]).laid_out([0, 2, 1, 3])),
            Some(Given::random(&mut numbers, [1, 1, t, hc])),
            mixed.then(|| Given::random(&mut numbers, [1, t, hc, hc]).laid_out([0, 1, 3, 2])),
        ];
        Trial::new(Op::Dsv4HcPost, given, [1, t, hc, d])
    }

    #[test]
    fn streams_are_mixed_from_source_to_result() {
        for mixed in [false, true] {
            let own = trial(mixed);
            let [x, residual, post] = [0, 1, 2].map(|slot| own.given[slot].as_ref().unwrap().to_vec());
            let comb = own.given[3].as_ref().map(Given::to_vec);
            let of = |i: usize| {
                let (t, j, d) = (i / 24, i / 6 % 4, i % 6);
                let first = x[t * 6 + d] as f32 * post[t * 4 + j] as f32;
                let sum = match &comb {
                    None => first + residual[i] as f32,
                    Some(comb) => (0..4).fold(first, |sum, from| {
                        let comb = comb[(t * 4 + from) * 4 + j] as f32;
                        comb.mul_add(residual[(t * 4 + from) * 6 + d] as f32, sum)
                    }),
                };
                f64::from(sum)
            };
            let recorded: Vec<f64> = (0..72).map(of).collect();
            let excess = own.excess(&recorded);
            assert!(excess <= 1.0, "{excess}");
            own.assert_single_within_bound();
            assert!(own.bound(&own.double()).iter().all(|b| *b < 4e-6));
        }
    }

    #[test]
    fn errors_are_carried() {
        for (mixed, slots) in [(false, 3), (true, 4)] {
            for slot in 0..slots {
                trial(mixed).assert_carries(slot, 1e-3, 4.0);
            }
        }
    }
}
