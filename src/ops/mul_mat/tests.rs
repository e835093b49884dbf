use half::{bf16, f16};
use parity_graph::Op;

use super::super::trial::{Given, Numbers, Trial};
use crate::arithmetic::{Arithmetic, Operands};
use crate::gguf::{DType, TensorInfo};
use crate::numerics::Storage;

pub fn trial(weight: Given, x: Given) -> Trial {
    let ([_, _, m, _], [b3, b2, n, _]) = (weight.shape(), x.shape());
    Trial::new(Op::MulMat, vec![Some(weight), Some(x)], [b3, b2, n, m])
}

/// Blocks of random bytes, but for the scales, which are small.
pub fn weight(numbers: &mut Numbers, dtype: DType, shape: &[usize]) -> Given {
    let blocks = shape.iter().product::<usize>() / dtype.block_len();
    let scales: &[usize] = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => panic!("no blocks"),
    };
    let mut bytes: Vec<u8> = (0..blocks * dtype.block_bytes()).map(|_| numbers.below(256) as u8).collect();
    for block in bytes.chunks_mut(dtype.block_bytes()) {
        for at in scales {
            let scale = f16::from_f64(0.01 * (1.0 + numbers.unit()));
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    let info = TensorInfo {
        name: "w".into(),
        dtype,
        shape: shape.to_vec(),
        offset: 0,
        byte_len: bytes.len(),
        shard: 0,
        loaded: Storage::F32,
    };
    Given::Weight { info, bytes }
}

#[test]
fn heads_are_shared_by_division() {
    let mut numbers = Numbers::new(1);
    let (w, x) = (Given::random(&mut numbers, [2, 3, 4, 5]), Given::random(&mut numbers, [4, 6, 7, 5]));
    let (a, b) = (w.to_vec(), x.to_vec());
    let out = trial(w, x).double();
    let mut expected = Vec::new();
    for i3 in 0..4 {
        for i2 in 0..6 {
            for j in 0..7 {
                for i in 0..4 {
                    let w = (((i3 / 2) * 3 + i2 / 2) * 4 + i) * 5;
                    let x = ((i3 * 6 + i2) * 7 + j) * 5;
                    expected.push((0..5).map(|k| a[w + k] * b[x + k]).sum::<f64>());
                }
            }
        }
    }
    for (out, expected) in out.iter().zip(&expected) {
        assert!((out - expected).abs() < 1e-14);
    }
}

#[test]
fn f32_is_within_the_bound_whatever_the_strides() {
    let mut numbers = Numbers::new(2);
    for (a, b) in
        [([1, 1, 33, 300], [1, 1, 5, 300]), ([1, 2, 17, 64], [1, 6, 70, 64]), ([2, 1, 3, 1], [2, 4, 1, 1])]
    {
        let w = Given::random(&mut numbers, a).laid_out([0, 2, 1, 3]);
        let x = Given::random(&mut numbers, b).laid_out([0, 2, 3, 1]);
        let plain = trial(w.clone(), x.clone());
        plain.assert_single_within_bound();
        assert_eq!(plain.double(), trial(Given::new(a, w.to_vec()), Given::new(b, x.to_vec())).double());
        trial(w.laid_out([0, 1, 3, 2]).held_as(DType::F16), x).assert_single_within_bound();
    }
}

#[test]
fn activations_are_rounded_to_what_the_weight_is_multiplied_as() {
    let mut numbers = Numbers::new(3);
    let x = Given::random(&mut numbers, [1, 1, 2, 256]);
    for dtype in [DType::F16, DType::BF16] {
        let round = |v: f64| match dtype {
            DType::F16 => f16::from_f64(v).to_f64(),
            _ => bf16::from_f64(v).to_f64(),
        };
        let w: Vec<f64> = numbers.many(3 * 256).into_iter().map(round).collect();
        let w = Given::new([1, 1, 3, 256], w).held_as(dtype);
        let narrow = Given::new([1, 1, 2, 256], x.to_vec().into_iter().map(round).collect());
        let (mut own, rounded) = (trial(w.clone(), x.clone()), trial(w, narrow));
        assert_eq!(own.double(), rounded.double());
        // Not rounding them is no rounding error of f32.
        own.arithmetic = Arithmetic { operands: Operands::Exact, ..Arithmetic::LLAMA_CPU };
        assert!(own.excess(&rounded.double()) > 10.0);
    }
}

#[test]
fn the_hadamard_hint_replaces_the_matrix() {
    let mut numbers = Numbers::new(4);
    let x = Given::random(&mut numbers, [1, 2, 3, 64]).laid_out([0, 2, 1, 3]);
    let mut hinted = trial(Given::new([1, 1, 64, 64], vec![f64::NAN; 64 * 64]), x.clone());
    hinted.params.set_int(1, 1);
    let sign = |a: usize, b: usize| if (a & b).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let w = (0..64 * 64).map(|i| sign(i / 64, i % 64) / 8.0).collect();
    let matrix = trial(Given::new([1, 1, 64, 64], w), x).double();
    for (a, b) in hinted.double().iter().zip(&matrix) {
        assert!((a - b).abs() < 1e-14);
    }
    hinted.assert_single_within_bound();
    hinted.assert_carries(1, 1e-3, 12.0);
    let exact = hinted.double();
    // Sharp: some ten roundings of a value.
    assert!(hinted.bound(&exact).iter().all(|b| *b < 2e-6));
}

/// The sum of a row of Q8_0 with Q8_0 blocks as ggml computes it: integers, then d·d'·sum in f32.
fn q8_0_dot(w: &[u8], x: &[f64]) -> f64 {
    let mut total = 0f32;
    for (block, x) in w.chunks(34).zip(x.chunks(32)) {
        let max = x.iter().fold(0f32, |max, x| max.max(x.abs() as f32));
        let inverse = 127.0 / max;
        let d = f16::from_f32(max / 127.0).to_f32();
        let quants = x.iter().map(|x| ((*x as f32) * inverse).round_ties_even() as i32);
        let sum: i32 = block[2..].iter().zip(quants).map(|(w, q)| i32::from(*w as i8) * q).sum();
        total += f16::from_le_bytes([block[0], block[1]]).to_f32() * d * sum as f32;
    }
    f64::from(total)
}

/// As ggml's `ggml_vec_dot_q4_1_q8_1`: d·d'·Σ and the minimum times the rounded sum of the block.
fn q4_1_dot(w: &[u8], x: &[f64]) -> f64 {
    let mut total = 0f32;
    for (block, x) in w.chunks(20).zip(x.chunks(32)) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let max = x.iter().fold(0f32, |max, x| max.max(x.abs() as f32));
        let d = max / 127.0;
        let quants: Vec<i32> =
            x.iter().map(|x| ((*x as f32) * (127.0 / max)).round_ties_even() as i32).collect();
        let s = f16::from_f32(d * quants.iter().sum::<i32>() as f32).to_f32();
        let pairs = block[4..].iter().enumerate();
        let sum: i32 =
            pairs.map(|(i, b)| i32::from(b & 15) * quants[i] + i32::from(b >> 4) * quants[i + 16]).sum();
        total += half(0) * f16::from_f32(d).to_f32() * sum as f32 + half(2) * s;
    }
    f64::from(total)
}

