//! The kernel that decodes weights before the matrix product for many rows.

use super::linear::few_chunk;
use super::{Address, Call, THREADS, Weight};
use crate::gguf::DType;

/// Chunks that a block decodes: UNPACK_WARPS·UNPACK_CHUNKS of the kernel.
const CHUNKS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct UnpackArgs {
    weight: Address,
    row_bytes: i64,
    out: Address,
    columns: i32,
    chunks: i32,
    row_chunks: i32,
}

/// The weight in f16 at another address.
pub fn unpacked(weight: &Weight, address: Address) -> Weight {
    Weight { address, dtype: DType::F16, ..*weight }
}

/// Decodes a weight (O, I) into [`unpacked`].
pub fn unpack(weight: &Weight, out: Address) -> Call {
    let row_chunks = weight.columns.div_ceil(few_chunk(weight.dtype));
    let chunks = weight.outputs * row_chunks;
    let args = UnpackArgs {
        weight: weight.address,
        row_bytes: weight.row_bytes(),
        out,
        columns: weight.columns as i32,
        chunks: chunks as i32,
        row_chunks: row_chunks as i32,
    };
    Call::new(format!("unpack_{}", weight.format()), [chunks.div_ceil(CHUNKS), 1, 1], THREADS, args)
}
