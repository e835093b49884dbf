//! SILU: `dst = s0 / (1 + e^-s0)`.
//!
//! s0 of any shape; the result has its shape and type. The CPU has a vector exponential that is within 2 ulp, and
//! libm's for the last `ne0 mod 16` elements (ggml-cpu/vec.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32, logistic};
use super::unary::{self, Setting, Unary, smooth};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Silu>(
    Op::Silu,
    "a value times its sigmoid: x / (1 + e^-x)",
    "the error of the exponential by its share of 1 + e^-x, and three more roundings, relative to the result",
);

enum Silu {}

impl Unary for Silu {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        silu(x)
    }

    fn rounding(setting: Setting<'_>, x: f64, y: f64) -> f64 {
        silu_rounding(setting, x, y)
    }

    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        silu_carry(x, e)
    }
}

/// x / (1 + e^-x)
pub(super) fn silu<S: Scalar>(x: S) -> S {
    x / (S::ONE + (-x).exp())
}

/// The sigmoid's error, and the rounding of the product with it. Where e^-x is beyond f32 the result is nothing.
pub(super) fn silu_rounding(setting: Setting<'_>, x: f64, y: f64) -> f64 {
    x.abs() * logistic(setting.arithmetic, x) + UNIT_F32 * y.abs() + TINY_F32 * (1.0 + x.abs())
}

/// silu' = σ + x·σ·(1 - σ) is within -0.1 and 1.1, silu'' within -0.16 and 0.5.
pub(super) fn silu_carry(x: f64, e: f64) -> f64 {
    const SLOPE_MAX: f64 = 1.1;
    const CURVATURE_MAX: f64 = 0.5;
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    smooth(sigmoid + x * sigmoid * (1.0 - sigmoid), SLOPE_MAX, CURVATURE_MAX, e)
}
