//! GEGLU: `dst = gelu(g)·u`, with the tanh form of GELU.
//!
//! s0 and s1 (a, b, c, d): gate g and up u; the result has their shape. Or s0 (a, b, c, 2d) alone: gate in the first
//! half of each row, up in the second. Words: glu, swapped (exchanges the two halves of a single source), alpha, limit.
//! The CPU has gelu(g) from its table of f16, see GELU; up is not rounded (ggml-cpu/vec.h).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::gelu::{gelu, gelu_carry, gelu_rounding};
use super::glu::{self, Gated, product_carry};
use super::unary::Setting;
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<Geglu>(
    Op::Geglu,
    "the GELU of the gate times up: gelu(gate) · up",
    "the error of the GELU times up, and one rounding of the product",
);

enum Geglu {}

impl Gated for Geglu {
    fn value<S: Scalar>(setting: Setting<'_>, gate: S, up: S) -> S {
        S::from_f64(gelu(setting.arithmetic, gate.to_f64())) * up
    }

    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64 {
        gelu_rounding(setting.arithmetic, gate) * up.abs() + UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        let moved = if eg == 0.0 { 0.0 } else { gelu_carry(setting.arithmetic, gate, eg) };
        product_carry(gelu(setting.arithmetic, gate), moved, up, eu)
    }
}
