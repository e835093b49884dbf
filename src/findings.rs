//! From comparisons and evidence to one answer: the report.

use std::collections::BTreeMap;

use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Recording;
use crate::faults::diagnose::Diagnosed;
use crate::report::{
    Budget, CheckpointVerdict, Coverage, Entry, FirstDivergence, Local, Nonfinite, Report, SCHEMA, Seen,
    Side, TokenReport, Verdict, words,
};

mod bracket;

use bracket::bracket;

/// The answer for one checkpoint, with its evidence.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// The answer.
    pub verdict: CheckpointVerdict,
    /// Its evidence in one sentence.
    pub evidence: Option<String>,
    /// Both sides' own errors.
    pub local: Local,
    /// Where the distance comes from.
    pub budget: Option<Budget>,
}

/// Everything that a report is put together from.
#[derive(Default)]
pub struct Parts {
    /// The numbers, in execution order.
    pub comparisons: Vec<Comparison>,
    /// What audits say; a checkpoint that they do not judge is judged by its numbers alone.
    pub judgement: Judgement,
    /// From logits to tokens.
    pub tokens: Option<TokenReport>,
    /// The side that is judged.
    pub candidate: Side,
    /// The side that it is held against.
    pub reference: Option<Side>,
    /// What a reader must know of the inputs.
    pub notes: Vec<String>,
    /// Whether checkpoints that a side lacks are no obstacle to parity.
    pub allow_missing: bool,
}

/// What audits add to a report.
#[derive(Default)]
pub struct Judgement {
    /// The answer for each checkpoint.
    pub judged: BTreeMap<Checkpoint, Judged>,
    /// The mistakes behind the first faulty nodes.
    pub named: BTreeMap<Checkpoint, Diagnosed>,
    /// What a reader must know of the sides' arithmetic.
    pub notes: Vec<String>,
    /// Token rows whose local error was computed; `None` without an audit.
    pub rows_audited: Option<u64>,
    /// Token rows that were screened besides, where there was an audit.
    pub rows_screened: Option<u64>,
    /// What a match rests on besides evidence, where a node before it was not looked at.
    pub limit: Option<String>,
}

/// Where a recording comes from.
pub fn side(recording: &dyn Recording, path: Option<String>) -> Side {
    let manifest = recording.manifest();
    Side {
        path,
        producer: manifest.producer.clone(),
        model: manifest.model.clone(),
        tokens: manifest.tokens.len(),
        steps: manifest.steps.iter().map(|step| step.positions.len()).collect(),
        provenance: manifest.provenance.clone(),
    }
}

/// Puts the report together.
pub fn assemble(parts: Parts) -> Report {
    let coverage = coverage(&parts);
    let mut entries: Vec<Entry> =
        parts.comparisons.iter().map(|comparison| entry(&parts, comparison)).collect();
    let bracket = bracket(&entries, parts.judgement.rows_audited.is_some());
    if let Some((at, text)) = &bracket {
        *entries[*at].evidence.get_or_insert_default() += &format!("; {text}");
    }
    let first = entries.iter().find(|entry| diverges(entry.verdict));
    let first_divergence = first.map(|entry| {
        let named = parts.judgement.named.get(&entry.id).cloned().unwrap_or_default();
        FirstDivergence {
            checkpoint: entry.id,
            layer: entry.layer,
            verdict: entry.verdict,
            inputs: named.inputs,
            diagnosis: named.diagnosis,
            residual: named.residual,
            tried: named.tried,
            reproduce: None,
        }
    });
    let origins = entries.iter().filter(|e| e.verdict == CheckpointVerdict::Origin).map(|e| e.id).collect();
    let mut notes = parts.notes;
    notes.extend(parts.judgement.notes);
    let alone = parts.reference.is_none();
    let (verdict, mut reason) = verdict(&entries, &coverage, alone, parts.allow_missing);
    match verdict {
        Verdict::Undecided => {
            reason.iter_mut().zip(&bracket).for_each(|(reason, (_, text))| *reason += &format!("; {text}"))
        }
        Verdict::Parity => {
            reason = reason.or(parts.judgement.limit.as_ref().map(|limit| as_far_as_seen(&entries, limit)))
        }
        Verdict::Divergence => {}
    }
    Report {
        schema: SCHEMA.to_owned(),
        verdict,
        reason,
        first_divergence,
        origins,
        coverage,
        checkpoints: entries,
        tokens: parts.tokens,
        candidate: parts.candidate,
        reference: parts.reference,
        notes,
        ..Report::default()
    }
}

/// An agreement that rests on less than all nodes.
fn as_far_as_seen(entries: &[Entry], limit: &str) -> String {
    let compared = entries.iter().filter(|entry| entry.numbers.is_some()).count();
    let compared = words::count(compared, "checkpoint");
    format!("{compared} within what rounding explains, as far as they were looked at; {limit}")
}

