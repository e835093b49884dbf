use parity_graph::Op;

use super::super::trial::{Given, Numbers, Trial};
use crate::gguf::DType;

/// (n, m, k) experts, (T, E', k) rows, ids (T, E) as the first of longer rows.
fn trial(numbers: &mut Numbers, repeated: usize, dtype: DType) -> Trial {
    let (n, m, k, t, e) = (5, 6, 32, 7, 4);
    let ids = (0..t * e).map(|_| numbers.below(n) as f64).collect();
    let given = vec![
        Some(Given::random(numbers, [1, n, m, k]).held_as(dtype)),
        Some(Given::random(numbers, [1, t, repeated, k]).laid_out([0, 2, 1, 3])),
        Some(Given::new([1, 1, t, e], ids).laid_out([0, 1, 2, 3]).held_as(DType::I32)),
    ];
    Trial::new(Op::MulMatId, given, [1, t, e, m])
}

#[test]
fn every_row_meets_the_expert_that_was_chosen() {
    let mut numbers = Numbers::new(1);
    for repeated in [1, 2, 4] {
        let own = trial(&mut numbers, repeated, DType::F32);
        let [w, x, ids] = [0, 1, 2].map(|slot| own.given[slot].as_ref().unwrap().to_vec());
        for (index, value) in own.double().into_iter().enumerate() {
            let (t, e, i) = (index / 24, index / 6 % 4, index % 6);
            let w = &w[(ids[t * 4 + e] as usize * 6 + i) * 32..][..32];
            let x = &x[(t * repeated + e % repeated) * 32..][..32];
            let expected: f64 = w.iter().zip(x).map(|(w, x)| w * x).sum();
            assert!((value - expected).abs() < 1e-14);
        }
        own.assert_single_within_bound();
        trial(&mut numbers, repeated, DType::F16).assert_single_within_bound();
    }
}

#[test]
fn a_row_that_meets_several_experts_has_one_rounding() {
    let mut numbers = Numbers::new(2);
    let mut own = trial(&mut numbers, 1, DType::Q4_0);
    let mut x = own.given[1].as_ref().unwrap().to_vec();
    (x[0], x[3]) = (127.0, 2.5);
    own.given[1] = Some(own.given[1].as_ref().unwrap().with(&x));
    x[3] = 2.51;
    let mut other = own.clone();
    other.given[1] = Some(own.given[1].as_ref().unwrap().with(&x));
    let excess = own.excess(&other.double());
    assert!(excess < 0.5, "{excess}");
}

#[test]
fn errors_are_carried() {
    let own = trial(&mut Numbers::new(3), 2, DType::F32);
    for slot in [0, 1] {
        own.assert_carries(slot, 1e-4, 8.0);
    }
}

#[test]
fn an_id_out_of_range_is_refused() {
    let mut own = trial(&mut Numbers::new(4), 1, DType::F32);
    for wrong in [-1.0, 5.0, 0.5, f64::NAN] {
        let ids = own.given[2].as_ref().unwrap().with(&[wrong; 28]);
        own.given[2] = Some(ids);
        assert!(own.with::<f64, _>(|args| (own.rule().double)(args)).is_err());
    }
}
