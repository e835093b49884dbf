//! Single values rounded to fewer bits, once, and without a branch, so that a loop over it becomes vector
//! instructions.

use super::Narrow;
use super::round::Rounding;
use crate::gguf::DType;
use crate::scalar::{Scalar, bf16, each, half};

impl Narrow {
    /// Rounds values in place.
    pub fn store<S: Scalar>(self, values: &mut [S]) {
        match self {
            Narrow::F16 => each(values, half),
            Narrow::Bf16 => each(values, |value| f64::from(bf16(value as f32))),
            Narrow::Tf32 => each(values, |value| f64::from(tf32(value as f32))),
            Narrow::Tf32Away => each(values, |value| f64::from(tf32_away(value as f32))),
            Narrow::Tf32Cut => each(values, |value| f64::from(tf32_cut(value as f32))),
            Narrow::Pair => each(values, |value| f64::from(pair(value as f32))),
        }
    }

    /// Whether it has every number of a type: TF32 has the significant bits of f16 and the exponents of bf16, and so have two
    /// bf16.
    pub fn holds(self, dtype: DType) -> bool {
        match self {
            Narrow::F16 => dtype == DType::F16,
            Narrow::Bf16 => dtype == DType::BF16,
            Narrow::Tf32 | Narrow::Tf32Away | Narrow::Tf32Cut | Narrow::Pair => {
                matches!(dtype, DType::F16 | DType::BF16)
            }
        }
    }

    /// As activations are rounded to it.
    pub fn rounding(self) -> Rounding {
        match self {
            Narrow::F16 => Rounding::F16,
            Narrow::Bf16 => Rounding::Bf16,
            Narrow::Tf32 => Rounding::Tf32,
            Narrow::Tf32Away => Rounding::Tf32Away,
            Narrow::Tf32Cut => Rounding::Tf32Cut,
            Narrow::Pair => Rounding::Pair,
        }
    }
}

/// To the nearest multiple of a power of two, halves to the even one, of magnitudes below 2^51 of them.
pub fn nearest_of(value: f64, step: f64) -> f64 {
    /// 1.5·2^52
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    ((value / step + SHIFT) - SHIFT) * step
}

/// To the nearest bf16 and the nearest one of what that leaves: their sum.
#[inline(always)]
pub fn pair(value: f32) -> f32 {
    let high = bf16(value);
    if high.is_finite() { high + bf16(value - high) } else { high }
}

/// The lesser part of such a sum.
#[inline(always)]
pub fn lesser(value: f64) -> f64 {
    let high = bf16(value as f32);
    if high.is_finite() { f64::from(bf16(value as f32 - high)) } else { 0.0 }
}

/// Mantissa bits of f32 that TF32 does not have.
const TF32_DROPPED: u32 = 13;

/// To the nearest of 11 significant bits, halves to the even one.
#[inline(always)]
pub fn tf32(value: f32) -> f32 {
    let bits = value.to_bits();
    let odd = (bits >> TF32_DROPPED) & 1;
    let rounded = bits.wrapping_add((1 << (TF32_DROPPED - 1)) - 1 + odd) & !((1 << TF32_DROPPED) - 1);
    if value.is_finite() { f32::from_bits(rounded) } else { value }
}

/// To the nearest of 11 significant bits, halves away from zero.
#[inline(always)]
pub fn tf32_away(value: f32) -> f32 {
    let rounded = value.to_bits().wrapping_add(1 << (TF32_DROPPED - 1)) & !((1 << TF32_DROPPED) - 1);
    if value.is_finite() { f32::from_bits(rounded) } else { value }
}

/// To 11 significant bits, towards zero.
#[inline(always)]
pub fn tf32_cut(value: f32) -> f32 {
    if value.is_finite() { f32::from_bits(value.to_bits() & !((1 << TF32_DROPPED) - 1)) } else { value }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::{bf16, half, tf32, tf32_away, tf32_cut};

    #[test]
    fn half_is_the_nearest_f16_of_an_f64() {
        for bits in (0..u64::from(u32::MAX)).step_by(65_537) {
            // Exponents around those of f16, mantissas of every kind, halves among them.
            for exponent in 990..1042u64 {
                for sign in [0, 1u64 << 63] {
                    let value = f64::from_bits(sign | (exponent << 52) | (bits << 20));
                    // Hardware may round to f32 on the way, which is further off.
                    let (own, library) = (half(value), f16::from_f64(value).to_f64());
                    assert_eq!(f16::from_f64(own).to_f64(), own, "{value:e}");
                    assert!((own - value).abs() <= (library - value).abs() || own == library, "{value:e}");
                }
            }
        }
        assert!(half(f64::NAN).is_nan() && half(f64::INFINITY) == f64::INFINITY);
    }

    #[test]
    fn bf16_is_the_librarys() {
        for bits in (0..=u32::MAX).step_by(4_093) {
            let value = f32::from_bits(bits);
            let library = half::bf16::from_f32(value).to_f32();
            assert!(bf16(value) == library || value.is_nan() && library.is_nan(), "{value:e}");
        }
        let largest = f32::MAX;
        assert!(bf16(largest).is_infinite() && bf16(-f32::INFINITY) == -f32::INFINITY);
    }

    #[test]
    fn tf32_keeps_eleven_bits() {
        let step = 1.0 / 1024.0;
        assert_eq!(tf32(1.0 + 0.5 * step), 1.0);
        assert_eq!(tf32(1.0 + 1.5 * step), 1.0 + 2.0 * step);
        assert_eq!(tf32(1.0 + 0.51 * step), 1.0 + step);
        assert_eq!(tf32_away(-1.0 - 0.5 * step), -1.0 - step);
        assert_eq!(tf32_away(1.0 + 0.49 * step), 1.0);
        assert_eq!(tf32_cut(1.0 + 0.99 * step), 1.0);
        assert_eq!(tf32_cut(-1.0 - 0.99 * step), -1.0);
        assert!(tf32(f32::NAN).is_nan() && tf32_cut(f32::INFINITY) == f32::INFINITY);
    }
}
