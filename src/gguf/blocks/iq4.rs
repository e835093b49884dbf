//! IQ4_NL and IQ4_XS: four-bit indices into a table of unevenly spaced values.

use super::{half, int, part};
use crate::scalar::Scalar;

/// `kvalues_iq4nl` in ggml-common.h.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 16 bytes of nibbles: value l in the low, l + 16 in the high half. y = scale·table[q]
#[inline(always)]
fn look_up<S: Scalar>(scale: S, indices: &[u8; 16], out: &mut [S; 32]) {
    let table = VALUES.map(|value| scale * int(value));
    for l in 0..16 {
        out[l] = table[usize::from(indices[l] & 15)];
        out[l + 16] = table[usize::from(indices[l] >> 4)];
    }
}

/// d, 16 bytes of nibbles. y = d·table[q]
#[inline(always)]
pub fn nl<S: Scalar>(block: &[u8; 18], out: &mut [S; 32]) {
    look_up(half(block, 0), part(block, 2), out);
}

/// d, 2 bytes of high bit pairs and 4 bytes of low nibbles of 8 scales, 128 bytes of nibbles.
/// y = (d·(scale - 32))·table[q]
#[inline(always)]
pub fn xs<S: Scalar>(block: &[u8; 136], out: &mut [S; 256]) {
    let d: S = half(block, 0);
    let high = u16::from_le_bytes(*part(block, 2));
    let low: &[u8; 4] = part(block, 4);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = (low[group / 2] >> (group % 2 * 4)) & 15;
        let scale = low | (((high >> (2 * group)) & 3) << 4) as u8;
        look_up(d * int(scale as i8 - 32), part(block, 8 + 16 * group), out);
    }
}
