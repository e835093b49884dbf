//! EXP: `dst = e^s0`.
//!
//! s0 of any shape; the result has its shape and type. The CPU calls libm's `expf` (ggml-cpu/unary-ops.cpp); results
//! beyond the largest f32 are infinite.

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, exponential};
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Exp>(
    Op::Exp,
    "e to the power of a value: e^x",
    "a few units u = 2^-24 of the exponential itself, and |x|·u more where it goes through exp2, relative \
     to the result",
);

enum Exp {}

impl Unary for Exp {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        x.exp()
    }

    fn rounding(setting: Setting<'_>, x: f64, y: f64) -> f64 {
        exponential(setting.arithmetic, x) * y.abs() + TINY_F32
    }

    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(f64::exp, x, e)
    }
}
