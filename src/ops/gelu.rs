//! GELU: `dst = 0.5·s0·(1 + tanh(√(2/π)·s0·(1 + 0.044715·s0²)))`.
//!
//! s0 of any shape; the result has its shape and type. The CPU reads a table over all f16: `f16(gelu(f16(x)))` for
//! -10 < x < 10, 0 below and x above (ggml-cpu/vec.h, `ggml_vec_gelu_f32`). The table itself was made with `tanhf` in
//! f32, so that an entry may be rounded to the other side, or by 1 + tanh cancelling be further off.

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32, tangent};
use super::unary::{self, Setting, Unary, smooth};
use crate::arithmetic::round::to_f16;
use crate::arithmetic::{self, Arithmetic};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<Gelu>(
    Op::Gelu,
    "the tanh form of GELU: x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))",
    "the error of the tanh by its share of the result, and where llama.cpp's CPU reads its table, half a \
     step of f16",
);

enum Gelu {}

impl Unary for Gelu {
    fn value<S: Scalar>(setting: Setting<'_>, x: S) -> S {
        S::from_f64(gelu(setting.arithmetic, x.to_f64()))
    }

    fn rounding(setting: Setting<'_>, x: f64, _y: f64) -> f64 {
        gelu_rounding(setting.arithmetic, x)
    }

    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64 {
        gelu_carry(setting.arithmetic, x, e)
    }
}

/// From where on the CPU reads no table.
const TABLE_END: f64 = 10.0;
/// The constants as ggml has them, in f32.
const COEFFICIENT: f64 = 0.044715f32 as f64;
const SQRT_2_OVER_PI: f64 = 0.797_884_6_f32 as f64;

/// GELU of x as `arithmetic` has it. Also the gate of GEGLU.
pub(super) fn gelu(arithmetic: &Arithmetic, x: f64) -> f64 {
    match arithmetic.gelu {
        arithmetic::Gelu::Exact => exact(x),
        arithmetic::Gelu::F16Table if x <= -TABLE_END => 0.0,
        arithmetic::Gelu::F16Table if x >= TABLE_END => x,
        arithmetic::Gelu::F16Table => to_f16(exact(to_f16(x))),
    }
}

/// The argument of tanh.
fn argument(x: f64) -> f64 {
    SQRT_2_OVER_PI * x * (1.0 + COEFFICIENT * x * x)
}

/// 0.5·x·(1 + tanh z) = x / (1 + e^-2z), which does not cancel.
fn exact(x: f64) -> f64 {
    x / (1.0 + (-2.0 * argument(x)).exp())
}

/// How far the tanh form in f32 is off: tanh's own error, which 1 + tanh keeps however small the sum is; six
/// roundings of its argument; the sum and two products.
fn formula_rounding(arithmetic: &Arithmetic, x: f64) -> f64 {
    const ARGUMENT_ROUNDINGS: f64 = 6.0;
    const ROUNDINGS: f64 = 3.0;
    let (z, y) = (argument(x), exact(x));
    let t = z.tanh();
    let moved = (1.0 - t * t) * z.abs() * ARGUMENT_ROUNDINGS * UNIT_F32;
    0.5 * x.abs() * (tangent(arithmetic, z) + moved) + ROUNDINGS * UNIT_F32 * y.abs() + TINY_F32
}

/// How far rounding moves gelu(x): in f32, or past which roundings to f16 it moves an entry of the table.
pub(super) fn gelu_rounding(arithmetic: &Arithmetic, x: f64) -> f64 {
    match arithmetic.gelu {
        arithmetic::Gelu::Exact => formula_rounding(arithmetic, x),
        arithmetic::Gelu::F16Table if x.abs() >= TABLE_END => 0.0,
        arithmetic::Gelu::F16Table => {
            let rounded = to_f16(x);
            let (y, off) = (exact(rounded), formula_rounding(arithmetic, rounded));
            let entry = to_f16(y);
            (to_f16(y + off) - entry).abs().max((to_f16(y - off) - entry).abs())
        }
    }
}

/// How far an error of x moves gelu(x). gelu' is within -0.13 and 1.13, gelu'' within -0.2 and 0.8.
pub(super) fn gelu_carry(arithmetic: &Arithmetic, x: f64, e: f64) -> f64 {
    const SLOPE_MAX: f64 = 1.13;
    const CURVATURE_MAX: f64 = 0.8;
    let slope = |x: f64| {
        let t = argument(x).tanh();
        let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * COEFFICIENT * x * x);
        0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    };
    match arithmetic.gelu {
        arithmetic::Gelu::Exact => smooth(slope(x), SLOPE_MAX, CURVATURE_MAX, e),
        arithmetic::Gelu::F16Table => {
            let own = gelu(arithmetic, x);
            let rounded = to_f16(x);
            let off = (to_f16(x + e) - rounded).abs().max((to_f16(x - e) - rounded).abs());
            let y = exact(rounded);
            let moved = smooth(slope(rounded), SLOPE_MAX, CURVATURE_MAX, off);
            let within = (to_f16(y + moved) - own).abs().max((to_f16(y - moved) - own).abs());
            // Across an end of the table, and beyond it.
            let ends = (gelu(arithmetic, x + e) - own).abs().max((gelu(arithmetic, x - e) - own).abs());
            if x.abs() + e < TABLE_END { within } else { within.max(ends) }
        }
    }
}
