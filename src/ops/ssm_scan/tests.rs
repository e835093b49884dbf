use parity_graph::Op;

use super::super::trial::{Given, Numbers, Trial};
use crate::arithmetic::{Arithmetic, Softplus};
use crate::gguf::DType;

/// S 2, T 5, H 4, G 2; Mamba-1 has P = 1 and a row of A per head.
fn trial(first: bool, tokens: usize, blocks: usize) -> Trial {
    let mut numbers = Numbers::new(9);
    let (s, t, h, g, n) = (2, tokens, 4, 2, 8);
    let p = if first { 1 } else { 3 };
    let a_width = if first { n } else { 1 };
    let a = (0..h * a_width).map(|_| -f64::from((4.0 * numbers.unit() + 0.1) as f32)).collect();
    // Small steps, where log(1 + e^x) loses digits, and one beyond 20.
    let dt = (0..s * t * h)
        .map(|i| if i == 5 { 21.5 } else { f64::from((-8.0 * numbers.unit()) as f32) })
        .collect();
    let given = vec![
        Some(Given::random(&mut numbers, [3, h, p, n])),
        Some(Given::random(&mut numbers, [s, t, h, p]).laid_out([0, 1, 2, 3])),
        Some(Given::new([1, s, t, h], dt).laid_out([0, 1, 3, 2])),
        Some(Given::new([1, 1, h, a_width], a)),
        Some(Given::random(&mut numbers, [s, t, g, n]).laid_out([0, 2, 1, 3])),
        Some(Given::random(&mut numbers, [s, t, g, n])),
        Some(Given::new([1, 1, 1, s], vec![2.0, 0.0]).held_as(DType::I32)),
    ];
    let elements = s * t * h * p + blocks * s * h * p * n;
    let mut trial = Trial::new(Op::SsmScan, given, [1, 1, 1, elements]);
    trial.params.set_int(0, blocks as i32);
    trial
}

/// As ggml's kernel, in f32 step by step.
fn kernel(trial: &Trial) -> Vec<f64> {
    let values: Vec<Vec<f32>> = trial
        .given
        .iter()
        .map(|given| given.as_ref().unwrap().to_vec().into_iter().map(|v| v as f32).collect())
        .collect();
    let [s, t, h, p] = trial.given[1].as_ref().unwrap().shape();
    let ([_, _, g, n], a_width) =
        (trial.given[4].as_ref().unwrap().shape(), trial.given[3].as_ref().unwrap().shape()[3]);
    let blocks = trial.params.int(0) as usize;
    let mut out = vec![0f32; trial.shape[3]];
    for (is, ih) in (0..s).flat_map(|is| (0..h).map(move |ih| (is, ih))) {
        let first = (values[6][is] as usize * h + ih) * p * n;
        let mut state = values[0][first..first + p * n].to_vec();
        for it in 0..t {
            let at = (is * t + it) * h + ih;
            let dt = values[2][at];
            let d = if dt > 20.0 { dt } else { (1.0 + dt.exp()).ln() };
            let group = ((is * t + it) * g + ih / (h / g)) * n;
            for ip in 0..p {
                let x = values[1][at * p + ip] * d;
                let mut y = 0f32;
                for i in 0..n {
                    let st = &mut state[ip * n + i];
                    *st = *st * (d * values[3][ih * a_width + i % a_width]).exp() + values[4][group + i] * x;
                    y += *st * values[5][group + i];
                }
                out[at * p + ip] = y;
            }
            let block = t - 1 - it;
            if block < blocks {
                let at = s * t * h * p + ((block * s + is) * h + ih) * p * n;
                out[at..at + p * n].copy_from_slice(&state);
            }
        }
    }
    out.into_iter().map(f64::from).collect()
}

#[test]
fn the_kernel_is_explained() {
    for (first, tokens, blocks) in [(true, 5, 1), (false, 5, 2), (false, 200, 1)] {
        let mut own = trial(first, tokens, blocks);
        let recorded = kernel(&own);
        let excess = own.excess(&recorded);
        assert!(excess <= 1.0, "{excess}");
        own.assert_single_within_bound();
        let exact = own.double();
        let largest = exact.iter().fold(0.0, |max: f64, y| max.max(y.abs()));
        assert!(own.bound(&exact).iter().all(|b| *b < 1e-5 * largest), "some ten roundings of the largest");
        // Another start.
        for wrong in [vec![1.0, 0.0], vec![2.0, 1.0]] {
            own.given[6] = Some(Given::new([1, 1, 1, 2], wrong));
            assert!(own.excess(&recorded) > 50.0);
        }
    }
}

#[test]
fn the_sum_within_softplus_is_rounded() {
    let mut own = trial(false, 5, 1);
    let dt = own.given[2].as_ref().unwrap().to_vec().iter().map(|v| v - 10.0).collect::<Vec<f64>>();
    own.given[2] = Some(own.given[2].as_ref().unwrap().with(&dt));
    // From nothing: next to a state of 1 such small steps are lost.
    own.given[0] = Some(Given::new([3, 4, 3, 8], vec![0.0; 288]));
    let recorded = kernel(&own);
    assert!(own.excess(&recorded) <= 1.0);
    own.arithmetic = Arithmetic { softplus: Softplus::Exact, ..Arithmetic::LLAMA_CPU };
    assert!(own.excess(&recorded) > 3.0);
}

#[test]
fn states_are_in_the_order_of_the_tokens() {
    let (two, shorter) = (trial(false, 5, 2), trial(false, 5, 1));
    let (two, one) = (two.double(), shorter.double());
    let (outputs, size) = (2 * 5 * 4 * 3, 2 * 4 * 3 * 8);
    assert_eq!(two[..outputs + size], one[..]);
    assert_ne!(two[outputs..outputs + size], two[outputs + size..]);
}

#[test]
fn errors_are_carried() {
    let mut own = trial(false, 5, 2);
    own.arithmetic.softplus = Softplus::Exact;
    for slot in 0..6 {
        own.assert_carries(slot, 1e-4, 16.0);
    }
    trial(true, 5, 1).assert_carries(2, 1e-3, 16.0);
}

#[test]
fn an_id_out_of_range_is_refused() {
    let mut own = trial(false, 2, 1);
    own.given[6] = Some(Given::new([1, 1, 1, 2], vec![3.0, 0.0]));
    assert!(own.with::<f64, _>(|args| (own.rule().double)(args)).is_err());
}
