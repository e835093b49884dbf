//! The comparison of token rows: every number is that of plain f64 arithmetic, whatever the rows hold.

use parity::engine::RowStats;
use parity::engine::cuda::calls::{self, STATS_PAIRS_MAX, StatsPair};
use parity::numerics::Storage;

use crate::data::{Memory, Random};
use crate::host::{self, Kernels};
use crate::ops::words;
use crate::run;

/// A candidate and a reference, (T, W) each, and where they lie.
struct Pair {
    a: Memory,
    b: Memory,
    width: usize,
    storage: Storage,
    places: Option<Memory>,
    shown: Memory,
}

impl Pair {
    /// Of values in f32, of which the candidate's are stored in `storage`; shows the rows that `places` name.
    fn new([a, b]: [&[f32]; 2], rows: usize, storage: Storage, places: Option<&[i32]>) -> Pair {
        let width = a.len() / rows;
        let n_shown = places.map_or(0, |places| places.iter().filter(|place| **place >= 0).count());
        Pair {
            a: Memory::stored(a, storage),
            b: Memory::of_f32(b),
            width,
            storage,
            places: places.map(words),
            shown: Memory::room(n_shown * width, storage),
        }
    }

    fn on_device(&self) -> StatsPair {
        StatsPair {
            a: self.a.address(),
            b: self.b.address(),
            width: self.width,
            storage: self.storage,
            places: self.places.as_ref().map_or(0, Memory::address),
            shown: self.shown.address(),
        }
    }

    /// (T,) what the kernel has to find.
    fn expected(&self) -> Vec<RowStats> {
        let (a, b) = (self.a.values(self.storage), self.b.values(Storage::F32));
        a.chunks_exact(self.width).zip(b.chunks_exact(self.width)).map(|(a, b)| plain(a, b)).collect()
    }
}

/// The numbers by their definitions.
fn plain(a: &[f32], b: &[f32]) -> RowStats {
    let mut row = RowStats { max: -1.0, column: a.len() as i64, ..RowStats::default() };
    for (column, (&x, &y)) in a.iter().zip(b).enumerate() {
        row.nonfinite_a += u32::from(!x.is_finite());
        row.nonfinite_b += u32::from(!y.is_finite());
        if !x.is_finite() || !y.is_finite() {
            continue;
        }
        let (wide_a, wide_b) = (f64::from(x), f64::from(y));
        let error = (wide_a - wide_b).abs();
        if error > row.max {
            (row.max, row.column, row.a, row.b) = (error, column as i64, x, y);
        }
        if error > 0.0 {
            row.ratio = row.ratio.max(error / wide_b.abs());
        }
        row.abs_error += error;
        row.squared_error += error * error;
        row.squared_a += wide_a * wide_a;
        row.squared_b += wide_b * wide_b;
        row.product += wide_a * wide_b;
        row.positive += u32::from(x > y);
        row.differing += u32::from(x != y);
    }
    row.max = row.max.max(0.0);
    row
}

/// Runs the pairs in one launch: (pairs, T) rows.
fn found(kernels: &Kernels, pairs: &[Pair], rows: usize) -> Vec<RowStats> {
    let out = Memory::new(pairs.len() * rows * size_of::<RowStats>());
    let on_device: Vec<StatsPair> = pairs.iter().map(Pair::on_device).collect();
    run(kernels, &[calls::stats(&on_device, rows, out.address())], &out, Storage::F32);
    // SAFETY: the kernel has written as many.
    unsafe { std::slice::from_raw_parts(out.address() as *const RowStats, pairs.len() * rows) }.to_vec()
}

/// Everything but sums has the same bits; sums in f64 are in another order.
fn check(what: &str, found: &RowStats, expected: &RowStats, width: usize) {
    let exact = |row: &RowStats| {
        let counts = (row.positive, row.differing, row.nonfinite_a, row.nonfinite_b);
        (row.max.to_bits(), row.ratio.to_bits(), row.column, row.a.to_bits(), row.b.to_bits(), counts)
    };
    assert_eq!(exact(found), exact(expected), "{what}: {found:?} for {expected:?}");
    let products = (expected.squared_a * expected.squared_b).sqrt();
    for (found, expected, size) in [
        (found.abs_error, expected.abs_error, expected.abs_error),
        (found.squared_error, expected.squared_error, expected.squared_error),
        (found.squared_a, expected.squared_a, expected.squared_a),
        (found.squared_b, expected.squared_b, expected.squared_b),
        (found.product, expected.product, products),
    ] {
        let within = width as f64 * f64::EPSILON * size;
        assert!((found - expected).abs() <= within, "{what}: {found} for {expected}");
    }
}

