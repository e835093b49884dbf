//! Every kernel against plain scalar arithmetic, without a GPU: odd sizes, every weight format, and threads in
//! shuffled order, so that a missing barrier is seen.
#![cfg(feature = "cuda")]
#![allow(missing_docs)]

mod attention;
mod barriers;
#[path = "../support/cxx.rs"]
mod cxx;
mod data;
mod fused;
mod host;
mod linear;
mod ops;
#[path = "../support/samples.rs"]
mod samples;
mod stats;
mod warpgroups;

use data::Memory;
use half::f16;
use parity::engine::cuda::calls::Call;
use parity::numerics::Storage;

/// Bytes of shared memory of a block, as most GPUs have it.
const SHARED: usize = 99 << 10;
/// Rounding unit of f32.
const U32: f64 = f32::EPSILON as f64 / 2.0;

/// Orders of the threads that every kernel is run in: as numbered, and three shuffled, or one in a sample.
fn seeds() -> Vec<u32> {
    samples::sample("orders of the threads", 2, [0, 1, 2, 3])
}

/// Runs a call in all orders and returns what it wrote to `out`, which must be the same bits in all of them.
fn run(kernels: &host::Kernels, calls: &[Call], out: &Memory, storage: Storage) -> Vec<f32> {
    let mut first: Option<Vec<u8>> = None;
    for seed in seeds() {
        for call in calls {
            kernels.run(call, seed).unwrap_or_else(|error| panic!("{}, order {seed}: {error}", call.kernel));
        }
        let bits = out.bytes().to_vec();
        let same = first.get_or_insert_with(|| bits.clone()) == &bits;
        assert!(same, "{}: order {seed} of the threads gives another result", calls[0].kernel);
    }
    out.values(storage)
}

/// Half the distance between neighbours of `value` in what it is stored as.
fn storage_rounding(value: f64, storage: Storage) -> f64 {
    match storage {
        Storage::F32 => U32 * value.abs(),
        // 2^-25 below the normal range.
        _ => f64::from(f16::EPSILON.to_f32()) / 2.0 * value.abs() + 2f64.powi(-25),
    }
}

/// `found` must be within `bound(i)` of `exact(i)`.
fn check(what: &str, found: &[f32], exact: impl Fn(usize) -> (f64, f64)) {
    for (i, &value) in found.iter().enumerate() {
        let (expected, bound) = exact(i);
        let error = (f64::from(value) - expected).abs();
        assert!(error <= bound, "{what}: element {i} is {value}, not {expected}: {error:e} > {bound:e}");
    }
}

#[test]
fn kernels_run_here() {
    host::kernels();
}
