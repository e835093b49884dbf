//! Named factors that bounds are products of; `docs/bounds.md` derives each under the same name.

use crate::arithmetic::{Arithmetic, Functions, Narrow, Sums};
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::scalar::Scalar;

/// Unit roundoff of f32: half the distance from 1 to the next number.
pub const UNIT_F32: f64 = <f32 as Scalar>::UNIT_ROUNDOFF;
/// Unit roundoff of f16.
pub const UNIT_F16: f64 = 1.0 / 2048.0;
/// Unit roundoff of bf16.
pub const UNIT_BF16: f64 = 1.0 / 256.0;
/// Half the distance between neighbouring subnormal f16 numbers.
pub const SUBNORMAL_F16: f64 = 1.0 / 33_554_432.0;
/// Below this magnitude f32 results may be flushed to zero, and their roundings are absolute.
pub const TINY_F32: f64 = f32::MIN_POSITIVE as f64;
/// Roundings are uniform within ±u and independent: their sum in quadrature, times this, is seven standard
/// deviations (4·√3), beyond what a dump with 10^11 elements reaches.
pub const CONFIDENCE: f64 = 4.0;
/// Two products and their sum.
pub const ROPE_ROUNDINGS: f64 = 3.0;
/// Roundings of an angle before it grows with the index of its pair: the product with the position, the
/// division by a frequency factor, the power's own.
pub const ANGLE_ROUNDINGS: f64 = 4.0;
/// Error of sine and cosine in units of 1·u (libm: within 1 ulp; vectorised ones: 2).
pub const SINCOS_ROUNDINGS: f64 = 4.0;
/// exp in units of u: ggml's `ggml_v_expf` is within 1.95 ulp, an ulp is up to 2u.
pub const EXP_ROUNDINGS: f64 = 4.0;
/// log in units of u: within 2 ulp.
pub const LOG_ROUNDINGS: f64 = 4.0;
/// tanh in units of u: glibc's `tanhf` is within 2 ulp.
pub const TANH_ROUNDINGS: f64 = 4.0;
/// A score is scaled, masked, and the maximum is subtracted from it.
pub const SCORE_ROUNDINGS: f64 = 3.0;
/// The sum's inverse and the product with it.
pub const NORMALISE_ROUNDINGS: f64 = 3.0;
/// A stored block is decoded with up to this many roundings of values up to its largest.
pub const DECODE_ROUNDINGS: f64 = 3.0;
/// Terms that are added in f32 before a sum goes on in f64: as many as the widest vectors of a CPU hold.
pub const GROUP: usize = 16;
/// CUDA's `-use_fast_math`: sine and cosine are within 2^-20.5 up to π, and beyond lose what the angle's
/// reduction in f32 loses (CUDA C Programming Guide, intrinsic functions).
pub const FAST_TRIG: f64 = 1.0 / 1_482_910.0;
/// `__expf(x)` is exp2 of a product rounded to f32: |x|·u more, twice for safety of the constant log2(e).
pub const FAST_EXP_ARGUMENT: f64 = 2.0;
/// Division on GPUs is within 2.5 ulp (Vulkan specification, precision of GLSL.std.450; CUDA's fast division 2 ulp), an ulp
/// is up to 2u.
pub const QUOTIENT_ROUNDINGS: f64 = 5.0;
/// `__tanhf(x)` is within 2^-11 of itself (the same table).
pub const FAST_TANH: f64 = 1.0 / 2048.0;

/// Eigen's tanh in f32, a ratio of two polynomials (`generic_fast_tanh_float`, which XLA took over), in units of u: 6.7 over
/// all f32.
pub const RATIONAL_TANH: f64 = 8.0;
/// erf by the polynomial 7.1.26 of Abramowitz and Stegun is within 1.5e-7, whatever it comes to.
pub const POLYNOMIAL_ERF: f64 = 1.5e-7;

/// Above this share of its bound an error is more than rounding.
pub const HEALTHY: f64 = 1.0;

/// Unit roundoff of a type that values are kept in.
pub fn storage_unit(kept: Storage) -> f64 {
    match kept {
        Storage::F32 => UNIT_F32,
        Storage::F16 => UNIT_F16,
        Storage::Bf16 => UNIT_BF16,
    }
}

/// A sum of `terms` numbers, one after the other: every addition rounds the sum so far, so that the error is u
/// times those sums in quadrature. Relative to the largest of them.
pub fn accumulation(terms: usize, unit: f64) -> f64 {
    CONFIDENCE * (terms as f64).sqrt() * unit
}

