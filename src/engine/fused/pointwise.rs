//! Ops that treat every element alone: bias, residual sum, gated activation.

use std::mem::MaybeUninit;

use rayon::prelude::*;

use crate::engine::fused::graph::{Activation, Glu};
use crate::gguf::TensorRef;
use crate::scalar::{self, Scalar, vectorized};
use crate::tensor::{Matrix, View};

/// x + times·bias, x (T, O), bias (O,).
pub fn bias<S: Scalar>(bias: Option<&TensorRef<'_>>, times: u32, x: View<'_, S>) -> Matrix<S> {
    let bias = super::nodes::vector::<S>(bias);
    let mut out = x.to_matrix();
    if !bias.is_empty() {
        for _ in 0..times {
            for row in out.data.chunks_exact_mut(x.cols.max(1)) {
                row.iter_mut().zip(bias.iter()).for_each(|(x, b)| *x += *b);
            }
        }
    }
    out
}

/// scale₀·a + scale₁·b
pub fn add<S: Scalar>(scale: [f64; 2], a: View<'_, S>, b: View<'_, S>) -> Matrix<S> {
    let plain = scale == [1.0, 1.0];
    let [sa, sb] = scale.map(S::from_f64);
    let sum = |(&a, &b): (&S, &S)| if plain { a + b } else { sa * a + sb * b };
    Matrix::new(a.rows, a.cols, a.data.iter().zip(b.data).map(sum).collect())
}

/// act(gate)·up, or act(gate) alone.
pub fn glu<S: Scalar>(glu: Glu, gate: View<'_, S>, up: View<'_, S>) -> Matrix<S> {
    let n = gate.data.len();
    assert_eq!(n, up.data.len(), "gate and up have one shape");
    let mut out: Vec<S> = Vec::with_capacity(n);
    let (turned, other) = if glu.swapped { (up, gate) } else { (gate, up) };
    let inputs = turned.data.par_chunks(PART).zip(other.data.par_chunks(PART));
    out.spare_capacity_mut()[..n].par_chunks_mut(PART).zip(inputs).for_each(|(out, (turned, other))| {
        vectorized(
            #[inline(always)]
            || match (glu.gated, glu.activation) {
                (true, Activation::Silu) => each(out, turned, other, |x, y| silu(x) * y),
                (true, act) => each(out, turned, other, |x, y| activation(act, x) * y),
                (false, act) => each(out, turned, other, |x, _| activation(act, x)),
            },
        );
    });
    // SAFETY: every part has been written.
    unsafe { out.set_len(n) };
    Matrix::new(gate.rows, gate.cols, out)
}

/// Elements that one thread takes at a time.
const PART: usize = 1 << 14;

/// out[i] = f(a[i], b[i])
#[inline(always)]
fn each<S: Scalar>(out: &mut [MaybeUninit<S>], a: &[S], b: &[S], f: impl Fn(S, S) -> S) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        out.write(f(*a, *b));
    }
}

/// x / (1 + e^-x), in f64 whatever the scalar.
#[inline(always)]
fn silu<S: Scalar>(x: S) -> S {
    let x = x.to_f64();
    S::from_f64(x / (1.0 + scalar::exp(-x)))
}

#[inline(always)]
fn activation<S: Scalar>(activation: Activation, x: S) -> S {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => {
            // Hendrycks and Gimpel, arXiv 1606.08415: 0.5x(1 + tanh(sqrt(2/π)(x + 0.044715x³))).
            let inner =
                S::from_f64((2.0 / std::f64::consts::PI).sqrt()) * (x + S::from_f64(0.044715) * x * x * x);
            S::from_f64(0.5) * x * (S::ONE + inner.tanh())
        }
        Activation::GeluErf => S::from_f64(0.5 * x.to_f64() * erfc(-x.to_f64() / std::f64::consts::SQRT_2)),
    }
}

/// Complementary error function through the continued Chebyshev fit of Numerical Recipes (3rd ed., 6.2.2),
/// fractional error below 1.2e-7: f32 accuracy, which is what engines have of it.
fn erfc(x: f64) -> f64 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    const C: [f64; 10] = [
        -1.26551223,
        1.00002368,
        0.37409196,
        0.09678418,
        -0.18628806,
        0.27886807,
        -1.13520398,
        1.48851587,
        -0.82215223,
        0.17087277,
    ];
    let series = C.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let value = t * (-z * z + series).exp();
    if x >= 0.0 { value } else { 2.0 - value }
}
