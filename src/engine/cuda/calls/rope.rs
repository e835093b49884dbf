//! The rotary embedding kernel.

use super::{Address, Call, THREADS, name_of};
use crate::engine::fused::graph::{Anchor, Pairing, Rope};
use crate::numerics::Storage;

/// Tensors that turn in one launch.
const PARTS_MAX: usize = 2;

/// One tensor that turns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RopePart {
    /// (T, heads, E)
    pub x: Address,
    /// (T, heads, E)
    pub out: Address,
    /// (S, heads, E) that the result is appended to, or 0.
    pub cache: Address,
    /// Number of heads.
    pub heads: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    parts: [RopePart; PARTS_MAX],
    table: Address,
    first: Address,
    rows: i32,
    head_width: i32,
    dims: i32,
    interleaved: i32,
    times: i32,
    in_step: i32,
    cache_f16: i32,
}

/// What the tensors of one launch have in common.
#[derive(Clone, Copy, Debug)]
pub struct RopeData {
    /// (positions, dims/2, 2): cosine, sine.
    pub table: Address,
    /// (1,) position of row 0 as i32
    pub first: Address,
    /// T
    pub rows: usize,
    /// What values are stored as.
    pub storage: Storage,
    /// What the cache holds.
    pub kv: Storage,
}

/// Turns up to two tensors.
pub fn rope(rope: &Rope, parts: &[RopePart], data: RopeData) -> Call {
    let mut all = [RopePart::default(); PARTS_MAX];
    all[..parts.len()].copy_from_slice(parts);
    let args = RopeArgs {
        parts: all,
        table: data.table,
        first: data.first,
        rows: data.rows as i32,
        head_width: rope.head_width as i32,
        dims: rope.dims as i32,
        interleaved: i32::from(rope.pairing == Pairing::Interleaved),
        times: rope.times as i32,
        in_step: i32::from(rope.position.first.from == Anchor::Step),
        cache_f16: i32::from(data.kv != Storage::F32),
    };
    let heads = parts.iter().map(|part| part.heads as usize).max().unwrap_or(0);
    let blocks = (data.rows * heads * rope.head_width.div_ceil(2)).div_ceil(THREADS as usize);
    Call::new(format!("rope_{}", name_of(data.storage)), [blocks, parts.len(), 1], THREADS, args)
}
