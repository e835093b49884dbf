//! MUL_MAT: `dst[i3, i2, j, i] = Σ_k s0[i3/r3, i2/r2, i, k] · s1[i3, i2, j, k]`.
//!
//! s0 (A3, A2, m, k), a weight or a strided view such as a cache; s1 (B3, B2, n, k); the result (B3, B2, n, m), with
//! r3 = B3/A3 and r2 = B2/A2: heads are shared by division. Words: `hint` 1 says that s0 is a Hadamard matrix: then s0
//! is not read, and each row of s1 is transformed in natural order, times 1/sqrt(k). The words on precision change
//! nothing on the CPU, which first converts s1 to the `vec_dot_type` of s0 and then adds up in lanes of f32
//! (ggml-cpu/ggml-cpu.c).

use parity_graph::Op;

use super::bound::{CONFIDENCE, TINY_F32, UNIT_F32};
use super::matrices::{Meeting, Problem};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::MulMat,
    formula: "the matmul of a weight, or of a cache, with rows: y[o] = Σ_i w[o, i]·x[i]",
    explained: "4·√n·u (u = 2^-24, n terms) of the square root of Σ (w·x)² and of the result; what a kernel \
        rounds the rows to on purpose (f16, bf16, blocks of integers) is followed, and what its sums in f16 \
        lose is bounded",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Settled { bound, settle, unsettled },
    carry,
};

/// Word that holds the hint, and its only value.
const HINT: usize = 1;
const HADAMARD: i32 = 1;
/// The last factor is rounded, and so is the product with it.
const HADAMARD_ROUNDINGS: f64 = 2.0;

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    if is_hadamard(args) {
        return hadamard(args);
    }
    Ok(problem(args)?.compute())
}

pub fn problem<'b, 'a, S: Scalar>(args: &'b Args<'a, S>) -> Result<Problem<'b, 'a, S>> {
    let ([a3, a2, m, k], [b3, b2, n, width]) = (args.source(0)?.shape(), args.source(1)?.shape());
    let divides = |a: usize, b: usize| a > 0 && b.is_multiple_of(a);
    if width != k || args.shape != [b3, b2, n, m] || !divides(a3, b3) || !divides(a2, b2) {
        return Err(args.misfit("(A3, A2, m, k) and (B3, B2, n, k) for a result (B3, B2, n, m)"));
    }
    let (r3, r2) = (b3 / a3, b2 / a2);
    let meeting = |matrix: usize| {
        let (i3, i2) = (matrix / a2 * r3, matrix % a2 * r2);
        let rows = (i3..i3 + r3).flat_map(|i| {
            (i2..i2 + r2).flat_map(move |j| {
                let first = (i * b2 + j) * n;
                first..first + n
            })
        });
        Meeting { matrix, pairs: rows.map(|row| (row, row)).collect() }
    };
    Problem::new(args, (0..a3 * a2).map(meeting).collect())
}

fn is_hadamard<S>(args: &Args<'_, S>) -> bool {
    args.params.int(HINT) == HADAMARD
}

fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    if is_hadamard(args) {
        return hadamard_bound(args, exact);
    }
    problem(args).map_or_else(|_| vec![0.0; exact.len()], |problem| problem.bound(exact))
}

fn settle(args: &Args<'_, f64>, exact: &mut [f64], recorded: &[f64]) {
    if let Ok(problem) = problem(args)
        && !is_hadamard(args)
        && exact.len() == recorded.len()
    {
        problem.settle(exact, recorded);
    }
}

/// See [`Problem::unsettled`].
fn unsettled(args: &Args<'_, f64>) -> Vec<f64> {
    match problem(args) {
        Ok(problem) if !is_hadamard(args) => problem.unsettled(),
        _ => Vec::new(),
    }
}

fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    if is_hadamard(args) {
        let k = args.shape[3].max(1);
        let sums = error.chunks(k).map(|e| e.iter().sum::<f64>() / (k as f64).sqrt());
        return if slot == 1 { sums.flat_map(|sum| vec![sum; k]).collect() } else { vec![0.0; exact.len()] };
    }
    match (problem(args), args.get(1)) {
        (Ok(problem), _) if slot == 0 => problem.carry_matrices(error),
        (Ok(problem), Some(x)) if slot == 1 => problem.carry_rows(&x.values(), error),
        _ => vec![0.0; exact.len()],
    }
}

/// The fast Walsh-Hadamard transform of each row in natural order, times 1/sqrt(k).
fn hadamard<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (x, k) = (args.source(1)?, args.shape[3]);
    if x.shape() != args.shape || !k.is_power_of_two() {
        return Err(args.misfit("for the hint of a Hadamard matrix, rows of a power of two as source 1"));
    }
    let mut out = x.values().into_owned();
    let factor = S::from_f64(1.0 / (k as f64).sqrt());
    for row in out.chunks_exact_mut(k) {
        (0..k.ilog2()).for_each(|level| butterflies(row, 1 << level));
        row.iter_mut().for_each(|y| *y *= factor);
    }
    Ok(out)
}

/// Sums and differences of all pairs that lie `half` apart.
fn butterflies<S: Scalar>(row: &mut [S], half: usize) {
    for pair in row.chunks_exact_mut(2 * half) {
        let (first, second) = pair.split_at_mut(half);
        for (a, b) in first.iter_mut().zip(second) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// Each level rounds sums that reach an output with a factor of ±1/sqrt(k): those sums in quadrature, over all
/// levels, in the order of the levels that rounds more.
fn hadamard_bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(1) else { return vec![0.0; exact.len()] };
    let k = args.shape[3].max(1);
    let levels = k.ilog2();
    let mut out = Vec::with_capacity(exact.len());
    for (x, y) in x.values().chunks(k).zip(exact.chunks(k)) {
        let mut squares = [vec![0.0; k], vec![0.0; k]];
        for (order, squares) in squares.iter_mut().enumerate() {
            let mut values = x.to_vec();
            for step in 0..levels {
                let level = if order == 0 { step } else { levels - 1 - step };
                butterflies(&mut values, 1 << level);
                // Output j is made from the elements whose bits of the levels so far are those of j.
                let done = if order == 0 { (2 << level) - 1 } else { k - (1 << level) };
                let mut sums = vec![0.0; k];
                values.iter().enumerate().for_each(|(i, v)| sums[i & done] += v * v);
                squares.iter_mut().enumerate().for_each(|(j, square)| *square += sums[j & done]);
            }
        }
        for (j, y) in y.iter().enumerate() {
            let levels = (squares[0][j].max(squares[1][j]) / k as f64).sqrt();
            out.push(UNIT_F32 * (CONFIDENCE * levels + HADAMARD_ROUNDINGS * y.abs()) + TINY_F32);
        }
    }
    out
}

#[cfg(test)]
#[path = "mul_mat/devices.rs"]
mod devices;
#[cfg(test)]
mod tests;
