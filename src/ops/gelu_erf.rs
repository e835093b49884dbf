//! GELU_ERF: `dst = 0.5·s0·(1 + erf(s0/√2))`.
//!
//! s0 of any shape; the result has its shape and type. No backend reads a table for it (ggml-cpu/vec.h,
//! `ggml_vec_gelu_erf_f32`).

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use parity_graph::Op;

use super::Rule;
use super::bound::{POLYNOMIAL_ERF, TINY_F32, UNIT_F32};
use super::unary::{self, Setting, Unary, smooth};
use crate::arithmetic::{Arithmetic, Functions};
use crate::scalar::Scalar;

pub const RULE: Rule = unary::rule::<GeluErf>(
    Op::GeluErf,
    "GELU with the error function: x/2 · (1 + erf(x/√2))",
    "the error of erf by its share of the result, and one rounding of the sum and of each product",
);

enum GeluErf {}

impl Unary for GeluErf {
    fn value<S: Scalar>(_setting: Setting<'_>, x: S) -> S {
        S::from_f64(exact(x.to_f64()))
    }

    fn rounding(setting: Setting<'_>, x: f64, _y: f64) -> f64 {
        rounding(setting.arithmetic, x)
    }

    fn carry(_setting: Setting<'_>, x: f64, e: f64) -> f64 {
        carry(x, e)
    }
}

/// 0.5·x·erfc(-x/√2), which does not cancel. Also the gate of GEGLU_ERF.
pub(super) fn exact(x: f64) -> f64 {
    0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2)
}

/// How far the formula in f32 is off: erf's own error, which 1 + erf keeps however small the sum is; two roundings of its
/// argument; the sum and two products.
pub(super) fn rounding(arithmetic: &Arithmetic, x: f64) -> f64 {
    /// Of erf in f32, in units of the last place: of glibc and of CUDA (Programming Guide, table of maximum errors).
    const ERF_ULPS: f64 = 2.0;
    /// A unit of the last place is two unit roundoffs.
    const ULP: f64 = 2.0 * UNIT_F32;
    const ARGUMENT_ROUNDINGS: f64 = 2.0;
    const ROUNDINGS: f64 = 3.0;
    let z = x * FRAC_1_SQRT_2;
    let moved = FRAC_2_SQRT_PI * (-z * z).exp() * z.abs() * ARGUMENT_ROUNDINGS * UNIT_F32;
    let of_erf = ERF_ULPS * ULP * libm::erf(z).abs() + moved;
    let of_erf = match arithmetic.functions {
        Functions::Library | Functions::FastMath => of_erf,
        Functions::Exponential | Functions::Rational => of_erf + POLYNOMIAL_ERF,
    };
    0.5 * x.abs() * of_erf + ROUNDINGS * UNIT_F32 * exact(x).abs() + TINY_F32
}

/// How far an error of x moves it. The slope Φ(x) + x·φ(x) is within -0.13 and 1.13, the curvature φ(x)·(2 - x²) within
/// -0.11 and 0.8.
pub(super) fn carry(x: f64, e: f64) -> f64 {
    const SLOPE_MAX: f64 = 1.13;
    const CURVATURE_MAX: f64 = 0.8;
    let density = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * x * x).exp();
    let slope = 0.5 * libm::erfc(-x * FRAC_1_SQRT_2) + x * density;
    smooth(slope, SLOPE_MAX, CURVATURE_MAX, e)
}
