//! The comparison of token rows on the device.

use super::{Address, Call};
use crate::numerics::Storage;

/// Pairs that one launch compares.
pub const STATS_PAIRS_MAX: usize = 6;
/// Threads of a block, those of a warp and of half a warp: as the kernel's.
const BLOCK: usize = 128;
const WARP: usize = 32;
const HALF_WARP: usize = 16;
/// Columns from which on a row goes to a warp, and to a block.
const WARP_ROW: usize = 2048;
const BLOCK_ROW: usize = 16_384;

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
    lanes: i32,
    first_block: i32,
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
    let mut blocks = 0;
    for (args, pair) in args.pair.iter_mut().zip(pairs) {
        let StatsPair { a, b, width, storage, places, shown } = *pair;
        let lanes = lanes_of_row(width);
        *args = PairArgs {
            a,
            b,
            places,
            shown,
            width: width as i32,
            a_f16: i32::from(storage != Storage::F32),
            lanes: lanes as i32,
            first_block: blocks as i32,
        };
        blocks += rows.div_ceil(BLOCK / lanes);
    }
    Call::new("stats_rows".into(), [blocks, 1, 1], BLOCK as u32, args)
}

/// Lanes that take a row of so many columns.
fn lanes_of_row(width: usize) -> usize {
    match width {
        BLOCK_ROW.. => BLOCK,
        WARP_ROW.. => WARP,
        _ => HALF_WARP,
    }
}
