//! The comparison of token rows on the device.

use super::{Address, Call, THREADS};
use crate::numerics::Storage;

#[repr(C)]
#[derive(Clone, Copy)]
struct StatsArgs {
    a: Address,
    b: Address,
    out: Address,
    width: i64,
    a_f16: i32,
}

/// Compares `a` (T, W) in `storage` with `b` (T, W) in f32; (T,) [`crate::engine::RowStats`] at `out`.
pub fn stats([a, b, out]: [Address; 3], [rows, width]: [usize; 2], storage: Storage) -> Call {
    let args = StatsArgs { a, b, out, width: width as i64, a_f16: i32::from(storage != Storage::F32) };
    Call::new("stats_rows".into(), [rows, 1, 1], THREADS, args)
}