fn compare(kernels: &Kernels, what: &str, pairs: &[Pair], rows: usize) {
    let found = found(kernels, pairs, rows);
    for (index, (found, pair)) in found.chunks_exact(rows).zip(pairs).enumerate() {
        for (t, (found, expected)) in found.iter().zip(pair.expected()).enumerate() {
            check(&format!("{what}, pair {index}, row {t}"), found, &expected, pair.width);
        }
    }
}

#[test]
fn statistics_of_any_width() {
    let Some(kernels) = host::kernels() else { return };
    let rows = 2;
    for storage in [Storage::F32, Storage::F16] {
        for width in [1, 7, 8, 128, 129, 264, 520, 896, 999, 2048, 4872, 9000, 16_384, 40_008, 70_001] {
            let mut random = Random(width as u64);
            let (mut x, y) = (random.values(rows * width), random.values(rows * width));
            if width > 500 {
                // In the second row alone: the first is in the same warp.
                (x[width + 3], x[width + 400]) = (f32::NAN, f32::INFINITY);
                (x[width + 77], x[width + 88]) = (y[width + 77] + 50.0, y[width + 88] + 50.0);
            }
            let pair = Pair::new([&x, &y], rows, storage, None);
            compare(kernels, &format!("{width} of {storage:?}"), &[pair], rows);
        }
    }
}

/// Rows in f32 for which an estimate in f32 alone would give another maximum, another ratio, or none.
fn strange(random: &mut Random, width: usize) -> Vec<(&'static str, Vec<f32>, Vec<f32>)> {
    let y: Vec<f32> = random.values(width);
    let near: Vec<f32> = y.iter().map(|y| y + 1e-3).collect();
    let with = |values: &[f32], changes: &[(usize, f32)]| {
        let mut values = values.to_vec();
        changes.iter().for_each(|&(at, value)| values[at] = value);
        values
    };
    let zeros = vec![0.0; width];
    let tiny: Vec<f32> = y.iter().map(|y| y * 1e-42).collect();
    let scaled_by = |values: &[f32], scale: f32| -> Vec<f32> { values.iter().map(|v| v * scale).collect() };
    let scaled = |scale: f32| scaled_by(&y, scale);
    // One difference in f32, and larger by a trifle in f64 the later it comes.
    let trifles = |i: usize| if i % 64 == 40 { (i as f32 + 1.0) * 1e-13 } else { 0.5 };
    let late: Vec<f32> = (0..width).map(trifles).collect();
    let ones: Vec<f32> = (0..width).map(|i| if i % 64 == 40 { -4.0 } else { 0.5 }).collect();
    // Ratios that differ by less than an estimate in f32 is off.
    let divisors: Vec<f32> = y.iter().map(|y| 1.5 + y / 2.0).collect();
    let beside: Vec<f32> = divisors.iter().map(|y| y * 1.7).collect();
    vec![
        ("equal", y.clone(), y.clone()),
        ("zeros", zeros.clone(), zeros.clone()),
        ("signs of zero", with(&zeros, &[(3, -0.0)]), with(&zeros, &[(9, -0.0)])),
        ("against zeros", y.clone(), zeros.clone()),
        ("a zero against zeros", with(&y, &[(5, 0.0), (100, 0.0)]), with(&near, &[(5, 0.0), (100, 0.0)])),
        ("one zero", near.clone(), with(&y, &[(70, 0.0)])),
        ("ties", with(&y, &[(20, y[20] + 64.0), (200, y[200] + 64.0)]), y.clone()),
        ("trifles", late, ones),
        ("ratios side by side", beside, divisors.clone()),
        (
            "a subnormal divisor, no large ratio",
            with(&divisors, &[(33, 2e-39)]),
            with(&scaled_by(&divisors, 0.3), &[(33, 1e-39)]),
        ),
        (
            "huge divisors, the largest ratio not where the largest difference is",
            with(&divisors, &[(33, -1e38), (99, -1e37)]),
            with(&scaled_by(&divisors, 0.9), &[(33, 1.5e38), (99, 3e38)]),
        ),
        ("a subnormal divisor", near.clone(), with(&y, &[(33, 1e-39)])),
        ("subnormal", tiny.clone(), scaled(2e-42)),
        ("tiny", scaled(1e-25), scaled(1.000_1e-25)),
        ("tiny beside large", with(&y, &[(1, 1e-30)]), with(&y, &[(1, 2e-30)])),
        ("tiny against large", with(&scaled(1e30), &[(2, 1e-20)]), with(&scaled(1e30), &[(2, 1.1e-20)])),
        ("huge", with(&y, &[(8, 3e38)]), with(&y, &[(8, -3e38), (9, 1e-3)])),
        ("huge divisors", scaled(3e38), scaled(2.9e38)),
        ("a ratio beyond f32", with(&y, &[(8, 1e30)]), with(&y, &[(8, 1e-30)])),
        ("no pair is finite", vec![f32::NAN; width], vec![f32::INFINITY; width]),
        ("infinite on one side", with(&near, &[(8, f32::NEG_INFINITY)]), y.clone()),
        ("not a number in the reference", near, with(&y, &[(0, f32::NAN), (1, f32::INFINITY)])),
    ]
}

