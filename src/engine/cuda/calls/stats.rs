//! The comparison of values on the device.

use super::{Address, Call, THREADS};
use crate::numerics::Storage;

/// Blocks of a comparison at most; the last step merges their results.
pub const STATS_PARTS: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct StatsArgs {
    a: Address,
    b: Address,
    parts: Address,
    out: Address,
    n: i64,
    count: i32,
    a_f16: i32,
}

/// What a comparison on the device comes to. Sums and the maximum leave out pairs that are not two
/// finite numbers; `worst` is the lowest index with the maximum, which is -1 where no pair is finite.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// max |a - b|
    pub abs_err_max: f64,
    /// Σ (a - b)²
    pub squared_error: f64,
    /// Σ a²
    pub squared_a: f64,
    /// Σ b²
    pub squared_b: f64,
    /// Σ a·b
    pub product: f64,
    /// Σ |a - b|
    pub abs_error: f64,
    /// Flat index of the maximum.
    pub worst: i64,
    /// How often a > b.
    pub positive: i64,
    /// NaN and infinite values of a.
    pub nonfinite_a: i64,
    /// NaN and infinite values of b.
    pub nonfinite_b: i64,
}

/// Compares `a` (n,) in `storage` with `b` (n,) in f32: two launches, the [`Stats`] at `out`.
/// `parts` has room for [`STATS_PARTS`] of them.
pub fn stats([a, b, parts, out]: [Address; 4], n: usize, storage: Storage) -> [Call; 2] {
    let count = n.div_ceil(THREADS as usize).clamp(1, STATS_PARTS);
    let a_f16 = i32::from(storage != Storage::F32);
    let args = StatsArgs { a, b, parts, out, n: n as i64, count: count as i32, a_f16 };
    [
        Call::new("stats_part".into(), [count, 1, 1], THREADS, args),
        Call::new("stats_merge".into(), [1, 1, 1], THREADS, args),
    ]
}
