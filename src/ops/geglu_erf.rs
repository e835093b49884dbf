//! GEGLU_ERF: `dst = gelu(g)·u`, with the error function in GELU.
//!
//! Shapes and words as of GEGLU.

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::gelu_erf::{carry, exact, rounding};
use super::glu::{self, Gated, product_carry};
use super::unary::Setting;
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<GegluErf>(
    Op::GegluErf,
    "the GELU of the gate, with the error function, times up: gelu(gate) · up",
    "the error of the GELU times up, and one rounding of the product",
);

enum GegluErf {}

impl Gated for GegluErf {
    fn value<S: Scalar>(_setting: Setting<'_>, gate: S, up: S) -> S {
        S::from_f64(exact(gate.to_f64())) * up
    }

    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64 {
        rounding(setting.arithmetic, gate) * up.abs() + UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(_setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        let moved = if eg == 0.0 { 0.0 } else { carry(gate, eg) };
        product_carry(exact(gate), moved, up, eu)
    }
}
