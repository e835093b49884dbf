//! Traps of llama.cpp's kernels, each with a value worked out by hand or seen of the kernel.

use parity_graph::{Op, Params};

use super::cases::{Case, Values};
use crate::arithmetic::Arithmetic;
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::ops::source::{Data, Source};

fn row(values: &[f64]) -> Option<Values> {
    Some(Values::whole(DType::F32, [1, 1, 1, values.len()], values.to_vec()))
}

fn case(op: Op, floats: &[(usize, f32)], sources: Vec<Option<Values>>, shape: [usize; 4]) -> Case {
    let mut params = Params::default();
    for &(word, value) in floats {
        params.set_float(word, value);
    }
    let result = Values::whole(DType::F32, shape, vec![0.0; shape.iter().product()]);
    Case { op, params, sources, result }
}

fn of(op: Op, values: &[f64]) -> Vec<f64> {
    case(op, &[], vec![row(values)], [1, 1, 1, values.len()]).double(&Arithmetic::LLAMA_CPU)
}

#[test]
fn softplus_is_zero_where_one_plus_e_to_x_rounds_to_one() {
    let y = of(Op::Softplus, &[-20.0, -16.0, 20.5, 0.0]);
    assert_eq!((y[0], y[2]), (0.0, 20.5));
    let six_percent = y[1] / (-16.0f64).exp() - 1.0;
    assert!((0.05..0.07).contains(&six_percent.abs()), "{six_percent}");
    let exact = case(Op::Softplus, &[], vec![row(&[-20.0])], [1, 1, 1, 1]).double(&Arithmetic::EXACT);
    assert!((exact[0] / (-20.0f64).exp() - 1.0).abs() < 1e-8, "{exact:?}");
}

#[test]
fn gelu_comes_from_a_table_of_f16_up_to_ten() {
    let x = 1.000_3;
    let y = of(Op::Gelu, &[x, 10.5, -10.5]);
    let f16 = |x: f64| half::f16::from_f64(x).to_f64();
    let exact = case(Op::Gelu, &[], vec![row(&[f16(x)])], [1, 1, 1, 1]).double(&Arithmetic::EXACT)[0];
    assert_eq!(y, [f16(exact), 10.5, 0.0]);
    // The formula itself: Φ(1) to three digits, which the tanh form keeps.
    assert!((exact - 0.8413).abs() < 1e-3, "{exact}");
}

#[test]
fn gelu_with_the_error_function_is_no_tanh_form_and_its_bound_holds_the_formula_in_f32() {
    let xs: Vec<f64> = (-24..=24).map(|i| f64::from(i) / 4.0).collect();
    let of_erf = case(Op::GeluErf, &[], vec![row(&xs)], [1, 1, 1, xs.len()]);
    let y = of_erf.double(&Arithmetic::EXACT);
    // x·Φ(x), Φ(1) of tables; the tanh form is 1.5e-4 from it there.
    assert!((y[28] - 0.841_344_746_068_543).abs() < 1e-14, "{}", y[28]);
    assert_eq!(y, of(Op::GeluErf, &xs), "no table");
    let form = case(Op::Gelu, &[], vec![row(&xs)], [1, 1, 1, xs.len()]).double(&Arithmetic::EXACT);
    assert!((form[28] - y[28]).abs() > 1e-4, "{}", form[28]);
    let gated = case(Op::GegluErf, &[], vec![row(&xs), row(&xs)], [1, 1, 1, xs.len()]);
    let gated = gated.double(&Arithmetic::EXACT);
    for ((x, y), gated) in xs.iter().zip(&y).zip(gated) {
        assert_eq!(gated, x * y);
        let x = *x as f32;
        let single = 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2));
        let (off, bound) =
            ((f64::from(single) - y).abs(), crate::ops::gelu_erf::rounding(&Arithmetic::EXACT, f64::from(x)));
        assert!(off <= bound, "{x}: {off:e} of {bound:e}");
    }
}

#[test]
fn a_fill_by_scale_and_bias_leaves_nan_of_infinities() {
    let words = [(0, 0.0), (1, f32::NEG_INFINITY)];
    let y = case(Op::Scale, &words, vec![row(&[1.0, f64::INFINITY])], [1, 1, 1, 2]);
    let y = y.double(&Arithmetic::LLAMA_CPU);
    assert!(y[0] == f64::NEG_INFINITY && y[1].is_nan(), "{y:?}");
}