/// As `ggml_vec_dot_q6_K_q8_K` adds up: each 16 quants times their scale in integers, d·d' in f32 once a block.
fn q6_k_dot(w: &[u8], x: &[f64]) -> f64 {
    let mut total = 0f32;
    for (block, x) in w.chunks(210).zip(x.chunks(256)) {
        let max = x.iter().fold(0f32, |max, x| max.max(x.abs() as f32));
        let inverse = 127.0 / max;
        let mut sum = 0i32;
        for (i, x) in x.iter().enumerate() {
            let (half, within) = (i / 128, i % 128);
            let (quarter, l) = (within / 32, within % 32);
            let low = block[half * 64 + l + 32 * (quarter % 2)];
            let low = if quarter < 2 { low & 15 } else { low >> 4 };
            let high = block[128 + half * 32 + l] >> (2 * quarter) & 3;
            let quant = i32::from(low | high << 4) - 32;
            let scale = i32::from(block[192 + i / 16] as i8);
            sum += scale * quant * ((*x as f32) * inverse).round_ties_even() as i32;
        }
        total += f16::from_le_bytes([block[208], block[209]]).to_f32() * (1.0 / inverse) * sum as f32;
    }
    f64::from(total)
}

#[test]
fn integer_products_are_explained() {
    let mut numbers = Numbers::new(5);
    type Dot = fn(&[u8], &[f64]) -> f64;
    let dots: [(DType, Dot); 3] = [(DType::Q8_0, q8_0_dot), (DType::Q4_1, q4_1_dot), (DType::Q6_K, q6_k_dot)];
    for (dtype, dot) in dots {
        let w = weight(&mut numbers, dtype, &[70, 512]);
        let x = Given::random(&mut numbers, [1, 1, 65, 512]);
        let Given::Weight { bytes, .. } = &w else { unreachable!() };
        let row = 512 / dtype.block_len() * dtype.block_bytes();
        let recorded: Vec<f64> = x
            .to_vec()
            .chunks(512)
            .flat_map(|x| bytes.chunks(row).map(|w| dot(w, x)).collect::<Vec<_>>())
            .collect();
        let mut own = trial(w, x);
        let excess = own.excess(&recorded);
        assert!(excess <= 1.0, "{dtype}: {excess}");
        own.assert_single_within_bound();
        // Exact activations are told from rounded ones.
        own.arithmetic = Arithmetic::EXACT;
        assert!(own.excess(&recorded) > 10.0, "{dtype}");
    }
}

