//! Attention of few queries on CUDA over caches in blocks: the kernel written out once more, integer by integer in f32.

use half::f16;
use parity_graph::Op;

use super::super::super::trial::{Given, Numbers, Trial};
use crate::arithmetic::{Arithmetic, Flash, Functions, Units, Vector, cache_blocks};
use crate::gguf::DType;

const HEAD: usize = 64;
const POSITIONS: usize = 40;
const HEADS: usize = 4;
const QUERIES: usize = 2;

/// Random keys or values as a cache keeps them.
fn cached(numbers: &mut Numbers, dtype: DType) -> Given {
    let mut values = numbers.many(HEADS / 2 * POSITIONS * HEAD);
    let mut error = vec![0.0; values.len()];
    match cache_blocks::is_kept(dtype) {
        true => cache_blocks::keep(dtype, &mut values, &mut error),
        false => values.iter_mut().for_each(|value| *value = f16::from_f64(*value).to_f64()),
    }
    Given::new([1, HEADS / 2, POSITIONS, HEAD], values).held_as(dtype)
}

fn trial(seed: u64, [keys, values]: [DType; 2], flash: Flash) -> Trial {
    let mut numbers = Numbers::new(seed);
    let given = vec![
        Some(Given::random(&mut numbers, [1, HEADS, QUERIES, HEAD])),
        Some(cached(&mut numbers, keys)),
        Some(cached(&mut numbers, values)),
    ];
    let mut trial = Trial::new(Op::FlashAttn, given, [1, QUERIES, HEADS, HEAD]);
    trial.params.set_float(0, 0.25);
    trial.arithmetic = Arithmetic { flash, functions: Functions::FastMath, ..Arithmetic::EXACT };
    trial
}

/// A score of integers: `quantize_q8_1_to_shared`, `vec_dot_fattn_vec_KQ_*`.
fn score(dtype: DType, query: &[f32], key: &[f64]) -> f32 {
    let mut sum = 0f32;
    for (x, key) in query.chunks(32).zip(key.chunks(32)) {
        let d = x.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
        let quants: Vec<f32> = x.iter().map(|x| (x / d).round()).collect();
        let of_values: f32 = x.iter().sum();
        let (scale, least) = match dtype {
            DType::Q8_0 => (1.0, 0.0),
            DType::Q4_0 => {
                // Quant -8 is that of the largest value.
                let largest = key.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
                (largest / -8.0, largest)
            }
            _ => {
                let [low, high] = [f64::min, f64::max].map(|f| key.iter().copied().reduce(f).unwrap());
                ((high - low) / 15.0, low)
            }
        };
        let integers: f64 = key.iter().zip(&quants).map(|(k, q)| (k - least) / scale * f64::from(*q)).sum();
        let integers = if dtype == DType::Q8_0 { integers as f32 } else { integers.round() as f32 };
        sum += match dtype {
            DType::Q4_0 => scale as f32 * (integers * d - 8.0 * of_values),
            _ => scale as f32 * d * integers + least as f32 * of_values,
        };
    }
    sum
}

fn kernel(trial: &Trial, dtype: DType, converts: bool) -> Vec<f64> {
    let values = |slot: usize| trial.given[slot].as_ref().unwrap().to_vec();
    let narrow = |x: f64| if converts { f16::from_f32(x as f32).to_f64() } else { x };
    let (q, k, v) = (values(0), values(1), values(2));
    let mut out = Vec::new();
    for (n, h) in (0..QUERIES).flat_map(|n| (0..HEADS).map(move |h| (n, h))) {
        let query = &q[(h * QUERIES + n) * HEAD..][..HEAD];
        let query: Vec<f32> = query.iter().map(|q| 0.25 * *q as f32).collect();
        let row = |of: &[f64], m: usize| -> Vec<f64> {
            of[(h / 2 * POSITIONS + m) * HEAD..][..HEAD].iter().map(|x| narrow(*x)).collect()
        };
        let scores: Vec<f32> = (0..POSITIONS)
            .map(|m| match converts {
                true => query.iter().zip(row(&k, m)).fold(0f32, |z, (q, k)| q.mul_add(k as f32, z)),
                false => score(dtype, &query, &row(&k, m)),
            })
            .collect();
        let largest = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|z| (z - largest).exp()).collect();
        let total: f32 = weights.iter().sum();
        let mut sums = [0f32; HEAD];
        for (m, p) in weights.iter().enumerate() {
            sums.iter_mut().zip(row(&v, m)).for_each(|(sum, v)| *sum += p * v as f32);
        }
        out.extend(sums.map(|sum| f64::from(sum / total)));
    }
    out
}

