//! Products as the kernels of devices compute them: each written out once more here, integer by integer or step by step.

use half::f16;

use super::super::trial::{Given, Numbers, Trial};
use super::tests::{trial, weight};
use crate::arithmetic::{Arithmetic, HalfSums, Integers, Narrow, Operands, cache_blocks};
use crate::gguf::DType;

fn under(operands: Operands, mut trial: Trial) -> Trial {
    trial.arithmetic = Arithmetic { operands, ..Arithmetic::EXACT };
    trial
}

fn to_half(value: f64) -> f64 {
    f16::from_f64(value).to_f64()
}

/// d, quants and sum of a block of 32, as MMQ (`127/max`), MMVQ (`max/127`) or Vulkan quantises it.
fn quantised(kernel: Integers, x: &[f64]) -> (f64, Vec<f64>, f64) {
    let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
    let (d, quants): (f32, Vec<f64>) = match kernel {
        Integers::Many => {
            let inverse = 127.0 / max;
            (1.0 / inverse, x.iter().map(|x| f64::from((x * inverse).round())).collect())
        }
        Integers::Few => {
            let d = max / 127.0;
            (d, x.iter().map(|x| f64::from((x / d).round())).collect())
        }
        Integers::Packed => {
            let inverse = 1.0 / (max / 127.0);
            (max / 127.0, x.iter().map(|x| f64::from((x * inverse).round())).collect())
        }
    };
    let sum = match kernel {
        Integers::Packed => f64::from(quants.iter().sum::<f64>() as f32 * d),
        _ => x.iter().map(|x| f64::from(*x)).sum(),
    };
    (f64::from(d), quants, sum)
}

/// Σ over blocks of `f(stored block, d, quants, sum)`.
fn blocks(
    bytes: &[u8],
    size: usize,
    kernel: Integers,
    x: &[f64],
    f: impl Fn(&[u8], f64, &[f64], f64) -> f64,
) -> f64 {
    bytes
        .chunks(size)
        .zip(x.chunks(32))
        .map(|(block, x)| {
            let (d, quants, sum) = quantised(kernel, x);
            f(block, d, &quants, sum)
        })
        .sum()
}

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f64()
}

/// Σ (quant - middle)·x of 16 bytes of nibbles.
fn nibbles(bytes: &[u8], middle: f64, x: &[f64]) -> f64 {
    (0..16)
        .map(|l| (f64::from(bytes[l] & 15) - middle) * x[l] + (f64::from(bytes[l] >> 4) - middle) * x[l + 16])
        .sum()
}

#[test]
fn blocks_are_multiplied_as_integers_and_minima_meet_the_sums_of_what_was_not_yet_quantised() {
    let mut numbers = Numbers::new(21);
    let (rows, n, k) = (3, 2, 128);
    for (dtype, size) in [(DType::Q4_0, 18), (DType::Q4_1, 20), (DType::Q8_0, 34)] {
        let x = Given::random(&mut numbers, [1, 1, n, k]);
        let w = weight(&mut numbers, dtype, &[rows, k]);
        let Given::Weight { bytes, .. } = &w else { unreachable!() };
        for kernel in [Integers::Many, Integers::Few, Integers::Packed] {
            let of = |block: &[u8], d: f64, q: &[f64], sum: f64| match (dtype, kernel) {
                (DType::Q4_0, Integers::Many) => {
                    nibbles(&block[2..], 8.0, q) * half_at(block, 0) * to_half(d)
                }
                (DType::Q4_0, Integers::Few | Integers::Packed) => {
                    half_at(block, 0) * (nibbles(&block[2..], 0.0, q) * to_half(d) - 8.0 * to_half(sum))
                }
                (DType::Q4_1, Integers::Many) => {
                    half_at(block, 0) * to_half(d) * nibbles(&block[4..], 0.0, q)
                        + half_at(block, 2) * to_half(sum)
                }
                (DType::Q4_1, Integers::Packed) => {
                    half_at(block, 0) * to_half(d) * nibbles(&block[4..], 0.0, q)
                        + half_at(block, 2) * to_half(sum)
                }
                (DType::Q4_1, Integers::Few) => {
                    nibbles(&block[4..], 0.0, q) * to_half(half_at(block, 0) * to_half(d))
                        + to_half(half_at(block, 2) * to_half(sum))
                }
                (_, kernel) => {
                    let d = if kernel == Integers::Many { d } else { to_half(d) };
                    let sum: f64 = block[2..].iter().zip(q).map(|(w, q)| f64::from(*w as i8) * q).sum();
                    sum * half_at(block, 0) * d
                }
            };
            let values = x.to_vec();
            let mut expected = Vec::new();
            for x in values.chunks(k) {
                expected.extend(bytes.chunks(k / 32 * size).map(|w| blocks(w, size, kernel, x, of)));
            }
            let own = under(Operands::Blocks(kernel), trial(w.clone(), x.clone()));
            let over = own.excess(&expected);
            assert!(over <= 1.0, "{dtype} {kernel:?}: {over}");
            // The other kernel is no rounding error of this one, where they differ.
            let other = if kernel == Integers::Many { Integers::Few } else { Integers::Many };
            let other = under(Operands::Blocks(other), trial(w.clone(), x.clone())).excess(&expected);
            assert!(other > 10.0, "{dtype} {kernel:?}: {other}");
        }
    }
}

