//! SIGMOID: `dst = 1 / (1 + e^-s0)`.
//!
//! s0 of any shape; the result has its shape and type. The CPU calls libm's `expf` (ggml-cpu/unary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, logistic};
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Sigmoid>(
    Op::Sigmoid,
    "1 / (1 + e^-x)",
    "the error of the exponential by its share of 1 + e^-x, and the roundings of the sum and the quotient",
);

enum Sigmoid {}

impl Unary for Sigmoid {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        S::ONE / (S::ONE + (-x).exp())
    }

    fn rounding(setting: Setting<'_>, x: f64, _y: f64) -> f64 {
        logistic(setting.arithmetic, x) + TINY_F32
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| Sigmoid::value(setting, x), x, e)
    }
}
