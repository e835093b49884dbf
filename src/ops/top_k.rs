//! TOP_K: the indices of the k largest values of each row, in no order.
//!
//! s0 (a, b, c, d); the result (a, b, c, k), I32. No words. The CPU sorts partially and then exchanges the first two,
//! so that nobody relies on an order (ggml-cpu/ops.cpp): a recorded result is judged as a set, by its values.

use parity_graph::Op;

use super::order::{choices, sorted};
use super::source::rows;
use super::{Args, Check, Choice, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::TopK,
    formula: "the indices of the k largest values of each row, in no order",
    explained: "another choice among values that differ by no more than rounding moved them",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Choice(choice),
    carry,
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let x = args.source(0)?;
    let ([a, b, c, d], k) = (x.shape(), args.shape[3]);
    if args.shape[..3] != [a, b, c] || k > d {
        return Err(args.misfit("a source with as many rows as the result, at least as long"));
    }
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        let mut indices = sorted(&x.row(row), true);
        indices.truncate(k);
        if k > 1 {
            indices.swap(0, 1);
        }
        out.extend(indices.into_iter().map(|index| S::from_f64(index as f64)));
    }
    Ok(out)
}

fn choice(args: &Args<'_, f64>, recorded: &[f64]) -> Vec<Choice> {
    let largest = |scores: &[f64]| {
        let indices = sorted(scores, true).into_iter().take(args.shape[3]);
        indices.map(|index| scores[index]).collect()
    };
    choices(args, recorded, largest, |chosen| chosen.sort_by(|a, b| b.total_cmp(a)))
}

/// A choice is no number that moves.
fn carry(_args: &Args<'_, f64>, exact: &[f64], _slot: usize, _error: &[f64]) -> Vec<f64> {
    vec![0.0; exact.len()]
}

#[cfg(test)]
mod tests {
    use parity_graph::Op;

    use super::super::trial::{Given, Trial};
    use super::super::{Check, Choice};

    #[test]
    fn choices_are_judged_as_sets() {
        let given = Given::new([1, 1, 1, 8], (0..8).map(f64::from).collect());
        let own = Trial::new(Op::TopK, vec![Some(given)], [1, 1, 1, 4]);
        assert_eq!(own.double(), [6.0, 7.0, 5.0, 4.0]);
        let Check::Choice(choice) = &own.rule().check else { panic!("a choice") };
        let choices = |recorded: [f64; 4]| own.with(|args| choice(args, &recorded));
        assert_eq!(choices([4.0, 5.0, 7.0, 6.0]), []);
        assert_eq!(choices([3.0, 5.0, 7.0, 6.0]), [Choice { row: [0, 0, 0], margin: 1.0, near: 0.0 }]);
        assert!(choices([7.0, 7.0, 5.0, 4.0])[0].margin.is_nan());
        assert!(choices([8.0, 7.0, 5.0, 6.0])[0].margin.is_nan());
    }

    #[test]
    fn equal_values_at_the_edge_may_both_be_chosen() {
        let given = Given::new([1, 1, 1, 5], vec![-0.0, 0.0, f64::NEG_INFINITY, 0.0, 2.0]);
        let own = Trial::new(Op::TopK, vec![Some(given)], [1, 1, 1, 2]);
        let Check::Choice(choice) = &own.rule().check else { panic!("a choice") };
        for other in [0.0, 1.0, 3.0] {
            assert_eq!(own.with(|args| choice(args, &[other, 4.0])), []);
        }
        assert_eq!(own.with(|args| choice(args, &[2.0, 4.0]))[0].margin, f64::INFINITY);
    }
}
