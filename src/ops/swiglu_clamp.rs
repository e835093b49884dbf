//! SWIGLU_CLAMP: `dst = silu(min(g, limit)) · clamp(u, -limit, limit)`.
//!
//! s0 and s1 (a, b, c, d): gate g and up u; the result has their shape. Or s0 (a, b, c, 2d) alone: gate in the first
//! half of each row, up in the second. Words: glu, swapped (exchanges the two halves of a single source), alpha, limit.
//! The gate is limited from above only. As SWIGLU otherwise (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::bound::{TINY_F32, UNIT_F32};
use super::glu::{self, Gated, product_carry};
use super::silu::{silu, silu_carry, silu_rounding};
use super::unary::{Setting, monotone};
use crate::scalar::Scalar;

pub const RULE: Rule = glu::rule::<SwigluClamp>(
    Op::SwigluClamp,
    "the SiLU of the gate, limited from above, times up within two limits: silu(min(gate, limit)) · \
     clamp(up, -limit, limit)",
    "the error of the SiLU times up, and one rounding of the product",
);

enum SwigluClamp {}

impl Gated for SwigluClamp {
    fn value<S: Scalar>(setting: Setting<'_>, gate: S, up: S) -> S {
        let (gate, up) = limited(setting, gate, up);
        silu(gate) * up
    }

    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64 {
        let (gate, up) = limited(setting, gate, up);
        silu_rounding(setting, gate, silu(gate)) * up.abs() + UNIT_F32 * y.abs() + TINY_F32
    }

    fn carry(setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64 {
        let (g, u) = limited(setting, gate, up);
        let (eg, eu) = limited_carry(setting, gate, up, eg, eu);
        product_carry(silu(g), silu_carry(g, eg), u, eu)
    }
}

/// Word `limit`.
const LIMIT: usize = 3;

/// Gate and up within the limit of the op. Also of SWIGLU_OAI.
pub(super) fn limited<S: Scalar>(setting: Setting<'_>, gate: S, up: S) -> (S, S) {
    let limit = S::from_f32(setting.params.float(LIMIT));
    let below = |x: S| if x < limit { x } else { limit };
    let up = below(up);
    (below(gate), if up > -limit { up } else { -limit })
}

/// How far errors of gate and up move what is within the limit.
pub(super) fn limited_carry(setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> (f64, f64) {
    let gate = monotone(|gate| limited(setting, gate, 0.0).0, gate, eg);
    (gate, monotone(|up| limited(setting, 0.0, up).1, up, eu))
}
