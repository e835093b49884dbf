//! SGN: `dst` = -1, 0 or 1.
//!
//! s0 of any shape; the result has its shape and type. Exact; 0 of a NaN (ggml-cpu/unary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Sgn>(Op::Sgn, "the sign of a value: -1, 0 or 1", "nothing");

enum Sgn {}

impl Unary for Sgn {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        if x > S::ZERO {
            S::ONE
        } else if x < S::ZERO {
            -S::ONE
        } else {
            S::ZERO
        }
    }

    fn rounding(_setting: Setting<'_>, _x: f64, _y: f64) -> f64 {
        0.0
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| Sgn::value(setting, x), x, e)
    }
}
