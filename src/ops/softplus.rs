//! SOFTPLUS: `dst = log(1 + e^s0)`.
//!
//! s0 of any shape; the result has its shape and type. The CPU gives s0 itself above 20, and else rounds 1 + e^s0 to
//! f32 before it takes the logarithm: below -17 that is 0 (ggml-cpu/unary-ops.cpp, ggml-impl.h).

use parity_graph::Op;

use super::Rule;
use super::bound::{LOG_ROUNDINGS, TINY_F32, UNIT_F32, exponential};
use super::unary::{self, Setting, Unary, monotone};
use crate::arithmetic::{self, Arithmetic};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Softplus>(
    Op::Softplus,
    "log(1 + e^x)",
    "the errors of the exponential and of the logarithm, and where llama.cpp's CPU rounds 1 + e^x to f32, \
     that",
);

enum Softplus {}

impl Unary for Softplus {
    fn value<S: Scalar>(setting: Setting<'_>, x: S) -> S {
        S::from_f64(softplus(setting.arithmetic, x.to_f64()))
    }

    fn rounding(setting: Setting<'_>, x: f64, y: f64) -> f64 {
        softplus_rounding(setting.arithmetic, x, y)
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| softplus(setting.arithmetic, x), x, e)
    }
}

/// Above it the CPU takes log(1 + e^x) for x: the two differ by 2e-9.
const LINEAR_FROM: f64 = 20.0;

/// log(1 + e^x), as `arithmetic` has it. Also used inside of SSM_SCAN.
pub(super) fn softplus(arithmetic: &Arithmetic, x: f64) -> f64 {
    match arithmetic.softplus {
        arithmetic::Softplus::RoundedSum if x > LINEAR_FROM => x,
        arithmetic::Softplus::RoundedSum => rounded(1.0 + x.exp()).ln(),
        // log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), which does not overflow.
        arithmetic::Softplus::Exact => x.max_nan(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

/// How far rounding moves softplus(x) = y in f32. Where the sum is rounded on purpose, an error of the exponential
/// may round it to the other side.
pub(super) fn softplus_rounding(arithmetic: &Arithmetic, x: f64, y: f64) -> f64 {
    let logarithm = LOG_ROUNDINGS * UNIT_F32 * y.abs() + TINY_F32;
    let relative = exponential(arithmetic, x);
    match arithmetic.softplus {
        arithmetic::Softplus::RoundedSum if x > LINEAR_FROM => 0.0,
        arithmetic::Softplus::RoundedSum => {
            let power = x.exp();
            let moved = |factor: f64| (rounded(1.0 + power * (1.0 + factor)).ln() - y).abs();
            logarithm + moved(relative).max(moved(-relative))
        }
        arithmetic::Softplus::Exact => logarithm + power_share(x) * relative,
    }
}

/// e^x / (1 + e^x): how far log(1 + e^x) moves for a relative change of e^x.
fn power_share(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn rounded(value: f64) -> f64 {
    f64::from(value as f32)
}
