mod few;

use half::f16;
use parity_graph::Op;

use super::super::trial::{Given, Numbers, Trial};
use crate::arithmetic::{Arithmetic, Flash, Narrow, OfAttention, Scaled, Weights};
use crate::gguf::DType;

struct Sizes {
    b: usize,
    h: usize,
    kv: usize,
    n: usize,
    m: usize,
    dk: usize,
    dv: usize,
}

const SMALL: Sizes = Sizes { b: 2, h: 6, kv: 3, n: 5, m: 9, dk: 8, dv: 4 };

fn f16s(numbers: &mut Numbers, shape: [usize; 4]) -> Given {
    let values = numbers.many(shape.iter().product());
    let values = values.into_iter().map(|v| f16::from_f64(v).to_f64()).collect();
    Given::new(shape, values).held_as(DType::F16)
}

/// Q, K and V as permuted views, a causal mask with a bias that ALiBi multiplies, sinks.
fn trial(seed: u64, sizes: &Sizes, kind: Flash) -> Trial {
    let mut numbers = Numbers::new(seed);
    let Sizes { b, h, kv, n, m, dk, dv } = *sizes;
    let mask = (0..2 * (n + 2) * m).map(|i| {
        let (query, position) = (i / m % (n + 2), i % m);
        if position > query + m - n { f64::NEG_INFINITY } else { -((i % 4) as f64) / 4.0 }
    });
    let given = vec![
        Some(Given::random(&mut numbers, [b, h, n, dk]).laid_out([0, 2, 1, 3])),
        Some(f16s(&mut numbers, [1, kv, m, dk]).laid_out([0, 2, 1, 3])),
        Some(f16s(&mut numbers, [b, kv, m, dv]).laid_out([0, 1, 3, 2])),
        Some(Given::new([1, 2, n + 2, m], mask.collect()).held_as(DType::F16)),
        Some(Given::random(&mut numbers, [1, 1, 1, h])),
    ];
    let mut trial = Trial::new(Op::FlashAttn, given, [b, n, h, dv]);
    trial.params.set_float(0, 1.5);
    trial.arithmetic = Arithmetic { flash: kind, ..Arithmetic::LLAMA_CPU };
    trial
}

