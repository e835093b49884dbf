//! Named factors that bounds are products of; `docs/bounds.md` derives each under the same name.

use crate::scalar::Scalar;

/// Unit roundoff of f32: half the distance from 1 to the next number.
pub const UNIT_F32: f64 = <f32 as Scalar>::UNIT_ROUNDOFF;
/// Unit roundoff of f16.
pub const UNIT_F16: f64 = 1.0 / 2048.0;
/// Unit roundoff of bf16.
pub const UNIT_BF16: f64 = 1.0 / 256.0;
/// Half the distance between neighbouring subnormal f16 numbers.
pub const SUBNORMAL_F16: f64 = 1.0 / 33_554_432.0;
/// Below this magnitude f32 results may be flushed to zero.
pub const TINY_F32: f64 = f32::MIN_POSITIVE as f64;
/// Roundings are uniform within ±u and independent: their sum in quadrature, times this, is seven standard
/// deviations (4·√3), beyond what a dump with 10^11 elements reaches.
pub const CONFIDENCE: f64 = 4.0;

/// A sum of `terms` numbers, one after the other: every addition rounds the sum so far, so that the error is u
/// times those sums in quadrature. Relative to the largest of them.
pub fn accumulation(terms: usize, unit: f64) -> f64 {
    CONFIDENCE * (terms as f64).sqrt() * unit
}
