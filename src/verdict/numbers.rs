//! The answer for one checkpoint of which nothing but numbers is known, and what rounding that was simulated says of them.

use super::{Judged, Why};
use crate::audit::recorded::Carried;
use crate::compare::{Comparison, Status};
use crate::dump::Unfinite;
use crate::report::CheckpointVerdict::{self, Beyond, Match, Nonfinite, Reference, Shape, Undecided};
use crate::report::Local;

/// The answer that needs no evidence of exact arithmetic.
pub fn by_numbers(comparison: &Comparison) -> Judged {
    let (verdict, why) = unmeasured(comparison).unwrap_or_else(|| measured(comparison));
    Judged { verdict, why, local: Local::default() }
}

/// The answer where there are no numbers: what is missing or reshaped.
fn unmeasured(comparison: &Comparison) -> Option<(CheckpointVerdict, Why)> {
    let lacks = |text| Some((CheckpointVerdict::Missing, Why::Lacking(text)));
    match &comparison.status {
        Status::MissingCandidate => lacks("not in the candidate"),
        Status::MissingReference => lacks("not in the reference"),
        Status::MissingBoth => lacks("in neither recording"),
        Status::Shape(ours, theirs) => {
            Some((Shape, Why::Shapes { candidate: ours.clone(), reference: theirs.clone() }))
        }
        Status::OtherSteps(tensors) if comparison.numbers.is_none() => {
            Some((CheckpointVerdict::Missing, Why::OtherSteps(*tensors)))
        }
        Status::Compared | Status::MissingRows(_) if comparison.numbers.is_none() => {
            lacks("no token position that both sides have")
        }
        Status::Compared | Status::MissingRows(_) | Status::OtherSteps(_) => None,
    }
}

fn measured(comparison: &Comparison) -> (CheckpointVerdict, Why) {
    let Some(numbers) = &comparison.numbers else { return (Undecided, Why::NotRecorded) };
    match (numbers.nonfinite.candidate, comparison.within_tolerance) {
        (1.., _) => {
            let count = Unfinite::unknown(numbers.nonfinite.candidate);
            (Nonfinite, Why::Nonfinite { count, from: "its inputs have none, as far as recorded" })
        }
        (0, Some(true)) => (Match, Why::Tolerance { within: true }),
        (0, _) if numbers.nonfinite.reference > 0 => {
            (Reference, Why::ReferenceNonfinite(numbers.nonfinite.reference))
        }
        (0, Some(false)) => (Beyond, Why::Tolerance { within: false }),
        (0, None) if numbers.abs_err_max == 0.0 => (Match, Why::Equal),
        (0, None) => (Undecided, Why::Differs),
    }
}

/// What a simulation of the nodes before says: both the candidate's distance from the exact forward pass and that
/// of the two sides have to be rounding, and rounding has to be small enough for mistakes to show.
pub fn by_carried(carried: &Carried, comparison: &Comparison, open: Why) -> (CheckpointVerdict, Why) {
    // A few printed values may be small ones: they are measured by the size of all.
    let distance = |numbers: &crate::report::Numbers| match comparison.seen {
        Some(_) => numbers.rmse / carried.size,
        None => numbers.rel_l2,
    };
    let distance = comparison.numbers.as_ref().map(distance);
    let why = |sharp| Why::Carried { carried: *carried, distance, sharp, local: Box::new(open.clone()) };
    let candidate = carried.candidate.is_none_or(|own| own.over <= 1.0);
    let apart = distance.is_none_or(|distance| distance <= carried.apart);
    match (candidate && apart && (carried.candidate.is_some() || distance.is_some()), carried.is_sharp()) {
        (true, true) => (Match, why(true)),
        (true, false) => (Undecided, why(false)),
        (false, _) => (Undecided, why(true)),
    }
}
