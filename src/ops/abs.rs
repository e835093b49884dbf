//! ABS: `dst = |s0|`.
//!
//! s0 of any shape; the result has its shape and type. Exact (ggml-cpu/unary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::unary::{self, Setting, Unary};
use crate::scalar::Scalar;

pub const RULE: Rule =
    unary::rule::<Abs>(Op::Abs, "the absolute value: |x|", "nothing: every bit is the source's");

enum Abs {}

impl Unary for Abs {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        x.abs()
    }

    fn rounding(_setting: Setting<'_>, _x: f64, _y: f64) -> f64 {
        0.0
    }

    fn carry(_setting: Setting<'_>, _x: f64, e: f64) -> f64 {
        e
    }
}
