//! CLAMP: `dst = max(min(s0, max), min)`.
//!
//! s0 of any shape; the result has its shape. Words: min, max, which may be infinite. Exact; a NaN becomes max
//! (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Clamp>(
    Op::Clamp,
    "a value within two limits: max(min(x, max), min)",
    "nothing: every bit is the source's or a limit's",
);

enum Clamp {}

impl Unary for Clamp {
    fn value<S: Scalar>(setting: Setting<'_>, x: S) -> S {
        let (min, max) = (S::from_f32(setting.params.float(0)), S::from_f32(setting.params.float(1)));
        let below = if x < max { x } else { max };
        if below > min { below } else { min }
    }

    fn rounding(_setting: Setting<'_>, _x: f64, _y: f64) -> f64 {
        0.0
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| Clamp::value(setting, x), x, e)
    }
}
