//! F32, F16, BF16: exact in both number types.

use half::slice::HalfFloatSliceExt;

use crate::scalar::Scalar;

/// Values that are converted at a time.
const CHUNK: usize = 64;

#[inline(always)]
pub fn f32<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = S::from_f32(f32::from_le_bytes(*bytes));
    }
}

#[inline(always)]
pub fn f16<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    let mut halves = [half::f16::ZERO; CHUNK];
    let mut floats = [0f32; CHUNK];
    for (bytes, out) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = half::f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(&mut floats);
        for (out, value) in out.iter_mut().zip(&floats) {
            *out = S::from_f32(*value);
        }
    }
}

#[inline(always)]
pub fn bf16<S: Scalar>(bytes: &[u8], out: &mut [S]) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = S::from_f32(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
    }
}