#[test]
fn keys_of_a_cache_are_multiplied_as_the_blocks_that_they_are_kept_in() {
    let mut numbers = Numbers::new(26);
    let (rows, n, k) = (5, 2, 64);
    for (dtype, levels) in [(DType::Q4_0, 8.0), (DType::Q5_0, 16.0), (DType::Q4_1, 15.0), (DType::Q5_1, 31.0)]
    {
        let x = Given::random(&mut numbers, [1, 1, n, k]);
        let mut keys = numbers.many(rows * k);
        cache_blocks::keep(dtype, &mut keys, &mut vec![0.0; rows * k]);
        let has_minimum = matches!(dtype, DType::Q4_1 | DType::Q5_1);
        // Of the block's key: scale, and what is added to scale·quant.
        let parts = |key: &[f64]| {
            let largest = key.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
            let [low, high] = [f64::min, f64::max].map(|f| key.iter().copied().reduce(f).unwrap());
            if has_minimum { ((high - low) / levels, low) } else { (-largest / levels, largest) }
        };
        let mut expected = Vec::new();
        for x in x.to_vec().chunks(k) {
            expected.extend(keys.chunks(k).map(|key| {
                let blocks = key.chunks(32).zip(x.chunks(32)).map(|(key, x)| {
                    let (d, quants, sum) = quantised(Integers::Few, x);
                    let (scale, least) = parts(key);
                    let raw = key.iter().zip(&quants).map(|(k, q)| ((k - least) / scale).round() * q);
                    let raw: f64 = raw.sum();
                    match has_minimum {
                        true => raw * to_half(scale * to_half(d)) + to_half(least * to_half(sum)),
                        false => scale * (raw * to_half(d) - levels * to_half(sum)),
                    }
                });
                blocks.sum::<f64>()
            }));
        }
        let cache = Given::new([1, 1, rows, k], keys.clone()).held_as(dtype);
        let few = under(Operands::Blocks(Integers::Few), trial(cache.clone(), x.clone()));
        let over = few.excess(&expected);
        assert!(over <= 1.0, "{dtype}: {over}");
        assert!(under(Operands::Exact, trial(cache, x)).excess(&expected) > 10.0, "{dtype}");
    }
}

#[test]
fn sums_in_f16_are_repeated_bit_by_bit_and_any_other_order_is_none() {
    let mut numbers = Numbers::new(22);
    let (m, n, k) = (18, 2, 96);
    let w: Vec<f64> = numbers.many(m * k).into_iter().map(to_half).collect();
    let x: Vec<f64> = numbers.many(n * k).into_iter().map(to_half).collect();
    let given = || {
        trial(Given::new([1, 1, m, k], w.clone()).held_as(DType::F16), Given::new([1, 1, n, k], x.clone()))
    };
    let mut expected = Vec::new();
    for x in x.chunks(k) {
        for w in w.chunks(k) {
            let order = (0..k / 4).flat_map(|four| (0..4).rev().map(move |i| 4 * four + i));
            expected.push(order.fold(0.0, |sum, i| to_half(sum + to_half(w[i] * x[i]))));
        }
    }
    let running = |fused| under(Operands::Half(HalfSums::Running { fused }), given());
    assert_eq!(running(false).double(), expected);
    assert!(running(true).excess(&expected) > 10.0);
    assert!(under(Operands::Both(Narrow::F16), given()).excess(&expected) > 10.0);
    // What f16 rounds in any order explains it, and little less does.
    let any = under(Operands::Unordered, given());
    assert!(any.excess(&expected) < 1.0);
}

