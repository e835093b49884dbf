//! SWIGLU_OAI: `dst = g' / (1 + e^(-alpha·g')) · (u' + 1)`, `g' = min(g, limit)`, `u' = clamp(u, -limit, limit)`.
//!
//! s0 and s1 (a, b, c, d): gate g and up u; the result has their shape. Or s0 (a, b, c, 2d) alone: gate in the first
//! half of each row, up in the second. Words: glu, swapped (exchanges the two halves of a single source), alpha, limit.
//! The gate is limited from above only. libm's `expf`, one value after the other (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32, exponential};
use super::glu::{self, Gated, product_carry};
use super::silu::silu_carry;
use super::swiglu_clamp::{limited, limited_carry};
use super::unary::Setting;
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<SwigluOai>(
    Op::SwigluOai,
    "gpt-oss' gate: g / (1 + e^(-alpha·g)) · (u + 1), with g = min(gate, limit), u = clamp(up, -limit, \
     limit)",
    "the error of the exponential by its share of the sum, and the roundings of the sums, the quotient and \
     the product",
);

enum SwigluOai {}

impl Gated for SwigluOai {
    fn value<S: Scalar>(setting: Setting<'_>, gate: S, up: S) -> S {
        let (gate, up) = limited(setting, gate, up);
        swish(setting, gate) * (up + S::ONE)
    }

    /// As SILU's, with one rounding more of alpha·g, which the exponential magnifies by |alpha·g|; up + 1 and the
    /// product are two more, and where up is near -1 the first of them is all there is: u·|up + 1|.
    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64 {
        const ROUNDINGS: f64 = 5.0;
        let (gate, up) = limited(setting, gate, up);
        let steep = alpha(setting) * gate;
        let share = 1.0 / (1.0 + steep.exp());
        let power = exponential(setting.arithmetic, steep) + UNIT_F32 * steep.abs();
        let tiny = TINY_F32 * (1.0 + gate.abs()) * (1.0 + up.abs());
        (share * power.min(1.0) + ROUNDINGS * UNIT_F32) * y.abs() + tiny
    }

    fn carry(setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        let (g, u) = limited(setting, gate, up);
        let (eg, eu) = limited_carry(setting, gate, up, eg, eu);
        // g / (1 + e^-αg) = silu(αg) / α
        let alpha = alpha(setting);
        let moved =
            if alpha == 0.0 { eg / 2.0 } else { silu_carry(alpha * g, alpha.abs() * eg) / alpha.abs() };
        product_carry(swish(setting, g), moved, u + 1.0, eu)
    }
}

/// Word `alpha`.
fn alpha(setting: Setting<'_>) -> f64 {
    f64::from(setting.params.float(2))
}

/// g / (1 + e^(-alpha·g))
fn swish<S: Scalar>(setting: Setting<'_>, gate: S) -> S {
    gate / (S::ONE + (-(S::from_f64(alpha(setting)) * gate)).exp())
}
