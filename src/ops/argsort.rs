//! ARGSORT: the indices of each row in the order of its values.
//!
//! s0 (a, b, c, d); the result has its shape, I32. Words: `descending`. The CPU sorts with `std::sort`, so that equal
//! values come in no defined order (ggml-cpu/ops.cpp): a recorded order is judged by the values at its places.

use parity_graph::Op;

use super::order::{choices, sorted};
use super::source::rows;
use super::{Args, Check, Choice, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Argsort,
    formula: "the indices of each row in the order of its values",
    explained: "another order of values that are equal, or that differ by no more than rounding moved them",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Choice(choice),
    carry,
};

fn is_descending<S>(args: &Args<'_, S>) -> bool {
    args.params.int(0) == 1
}

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let x = args.source(0)?;
    if x.shape() != args.shape {
        return Err(args.misfit("a source of the result's shape"));
    }
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let indices = sorted(&x.row(row), is_descending(args));
        out.extend(indices.into_iter().map(|index| S::from_f64(index as f64)));
    }
    Ok(out)
}

/// Place by place.
fn choice(args: &Args<'_, f64>, recorded: &[f64]) -> Vec<Choice> {
    let exact =
        |scores: &[f64]| sorted(scores, is_descending(args)).into_iter().map(|index| scores[index]).collect();
    choices(args, recorded, exact, |_| {})
}

/// An order is no number that moves.
fn carry(_args: &Args<'_, f64>, exact: &[f64], _slot: usize, _error: &[f64]) -> Vec<f64> {
    vec![0.0; exact.len()]
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Trial};
    use super::super::{Check, Choice};

    fn trial(shape: [usize; 4], values: Vec<f64>, descending: i32) -> Trial {
        let mut trial =
            Trial::new(Op::Argsort, vec![Some(Given::new(shape, values).laid_out([0, 2, 1, 3]))], shape);
        trial.params.set_int(0, descending);
        trial
    }

    fn choices(trial: &Trial, recorded: &[f64]) -> Vec<Choice> {
        let Check::Choice(choice) = &trial.rule().check else { panic!("a choice") };
        trial.with(|args| choice(args, recorded))
    }

    #[test]
    fn orders_are_judged_by_their_values() {
        let own = trial([1, 1, 2, 4], vec![3.0, 1.0, 1.0, f64::NEG_INFINITY, 4.0, 3.0, 2.0, 1.0], 1);
        assert_eq!(own.double(), [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
        assert_eq!(own.single(), own.double());
        assert_eq!(choices(&own, &[0.0, 2.0, 1.0, 3.0, 0.0, 1.0, 2.0, 3.0]), []);
        let swapped = choices(&own, &[0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0, 3.0]);
        assert_eq!(swapped, [Choice { row: [0, 0, 1], margin: 1.0, near: 0.0 }]);
        for wrong in
            [[0.0, 1.0, 1.0, 3.0], [0.0, 1.0, 2.0, 4.0], [0.5, 1.0, 2.0, 3.0], [f64::NAN, 1.0, 2.0, 3.0]]
        {
            let mut recorded = own.double();
            recorded[4..].copy_from_slice(&wrong);
            assert!(choices(&own, &recorded)[0].margin.is_nan());
        }
        let ascending = trial([1, 1, 2, 4], own.given[0].as_ref().unwrap().to_vec(), 0);
        assert_eq!(ascending.double(), [3.0, 1.0, 2.0, 0.0, 3.0, 2.0, 1.0, 0.0]);
        assert_eq!(choices(&ascending, &own.double()).len(), 2);
        let infinite = [3.0, 1.0, 2.0, 0.0, 0.0, 1.0, 2.0, 3.0];
        assert_eq!(choices(&own, &infinite)[0].margin, f64::INFINITY);
    }
}
