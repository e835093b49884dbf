//! SWIGLU: `dst = g / (1 + e^-g) · u`.
//!
//! s0 and s1 (a, b, c, d): gate g and up u; the result has their shape. Or s0 (a, b, c, 2d) alone: gate in the first
//! half of each row, up in the second. Words: glu, swapped (exchanges the two halves of a single source), alpha, limit.
//! The CPU has a vector exponential that is within 2 ulp, and libm's for the last `ne0 mod 16` elements
//! (ggml-cpu/vec.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::glu::{self, Gated, product_carry};
use super::silu::{silu, silu_carry, silu_rounding};
use super::unary::Setting;
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<Swiglu>(
    Op::Swiglu,
    "the SiLU of the gate times up: gate / (1 + e^-gate) · up",
    "the error of the SiLU times up (the exponential's, by its share of 1 + e^-gate, and three roundings), \
     and one rounding of the product",
);

enum Swiglu {}

impl Gated for Swiglu {
    fn value<S: Scalar>(_setting: Setting<'_>, gate: S, up: S) -> S {
        silu(gate) * up
    }

    /// The error of silu(g) times up, and the product's rounding.
    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64 {
        silu_rounding(setting, gate, silu(gate)) * up.abs() + UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(_setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        product_carry(silu(gate), silu_carry(gate, eg), up, eu)
    }
}
