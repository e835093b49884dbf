//! SQRT: `dst = √s0`.
//!
//! s0 of any shape; the result has its shape and type. `sqrtf`, rounded correctly (ggml-cpu/vec.h); NaN of what is
//! negative.

use parity_graph::Op;

use super::Rule;
use super::bound::UNIT_F32;
use super::unary::{self, Setting, Unary, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule =
    unary::rule::<Sqrt>(Op::Sqrt, "the square root of a value: √x", "one rounding of the result in f32");

enum Sqrt {}

impl Unary for Sqrt {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        x.sqrt()
    }

    fn rounding(_setting: Setting<'_>, _x: f64, y: f64) -> f64 {
        UNIT_F32 * y
    }

    /// The root is steepest below: towards zero, and no further.
    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        monotone(|x| x.max(0.0).sqrt(), x, e)
    }
}
