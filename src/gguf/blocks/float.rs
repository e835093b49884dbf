//! F32, F16, BF16: exact in both number types.

use crate::scalar::Scalar;

#[inline(always)]
pub fn f32<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = S::from_f32(f32::from_le_bytes(*bytes));
    }
}

#[inline(always)]
pub fn f16<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = S::from_f32(half(u16::from_le_bytes(*bytes)));
    }
}

/// A number of f16 by its bits, without a branch or a call, so that a loop over it becomes vector instructions. (Slices of the crate
/// `half`, 64 values at a time, took four times as long.)
#[inline(always)]
fn half(bits: u16) -> f32 {
    /// How much larger the exponents of f32 are, where it has them.
    const BIAS: u32 = (127 - 15) << 23;
    /// 2^-14, the least normal number of f16.
    const LEAST: u32 = BIAS + (1 << 23);
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    // Infinity and NaN have the largest exponent of either type.
    let more = if bits & 0x7c00 == 0x7c00 { BIAS } else { 0 };
    let normal = magnitude + BIAS + more;
    let subnormal = (f32::from_bits(magnitude + LEAST) - f32::from_bits(LEAST)).to_bits();
    f32::from_bits(sign | if bits & 0x7c00 == 0 { subnormal } else { normal })
}

#[inline(always)]
pub fn bf16<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = S::from_f32(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_f16_is_what_the_crate_half_has() {
        for bits in 0..=u16::MAX {
            let (own, wanted) = (super::half(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                own.to_bits() == wanted.to_bits() || own.is_nan() && wanted.is_nan(),
                "{bits:#06x}: {own}"
            );
        }
    }
}
