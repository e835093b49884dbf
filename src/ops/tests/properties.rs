//! What holds of every rule, whatever it computes.

use std::collections::BTreeMap;

use parity_graph::Op;

use super::cases::{Case, ratio, recorded};
use crate::arithmetic::Arithmetic;
use crate::scalar::Scalar;

/// Numbers from -1 to 1 (a linear congruential generator, Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

#[test]
fn strides_are_followed() {
    for case in recorded() {
        let mut scattered = case.clone();
        for source in scattered.sources.iter_mut().flatten() {
            *source = source.scattered();
        }
        let (a, b) = (case.double(&Arithmetic::LLAMA_CPU), scattered.double(&Arithmetic::LLAMA_CPU));
        assert!(a.iter().zip(&b).all(|(&a, &b)| same(a, b)), "{}", case.op);
        let (a, b) = (case.bound(&Arithmetic::LLAMA_CPU, &a), scattered.bound(&Arithmetic::LLAMA_CPU, &b));
        assert_eq!(a, b, "{}", case.op);
    }
}

#[test]
fn f32_is_within_the_bound_of_f64() {
    for arithmetic in [Arithmetic::EXACT, Arithmetic::LLAMA_CPU] {
        for case in recorded() {
            let (single, exact) = (case.single(&arithmetic), case.double(&arithmetic));
            let bound = case.bound(&arithmetic, &exact);
            for ((&single, &exact), &bound) in single.iter().zip(&exact).zip(&bound) {
                let single = f64::from(single);
                assert!(
                    ratio(single, exact, bound) <= 1.0,
                    "{}: {single:e}, not {exact:e} ± {bound:e}",
                    case.op
                );
            }
        }
    }
}

#[test]
fn bounds_are_numbers_and_no_wider_than_rounding() {
    // Of the result's largest value: an f16 of GELU's table, a softplus that cancels, otherwise f32.
    const NARROW: f64 = 1e-3;
    // YaRN's mean of two angles is rounded, and fused or not, at positions up to 40000.
    let is_yarn = |case: &Case| matches!(case.op, Op::Rope | Op::RopeBack) && case.params.float(7) != 0.0;
    for case in recorded().into_iter().filter(|case| !is_yarn(case)) {
        let exact = case.double(&Arithmetic::LLAMA_CPU);
        let bound = case.bound(&Arithmetic::LLAMA_CPU, &exact);
        let largest = exact.iter().filter(|y| y.is_finite()).fold(0.0f64, |max, y| max.max(y.abs()));
        for (&y, &bound) in exact.iter().zip(&bound) {
            assert!(bound >= 0.0 && bound.is_finite(), "{}: {bound} of {y}", case.op);
            assert!(y.is_finite() || bound == 0.0, "{}: {bound} of {y}", case.op);
            assert!(bound <= NARROW * largest + f64::from(f32::MIN_POSITIVE), "{}: {bound} of {y}", case.op);
        }
    }
}

/// The case with source `slot` moved by up to `error` of each value.
fn moved(case: &Case, slot: usize, error: &[f64], random: &mut Random) -> Case {
    let values = case.sources[slot].as_ref().unwrap().compact().data;
    // A sign more often than a value between: the worst is at the ends.
    let moved = values.iter().zip(error).map(|(x, e)| x + e * random.next().signum()).collect();
    case.replaced(slot, moved)
}

/// Errors of a source so small that what they do to second order is less than this share of what they do to first.
const SECOND_ORDER: f64 = 1e-3;

/// How far each element moves at most in some tries, and how far it is said to move.
fn moved_and_said(case: &Case, slot: usize, random: &mut Random) -> Vec<(f64, f64)> {
    let arithmetic = &Arithmetic::LLAMA_CPU;
    let exact = case.double(arithmetic);
    let values = case.sources[slot].as_ref().unwrap().compact().data;
    let error: Vec<f64> = values.iter().map(|x| 1e-6 * (x.abs().min(1e3) + 1e-3)).collect();
    let said = case.with(arithmetic, |args| (case.rule().carry)(args, &exact, slot, &error));
    let mut out: Vec<(f64, f64)> = said.into_iter().map(|said| (0.0, said)).collect();
    for _ in 0..8 {
        let other = moved(case, slot, &error, random).double(arithmetic);
        for ((out, &a), &b) in out.iter_mut().zip(&other).zip(&exact) {
            if a.is_finite() && b.is_finite() {
                // What f64 itself loses of values this large.
                let rounding = 64.0 * <f64 as Scalar>::UNIT_ROUNDOFF * b.abs().max(1.0);
                out.0 = out.0.max((a - b).abs() - rounding);
            }
        }
    }
    out
}

#[test]
fn an_error_of_a_source_carries_on_as_far_as_is_said() {
    // What signs at random, of a row of terms, reach of the worst case.
    const REACHED: f64 = 0.3;
    let mut random = Random(7);
    let mut sharpest: BTreeMap<(String, usize), f64> = BTreeMap::new();
    for case in recorded() {
        for slot in 0..case.sources.len() {
            let Some(source) = &case.sources[slot] else { continue };
            if !matches!(source.dtype.name(), "F32" | "F16") {
                continue;
            }
            for (moved, said) in moved_and_said(&case, slot, &mut random) {
                let op = &case.op;
                assert!(moved <= said * (1.0 + SECOND_ORDER), "{op} slot {slot}: {moved:e}, not {said:e}");
                let reached = sharpest.entry((op.to_string(), slot)).or_default();
                *reached = reached.max(if said > 0.0 { moved / said } else { 0.0 });
            }
            let none = vec![0.0; source.shape.iter().product()];
            let exact = case.double(&Arithmetic::LLAMA_CPU);
            let said =
                case.with(&Arithmetic::LLAMA_CPU, |args| (case.rule().carry)(args, &exact, slot, &none));
            assert!(said.iter().all(|&e| e == 0.0), "{}: an error of nothing", case.op);
        }
    }
    println!("{sharpest:#.2?}");
    for ((op, slot), reached) in sharpest {
        // Frequency factors are leaves, and so is what is never read.
        let given =
            matches!((op.as_str(), slot), ("ROPE" | "ROPE_BACK", 2) | ("FILL" | "IM2COL", 0) | ("CPY", 1));
        assert!(given || reached >= REACHED, "{op} slot {slot}: {reached}");
    }
}

#[test]
fn no_bound_and_no_carried_error_is_nan() {
    let strange = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38];
    let mut random = Random(3);
    for case in recorded() {
        for slot in 0..case.sources.len() {
            let Some(source) = &case.sources[slot] else { continue };
            if !matches!(source.dtype.name(), "F32" | "F16") {
                continue;
            }
            let mut values = source.compact().data;
            for value in values.iter_mut() {
                let pick = ((random.next() + 1.0) * 20.0) as usize;
                *value = strange.get(pick).copied().unwrap_or(*value);
            }
            let case = case.replaced(slot, values);
            for arithmetic in [Arithmetic::EXACT, Arithmetic::LLAMA_CPU] {
                let exact = case.double(&arithmetic);
                let bound = case.bound(&arithmetic, &exact);
                assert!(bound.iter().all(|&b| b >= 0.0), "{} slot {slot}", case.op);
                let error = vec![1e-3; source.shape.iter().product()];
                let carried = case.with(&arithmetic, |args| (case.rule().carry)(args, &exact, slot, &error));
                assert!(carried.iter().all(|&e| e >= 0.0), "{} slot {slot}", case.op);
            }
        }
    }
}