/// [`accumulation`] of a sum over `terms` elements of a row: in f32, or in f64 and rounded once, with up to `group`
/// terms added in f32 before.
pub fn row_sum(arithmetic: &Arithmetic, terms: usize, group: usize) -> f64 {
    match arithmetic.sums {
        Sums::Single => accumulation(terms, UNIT_F32),
        Sums::Double => UNIT_F32 * if group > 1 { 1.0 + group.min(terms) as f64 } else { 1.0 },
    }
}

/// Relative error of e^x. An exponential through exp2 rounds its argument, which is an error of |x|·u.
pub fn exponential(arithmetic: &Arithmetic, x: f64) -> f64 {
    let argument = match arithmetic.functions {
        Functions::Library => 1.0,
        Functions::FastMath | Functions::Exponential | Functions::Rational => FAST_EXP_ARGUMENT,
    };
    // Beyond, the result is infinite or nothing.
    UNIT_F32 * (EXP_ROUNDINGS + argument * x.abs().min(f64::from(f32::MAX_EXP)))
}

/// Absolute error of tanh z.
pub fn tangent(arithmetic: &Arithmetic, z: f64) -> f64 {
    let t = z.tanh();
    match arithmetic.functions {
        Functions::Library => TANH_ROUNDINGS * UNIT_F32 * t.abs(),
        Functions::FastMath => FAST_TANH * t.abs(),
        Functions::Rational => RATIONAL_TANH * UNIT_F32 * t.abs(),
        // 1 - 2/(e^2z + 1): the exponential by its share of the sum, the sum and the quotient; the difference.
        Functions::Exponential => {
            let share = 1.0 / (1.0 + (-2.0 * z).exp());
            let quotient = share * exponential(arithmetic, 2.0 * z) + (1.0 + QUOTIENT_ROUNDINGS) * UNIT_F32;
            (1.0 - t) * quotient + UNIT_F32
        }
    }
}

/// Absolute error of the sigmoid 1/(1 + e^-x): the exponential's by its share of the sum, the sum's and the quotient's. As
/// ½ + ½·tanh(x/2) it has half of tanh's and that of the sum, however small it is.
pub fn logistic(arithmetic: &Arithmetic, x: f64) -> f64 {
    let y = 1.0 / (1.0 + (-x).exp());
    match arithmetic.functions {
        Functions::Rational => 0.5 * tangent(arithmetic, 0.5 * x) + UNIT_F32 * y,
        _ => {
            let share = 1.0 / (1.0 + x.exp());
            (share * exponential(arithmetic, x) + (1.0 + quotient(arithmetic)) * UNIT_F32) * y
        }
    }
}

/// Error of a quotient of two f32 numbers, in units of u.
pub fn quotient(arithmetic: &Arithmetic) -> f64 {
    if arithmetic.functions == Functions::Library { 1.0 } else { QUOTIENT_ROUNDINGS }
}

/// What storing a result in `dtype` adds. The exact result is rounded as well where that type is narrow, so that the value of a
/// producer who rounds once from f32 is within half of this.
pub fn storage(dtype: DType, y: f64) -> f64 {
    match dtype {
        DType::F16 => UNIT_F16 * y.abs() + SUBNORMAL_F16,
        DType::BF16 => UNIT_BF16 * y.abs() + TINY_F32,
        _ => 0.0,
    }
}

/// A bound: nothing is allowed where the exact result is infinite or no number at all, and no bound is NaN. That an
/// infinity equals itself is for the caller to see.
pub fn finite(y: f64, bound: f64) -> f64 {
    if y.is_finite() && !bound.is_nan() { bound } else { 0.0 }
}

/// Unit roundoff of a narrow type: half a step beside 1, or a whole one where the rest is cut off.
pub fn unit_of(narrow: Narrow) -> f64 {
    match narrow {
        Narrow::F16 | Narrow::Tf32 | Narrow::Tf32Away => UNIT_F16,
        Narrow::Bf16 => UNIT_BF16,
        Narrow::Tf32Cut => 2.0 * UNIT_F16,
        Narrow::Pair => UNIT_BF16 * UNIT_BF16,
    }
}

/// By how much a value is rounded to a narrow type at least: of those types f16 alone has no small exponents.
pub fn least_of(narrow: Narrow) -> f64 {
    if narrow == Narrow::F16 { SUBNORMAL_F16 } else { TINY_F32 }
}
