//! Blocks of 32 values with one f16 scale d, and in the `_1` types one f16 offset m.

use super::{half, int, part};
use crate::scalar::Scalar;

/// Scale and minimum of quants from which `middle` is subtracted.
pub fn offset(d: f64, middle: u8) -> (f64, f64) {
    (d, -d * f64::from(middle))
}

/// d, 16 bytes of nibbles: value l in the low, l + 16 in the high half. y = (q - 8)·d
#[inline(always)]
pub fn q4_0<S: Scalar>(block: &[u8; 18], out: &mut [S; 32]) {
    let d: S = half(block, 0);
    let quants: &[u8; 16] = part(block, 2);
    for l in 0..16 {
        out[l] = int::<S>((quants[l] & 15) as i8 - 8) * d;
        out[l + 16] = int::<S>((quants[l] >> 4) as i8 - 8) * d;
    }
}

/// d, m, nibbles as in Q4_0. y = q·d + m
#[inline(always)]
pub fn q4_1<S: Scalar>(block: &[u8; 20], out: &mut [S; 32]) {
    let (d, m): (S, S) = (half(block, 0), half(block, 2));
    let quants: &[u8; 16] = part(block, 4);
    for l in 0..16 {
        out[l] = int::<S>(quants[l] & 15) * d + m;
        out[l + 16] = int::<S>(quants[l] >> 4) * d + m;
    }
}

/// The 32 five-bit quants of Q5_0 and Q5_1: nibbles as in Q4_0, their fifth bits in one 32-bit word.
#[inline(always)]
fn five_bits(high: &[u8; 4], low: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    let mut quants = [0; 32];
    for l in 0..16 {
        quants[l] = (low[l] & 15) | (((high >> l) & 1) << 4) as u8;
        quants[l + 16] = (low[l] >> 4) | (((high >> (l + 16)) & 1) << 4) as u8;
    }
    quants
}

/// d, 4 bytes of fifth bits, 16 bytes of nibbles. y = (q - 16)·d
#[inline(always)]
pub fn q5_0<S: Scalar>(block: &[u8; 22], out: &mut [S; 32]) {
    let d: S = half(block, 0);
    let quants = five_bits(part(block, 2), part(block, 6));
    for l in 0..32 {
        out[l] = int::<S>(quants[l] as i8 - 16) * d;
    }
}

/// d, m, fifth bits, nibbles. y = q·d + m
#[inline(always)]
pub fn q5_1<S: Scalar>(block: &[u8; 24], out: &mut [S; 32]) {
    let (d, m): (S, S) = (half(block, 0), half(block, 2));
    let quants = five_bits(part(block, 4), part(block, 8));
    for l in 0..32 {
        out[l] = int::<S>(quants[l]) * d + m;
    }
}

/// d, 32 signed bytes. y = q·d
#[inline(always)]
pub fn q8_0<S: Scalar>(block: &[u8; 34], out: &mut [S; 32]) {
    let d: S = half(block, 0);
    let quants: &[u8; 32] = part(block, 2);
    for l in 0..32 {
        out[l] = int::<S>(quants[l] as i8) * d;
    }
}