#[test]
fn statistics_of_strange_rows() {
    let Some(kernels) = host::kernels() else { return };
    // Rows of half a warp, of a warp, and of a block.
    for width in [256, 301, 2048, 2056, 16_384] {
        let mut random = Random(3);
        let mut rows = strange(&mut random, width);
        if width == 2048 {
            // Which column has which estimate is chance.
            let more = (0..8).flat_map(|_| strange(&mut random, width));
            rows = more.filter(|(what, ..)| ["ratios side by side", "trifles"].contains(what)).collect();
        }
        for (what, a, b) in rows.iter().filter(|_| width < 2048) {
            compare(kernels, what, &[Pair::new([a, b], 1, Storage::F32, None)], 1);
        }
        // All in one launch, where they share warps; and the other way round.
        let a: Vec<f32> = rows.iter().flat_map(|(_, a, _)| a.clone()).collect();
        let b: Vec<f32> = rows.iter().flat_map(|(_, _, b)| b.clone()).collect();
        for [a, b] in [[&a, &b], [&b, &a]] {
            let pair = |storage| Pair::new([a, b], rows.len(), storage, None);
            compare(kernels, "all", &[pair(Storage::F32), pair(Storage::F16)], rows.len());
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_is_beside_it() {
    let Some(kernels) = host::kernels() else { return };
    let (width, rows) = (333, 4);
    let mut random = Random(8);
    let (mut x, y) = (random.values(rows * width), random.values(rows * width));
    let before = found(kernels, &[Pair::new([&x, &y], rows, Storage::F32, None)], rows);
    (x[width + 7], x[2 * width + 7]) = (f32::NAN, f32::INFINITY);
    let after = found(kernels, &[Pair::new([&x, &y], rows, Storage::F32, None)], rows);
    assert_eq!((before[0], before[3]), (after[0], after[3]));
    assert_eq!((after[1].nonfinite_a, after[2].nonfinite_a), (1, 1));
}

#[test]
fn many_pairs_in_one_launch_and_rows_shown() {
    let Some(kernels) = host::kernels() else { return };
    // More than a block of rows, and the last of them alone in its block.
    let rows = 17;
    let mut random = Random(11);
    let mut places = vec![-1; rows];
    (places[0], places[5], places[16]) = (1, 0, 2);
    let pairs: Vec<Pair> = (0..STATS_PAIRS_MAX)
        .map(|index| {
            let width = [8, 2056, 140, 33, 16_392, 264][index];
            let storage = [Storage::F16, Storage::F32][index % 2];
            let values = [random.values(rows * width), random.values(rows * width)];
            let places = (index % 4 < 2).then_some(&places[..]);
            Pair::new([&values[0], &values[1]], rows, storage, places)
        })
        .collect();
    compare(kernels, "many", &pairs, rows);
    for pair in pairs.iter().filter(|pair| pair.places.is_some()) {
        let (shown, all) = (pair.shown.values(pair.storage), pair.a.values(pair.storage));
        let row = |t: usize| &all[t * pair.width..(t + 1) * pair.width];
        assert_eq!(shown, [row(5), row(0), row(16)].concat());
    }
}