/// Whether a checkpoint's verdict is a divergence of the candidate.
fn diverges(verdict: CheckpointVerdict) -> bool {
    use CheckpointVerdict::{Beyond, Nonfinite, Origin, Shape};
    matches!(verdict, Origin | Nonfinite | Shape | Beyond)
}

fn coverage(parts: &Parts) -> Coverage {
    let comparisons = &parts.comparisons;
    let numbers = || comparisons.iter().filter_map(|c| c.numbers.as_ref());
    Coverage {
        checkpoints_compared: numbers().count(),
        checkpoints_missing: comparisons.iter().filter(|c| is_missing(&c.status)).count(),
        elements_compared: numbers().map(|n| n.n).sum(),
        rows_compared: comparisons.iter().map(|c| c.rows_compared).sum(),
        rows_expected: comparisons.iter().map(|c| c.rows_expected).sum(),
        rows_audited: parts.judgement.rows_audited,
        seen: seen(comparisons),
        rows_screened: parts.judgement.rows_screened,
    }
}

/// How much was seen of all checkpoints of which a side was only printed.
fn seen(comparisons: &[Comparison]) -> Option<Seen> {
    let parts = || comparisons.iter().filter_map(|comparison| comparison.seen);
    parts().next()?;
    Some(Seen { values: parts().map(|s| s.values).sum(), of: parts().map(|s| s.of).sum(), sum: None })
}

fn is_missing(status: &Status) -> bool {
    use Status::*;
    matches!(status, MissingCandidate | MissingReference | MissingBoth | MissingRows(_))
}

fn entry(parts: &Parts, comparison: &Comparison) -> Entry {
    let judged = match parts.judgement.judged.get(&comparison.checkpoint) {
        Some(judged) => judged.clone(),
        None => by_numbers(comparison),
    };
    let judged = match comparison.status {
        Status::MissingRows(rows) => lacking(judged, rows),
        _ => judged,
    };
    let judged = match &comparison.seen {
        Some(seen) => in_part(judged, seen),
        None => judged,
    };
    let mut shape = vec![comparison.rows_compared as usize];
    shape.extend_from_slice(&comparison.row_shape);
    Entry {
        id: comparison.checkpoint,
        layer: comparison.checkpoint.layer_index(),
        verdict: judged.verdict,
        evidence: judged.evidence,
        numbers: comparison.numbers.clone(),
        local: judged.local,
        budget: judged.budget,
        diagnosis: parts.judgement.named.get(&comparison.checkpoint).map_or(vec![], |n| n.diagnosis.clone()),
        shape,
        seen: comparison.seen,
    }
}

/// The answer where the candidate lacks rows: nothing healthy, since nobody knows of those.
fn lacking(judged: Judged, rows: u64) -> Judged {
    if !judged.verdict.is_healthy() {
        return judged;
    }
    let text = format!("{} of the reference's rows are not in the candidate", words::thousands(rows));
    Judged { verdict: CheckpointVerdict::Missing, evidence: Some(text), ..judged }
}

/// The answer for a checkpoint of which a side was only printed: how much was seen, and whether the sum agrees.
fn in_part(judged: Judged, seen: &Seen) -> Judged {
    let Judged { mut verdict, evidence, local, budget } = judged;
    let mut text = evidence.unwrap_or_default();
    text += &format!("; {} of {} values seen", words::thousands(seen.values), words::thousands(seen.of));
    match seen.sum {
        Some(sum) if !(sum.over() <= 1.0) => {
            text += &format!(
                ", but the sums are {} apart ({} explained): values that were not seen differ",
                words::number((sum.candidate - sum.reference).abs()),
                words::number(sum.bound)
            );
            if verdict == CheckpointVerdict::Match {
                verdict = CheckpointVerdict::Undecided;
            }
        }
        Some(sum) => {
            let apart = words::number((sum.candidate - sum.reference).abs());
            text += &format!(", sums {apart} apart ({} explained)", words::number(sum.bound));
        }
        None => {}
    }
    Judged { verdict, evidence: Some(text), local, budget }
}

/// The answer that needs no evidence of exact arithmetic: what is missing, reshaped, not finite, equal, or
/// within the user's tolerance.
pub fn by_numbers(comparison: &Comparison) -> Judged {
    let (verdict, evidence) = match obvious(comparison) {
        Some((verdict, evidence)) => (verdict, Some(evidence)),
        None => (
            CheckpointVerdict::Undecided,
            Some("no audit and no tolerance: --rtol, --atol or --nmse would decide".to_owned()),
        ),
    };
    Judged { verdict, evidence, local: Local::default(), budget: None }
}

/// [`by_numbers`] where it is conclusive.
fn obvious(comparison: &Comparison) -> Option<(CheckpointVerdict, String)> {
    unmeasured(comparison).or_else(|| by_values(comparison))
}

