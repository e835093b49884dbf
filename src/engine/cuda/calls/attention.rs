//! The attention kernels.

use super::{Address, Call, ROWS_MAX_UNTILED, THREADS, name_of};
use crate::engine::fused::graph::{Anchor, Attention, Edge, Mask, ScoreLimit};
use crate::numerics::Storage;

/// Head widths up to which the kernels are built.
const HEAD_WIDTHS: [usize; 3] = [32, 64, 128];
/// Token rows of a block of the kernel for several rows, and of that for tensor cores.
const TILE_ROWS: usize = 4;
const MMA_ROWS: usize = 64;
/// Groups of warps of the latter, its threads, and its shared memory in bytes by [`HEAD_WIDTHS`]: BYTES of
/// kernels/attention_mma.cu, two buffers of keys and values a group.
const MMA_GROUPS: u32 = 2;
const MMA_THREADS: u32 = MMA_GROUPS * 128;
const MMA_SHARED: [u32; 3] = [MMA_GROUPS * (16 << 10), MMA_GROUPS * (32 << 10), MMA_GROUPS * (32 << 10)];
/// Positions of a block of `attention_few`, or a multiple of them where there would be more blocks of a row than so many;
/// one further block there is where scores are stored of positions that the row does not see. Heads of a block.
const SPLIT: usize = 256;
const SPLITS_MAX: usize = 64;
const HEADS_TOGETHER: usize = 8;
/// Further values beside a block's sums.
const BESIDE_SUMS: usize = 4;
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
    partial: Address,
    arrived: Address,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    head_width: i32,
    kv_modulo: i32,
    see_from_step: i32,
    see_shift: i32,
    softmax: i32,
    scale: f32,
    splits: i32,
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
    /// Room for [`AttentionKernel::Few`], or 0.
    pub room: Address,
    /// Positions that the cache has room for.
    pub capacity: usize,
}

/// Whether there is a kernel for this attention: none has windows, or limits of scores.
pub fn has_attention(a: &Attention) -> bool {
    let fits = a.head_width <= HEAD_WIDTHS[HEAD_WIDTHS.len() - 1] && a.head_width.is_multiple_of(HEAD_GROUP);
    let known = a.limit == ScoreLimit::None && seen(a).is_some() && kv_modulo(a).is_some();
    fits && known && a.heads.is_multiple_of(a.kv_heads)
}

/// Far beyond every position, and far from overflow when one is added.
const EVERYTHING: i32 = 1 << 30;

/// What a kernel is told of the mask: whether rows see their own step alone, and how many positions after their own
/// they see. `None` of what it cannot be told.
fn seen(a: &Attention) -> Option<(i32, i32)> {
    let Mask { first, behind } = a.mask.same()?;
    let from_step = match first {
        Edge { from: Anchor::Start, offset: 0 } => 0,
        Edge { from: Anchor::Step, offset: 0 } => 1,
        _ => return None,
    };
    let shift = match behind {
        Edge { from: Anchor::Row, offset } => {
            (offset - 1).clamp(-i64::from(EVERYTHING), EVERYTHING.into()) as i32
        }
        Edge { from: Anchor::End, offset: 0 } => EVERYTHING,
        _ => return None,
    };
    Some((from_step, shift))
}

/// What a kernel is told of the heads: 0 where H/K of them read one key head, 1 where they take turns.
fn kv_modulo(a: &Attention) -> Option<i32> {
    match a.group {
        group if group * a.kv_heads == a.heads => Some(0),
        1 => Some(1),
        _ => None,
    }
}

/// Which kernel computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernel {
    /// A block for each token row: few rows.
    Row,
    /// Several blocks for each token row: few rows, values and cache in f16.
    Few,
    /// A block for several rows.
    Tile,
    /// Tensor cores: values and cache in f16.
    Mma,
}

impl AttentionKernel {
    /// The kernel for a step of `rows` token rows, of `types` of values and of the cache.
    pub fn for_step(a: &Attention, rows: usize, types: [Storage; 2]) -> AttentionKernel {
        let fast = types == [Storage::F16; 2] && a.softmax;
        match rows {
            ..=ROWS_MAX_UNTILED if fast => AttentionKernel::Few,
            ..=ROWS_MAX_UNTILED => AttentionKernel::Row,
            _ if fast => AttentionKernel::Mma,
            _ => AttentionKernel::Tile,
        }
    }
}

/// Bytes in which the blocks of a row of [`AttentionKernel::Few`] leave their sums; zero at first.
pub fn attention_room(heads: usize, head_width: usize, capacity: usize) -> usize {
    let width = HEAD_WIDTHS.into_iter().find(|width| head_width <= *width).unwrap_or(head_width);
    arrived_bytes(heads) + 4 * ROWS_MAX_UNTILED * heads * splits(capacity) * (width + BESIDE_SUMS)
}

/// Blocks of a row at most.
fn splits(capacity: usize) -> usize {
    capacity.div_ceil(SPLIT).min(SPLITS_MAX + 1)
}

/// Bytes of the counts of blocks that have left their sums.
fn arrived_bytes(heads: usize) -> usize {
    (4 * ROWS_MAX_UNTILED * heads).next_multiple_of(256)
}

/// Scores, softmax and context as one. `None` where no kernel is wide enough: see [`has_attention`].
pub fn attention(
    a: &Attention,
    data: AttentionData,
    kernel: AttentionKernel,
    rows: usize,
    [storage, kv]: [Storage; 2],
) -> Option<Call> {
    let built = HEAD_WIDTHS.iter().position(|&width| a.head_width <= width).filter(|_| has_attention(a))?;
    let width = HEAD_WIDTHS[built];
    let (see_from_step, see_shift) = seen(a)?;
    let splits = splits(data.capacity);
    let args = AttentionArgs {
        q: data.q,
        k: data.k,
        v: data.v,
        out: data.out,
        scores: data.scores,
        probs: data.probs,
        first: data.first,
        partial: data.room + arrived_bytes(a.heads) as Address,
        arrived: data.room,
        rows: rows as i32,
        heads: a.heads as i32,
        kv_heads: a.kv_heads as i32,
        head_width: a.head_width as i32,
        kv_modulo: kv_modulo(a)?,
        see_from_step,
        see_shift,
        softmax: i32::from(a.softmax),
        scale: a.scale as f32,
        splits: splits as i32,
    };
    let grid = |rows_per_block: usize| [rows.div_ceil(rows_per_block), a.heads, 1];
    let types = format!("{}_{}", name_of(storage), name_of(kv));
    Some(match kernel {
        AttentionKernel::Row => Call::new(format!("attention_row_{types}_{width}"), grid(1), THREADS, args),
        AttentionKernel::Tile => {
            Call::new(format!("attention_tile_{types}_{width}"), grid(TILE_ROWS), THREADS, args)
        }
        AttentionKernel::Few => {
            let groups = a.kv_heads * (a.heads / a.kv_heads).div_ceil(HEADS_TOGETHER);
            Call::new(format!("attention_few_{width}"), [splits, rows, groups], THREADS, args)
        }
        AttentionKernel::Mma => {
            Call::new(format!("attention_mma_{width}"), grid(MMA_ROWS), MMA_THREADS, args)
                .sized(MMA_SHARED[built])
        }
    })
}
