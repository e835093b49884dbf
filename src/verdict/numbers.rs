//! Answers where sides were compared and neither was judged by a graph: of each checkpoint, and of the whole.

use indexmap::IndexMap;

use super::bracket::bracket;
use super::whole_of_numbers::Whole;
use super::{Gap, Why, spoken, text};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, Status};
use crate::dump::Unfinite;
use crate::report::CheckpointVerdict::{self, Beyond, Match, Nonfinite, Reference, Shape, Undecided};
use crate::report::{
    Coverage, Entry, FirstDivergence, Local, Report, SCHEMA, Seen, Side, TokenReport, Verdict,
};

/// The answer for one checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// The answer.
    pub verdict: CheckpointVerdict,
    /// What it rests on.
    pub why: Why,
    /// Both sides' local errors.
    pub local: Local,
}

/// Everything that a report is put together from.
#[derive(Default)]
pub struct Parts {
    /// The numbers, in execution order.
    pub comparisons: Vec<Comparison>,
    /// The answers.
    pub judgement: Judgement,
    /// From logits to tokens.
    pub tokens: Option<TokenReport>,
    /// The side that is judged.
    pub candidate: Side,
    /// The side that it is compared with.
    pub reference: Option<Side>,
    /// What a reader must know of the inputs.
    pub notes: Vec<String>,
    /// Rows that there is nothing to say about, though one side has tokens there.
    pub gaps: Vec<Gap>,
    /// Whether what a side lacks is no obstacle to parity.
    pub allow_missing: bool,
}

/// The answers for all checkpoints.
#[derive(Default)]
pub struct Judgement {
    /// By checkpoint: all that were compared.
    pub judged: IndexMap<Checkpoint, Judged>,
    /// What a reader must know of the sides' arithmetic.
    pub notes: Vec<String>,
    /// Token rows whose local error was computed; `None` without an audit.
    pub rows_audited: Option<u64>,
    /// Token rows that were screened besides, where there was an audit.
    pub rows_screened: Option<u64>,
}

/// Puts the report together.
pub fn assemble(parts: Parts) -> Report {
    let coverage = coverage(&parts);
    let whys: Vec<Why> = parts.comparisons.iter().map(|c| rows_there(&parts, c).why).collect();
    let mut entries: Vec<Entry> =
        parts.comparisons.iter().map(|comparison| entry(&parts, comparison)).collect();
    let bracket = bracket(&entries, parts.judgement.rows_audited.is_some());
    if let Some((at, text)) = &bracket {
        *entries[*at].evidence.get_or_insert_default() += &format!("; {text}");
    }
    let first = entries.iter().find(|entry| entry.verdict.is_fault());
    let first_divergence = first.map(|entry| FirstDivergence::at(entry.id, entry.verdict));
    let origins = entries.iter().filter(|e| e.verdict == CheckpointVerdict::Origin).map(|e| e.id).collect();
    let whole = Whole {
        entries: &entries,
        whys: &whys,
        coverage: &coverage,
        alone: parts.reference.is_none(),
        gaps: &parts.gaps,
        allow_missing: parts.allow_missing,
        tokens: parts.tokens.as_ref(),
    };
    let (verdict, mut reason) = whole.verdict();
    if verdict == Verdict::Undecided {
        reason.iter_mut().zip(&bracket).for_each(|(reason, (_, text))| *reason += &format!("; {text}"));
    }
    let (obstacles, accepted) = spoken(&parts.gaps, parts.allow_missing);
    let notes = parts.notes.into_iter().chain(parts.judgement.notes).chain(accepted).collect();
    Report {
        schema: SCHEMA.to_owned(),
        verdict,
        reason,
        first_divergence,
        origins,
        gaps: obstacles,
        coverage,
        checkpoints: entries,
        tokens: parts.tokens,
        candidate: parts.candidate,
        reference: parts.reference,
        notes,
        ..Report::default()
    }
}

fn coverage(parts: &Parts) -> Coverage {
    let comparisons = &parts.comparisons;
    let numbers = || comparisons.iter().filter_map(|c| c.numbers.as_ref());
    Coverage {
        checkpoints_compared: numbers().count(),
        checkpoints_missing: comparisons.iter().filter(|c| c.status.is_missing()).count(),
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

/// The answer for a checkpoint; where the candidate lacks rows nothing healthy, since nobody knows of those.
fn rows_there(parts: &Parts, comparison: &Comparison) -> Judged {
    let known = parts.judgement.judged.get(&comparison.checkpoint).cloned();
    let judged = known.unwrap_or_else(|| by_numbers(comparison));
    match comparison.status {
        Status::MissingRows(rows) if judged.verdict.is_healthy() => {
            Judged { verdict: CheckpointVerdict::Missing, why: Why::LackingRows(rows), ..judged }
        }
        // Here nobody has judged them by themselves.
        Status::OtherSteps(tensors) if judged.verdict.is_healthy() => {
            Judged { verdict: CheckpointVerdict::Missing, why: Why::OtherSteps(tensors), ..judged }
        }
        _ => judged,
    }
}

fn entry(parts: &Parts, comparison: &Comparison) -> Entry {
    let checkpoint = comparison.checkpoint;
    let Judged { mut verdict, why, local } = rows_there(parts, comparison);
    let mut evidence = text::sentence(&why);
    if let Some(seen) = &comparison.seen {
        evidence += &text::seen_in_part(seen);
        let other_sum = seen.sum.is_some_and(|sum| !(sum.over() <= 1.0));
        if other_sum && verdict == CheckpointVerdict::Match {
            verdict = CheckpointVerdict::Undecided;
        }
    }
    let mut shape = vec![comparison.rows_compared as usize];
    shape.extend_from_slice(&comparison.row_shape);
    Entry {
        bits: None,
        id: checkpoint,
        layer: checkpoint.layer_index(),
        verdict,
        evidence: Some(evidence),
        numbers: comparison.numbers.clone(),
        local,
        parts: None,
        diagnosis: Vec::new(),
        shape,
        seen: comparison.seen,
        op: None,
        inputs: Vec::new(),
    }
}

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
