//! The comparison of token rows on the device.

use super::{Address, Call};
use crate::numerics::Storage;

/// Pairs that one launch compares.
pub const STATS_PAIRS_MAX: usize = 6;
/// Token rows of one block, its threads, and columns from which on a row has a block of its own: BLOCK_PARTS and WIDE_ROW
/// of the kernel.
const ROWS: usize = 8;
const THREADS: u32 = 128;
const WIDE_ROW: usize = 2048;

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
    let blocks = |pair: &StatsPair| if pair.width >= WIDE_ROW { rows } else { rows.div_ceil(ROWS) };
    let blocks = pairs.iter().map(blocks).max().unwrap_or(1);
    Call::new("stats_rows".into(), [blocks, pairs.len(), 1], THREADS, args)
}
