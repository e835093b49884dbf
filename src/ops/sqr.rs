//! SQR: `dst = s0²`.
//!
//! s0 of any shape; the result has its shape and type. One product in f32 (ggml-cpu/vec.h).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::unary::{self, Setting, Unary};
use crate::scalar::Scalar;

pub const RULE: Rule =
    unary::rule::<Sqr>(Op::Sqr, "the square of a value: x²", "one rounding of the result in f32");

enum Sqr {}

impl Unary for Sqr {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        x * x
    }

    fn rounding(_setting: Setting<'_>, _x: f64, y: f64) -> f64 {
        UNIT_F32 * y + TINY_F32
    }

    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        2.0 * x.abs() * e + e * e
    }
}