/// As ggml's kernel for one row after the other computes, in f32 with a sum of values in f16, over `parts` ranges of
/// positions. With `wide` it is the tiled kernel: Q and the sum stay in f32.
fn kernel(trial: &Trial, parts: usize, wide: bool) -> Vec<f64> {
    let values = |slot: usize| trial.given[slot].as_ref().map(|g| (g.shape(), g.to_vec()));
    let ((q_shape, q), (k_shape, k), (v_shape, v)) =
        (values(0).unwrap(), values(1).unwrap(), values(2).unwrap());
    let (mask, sinks) = (values(3), values(4));
    let ([b, h, n, dk], [kb, kh, m, _], [vb, vh, _, dv]) = (q_shape, k_shape, v_shape);
    let (scale, max_bias, cap) = (trial.params.float(0), trial.params.float(1), trial.params.float(2));
    let scale = if cap != 0.0 { scale / cap } else { scale };
    let half = |x: f32| if wide { x } else { f16::from_f32(x).to_f32() };
    let mut out = Vec::new();
    for (ib, iq, ih) in (0..b).flat_map(|ib| (0..n).flat_map(move |iq| (0..h).map(move |ih| (ib, iq, ih)))) {
        let slope = match (max_bias > 0.0, ih < 4) {
            (false, _) => 1.0,
            (_, true) => 2f32.powf(-max_bias / 4.0).powi(ih as i32 + 1),
            (_, false) => 2f32.powf(-max_bias / 8.0).powi(2 * (ih as i32 - 4) + 1),
        };
        let query = &q[((ib * h + ih) * n + iq) * dk..][..dk];
        let mut joined: Vec<(f32, f32, Vec<f32>)> = Vec::new();
        let chunk = m.div_ceil(parts);
        for range in (0..m).step_by(chunk) {
            let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0f32, vec![0f32; dv]);
            for im in range..(range + chunk).min(m) {
                let bias = mask.as_ref().map_or(0.0, |([_, mh, mn, _], mask)| {
                    slope * mask[((ih % mh) * mn + iq) * m + im] as f32
                });
                if bias == f32::NEG_INFINITY {
                    continue;
                }
                let key = &k[((ib / (b / kb) * kh + ih / (h / kh)) * m + im) * dk..][..dk];
                let mut z =
                    query.iter().zip(key).fold(0f32, |z, (q, k)| half(*q as f32).mul_add(*k as f32, z));
                z *= scale;
                if cap != 0.0 {
                    z = cap * z.tanh();
                }
                z += bias;
                let (mut ms, mut p) = (1f32, 1f32);
                if z > max {
                    ms = (max - z).exp();
                    max = z;
                    acc.iter_mut().for_each(|acc| *acc = half(*acc * ms));
                } else {
                    p = (z - max).exp();
                }
                let value = &v[((ib / (b / vb) * vh + ih / (h / vh)) * m + im) * dv..][..dv];
                acc.iter_mut().zip(value).for_each(|(acc, v)| *acc = half((*v as f32).mul_add(p, *acc)));
                sum = sum * ms + p;
            }
            joined.push((max, sum, acc));
        }
        if let Some((_, sinks)) = &sinks {
            joined.push((sinks[ih] as f32, 1.0, vec![0.0; dv]));
        }
        let max = joined.iter().fold(f32::NEG_INFINITY, |max, part| max.max(part.0));
        let weight = |of: f32| if of == f32::NEG_INFINITY { 0.0 } else { (of - max).exp() };
        let sum: f32 = joined.iter().map(|part| part.1 * weight(part.0)).sum();
        let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        for d in 0..dv {
            out.push(f64::from(joined.iter().map(|part| part.2[d] * weight(part.0)).sum::<f32>() * inverse));
        }
    }
    out
}

