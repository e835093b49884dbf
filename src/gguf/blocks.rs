//! Stored blocks -> values, as ggml's `dequantize_row_*` compute them (ggml-quants.c).
//!
//! In f32 the values are ggml's bit for bit: the same operations in the same order, none of them fused.
//! In f64 the formula is the same and nothing is rounded to f32: what the judge computes with.

mod float;
mod iq4;
mod k_quants;
mod legacy;

use half::f16;

use super::dtype::DType;
use crate::scalar::{Scalar, vectorized};

/// Decodes whole blocks of `dtype` into `out`.
///
/// # Panics
/// If `bytes` and `out` are not the same number of whole blocks, or the type is not decodable
/// ([`DType::is_decodable`]): mistakes in the caller, not in data.
pub fn decode<S: Scalar>(dtype: DType, bytes: &[u8], out: &mut [S]) {
    let blocks = out.len() / dtype.block_len();
    assert_eq!(out.len(), blocks * dtype.block_len(), "values are whole {dtype} blocks");
    assert_eq!(bytes.len(), blocks * dtype.block_bytes(), "bytes of {} {dtype} values", out.len());
    vectorized(
        #[inline(always)]
        || decode_blocks(dtype, bytes, out),
    );
}

#[inline(always)]
fn decode_blocks<S: Scalar>(dtype: DType, bytes: &[u8], out: &mut [S]) {
    /// Compiled with its caller's vector instructions: a function that is handed over as it is would not be.
    macro_rules! blocks {
        ($decode:path) => {
            each_block(
                bytes,
                out,
                #[inline(always)]
                |block, out| $decode(block, out),
            )
        };
    }
    match dtype {
        DType::F32 => float::f32(bytes, out),
        DType::F16 => float::f16(bytes, out),
        DType::BF16 => float::bf16(bytes, out),
        DType::Q4_0 => blocks!(legacy::q4_0),
        DType::Q4_1 => blocks!(legacy::q4_1),
        DType::Q5_0 => blocks!(legacy::q5_0),
        DType::Q5_1 => blocks!(legacy::q5_1),
        DType::Q8_0 => blocks!(legacy::q8_0),
        DType::Q2_K => blocks!(k_quants::q2_k),
        DType::Q3_K => blocks!(k_quants::q3_k),
        DType::Q4_K => blocks!(k_quants::q4_k),
        DType::Q5_K => blocks!(k_quants::q5_k),
        DType::Q6_K => blocks!(k_quants::q6_k),
        DType::IQ4_NL => blocks!(iq4::nl),
        DType::IQ4_XS => blocks!(iq4::xs),
        _ => panic!("{dtype} is not decodable"),
    }
}

/// Values that share one minimum, where the type has minima: y = scale·q + minimum with q of one sign. Quants of
/// Q6_K are stored from 0 to 63, and kernels sum the 32 that is too much of each apart, as they do with a minimum.
pub fn minimum_group(dtype: DType) -> Option<usize> {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => Some(32),
        DType::Q2_K | DType::Q6_K => Some(16),
        _ => None,
    }
}

/// The minimum of every group of [`minimum_group`] values, in order; none where the type has none.
pub fn minima<S: Scalar>(dtype: DType, bytes: &[u8]) -> Vec<S> {
    match dtype {
        DType::Q4_1 => each_minimum(bytes, |block: &[u8; 20]| [half(block, 2)]),
        DType::Q5_1 => each_minimum(bytes, |block: &[u8; 24]| [half(block, 2)]),
        DType::Q2_K => each_minimum(bytes, k_quants::minima_of_16),
        DType::Q6_K => each_minimum(bytes, k_quants::offsets_of_16),
        DType::Q4_K => each_minimum(bytes, k_quants::minima_of_32::<S, 144>),
        DType::Q5_K => each_minimum(bytes, k_quants::minima_of_32::<S, 176>),
        _ => Vec::new(),
    }
}

/// Scale and minimum of every group of values of a type that has minima, or an offset of all its quants: y = scale·q +
/// minimum with q >= 0. Groups are those of [`minimum_group`], and whole blocks of Q4_0 and Q5_0. None of other types.
pub fn groups(dtype: DType, bytes: &[u8]) -> Vec<(f64, f64)> {
    match dtype {
        DType::Q4_0 => each_minimum(bytes, |block: &[u8; 18]| [legacy::offset(half(block, 0), 8)]),
        DType::Q5_0 => each_minimum(bytes, |block: &[u8; 22]| [legacy::offset(half(block, 0), 16)]),
        DType::Q4_1 => each_minimum(bytes, |block: &[u8; 20]| [(half(block, 0), half(block, 2))]),
        DType::Q5_1 => each_minimum(bytes, |block: &[u8; 24]| [(half(block, 0), half(block, 2))]),
        DType::Q2_K => each_minimum(bytes, k_quants::groups_of_16),
        DType::Q4_K => each_minimum(bytes, k_quants::groups_of_32::<144>),
        DType::Q5_K => each_minimum(bytes, k_quants::groups_of_32::<176>),
        _ => Vec::new(),
    }
}

/// Calls `minima` on every block; its signature says how large blocks are.
fn each_minimum<S, const BYTES: usize, const GROUPS: usize>(
    bytes: &[u8],
    minima: impl Fn(&[u8; BYTES]) -> [S; GROUPS],
) -> Vec<S> {
    bytes.as_chunks::<BYTES>().0.iter().flat_map(minima).collect()
}

/// Calls `block` on every block; its signature says how large blocks are.
#[inline(always)]
fn each_block<S, const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [S],
    block: impl Fn(&[u8; BYTES], &mut [S; LEN]),
) {
    let blocks = bytes.as_chunks::<BYTES>().0;
    let outs = out.as_chunks_mut::<LEN>().0;
    for (bytes, out) in blocks.iter().zip(outs) {
        block(bytes, out);
    }
}

/// The stored f16 at byte `at`.
#[inline(always)]
fn half<S: Scalar, const N: usize>(block: &[u8; N], at: usize) -> S {
    S::from_f32(f16::from_le_bytes([block[at], block[at + 1]]).to_f32())
}

/// A small integer.
#[inline(always)]
fn int<S: Scalar>(value: impl Into<f32>) -> S {
    S::from_f32(value.into())
}

/// The `N` bytes at `at`.
#[inline(always)]
fn part<const N: usize, const BYTES: usize>(block: &[u8; BYTES], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a part lies within its block")
}
