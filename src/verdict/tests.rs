//! Answers from numbers alone.

use super::numbers::{Parts, assemble};
use super::*;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::Kind;
use crate::compare::Comparison;
use crate::compare::{Accumulator, Status, Tolerance};
use crate::report::Verdict;

fn comparison(a: &[f32], b: &[f32]) -> Comparison {
    let mut sums = Accumulator::new(Tolerance::default());
    sums.row(0, a, b);
    Comparison {
        checkpoint: Checkpoint::global(Kind::Logits),
        status: Status::Compared,
        row_shape: vec![a.len()],
        numbers: sums.numbers(&[a.len()]),
        within_tolerance: None,
        rows_compared: 1,
        rows_expected: 1,
        seen: None,
    }
}

fn verdict_of(comparisons: Vec<Comparison>) -> Verdict {
    assemble(Parts { comparisons, reference: Some(Side::default()), ..Parts::default() }).verdict
}

#[test]
fn nothing_compared_is_never_parity() {
    assert_eq!(verdict_of(vec![]), Verdict::Undecided);
}

#[test]
fn equal_values_are_parity_and_others_undecided_without_evidence() {
    assert_eq!(verdict_of(vec![comparison(&[1.0], &[1.0])]), Verdict::Parity);
    assert_eq!(verdict_of(vec![comparison(&[1.0], &[1.1])]), Verdict::Undecided);
}

#[test]
fn a_nan_a_missing_and_a_reshaped_checkpoint_never_pass() {
    assert_eq!(verdict_of(vec![comparison(&[f32::NAN], &[f32::NAN])]), Verdict::Divergence);
    assert_eq!(verdict_of(vec![comparison(&[1.0], &[f32::NAN])]), Verdict::Undecided);
    for (status, expected) in [
        (Status::MissingCandidate, Verdict::Undecided),
        (Status::MissingReference, Verdict::Undecided),
        (Status::Shape(vec![1], vec![2]), Verdict::Divergence),
    ] {
        let absent = Comparison { status, numbers: None, rows_compared: 0, ..comparison(&[1.0], &[1.0]) };
        assert_eq!(verdict_of(vec![comparison(&[1.0], &[1.0]), absent]), expected);
    }
}

#[test]
fn tokens_that_were_not_compared_are_no_parity() {
    let with = |gaps: &[Gap], allow_missing| {
        let comparisons = vec![comparison(&[1.0], &[1.0])];
        let reference = Some(Side::default());
        assemble(Parts { comparisons, reference, gaps: gaps.to_vec(), allow_missing, ..Parts::default() })
            .verdict
    };
    assert_eq!(with(&gaps(&[1, 2], &[1, 2]), false), Verdict::Parity);
    assert_eq!(with(&gaps(&[1, 2], &[1, 2, 3]), false), Verdict::Undecided);
    assert_eq!(with(&gaps(&[1, 2], &[1, 2, 3]), true), Verdict::Parity);
    assert_eq!(with(&gaps(&[1, 3], &[1, 2]), true), Verdict::Undecided, "other tokens are never accepted");
}
