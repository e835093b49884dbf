//! K-quants: super-blocks of 256 values whose groups of 16 or 32 have small integer scales.
//!
//! d is the f16 scale of the scales, dmin that of the minima.

use super::{half, int, part};
use crate::scalar::Scalar;

/// 16 bytes of 4-bit (scale, min) for groups of 16, 64 bytes of 2-bit quants, d, dmin.
/// y = (d·scale)·q - dmin·min
#[inline(always)]
pub fn q2_k<S: Scalar>(block: &[u8; 84], out: &mut [S; 256]) {
    let scales: &[u8; 16] = part(block, 0);
    let quants: &[u8; 64] = part(block, 16);
    let (d, dmin): (S, S) = (half(block, 80), half(block, 82));
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * int(scales[group] & 15);
        let min = dmin * int(scales[group] >> 4);
        let quants: &[u8; 16] = part(quants, two_bit_bytes(group));
        let shift = two_bit_shift(group);
        for l in 0..16 {
            out[l] = scale * int((quants[l] >> shift) & 3) - min;
        }
    }
}

/// Where the 2-bit quants of a group of 16 lie: 32 bytes hold 128 values, 4 planes of 32.
#[inline(always)]
const fn two_bit_bytes(group: usize) -> usize {
    group / 8 * 32 + group % 2 * 16
}

/// By how many bits they are shifted up.
#[inline(always)]
const fn two_bit_shift(group: usize) -> usize {
    group % 8 / 2 * 2
}

/// 32 bytes of third bits, 64 bytes of 2-bit quants, 12 bytes of 6-bit scales for groups of 16, d.
/// y = (d·(scale - 32))·(q - 4)
#[inline(always)]
pub fn q3_k<S: Scalar>(block: &[u8; 110], out: &mut [S; 256]) {
    let high: &[u8; 32] = part(block, 0);
    let quants: &[u8; 64] = part(block, 32);
    let scales = q3_k_scales(part(block, 96));
    let d: S = half(block, 108);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * int(scales[group] as i8 - 32);
        let high: &[u8; 16] = part(high, group % 2 * 16);
        let quants: &[u8; 16] = part(quants, two_bit_bytes(group));
        let shift = two_bit_shift(group);
        for l in 0..16 {
            let third = (high[l] >> (group / 2)) & 1;
            let quant = ((quants[l] >> shift) & 3) | (third << 2);
            out[l] = scale * int(quant as i8 - 4);
        }
    }
}

/// 16 scales of 6 bits: low nibbles in 8 bytes, two high bits of each in the next 4.
#[inline(always)]
fn q3_k_scales(packed: &[u8; 12]) -> [u8; 16] {
    std::array::from_fn(|i| {
        let low = if i < 8 { packed[i] & 15 } else { packed[i - 8] >> 4 };
        let high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
        low | (high << 4)
    })
}

/// The scale and minimum of group `j` of 32, 6 bits each: `get_scale_min_k4`.
#[inline(always)]
fn scale_min(j: usize, packed: &[u8; 12]) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// d·scale and dmin·min of the eight groups of a Q4_K or Q5_K block, which open with the same 16 bytes.
#[inline(always)]
fn scales_mins<S: Scalar, const BYTES: usize>(block: &[u8; BYTES]) -> [(S, S); 8] {
    let (d, dmin): (S, S) = (half(block, 0), half(block, 2));
    std::array::from_fn(|j| {
        let (scale, min) = scale_min(j, part(block, 4));
        (d * int(scale), dmin * int(min))
    })
}

/// d, dmin, 12 bytes of scales, 128 bytes of nibbles: each 32 bytes hold two groups of 32.
/// y = (d·scale)·q - dmin·min
#[inline(always)]
pub fn q4_k<S: Scalar>(block: &[u8; 144], out: &mut [S; 256]) {
    let groups = scales_mins::<S, _>(block);
    for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let quants: &[u8; 32] = part(block, 16 + 32 * pair);
        let [(scale_0, min_0), (scale_1, min_1)] = [groups[2 * pair], groups[2 * pair + 1]];
        for l in 0..32 {
            out[l] = scale_0 * int(quants[l] & 15) - min_0;
            out[l + 32] = scale_1 * int(quants[l] >> 4) - min_1;
        }
    }
}

/// d, dmin, 12 bytes of scales, 32 bytes of fifth bits, 128 bytes of nibbles as in Q4_K.
/// y = (d·scale)·q - dmin·min
#[inline(always)]
pub fn q5_k<S: Scalar>(block: &[u8; 176], out: &mut [S; 256]) {
    let groups = scales_mins::<S, _>(block);
    let high: &[u8; 32] = part(block, 16);
    for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let low: &[u8; 32] = part(block, 48 + 32 * pair);
        let [(scale_0, min_0), (scale_1, min_1)] = [groups[2 * pair], groups[2 * pair + 1]];
        for l in 0..32 {
            let high = high[l] >> (2 * pair);
            out[l] = scale_0 * int((low[l] & 15) | ((high & 1) << 4)) - min_0;
            out[l + 32] = scale_1 * int((low[l] >> 4) | ((high & 2) << 3)) - min_1;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales for groups of 16, d.
/// y = (d·scale)·(q - 32)
#[inline(always)]
pub fn q6_k<S: Scalar>(block: &[u8; 210], out: &mut [S; 256]) {
    let scales: &[u8; 16] = part(block, 192);
    let d: S = half(block, 208);
    for (part_of_128, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low: &[u8; 64] = part(block, 64 * part_of_128);
        let high: &[u8; 32] = part(block, 128 + 32 * part_of_128);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * int(scales[8 * part_of_128 + group] as i8);
            // Groups 0 to 3 lie in the low nibbles of the 64 bytes, 4 to 7 in the high ones.
            let low: &[u8; 16] = part(low, group % 4 * 16);
            let high: &[u8; 16] = part(high, group % 2 * 16);
            let (low_shift, high_shift) = (group / 4 * 4, group / 2 * 2);
            for l in 0..16 {
                let quant = ((low[l] >> low_shift) & 15) | (((high[l] >> high_shift) & 3) << 4);
                out[l] = scale * int(quant as i8 - 32);
            }
        }
    }
}
