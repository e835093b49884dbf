//! REGLU: `dst = max(g, 0)·u`.
//!
//! s0 and s1 (a, b, c, d): gate g and up u; the result has their shape. Or s0 (a, b, c, 2d) alone: gate in the first
//! half of each row, up in the second. Words: glu, swapped (exchanges the two halves of a single source), alpha, limit.
//! One product in f32 (ggml-cpu/vec.h); 0 where g is not above 0.

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::glu::{self, Gated, product_carry};
use super::unary::{Setting, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<Reglu>(
    Op::Reglu,
    "the positive part of the gate times up: max(gate, 0) · up",
    "one rounding of the product",
);

enum Reglu {}

impl Gated for Reglu {
    fn value<S: Scalar>(_setting: Setting<'_>, gate: S, up: S) -> S {
        if gate > S::ZERO { gate * up } else { S::ZERO }
    }

    fn rounding(_setting: Setting<'_>, _gate: f64, _up: f64, y: f64) -> f64 {
        UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(_setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        let relu = |x: f64| x.max(0.0);
        product_carry(relu(gate), monotone(relu, gate, eg), up, eu)
    }
}
