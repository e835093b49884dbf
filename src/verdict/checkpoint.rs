//! The answer for one checkpoint from its evidence: a verdict, and why, as data.

use super::Why;
use crate::audit::recorded::Carried;
use crate::audit::{Missing, NodeAudit};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Unfinite;
use crate::report::CheckpointVerdict::{
    self, Beyond, Inherited, Match, Nonfinite, Origin, Reference, Shape, Undecided,
};
use crate::report::Numbers;

/// What is known of one checkpoint.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// Candidate and reference, as far as they could be compared.
    pub comparison: &'a Comparison,
    /// The candidate against exact arithmetic; `None` where it was not audited.
    pub candidate: Option<&'a Result<NodeAudit, Missing>>,
    /// The reference against exact arithmetic; `None` where there is none or it was not audited.
    pub reference: Option<&'a Result<NodeAudit, Missing>>,
    /// Whether the candidate is audited by itself: then nothing is missing but what it lacks.
    pub alone: bool,
    /// NaN and Inf over all rows of the candidate; those of the compared rows count where this is 0.
    pub unfinite: Unfinite,
    /// Where those come from.
    pub source: Source,
    /// A side whose rows are not as wide as the model's: the side, their shape, the width.
    pub width: Option<(&'static str, &'a [usize], usize)>,
    /// The first checkpoint before this one that is not healthy.
    pub before: Option<Checkpoint>,
    /// Whether nodes before it were looked at neither.
    pub unseen: bool,
    /// A node that reads the candidate's rows and was computed from other values.
    pub contradicted_by: Option<Checkpoint>,
    /// What rounding carries through those.
    pub carried: Option<&'a Carried>,
}

/// Where the NaN and Inf of a candidate come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// They arise here, as far as is known.
    #[default]
    Here,
    /// The inputs of every such row hold some already.
    Inputs,
}

impl<'a> Evidence<'a> {
    fn numbers(&self) -> Option<&'a Numbers> {
        self.comparison.numbers.as_ref()
    }

    fn healthy_candidate(&self) -> Option<&'a NodeAudit> {
        self.candidate.and_then(|audit| audit.as_ref().ok())
    }
}