#[test]
fn keys_in_blocks_are_multiplied_as_integers() {
    let [integers, converted] = [Vector::Integers, Vector::Converted].map(Flash::Vector);
    for (seed, dtype) in [(1, DType::Q8_0), (2, DType::Q4_0), (3, DType::Q4_1)] {
        let own = |flash| trial(seed, [dtype, DType::Q8_0], flash);
        let recorded = kernel(&own(integers), dtype, false);
        let excess = own(integers).excess(&recorded);
        assert!(excess <= 1.0, "{dtype}: {excess}");
        let exact = own(integers).double();
        let mut bounds = own(integers).bound(&exact);
        bounds.sort_unstable_by(f64::total_cmp);
        let median = bounds[bounds.len() / 2];
        assert!(median < 5e-6, "{dtype}: bounds are those of f32, not {median}");
        for other in [converted, Flash::Exact] {
            assert!(own(other).excess(&recorded) > 10.0, "{dtype}: {other:?}");
        }
        let mut wrong = own(integers);
        wrong.params.set_float(0, 0.2501);
        assert!(wrong.excess(&recorded) > 10.0, "{dtype}: another scale");
        // Another head's keys.
        let mut wrong = own(integers);
        let mut keys = wrong.given[1].as_ref().unwrap().to_vec();
        keys.rotate_left(POSITIONS * HEAD);
        wrong.given[1] = Some(wrong.given[1].as_ref().unwrap().with(&keys));
        assert!(wrong.excess(&recorded) > 1e3, "{dtype}: another head");
    }
}

#[test]
fn a_cache_without_a_kernel_of_its_own_is_converted_to_f16() {
    let [integers, converted] = [Vector::Integers, Vector::Converted].map(Flash::Vector);
    for (seed, types) in [(4, [DType::Q5_1, DType::Q4_1]), (5, [DType::F16, DType::Q8_0])] {
        let own = |flash| trial(seed, types, flash);
        let recorded = kernel(&own(converted), types[0], true);
        let excess = own(converted).excess(&recorded);
        assert!(excess <= 1.0, "{types:?}: {excess}");
        for other in [integers, Flash::Exact] {
            assert!(own(other).excess(&recorded) > 10.0, "{types:?}: {other:?}");
        }
    }
}

#[test]
fn what_rounding_decides_in_a_cache_is_carried_through_every_kernel() {
    let units = Units { batch: 64, warps: 2, queries: 8, heads: 2, blocks: None };
    for flash in
        [Flash::Vector(Vector::Integers), Flash::Vector(Vector::Converted), Flash::Units(units), Flash::Exact]
    {
        let own = trial(6, [DType::Q4_0, DType::Q8_0], flash);
        let exact = own.double();
        let bound = own.bound(&exact);
        // One value of a few keys, and of as many values, is a quant off.
        for (slot, step) in [(1, 0.1), (2, 0.01)] {
            let given = own.given[slot].as_ref().unwrap();
            let mut moved = given.to_vec();
            let mut error = vec![0.0; moved.len()];
            for at in (3..moved.len()).step_by(7 * HEAD) {
                (moved[at], error[at]) = (moved[at] + step, step);
            }
            let carried = own.with(|args| (own.rule().carry)(args, &exact, slot, &error));
            let mut other = own.clone();
            other.given[slot] = Some(given.with(&moved));
            let mut most = 0f64;
            for (((moved, exact), bound), carried) in
                other.double().iter().zip(&exact).zip(&bound).zip(&carried)
            {
                let off = (moved - exact).abs();
                assert!(off <= bound + carried, "{flash:?} {slot}: {off} {bound} {carried}");
                most = most.max(off / (bound + carried));
            }
            assert!(most > 0.02, "{flash:?} {slot}: {most} of what was allowed");
        }
    }
}