#[test]
fn tiles_are_explained_with_every_feature() {
    for (max_bias, cap, leave_out) in
        [(0.0, 0.0, 0), (8.0, 0.0, 0), (0.0, 3.0, 0), (4.0, 30.0, 4), (0.0, 0.0, 3)]
    {
        let mut own = trial(1, &SMALL, Flash::Exact);
        own.params.set_float(1, max_bias);
        own.params.set_float(2, cap);
        if leave_out > 0 {
            own.given[leave_out] = None;
        }
        let excess = own.excess(&kernel(&own, 1, true));
        assert!(excess <= 1.0, "max_bias {max_bias}, cap {cap}, without {leave_out}: {excess}");
        own.assert_single_within_bound();
        let exact = own.double();
        assert!(own.bound(&exact).iter().all(|b| *b < 2e-5), "bounds are those of f32");
        for word in 0..3 {
            let mut wrong = own.clone();
            wrong.params.set_float(word, 1.002 * own.params.float(word));
            assert!(own.params.float(word) == 0.0 || wrong.excess(&exact) > 2.0, "word {word}");
        }
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    for kind in [Flash::Exact, Flash::ByRow, Flash::Split(2), Flash::NativeF16] {
        for sinks in [false, true] {
            let mut own = trial(2, &SMALL, kind);
            let mut mask = own.given[3].as_ref().unwrap().to_vec();
            mask[9..18].fill(f64::NEG_INFINITY);
            own.given[3] = Some(own.given[3].as_ref().unwrap().with(&mask));
            if !sinks {
                own.given.truncate(4);
            }
            let exact = own.double();
            // Query 1 of the even heads.
            assert!(exact[6 * 4..7 * 4].iter().all(|y| *y == 0.0) && exact.iter().all(|y| y.is_finite()));
            assert!(own.bound(&exact).iter().all(|b| b.is_finite()));
        }
    }
}

#[test]
fn the_sum_in_f16_is_followed() {
    let sizes = Sizes { b: 1, h: 4, kv: 2, n: 3, m: 300, dk: 64, dv: 32 };
    let mut own = trial(3, &sizes, Flash::ByRow);
    let recorded = kernel(&own, 1, false);
    let excess = own.excess(&recorded);
    assert!(excess <= 1.0, "{excess}");
    let median = |own: &Trial| {
        let mut bounds = own.bound(&own.double());
        bounds.sort_unstable_by(f64::total_cmp);
        bounds[bounds.len() / 2]
    };
    let followed = median(&own);
    assert!(followed < 5e-5, "half of the sums have few roundings that are open: {followed}");
    // The tiled kernel is another arithmetic, and so is a CPU that computes in f16.
    assert!(own.excess(&kernel(&own, 1, true)) > 3.0);
    own.arithmetic.flash = Flash::Exact;
    assert!(own.excess(&recorded) > 3.0);
    own.arithmetic.flash = Flash::NativeF16;
    assert!(own.excess(&recorded) <= 1.0 && median(&own) > 20.0 * followed);
    own.arithmetic.flash = Flash::ByRow;
    own.params.set_float(0, 1.502);
    assert!(own.excess(&recorded) > 3.0);
}

#[test]
fn a_split_is_followed() {
    let sizes = Sizes { b: 1, h: 4, kv: 2, n: 1, m: 600, dk: 32, dv: 16 };
    for parts in [2, 3, 7] {
        let mut own = trial(4, &sizes, Flash::Split(parts));
        let recorded = kernel(&own, parts, false);
        let excess = own.excess(&recorded);
        assert!(excess <= 1.0, "{parts}: {excess}");
        own.arithmetic.flash = Flash::ByRow;
        assert!(own.excess(&recorded) > 2.0, "{parts}");
    }
}

#[test]
fn errors_are_carried() {
    let mut own = trial(5, &SMALL, Flash::Exact);
    own.params.set_float(2, 3.0);
    for slot in [0, 1, 2, 4] {
        own.assert_carries(slot, 1e-4, 12.0);
    }
    let narrow = trial(6, &SMALL, Flash::ByRow);
    for slot in [0, 1, 2] {
        narrow.assert_carries(slot, 1e-4, 400.0);
    }
}

#[test]
fn operands_that_are_rounded_carry_errors_to_the_next_number() {
    for narrow in [Narrow::F16, Narrow::Bf16, Narrow::Tf32, Narrow::Tf32Away, Narrow::Tf32Cut] {
        for scaled in [Scaled::Scores, Scaled::Queries, Scaled::Both] {
            let own = trial(7, &SMALL, Flash::Rounded(narrow, OfAttention::all(Weights::Divided), scaled));
            for slot in [0, 1, 2] {
                // Moved by as much as its steps are wide.
                own.assert_carries(slot, 1e-2, 400.0);
            }
        }
    }
}

#[test]
fn the_last_bit_of_a_scale_that_went_into_operands_is_no_mistake() {
    for narrow in [Narrow::F16, Narrow::Bf16, Narrow::Tf32, Narrow::Tf32Away, Narrow::Tf32Cut] {
        for scaled in [Scaled::Queries, Scaled::Both] {
            let own = trial(9, &SMALL, Flash::Rounded(narrow, OfAttention::all(Weights::Divided), scaled));
            let mut beside = own.clone();
            beside.params.set_float(0, own.params.float(0).next_up());
            let excess = own.excess(&beside.double());
            assert!(excess <= 1.0, "{narrow:?}, {scaled:?}: {excess}");
        }
    }
}

#[test]
fn scores_that_say_nothing_of_their_weights_choose_any_value_within_reach() {
    let mut own = trial(8, &SMALL, Flash::Exact);
    // Scores of thousands, moved by more than they lie apart.
    own.params.set_float(0, 400.0);
    for slot in [0, 1] {
        // No further than values lie apart.
        own.assert_carries(slot, 0.1, 4.0);
    }
}
