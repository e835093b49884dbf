//! TANH: `dst = tanh(s0)`.
//!
//! s0 of any shape; the result has its shape and type. The CPU calls libm's `tanhf` (ggml-cpu/unary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, tangent};
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Tanh>(
    Op::Tanh,
    "the hyperbolic tangent: tanh(x)",
    "a few units u = 2^-24 of the result, or on GPUs with fast functions 2^-11 of it",
);

enum Tanh {}

impl Unary for Tanh {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        x.tanh()
    }

    fn rounding(setting: Setting<'_>, x: f64, _y: f64) -> f64 {
        tangent(setting.arithmetic, x) + TINY_F32
    }

    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(f64::tanh, x, e)
    }
}
