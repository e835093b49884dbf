//! The comparison of token rows on the device.

use super::{Address, Call};
use crate::numerics::Storage;

/// Pairs that one launch compares.
pub const STATS_PAIRS_MAX: usize = 6;
/// Parts of rows that a block takes, and its threads; parts of a row at most, and columns of one but for rows that have so
/// many: BLOCK_PARTS, PARTS_MAX and PART_COLUMNS of the kernel.
const BLOCK_PARTS: usize = 24;
const THREADS: u32 = 384;
const PARTS_MAX: usize = 8;
const PART_COLUMNS: usize = 256;
/// Bytes of shared memory that a block asks for, so that a multiprocessor holds one: half of what a Hopper has. Beside it
/// is room for a block of most kernels that compute.
const SHARED: u32 = 112 << 10;

/// A checkpoint and its reference. Addresses are multiples of 16, or rows are read slowly.
#[derive(Clone, Copy, Debug)]
pub struct StatsPair {
    /// (T, W) of the candidate, in `storage`.
    pub a: Address,
    /// (T, W) of the reference, in f32.
    pub b: Address,
    /// W
    pub width: usize,
    /// Of the candidate.
    pub storage: Storage,
    /// (T,) i32: at which row of `shown` the candidate's is to be put, -1 for none. At address 0: no row is.
    pub places: Address,
    /// (n, W) in `storage`.
    pub shown: Address,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PairArgs {
    a: Address,
    b: Address,
    places: Address,
    shown: Address,
    width: i32,
    a_f16: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StatsArgs {
    out: Address,
    rows: i32,
    pairs: i32,
    pair: [PairArgs; STATS_PAIRS_MAX],
}

/// Compares `pairs`, at most [`STATS_PAIRS_MAX`], of `rows` token rows each; (pairs, T) [`crate::engine::RowStats`] at
/// `out`.
pub fn stats(pairs: &[StatsPair], rows: usize, out: Address) -> Call {
    let mut args = StatsArgs {
        out,
        rows: rows as i32,
        pairs: pairs.len() as i32,
        pair: [PairArgs::default(); STATS_PAIRS_MAX],
    };
    for (args, pair) in args.pair.iter_mut().zip(pairs) {
        let StatsPair { a, b, width, storage, places, shown } = *pair;
        let a_f16 = i32::from(storage != Storage::F32);
        *args = PairArgs { a, b, places, shown, width: width as i32, a_f16 };
    }
    let blocks =
        pairs.iter().map(|pair| rows.div_ceil(BLOCK_PARTS / parts_of(pair.width))).max().unwrap_or(1);
    Call::new("stats_rows".into(), [blocks, pairs.len(), 1], THREADS, args).sized(SHARED).beside()
}

/// Parts of a row.
fn parts_of(width: usize) -> usize {
    width.div_ceil(PART_COLUMNS).next_power_of_two().clamp(1, PARTS_MAX)
}