#[test]
fn a_row_that_is_masked_whole_is_no_number_and_sinks_need_no_mask() {
    let mask = row(&[f64::NEG_INFINITY; 3]);
    let words = [(0, 1.0)];
    let y = case(Op::SoftMax, &words, vec![row(&[1.0, 2.0, 3.0]), mask.clone()], [1, 1, 1, 3]);
    assert!(y.double(&Arithmetic::LLAMA_CPU).iter().all(|p| p.is_nan()));
    let sinks = row(&[0.0]);
    let y = case(Op::SoftMax, &words, vec![row(&[0.0, 0.0, 0.0]), None, sinks.clone()], [1, 1, 1, 3]);
    assert_eq!(y.double(&Arithmetic::LLAMA_CPU), [0.25; 3]);
    let y = case(Op::SoftMax, &words, vec![row(&[1.0, 2.0, 3.0]), mask, sinks], [1, 1, 1, 3]);
    assert_eq!(y.double(&Arithmetic::LLAMA_CPU), [0.0; 3]);
}

#[test]
fn alibi_has_two_series_of_slopes() {
    let slopes: Vec<f64> = (0..6).map(|h| crate::ops::soft_max::slope(8.0, h, 6)).collect();
    // n2 = 4: 2^(-2(h+1)), then 2^(-1), 2^(-3).
    let expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125];
    assert_eq!(slopes, expected);
    assert_eq!(crate::ops::soft_max::slope(0.0, 3, 6), 1.0);
}

#[test]
fn a_window_of_minus_infinity_is_the_lowest_f32() {
    let mut pool = case(Op::Pool2d, &[], vec![row(&[f64::NEG_INFINITY; 4])], [1, 1, 1, 1]);
    for (word, value) in [(1, 4), (2, 1), (3, 4), (4, 1)] {
        pool.params.set_int(word, value);
    }
    assert_eq!(pool.double(&Arithmetic::LLAMA_CPU), [f64::from(-f32::MAX)]);
    let mut mean = case(Op::Pool2d, &[], vec![row(&[3.0, 6.0])], [1, 1, 1, 1]);
    for (word, value) in [(0, 1), (1, 3), (2, 1), (3, 3), (4, 1), (5, 1)] {
        mean.params.set_int(word, value);
    }
    // One of the three is padding, and counts.
    assert_eq!(mean.double(&Arithmetic::LLAMA_CPU), [3.0]);
}

