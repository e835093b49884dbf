//! SCALE: `dst = s0·scale + bias`.
//!
//! s0 of any shape; the result has its shape. Words: scale, bias. One product in f32, or where the bias is not zero a
//! fused multiply-add or two roundings (ggml-cpu/ops.cpp, vec.h). A scale of 0 with a bias of -inf fills; a NaN or an
//! infinity in s0 then gives NaN.

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::unary::{self, Setting, Unary};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Scale>(
    Op::Scale,
    "a value times a factor, plus an offset: scale·x + bias",
    "one rounding of the product and one of the sum",
);

enum Scale {}

impl Unary for Scale {
    fn value<S: Scalar>(setting: Setting<'_>, x: S) -> S {
        let (scale, bias) = (setting.params.float(0), setting.params.float(1));
        let product = x * S::from_f32(scale);
        if bias == 0.0 { product } else { product + S::from_f32(bias) }
    }

    fn rounding(setting: Setting<'_>, x: f64, y: f64) -> f64 {
        let (scale, bias) = (setting.params.float(0), setting.params.float(1));
        let product = if bias == 0.0 { 0.0 } else { UNIT_F32 * (x * f64::from(scale)).abs() + TINY_F32 };
        product + UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(setting: Setting<'_>, _x: f64, e: f64) -> f64 {
        f64::from(setting.params.float(0)).abs() * e
    }
}
