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
    let (d, dmin): (S, S) = (half(block, 80), half(block, 82));
    for (half_block, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let quants = two_bits(part(block, 16 + 32 * half_block));
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let packed = scales[8 * half_block + group];
            let (scale, min) = (d * int(packed & 15), dmin * int(packed >> 4));
            for l in 0..16 {
                out[l] = scale * int(quants[16 * group + l]) - min;
            }
        }
    }
}

/// The 128 two-bit quants of 32 bytes: 32 in the lowest bits, the next 32 above them, and so on.
#[inline(always)]
fn two_bits(bytes: &[u8; 32]) -> [u8; 128] {
    let mut quants = [0; 128];
    for (plane, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for l in 0..32 {
            quants[l] = (bytes[l] >> (2 * plane)) & 3;
        }
    }
    quants
}

/// 32 bytes of third bits, 64 bytes of 2-bit quants, 12 bytes of 6-bit scales for groups of 16, d.
/// y = (d·(scale - 32))·(q - 4)
#[inline(always)]
pub fn q3_k<S: Scalar>(block: &[u8; 110], out: &mut [S; 256]) {
    let high: &[u8; 32] = part(block, 0);
    let scales = q3_k_scales(part(block, 96));
    let d: S = half(block, 108);
    for (half_block, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let mut quants = two_bits(part(block, 32 + 32 * half_block));
        for (plane, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for l in 0..32 {
                quants[l] |= ((high[l] >> (4 * half_block + plane)) & 1) << 2;
            }
        }
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * int(scales[8 * half_block + group] as i8 - 32);
            for l in 0..16 {
                out[l] = scale * int(quants[16 * group + l] as i8 - 4);
            }
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
    let mut groups = [(S::ZERO, S::ZERO); 8];
    for (j, group) in groups.iter_mut().enumerate() {
        let (scale, min) = scale_min(j, part(block, 4));
        *group = (d * int(scale), dmin * int(min));
    }
    groups
}

/// -dmin·min of the eight groups of 32 of a Q4_K or Q5_K block.
pub fn minima_of_32<S: Scalar, const BYTES: usize>(block: &[u8; BYTES]) -> [S; 8] {
    scales_mins::<S, _>(block).map(|(_, min)| -min)
}

/// d·scale and -dmin·min of the eight groups of 32 of a Q4_K or Q5_K block.
pub fn groups_of_32<const BYTES: usize>(block: &[u8; BYTES]) -> [(f64, f64); 8] {
    scales_mins::<f64, _>(block).map(|(scale, min)| (scale, -min))
}

/// d·scale and -dmin·min of the sixteen groups of 16 of a Q2_K block.
pub fn groups_of_16(block: &[u8; 84]) -> [(f64, f64); 16] {
    let d: f64 = half(block, 80);
    let minima = minima_of_16(block);
    std::array::from_fn(|group| (d * int::<f64>(block[group] & 15), minima[group]))
}

/// -dmin·min of the sixteen groups of 16 of a Q2_K block.
pub fn minima_of_16<S: Scalar>(block: &[u8; 84]) -> [S; 16] {
    let dmin: S = half(block, 82);
    std::array::from_fn(|group| -(dmin * int(block[group] >> 4)))
}

/// -32·d·scale of the sixteen groups of 16 of a Q6_K block.
pub fn offsets_of_16<S: Scalar>(block: &[u8; 210]) -> [S; 16] {
    let scales: &[u8; 16] = part(block, 192);
    let d: S = half(block, 208);
    std::array::from_fn(|group| -(d * int(scales[group] as i8) * int(32u8)))
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
    for (half_block, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low: &[u8; 64] = part(block, 64 * half_block);
        let mut quants = two_bits(part(block, 128 + 32 * half_block));
        for l in 0..64 {
            quants[l] = (quants[l] << 4) | (low[l] & 15);
            quants[64 + l] = (quants[64 + l] << 4) | (low[l] >> 4);
        }
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * int(scales[8 * half_block + group] as i8);
            for l in 0..16 {
                out[l] = scale * int(quants[16 * group + l] as i8 - 32);
            }
        }
    }
}
