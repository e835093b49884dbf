//! The answer for one checkpoint, with its evidence in one sentence.

use super::Missing;
use super::local::NodeAudit;
use crate::checkpoint::Checkpoint;
use crate::report::CheckpointVerdict::{
    self, Beyond, Inherited, Match, Nonfinite, Origin, Reference, Undecided,
};
use crate::report::{LocalError, Numbers};

/// What is known of one checkpoint.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The two sides held against each other; `None` in an audit of one dump.
    pub numbers: Option<&'a Numbers>,
    /// The candidate against exact arithmetic; `None` where it was not audited.
    pub candidate: Option<&'a Result<NodeAudit, Missing>>,
    /// The reference against exact arithmetic; `None` where there is none or it was not audited.
    pub reference: Option<&'a Result<NodeAudit, Missing>>,
    /// Whether the two sides were compared.
    pub compared: bool,
    /// Whether the difference is within the user's tolerance; `None` without one.
    pub tolerated: Option<bool>,
    /// The first checkpoint before this one that is not healthy.
    pub faulty: Option<Checkpoint>,
}

/// The verdict and why.
pub fn judge(evidence: &Evidence<'_>) -> (CheckpointVerdict, String) {
    let candidate = evidence.candidate.and_then(|audit| audit.as_ref().ok());
    let reference = evidence.reference.and_then(|audit| audit.as_ref().ok());
    if let Some(verdict) = nonfinite(evidence, candidate) {
        return verdict;
    }
    if candidate.is_some_and(|audit| audit.nonfinite_inputs) {
        let verdict = if evidence.faulty.is_some() { Inherited } else { Undecided };
        return (verdict, "its inputs hold NaN or Inf, so that nothing can be said of it".to_owned());
    }
    if let Some(own) = candidate.filter(|audit| !audit.is_healthy()) {
        return (Origin, format!("its own error is {}: the bug is in this node", beyond(&own.local)));
    }
    match evidence.tolerated {
        Some(true) => return (Match, "within the tolerance given".to_owned()),
        Some(false) => {
            return (Beyond, "beyond the tolerance given, though its own error is rounding".to_owned());
        }
        None => {}
    }
    if let Some(own) = reference.filter(|audit| !audit.is_healthy()) {
        let text = format!(
            "the reference's own error is {}: it is wrong, or not what it is taken for",
            beyond(&own.local)
        );
        return (Reference, text);
    }
    match (candidate, evidence.numbers) {
        (None, _) if evidence.numbers.is_some_and(|numbers| numbers.abs_err_max == 0.0) => {
            (Match, "equal".to_owned())
        }
        (None, _) => (Undecided, undecided(evidence)),
        (Some(own), None) => (Match, alone(own)),
        (Some(own), Some(numbers)) => healthy(evidence, own, reference, numbers),
    }
}

/// A node whose own error is rounding: what its distance from the reference comes from.
fn healthy(
    evidence: &Evidence<'_>,
    own: &NodeAudit,
    reference: Option<&NodeAudit>,
    numbers: &Numbers,
) -> (CheckpointVerdict, String) {
    let witnesses = witnesses(own, reference);
    if numbers.rel_l2 <= band(own) + reference.map_or(0.0, band) {
        return (Match, witnesses);
    }
    match evidence.faulty {
        Some(faulty) => {
            (Inherited, format!("{}; what it differs by comes from {faulty} or before it", alone(own)))
        }
        None => {
            (Match, format!("{witnesses}; no node before it is faulty: the distance is rounding, carried on"))
        }
    }
}

/// What rounding at this node explains of a distance, relative to its output.
fn band(audit: &NodeAudit) -> f64 {
    audit.local.bound_rel_l2.unwrap_or(0.0) + distance(audit)
}

fn undecided(evidence: &Evidence<'_>) -> String {
    match evidence.candidate {
        Some(Err(Missing(what))) => format!("to judge it, the recording needs {what}"),
        _ if evidence.compared => {
            "the sides differ; nothing says whether this node or its input is wrong".to_owned()
        }
        _ => "not recorded".to_owned(),
    }
}

/// NaN and Inf: of a node whose inputs were finite they are its own, else inherited.
fn nonfinite(evidence: &Evidence<'_>, candidate: Option<&NodeAudit>) -> Option<(CheckpointVerdict, String)> {
    let compared = evidence.numbers.map(|numbers| numbers.nonfinite).unwrap_or_default();
    let count = compared.candidate.max(candidate.map_or(0, |audit| audit.nonfinite));
    if count == 0 {
        let alone = compared.reference > 0;
        return alone
            .then(|| (Nonfinite, format!("{} NaN or Inf in the reference alone", compared.reference)));
    }
    let before = evidence.faulty.is_some()
        && candidate.is_none_or(|audit| audit.nonfinite_inputs || audit.nonfinite == 0);
    Some(match before {
        true => (Inherited, format!("{count} NaN or Inf; they come from before it")),
        false => (Nonfinite, format!("{count} NaN or Inf; its inputs have none, as far as recorded")),
    })
}

/// "llama.cpp is 1.3e-2 from exact here, your engine 4e-7".
fn witnesses(own: &NodeAudit, reference: Option<&NodeAudit>) -> String {
    match reference {
        Some(reference) => format!(
            "the candidate is {:.1e} from exact arithmetic here, the reference {:.1e}",
            distance(own),
            distance(reference)
        ),
        None => alone(own),
    }
}

fn alone(own: &NodeAudit) -> String {
    format!(
        "its own error is {:.1e}, {:.0} % of what rounding explains",
        own.local.rel_l2,
        100.0 * own.local.over_bound
    )
}

/// From exact arithmetic, without anybody's rounding.
fn distance(audit: &NodeAudit) -> f64 {
    audit.local.rel_l2_plain.unwrap_or(audit.local.rel_l2)
}

fn beyond(local: &LocalError) -> String {
    let at: Vec<String> = local.worst.iter().map(ToString::to_string).collect();
    let over = local.over_bound;
    let times = if over.is_finite() {
        format!("{over:.1e} times what rounding explains")
    } else {
        "beyond any bound".to_owned()
    };
    format!("{times}, worst at [{}]", at.join(", "))
}
