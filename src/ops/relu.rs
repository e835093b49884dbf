//! RELU: `dst = max(s0, 0)`.
//!
//! s0 of any shape; the result has its shape and type. Exact; 0 of a NaN (ggml-cpu/unary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Relu>(
    Op::Relu,
    "the larger of a value and zero: max(x, 0)",
    "nothing: every bit is the source's",
);

enum Relu {}

impl Unary for Relu {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        if x > S::ZERO { x } else { S::ZERO }
    }

    fn rounding(_setting: Setting<'_>, _x: f64, _y: f64) -> f64 {
        0.0
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| Relu::value(setting, x), x, e)
    }
}
