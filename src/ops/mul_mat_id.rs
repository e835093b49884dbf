//! MUL_MAT_ID: `dst[t, e, i] = Σ_k s0[ids[t, e], i, k] · s1[t, e mod E', k]`.
//!
//! s0 (n, m, k), one matrix per expert; s1 (T, E', k) with E' a divisor of E, often 1; s2 the ids (T, E), usually a
//! strided view of a longer row; the result (T, E, m). Conversion and sums are those of MUL_MAT, and its words on
//! precision change nothing on the CPU either (ggml-cpu/ggml-cpu.c).

use parity_graph::Op;

use super::matrices::{Meeting, Problem};
use super::{Args, Check, Rule};
use crate::error::{Error, Result};
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::MulMatId,
    formula: "the matmul of rows with the matrices of the experts that were chosen for them: y[o] = Σ_i \
        w[expert, o, i]·x[i]",
    explained: "4·√n·u (u = 2^-24, n terms) of the square root of Σ (w·x)² and of the result; what a kernel \
        rounds the rows to on purpose is followed",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Settled { bound, settle, unsettled },
    carry,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    Ok(problem(args)?.compute())
}

pub fn problem<'b, 'a, S: Scalar>(args: &'b Args<'a, S>) -> Result<Problem<'b, 'a, S>> {
    let [weights, x, ids] = [args.source(0)?, args.source(1)?, args.source(2)?];
    let ([one, experts, m, k], [a, t, repeated, width]) = (weights.shape(), x.shape());
    let [_, _, rows, chosen] = ids.shape();
    let fits = one == 1 && a == 1 && width == k && rows == t && ids.shape()[..2] == [1, 1];
    if !fits || args.shape != [1, t, chosen, m] || repeated == 0 || !chosen.is_multiple_of(repeated) {
        return Err(
            args.misfit("(n, m, k), (T, E', k) and ids (T, E) for a result (T, E, m), E' a divisor of E")
        );
    }
    let mut meetings: Vec<Meeting> =
        (0..experts).map(|matrix| Meeting { matrix, pairs: Vec::new() }).collect();
    for (row, id) in ids.values().iter().enumerate() {
        let expert = index(*id, experts).ok_or_else(|| {
            Error::new(args.name, format!("an id of row {} is no expert", row / chosen))
                .expected(format!("a whole number below {experts}"))
                .found(id.to_f64())
                .hint("was the node that chose the experts recorded whole?")
        })?;
        meetings[expert].pairs.push((row / chosen * repeated + row % chosen % repeated, row));
    }
    meetings.retain(|meeting| !meeting.pairs.is_empty());
    Problem::new(args, meetings)
}

/// A number as an index below `limit`.
fn index<S: Scalar>(value: S, limit: usize) -> Option<usize> {
    let value = value.to_f64();
    (value >= 0.0 && value < limit as f64 && value.fract() == 0.0).then_some(value as usize)
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    problem(args).map_or_else(|_| vec![0.0; exact.len()], |problem| problem.bound(exact))
}

fn settle(args: &Args<'_, f64>, exact: &mut [f64], recorded: &[f64]) {
    if let Ok(problem) = problem(args)
        && exact.len() == recorded.len()
    {
        problem.settle(exact, recorded);
    }
}

/// See [`Problem::unsettled`].
fn unsettled(args: &Args<'_, f64>) -> Vec<f64> {
    problem(args).map_or_else(|_| Vec::new(), |problem| problem.unsettled())
}

/// The ids are a choice: it is judged by itself, and the result follows the choice that was recorded.
fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    match (problem(args), args.get(1)) {
        (Ok(problem), _) if slot == 0 => problem.carry_matrices(error),
        (Ok(problem), Some(x)) if slot == 1 => problem.carry_rows(&x.values(), error),
        _ => vec![0.0; exact.len()],
    }
}

#[cfg(test)]
mod tests;