/// The verdict and why.
pub fn judge(evidence: &Evidence<'_>) -> (CheckpointVerdict, Why) {
    let candidate = evidence.healthy_candidate();
    let reference = evidence.reference.and_then(|audit| audit.as_ref().ok());
    // What only the reference lacks may be wrong all the same; an audit of one dump compares nothing.
    let wrong = evidence.comparison.status == Status::MissingReference
        && candidate.is_some_and(|audit| !audit.is_healthy());
    let alone = evidence.alone && evidence.comparison.status == Status::Compared;
    if let Some(unmeasured) = unmeasured(evidence.comparison).filter(|_| !wrong && !alone) {
        return unmeasured;
    }
    if let Some((side, shape, expected)) = evidence.width {
        return (Shape, Why::Width { side, shape: shape.to_vec(), expected });
    }
    if let Some(verdict) = nonfinite(evidence, candidate) {
        return verdict;
    }
    if let Some(found) = candidate.filter(|audit| !audit.is_healthy()) {
        return (Origin, Why::BeyondBound(found.local.clone(), evidence.contradicted_by));
    }
    match evidence.comparison.within_tolerance {
        Some(true) => return (Match, Why::Tolerance { within: true, audited: candidate.is_some() }),
        _ if evidence.numbers().is_some_and(|numbers| numbers.nonfinite.reference > 0) => {
            let count = evidence.numbers().map_or(0, |numbers| numbers.nonfinite.reference);
            return (Reference, Why::ReferenceNonfinite(count));
        }
        _ => {}
    }
    if let Some(found) = reference.filter(|audit| !audit.is_healthy()) {
        return (Reference, Why::ReferenceBeyondBound(found.local.clone()));
    }
    if evidence.comparison.within_tolerance == Some(false) {
        // What a healthy node got from a faulty one, be it the reference's, is no divergence of its own.
        if let Some((found, from)) = candidate.zip(evidence.before) {
            return (Inherited, Why::Inherited { local: found.local.clone(), from });
        }
        return (Beyond, Why::Tolerance { within: false, audited: candidate.is_some() });
    }
    match (candidate, evidence.numbers()) {
        (None, Some(numbers)) if numbers.abs_err_max == 0.0 => (Match, Why::Equal),
        (None, _) => not_audited(evidence),
        (Some(found), None) => (Match, Why::Local(found.local.clone())),
        (Some(found), Some(numbers)) => healthy(evidence, found, reference, numbers),
    }
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

/// NaN and Inf of the candidate: of rows whose inputs were finite they are the node's, else inherited.
fn nonfinite(evidence: &Evidence<'_>, candidate: Option<&NodeAudit>) -> Option<(CheckpointVerdict, Why)> {
    let compared = evidence.numbers().map_or(0, |numbers| numbers.nonfinite.candidate);
    let count = match evidence.unfinite.total() {
        0 => Unfinite::unknown(compared.max(candidate.map_or(0, |audit| audit.nonfinite))),
        _ => evidence.unfinite,
    };
    let from_inputs = evidence.source == Source::Inputs;
    match (count.total(), evidence.before) {
        (0, before) => {
            let lost = candidate.is_some_and(|audit| audit.nonfinite_inputs);
            let verdict = if before.is_some() { Inherited } else { Undecided };
            lost.then_some((verdict, Why::NonfiniteInputs))
        }
        (_, Some(_)) if from_inputs => {
            Some((Inherited, Why::Nonfinite { count, from: "they come from before it" }))
        }
        _ if from_inputs => {
            let from = "its inputs, which were not looked at, hold some already";
            Some((Nonfinite, Why::Nonfinite { count, from }))
        }
        _ => Some((Nonfinite, Why::Nonfinite { count, from: "its inputs have none, as far as recorded" })),
    }
}

/// A node that could not be computed again: what rounding carries up to it may still be known.
fn not_audited(evidence: &Evidence<'_>) -> (CheckpointVerdict, Why) {
    let why = match evidence.candidate {
        Some(Err(missing)) => Why::Needs(missing.clone()),
        Some(Ok(_)) | None if evidence.numbers().is_some() => Why::Differs,
        _ => Why::NotRecorded,
    };
    match evidence.carried.filter(|_| evidence.before.is_none()) {
        Some(carried) => by_carried(carried, evidence.comparison, why),
        None => (Undecided, why),
    }
}

/// A node whose local error is rounding: what its distance from the reference comes from.
fn healthy(
    evidence: &Evidence<'_>,
    found: &NodeAudit,
    reference: Option<&NodeAudit>,
    numbers: &Numbers,
) -> (CheckpointVerdict, Why) {
    let band = found.band() + reference.map_or(0.0, NodeAudit::band);
    let within = numbers.rel_l2 <= band;
    let witnesses = |carried| Why::Witnesses {
        candidate: found.local.clone(),
        reference: reference.map(|audit| audit.local.clone()),
        carried,
    };
    match evidence.before {
        Some(from) if !within => (Inherited, Why::Inherited { local: found.local.clone(), from }),
        _ if evidence.unseen && numbers.rel_l2 > 0.0 => {
            let open = Why::Unseen { distance: numbers.rel_l2 };
            match evidence.carried {
                Some(carried) => by_carried(carried, evidence.comparison, open),
                None => (Undecided, open),
            }
        }
        _ => (Match, witnesses(!within)),
    }
}

/// What a simulation of the nodes before says: both the candidate's distance from the exact forward pass and that
/// of the two sides have to be rounding, and rounding has to be small enough for mistakes to show.
pub fn by_carried(carried: &Carried, comparison: &Comparison, open: Why) -> (CheckpointVerdict, Why) {
    // A few printed values may be small ones: they are measured by the size of all.
    let distance = |numbers: &Numbers| match comparison.seen {
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