#[test]
fn groups_of_columns_are_an_interval_that_holds_what_a_matrix_unit_cuts_off() {
    let mut numbers = Numbers::new(23);
    let (m, n, k) = (5, 3, 160);
    let w: Vec<f64> = numbers.many(m * k).into_iter().map(to_half).collect();
    let x: Vec<f64> = numbers.many(n * k).into_iter().map(to_half).collect();
    let given = || {
        trial(Given::new([1, 1, m, k], w.clone()).held_as(DType::F16), Given::new([1, 1, n, k], x.clone()))
    };
    for (parts, narrow) in [(1, false), (2, true), (5, false)] {
        let mut expected = Vec::new();
        for x in x.chunks(k) {
            for w in w.chunks(k) {
                let mut total = 0.0;
                for part in 0..parts {
                    let mut sum = 0.0;
                    for first in (part * k / parts..(part + 1) * k / parts).step_by(16) {
                        // In f32, cut off below the 24 bits of the sum, as units do.
                        let group: f64 = (first..first + 16).map(|i| w[i] * x[i]).sum();
                        sum = to_half(f64::from((sum + group) as f32));
                    }
                    total = if narrow { to_half(total + sum) } else { total + sum };
                }
                expected.push(to_half(total));
            }
        }
        let own = under(Operands::Half(HalfSums::Groups { parts, narrow }), given());
        let over = own.excess(&expected);
        assert!(over <= 1.0, "{parts} parts: {over}");
        let others = under(Operands::Half(HalfSums::Groups { parts: parts + 1, narrow }), given());
        assert!(others.excess(&expected) > 10.0);
    }
}

#[test]
fn an_error_of_the_rows_moves_sums_in_f16_within_what_is_carried() {
    let mut numbers = Numbers::new(24);
    let (m, k) = (7, 64);
    let w: Vec<f64> = numbers.many(m * k).into_iter().map(to_half).collect();
    let x = numbers.many(k);
    for sums in [
        HalfSums::Running { fused: false },
        HalfSums::Threads(16),
        HalfSums::Groups { parts: 1, narrow: true },
    ] {
        let given = |x: &[f64]| {
            let weight = Given::new([1, 1, m, k], w.clone()).held_as(DType::F16);
            under(Operands::Half(sums), trial(weight, Given::new([1, 1, 1, k], x.to_vec())))
        };
        let own = given(&x);
        let exact = own.double();
        let error: Vec<f64> = x.iter().map(|x| 1e-5 * x.abs()).collect();
        let carried = own.with(|args| (own.rule().carry)(args, &exact, 1, &error));
        for sign in [-1.0, 1.0] {
            let moved: Vec<f64> = x.iter().zip(&error).map(|(x, e)| x + sign * e).collect();
            for ((moved, exact), carried) in given(&moved).double().iter().zip(&exact).zip(&carried) {
                assert!((moved - exact).abs() <= *carried, "{sums:?}: {moved} {exact} {carried}");
            }
        }
    }
}

#[test]
fn tf32_keeps_ten_bits_of_both_sides() {
    let mut numbers = Numbers::new(25);
    let (w, x) = (Given::random(&mut numbers, [1, 1, 4, 64]), Given::random(&mut numbers, [1, 1, 2, 64]));
    let cut = |given: &Given| -> Vec<f64> {
        given.to_vec().iter().map(|v| f64::from(f32::from_bits((*v as f32).to_bits() & !0x1fff))).collect()
    };
    let narrowed = trial(Given::new([1, 1, 4, 64], cut(&w)), Given::new([1, 1, 2, 64], cut(&x)));
    let expected = under(Operands::Exact, narrowed).double();
    let own = under(Operands::Both(Narrow::Tf32Cut), trial(w.clone(), x.clone()));
    assert!(own.excess(&expected) <= 1.0);
    assert!(under(Operands::Exact, trial(w, x)).excess(&expected) > 10.0);
}
