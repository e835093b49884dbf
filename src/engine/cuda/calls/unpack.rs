//! The kernel that decodes weights before the matrix product for many rows.

use super::{Address, Call, Weight};
use crate::gguf::DType;

/// Weights that a thread decodes.
const EACH: usize = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct UnpackArgs {
    weight: Address,
    row_bytes: i64,
    out: Address,
    groups: i64,
    columns: i32,
}

/// The weight in f16 at another address.
pub fn unpacked(weight: &Weight, address: Address) -> Weight {
    Weight { address, dtype: DType::F16, ..*weight }
}

/// Decodes a weight (O, I) into [`unpacked`].
pub fn unpack(weight: &Weight, out: Address) -> Call {
    let groups = weight.outputs * weight.columns / EACH;
    let args = UnpackArgs {
        weight: weight.address,
        row_bytes: weight.row_bytes(),
        out,
        groups: groups as i64,
        columns: weight.columns as i32,
    };
    Call::elementwise(format!("unpack_{}", weight.format()), groups, args)
}
