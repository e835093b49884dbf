//! The attention kernels.

use super::{Address, Call, ROWS_MAX_UNTILED, THREADS, name_of};
use crate::model::graph::{Attention, KvMap, Mask};
use crate::numerics::Storage;

/// Head widths up to which the kernels are built.
const HEAD_WIDTHS: [usize; 3] = [32, 64, 128];
/// What they load at once divides a head.
const HEAD_GROUP: usize = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionArgs {
    q: Address,
    k: Address,
    v: Address,
    out: Address,
    scores: Address,
    probs: Address,
    first: Address,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    head_width: i32,
    kv_modulo: i32,
    see_from_step: i32,
    see_shift: i32,
    softmax: i32,
    scale: f32,
}

/// Where an attention reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionData {
    /// (T, H, E)
    pub q: Address,
    /// (S, K, E), the cache
    pub k: Address,
    /// (S, K, E), the cache
    pub v: Address,
    /// (T, H, E)
    pub out: Address,
    /// (H, T, S) in f32, or 0
    pub scores: Address,
    /// (H, T, S) in f32, or 0; needs `scores`
    pub probs: Address,
    /// (1,) position of row 0 as i32
    pub first: Address,
}

/// Whether there is a kernel for this attention.
pub fn has_attention(a: &Attention) -> bool {
    let fits = a.head_width <= HEAD_WIDTHS[HEAD_WIDTHS.len() - 1] && a.head_width.is_multiple_of(HEAD_GROUP);
    fits && a.heads.is_multiple_of(a.kv_heads)
}

/// Scores, softmax and context as one. `None` where no kernel is wide enough: see [`has_attention`].
pub fn attention(
    a: &Attention,
    data: AttentionData,
    rows: usize,
    storage: Storage,
    kv: Storage,
) -> Option<Call> {
    let width = HEAD_WIDTHS.iter().find(|&&width| a.head_width <= width).filter(|_| has_attention(a))?;
    // Far beyond every position, and far from overflow when one is added.
    let everything = 1 << 30;
    let (see_from_step, see_shift) = match a.mask {
        Mask::Causal => (0, 0),
        Mask::None => (0, everything),
        Mask::Shift(shift) => (0, shift.clamp(-i64::from(everything), everything.into()) as i32),
        Mask::StepOnly => (1, 0),
    };
    let args = AttentionArgs {
        q: data.q,
        k: data.k,
        v: data.v,
        out: data.out,
        scores: data.scores,
        probs: data.probs,
        first: data.first,
        rows: rows as i32,
        heads: a.heads as i32,
        kv_heads: a.kv_heads as i32,
        head_width: a.head_width as i32,
        kv_modulo: i32::from(a.kv_map == KvMap::Modulo),
        see_from_step,
        see_shift,
        softmax: i32::from(a.softmax),
        scale: a.scale as f32,
    };
    let (form, rows_per_block) = if rows <= ROWS_MAX_UNTILED { ("row", 1) } else { ("tile", 4) };
    let kernel = format!("attention_{form}_{}_{}_{width}", name_of(storage), name_of(kv));
    Some(Call::new(kernel, [rows.div_ceil(rows_per_block), a.heads, 1], THREADS, args))
}