#[test]
fn a_row_of_zeros_without_epsilon_is_no_number() {
    for op in [Op::RmsNorm, Op::Norm] {
        assert!(of(op, &[0.0, 0.0]).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn the_length_of_a_row_is_at_least_epsilon() {
    let short = case(Op::L2Norm, &[(0, 10.0)], vec![row(&[3.0, 4.0])], [1, 1, 1, 2]);
    let near =
        |y: &[f64], wanted: [f64; 2]| y.iter().zip(wanted).all(|(y, wanted)| (y - wanted).abs() <= 1e-15);
    assert!(near(&of(Op::L2Norm, &[3.0, 4.0]), [0.6, 0.8]));
    assert!(near(&short.double(&Arithmetic::LLAMA_CPU), [0.3, 0.4]));
}

#[test]
fn an_epsilon_ten_times_as_large_is_beyond_the_bound() {
    let x: Vec<f64> = (0..4096).map(|i| f64::from(i * 37 % 101) / 50.0 - 1.0).collect();
    for op in [Op::RmsNorm, Op::Norm] {
        let norm = |eps| case(op.clone(), &[(0, eps)], vec![row(&x)], [1, 1, 1, x.len()]);
        let right = norm(1e-6);
        let exact = right.double(&Arithmetic::LLAMA_CPU);
        let wrong = norm(1e-5).double(&Arithmetic::LLAMA_CPU);
        let bound = right.bound(&Arithmetic::LLAMA_CPU, &exact);
        let seen =
            exact.iter().zip(&wrong).zip(&bound).filter(|((a, b), bound)| !((*a - *b).abs() <= **bound));
        assert!(seen.count() > 4000, "{op}");
    }
}

#[test]
fn rotary_positions_far_out_follow_the_recurrence_in_f32() {
    let mut rope = case(
        Op::Rope,
        &[(5, 1e4), (6, 1.0), (8, 1.0)],
        vec![row(&[1.0; 128]), Some(Values::whole(DType::I32, [1; 4], vec![131_071.0]))],
        [1, 1, 1, 128],
    );
    rope.params.set_int(1, 128);
    let far = rope.double(&Arithmetic::EXACT);
    let followed = rope.double(&Arithmetic::LLAMA_CPU);
    let off = far.iter().zip(&followed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!((1e-3..1e-1).contains(&off), "the recurrence is off by about 1e-2 there, not by {off}");
    // Whoever multiplies on in f32 is within the bound of exact angles; whoever is one position off is not.
    let bound = rope.bound(&Arithmetic::EXACT, &far);
    assert!(far.iter().zip(&followed).zip(&bound).all(|((a, b), bound)| (a - b).abs() <= *bound));
    rope.sources[1].as_mut().unwrap().data[0] += 1.0;
    let shifted = rope.double(&Arithmetic::LLAMA_CPU);
    let bound = rope.bound(&Arithmetic::LLAMA_CPU, &followed);
    assert!(followed.iter().zip(&shifted).zip(&bound).any(|((a, b), bound)| !((a - b).abs() <= *bound)));
}

#[test]
fn what_does_not_fit_is_an_error_and_no_panic() {
    let one = || row(&[1.0, 2.0, 3.0]);
    let index = |values: &[f64]| Some(Values::whole(DType::I32, [1, 1, 1, values.len()], values.to_vec()));
    let shapes = [[1, 1, 1, 3], [1, 1, 2, 3], [2, 1, 1, 4], [0, 1, 1, 3], [1, 1, 1, 0]];
    for rule in crate::ops::rules() {
        for shape in shapes {
            for sources in [vec![], vec![None, one()], vec![one()], vec![one(); 3], vec![row(&[]); 3]] {
                // Whatever comes out, it is a value of the right size or an error.
                let node = case(rule.op.clone(), &[(0, f32::NAN)], sources, shape);
                if let Ok(values) = node.with(&Arithmetic::EXACT, |args| (rule.double)(args)) {
                    assert_eq!(values.len(), shape.iter().product::<usize>(), "{}", rule.op);
                }
            }
        }
    }
    let picked = case(Op::GetRows, &[], vec![one(), index(&[7.0])], [1, 1, 1, 3]);
    let error = picked.with::<f64, _>(&Arithmetic::EXACT, |args| (picked.rule().double)(args)).unwrap_err();
    assert!(error.to_string().contains("picks row 7"), "{error}");
}

#[test]
fn a_decoded_row_is_bounded_by_its_largest_value() {
    let mut rows = case(Op::GetRows, &[], vec![row(&[1.0, -8.0]), row(&[0.0])], [1, 1, 1, 2]);
    assert_eq!(rows.bound(&Arithmetic::LLAMA_CPU, &[1.0, -8.0]), [0.0; 2]);
    rows.sources[0].as_mut().unwrap().dtype = DType::Q4_K;
    let expected = 3.0 * 8.0 * crate::ops::bound::UNIT_F32;
    assert_eq!(rows.bound(&Arithmetic::LLAMA_CPU, &[1.0, -8.0]), [expected; 2]);
}

#[test]
fn a_weight_is_read_row_by_row() {
    use crate::gguf::{TensorInfo, TensorRef};
    let info = TensorInfo {
        name: "w".into(),
        shape: vec![3, 2],
        dtype: DType::F32,
        offset: 0,
        byte_len: 24,
        shard: 0,
        loaded: Storage::F32,
    };
    let bytes: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let picked = case(Op::GetRows, &[], vec![None, row(&[2.0, 0.0])], [1, 1, 2, 2]);
    let values = picked.with::<f64, _>(&Arithmetic::EXACT, |args| {
        let weight = Data::Weight(TensorRef { info: &info, bytes: &bytes });
        let sources = vec![Some(Source { dtype: DType::F32, data: weight }), args.sources[1].clone()];
        (picked.rule().double)(&crate::ops::Args { sources, ..*args })
    });
    assert_eq!(values.unwrap(), [4.0, 5.0, 0.0, 1.0]);
}