/// The answer where there are no numbers: what is missing or reshaped.
pub fn unmeasured(comparison: &Comparison) -> Option<(CheckpointVerdict, String)> {
    let verdict = match &comparison.status {
        Status::MissingCandidate => (CheckpointVerdict::Missing, "not in the candidate".to_owned()),
        Status::MissingReference => (CheckpointVerdict::Missing, "not in the reference".to_owned()),
        Status::MissingBoth => (CheckpointVerdict::Missing, "in neither recording".to_owned()),
        Status::Shape(ours, theirs) => (
            CheckpointVerdict::Shape,
            format!("rows of {ours:?} in the candidate, {theirs:?} in the reference"),
        ),
        Status::Compared | Status::MissingRows(_) if comparison.numbers.is_none() => {
            (CheckpointVerdict::Missing, "no token position that both sides have".to_owned())
        }
        Status::Compared | Status::MissingRows(_) => return None,
    };
    Some(verdict)
}

fn by_values(comparison: &Comparison) -> Option<(CheckpointVerdict, String)> {
    let numbers = comparison.numbers.as_ref()?;
    let Nonfinite { candidate, reference } = numbers.nonfinite;
    if candidate + reference > 0 {
        let text = format!("{candidate} NaN or Inf in the candidate, {reference} in the reference");
        return Some((CheckpointVerdict::Nonfinite, text));
    }
    match comparison.within_tolerance {
        Some(true) => return Some((CheckpointVerdict::Match, "within the tolerance given".to_owned())),
        Some(false) => return Some((CheckpointVerdict::Beyond, "beyond the tolerance given".to_owned())),
        None => {}
    }
    (numbers.abs_err_max == 0.0).then(|| (CheckpointVerdict::Match, "equal".to_owned()))
}

/// The answer of the whole, and why where it is undecided; `alone` where one recording was audited.
fn verdict(
    entries: &[Entry],
    coverage: &Coverage,
    alone: bool,
    allow_missing: bool,
) -> (Verdict, Option<String>) {
    let count = |verdict| entries.iter().filter(|entry| entry.verdict == verdict).count();
    if entries.iter().any(|entry| diverges(entry.verdict)) {
        return (Verdict::Divergence, None);
    }
    let audited = entries.iter().any(|entry| entry.local.candidate.is_some());
    if coverage.checkpoints_compared == 0 && !(alone && audited) {
        let reason = match alone && coverage.rows_audited.is_some() {
            true => "no checkpoint could be computed again: what the nodes read was not recorded",
            false => "nothing was compared",
        };
        return (Verdict::Undecided, Some(reason.to_owned()));
    }
    if let Some(entry) = entries.iter().find(|entry| entry.verdict == CheckpointVerdict::Reference) {
        return (Verdict::Undecided, Some(format!("the reference itself is wrong at {}", entry.id)));
    }
    let missing = count(CheckpointVerdict::Missing);
    if missing > 0 && !allow_missing {
        let reason = format!(
            "{} missing on a side; --layer or --checkpoint narrows the comparison, --allow-missing accepts it",
            words::count(missing, "checkpoint")
        );
        return (Verdict::Undecided, Some(reason));
    }
    match count(CheckpointVerdict::Undecided) {
        0 => (Verdict::Parity, coverage.seen.as_ref().map(seen_alone)),
        n if audited => {
            (Verdict::Undecided, Some(format!("{} could not be judged", words::count(n, "checkpoint"))))
        }
        n if coverage.rows_audited.is_some() => {
            let reason = format!(
                "{} could not be judged, since what the nodes read was not recorded; --rtol, --atol or --nmse would \
                 decide",
                words::count(n, "checkpoint")
            );
            (Verdict::Undecided, Some(reason))
        }
        n => {
            let reason = format!(
                "{n} checkpoints differ and nothing says by how much they may; an audit (-m MODEL, no \
                 --no-audit) or --rtol, --atol, --nmse would"
            );
            (Verdict::Undecided, Some(reason))
        }
    }
}

/// What an agreement of printed values does not show.
fn seen_alone(seen: &Seen) -> String {
    let share = 100.0 * seen.values as f64 / seen.of.max(1) as f64;
    format!(
        "of what was printed: {} of {} values seen ({share:.2} %) agree, and nothing is known of the others but \
         their sums",
        words::thousands(seen.values),
        words::thousands(seen.of)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Kind;
    use crate::compare::{Accumulator, Tolerance};

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
        assemble(Parts { comparisons, ..Parts::default() }).verdict
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
        for (status, expected) in [
            (Status::MissingCandidate, Verdict::Undecided),
            (Status::MissingReference, Verdict::Undecided),
            (Status::Shape(vec![1], vec![2]), Verdict::Divergence),
        ] {
            let absent = Comparison { status, numbers: None, rows_compared: 0, ..comparison(&[1.0], &[1.0]) };
            assert_eq!(verdict_of(vec![comparison(&[1.0], &[1.0]), absent]), expected);
        }
    }
}