#[test]
fn a_tie_is_settled_by_what_was_recorded() {
    let mut numbers = Numbers::new(6);
    let w = weight(&mut numbers, DType::Q4_1, &[40, 64]);
    let mut x = numbers.many(64);
    (x[0], x[5]) = (127.0, 20.5);
    (x[32], x[40]) = (127.0, -3.5);
    let at = |values: &[f64]| trial(w.clone(), Given::new([1, 1, 1, 64], values.to_vec()));
    let own = at(&x);
    x[5] = 20.51;
    // As if another kernel had rounded 20.5 up.
    let recorded = at(&x).double();
    assert!(own.excess(&recorded) < 0.5, "{}", own.excess(&recorded));
    x[5] = 21.51;
    assert!(own.excess(&at(&x).double()) > 10.0);
}

#[test]
fn errors_are_carried() {
    let mut numbers = Numbers::new(7);
    let w = Given::random(&mut numbers, [1, 2, 4, 16]).laid_out([0, 2, 1, 3]);
    let x = Given::random(&mut numbers, [1, 6, 3, 16]);
    let own = trial(w.clone(), x.clone());
    for slot in [0, 1] {
        own.assert_carries(slot, 1e-4, 8.0);
    }
    let mut f16s = trial(w.held_as(DType::F16), x);
    f16s.assert_carries(0, 1e-4, 8.0);
    f16s.assert_carries(1, 1e-5, 64.0);
    f16s.given[0] = Some(weight(&mut numbers, DType::Q4_0, &[4, 32]));
    f16s.given[1] = Some(Given::random(&mut numbers, [1, 6, 3, 32]));
    f16s.assert_carries(1, 1e-3, 64.0);
}

#[test]
fn nothing_becomes_nan_and_shapes_are_checked() {
    let large = Given::new([1, 1, 2, 4], vec![1e30, -1e30, 1e-30, 0.0, 3e18, 0.0, -1e-38, 1e-45]);
    let own = trial(large, Given::new([1, 1, 1, 4], vec![1e-20, 1e7, 0.0, 1e-40]));
    let exact = own.double();
    assert!(own.bound(&exact).iter().all(|b| b.is_finite() && *b > 0.0));
    let zero = trial(Given::new([1, 1, 2, 4], vec![0.0; 8]), Given::new([1, 1, 1, 4], vec![0.0; 4]));
    assert_eq!(zero.excess(&[0.0, 0.0]), 0.0);
    let misfit = trial(Given::new([1, 2, 1, 4], vec![0.0; 8]), Given::new([1, 3, 1, 4], vec![0.0; 12]));
    assert!(misfit.with::<f64, _>(|args| (misfit.rule().double)(args)).is_err());
}
