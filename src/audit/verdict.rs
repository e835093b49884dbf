//! The answer for one checkpoint, with its evidence in one sentence.

use super::local::NodeAudit;
use super::Missing;
use crate::report::{CheckpointVerdict, LocalError, Numbers};

/// What is known of one checkpoint.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The two sides held against each other; `None` in an audit of one dump.
    pub numbers: Option<&'a Numbers>,
    /// The candidate against exact arithmetic; `None` where it was not audited.
    pub candidate: Option<&'a Result<NodeAudit, Missing>>,
    /// The reference against exact arithmetic; `None` where there is none or it was not audited.
    pub reference: Option<&'a Result<NodeAudit, Missing>>,
    /// Whether the two sides differ by more than both sides' rounding at this node explains. Decided by
    /// [`beyond_rounding`], or by the user's own tolerance where there is one.
    pub beyond: bool,
}

/// The verdict and why.
pub fn judge(evidence: &Evidence<'_>) -> (CheckpointVerdict, String) {
    let candidate = evidence.candidate.and_then(|audit| audit.as_ref().ok());
    let reference = evidence.reference.and_then(|audit| audit.as_ref().ok());
    if let Some(verdict) = nonfinite(evidence, candidate) {
        return verdict;
    }
    if let Some(own) = candidate.filter(|audit| !audit.is_healthy()) {
        return (CheckpointVerdict::Origin, format!("its own error is {}: the bug is in this node", times(&own.local)));
    }
    if let Some(own) = reference.filter(|audit| !audit.is_healthy()) {
        let text = format!("the reference's own error is {}: it, or what it is taken for, is wrong", times(&own.local));
        return (CheckpointVerdict::Reference, text);
    }
    let witnesses = witnesses(candidate, reference);
    match (evidence.beyond, candidate) {
        (false, _) => (CheckpointVerdict::Match, witnesses.unwrap_or_else(|| "the sides agree".to_owned())),
        (true, Some(own)) => {
            let text = format!(
                "its own error is {} of what rounding explains: its input differs already",
                share(own.local.over_bound)
            );
            (CheckpointVerdict::Inherited, text)
        }
        (true, None) => (CheckpointVerdict::Undecided, undecided(evidence.candidate)),
    }
}

fn undecided(candidate: Option<&Result<NodeAudit, Missing>>) -> String {
    match candidate {
        Some(Err(Missing(what))) => format!("the sides differ; to say why, the candidate's dump needs {what}"),
        _ => "the sides differ; without the model nothing says whether this node or its input is wrong".to_owned(),
    }
}

/// NaN and Inf: of a node whose inputs were finite they are its own, else inherited.
fn nonfinite(
    evidence: &Evidence<'_>,
    candidate: Option<&NodeAudit>,
) -> Option<(CheckpointVerdict, String)> {
    let compared = evidence.numbers.map(|numbers| numbers.nonfinite).unwrap_or_default();
    let count = compared.candidate.max(candidate.map_or(0, |audit| audit.nonfinite));
    if count == 0 {
        return (compared.reference > 0).then(|| {
            let text = format!("{} NaN or Inf in the reference alone", compared.reference);
            (CheckpointVerdict::Nonfinite, text)
        });
    }
    let inherited = candidate.is_some_and(|audit| audit.nonfinite_inputs);
    let verdict = if inherited { CheckpointVerdict::Inherited } else { CheckpointVerdict::Nonfinite };
    let whence = if inherited { "its inputs hold them already" } else { "its inputs are finite, as far as recorded" };
    Some((verdict, format!("{count} NaN or Inf; {whence}")))
}

/// "llama.cpp is 1.3e-2 from exact here, your engine 4e-7".
fn witnesses(candidate: Option<&NodeAudit>, reference: Option<&NodeAudit>) -> Option<String> {
    let distance = |audit: &NodeAudit| audit.local.rel_l2_plain.unwrap_or(audit.local.rel_l2);
    match (candidate, reference) {
        (Some(a), Some(b)) => Some(format!(
            "the candidate is {:.1e} from exact arithmetic here, the reference {:.1e}",
            distance(a),
            distance(b)
        )),
        (Some(a), None) => Some(format!("{:.1e} from exact arithmetic", distance(a))),
        (None, Some(b)) => Some(format!("the reference is {:.1e} from exact arithmetic here", distance(b))),
        (None, None) => None,
    }
}

fn times(local: &LocalError) -> String {
    let at: Vec<String> = local.worst.iter().map(ToString::to_string).collect();
    let over = local.over_bound;
    let beyond = if over.is_finite() { format!("{over:.3e} times what rounding explains") } else { "without bound".to_owned() };
    format!("{beyond}, worst at [{}]", at.join(", "))
}

fn share(over: f64) -> String {
    format!("{:.0} %", 100.0 * over)
}

/// Whether two sides differ by more than rounding at this node explains: ‖a - b‖ against the sum of both
/// sides' own rounding bands, all relative to the reference.
pub fn beyond_rounding(numbers: &Numbers, candidate: Option<&NodeAudit>, reference: Option<&NodeAudit>) -> bool {
    let band = |audit: Option<&NodeAudit>| {
        audit.map_or(0.0, |audit| {
            audit.local.bound_rel_l2.unwrap_or(0.0) + audit.local.rel_l2_plain.unwrap_or(audit.local.rel_l2)
        })
    };
    !(numbers.rel_l2 <= band(candidate) + band(reference))
}
