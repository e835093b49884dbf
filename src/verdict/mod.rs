//! From comparisons and audits to answers: one for each checkpoint, one for the whole.
//!
//! Answers are data until the report is put together: a verdict and [`Why`], which `text` puts into a sentence.

use indexmap::IndexMap;

use crate::checkpoint::Checkpoint;
use crate::compare::Comparison;
use crate::dump::{Recording, Unfinite};
use crate::gguf::Gguf;
use crate::report::{
    CheckpointVerdict, Coverage, Entry, FirstDivergence, Local, Report, SCHEMA, Seen, Side, TokenReport,
    Verdict,
};

mod bracket;
mod nodes;
mod numbers;
pub mod recorded;
mod text;
mod weights;
mod whole;

pub use nodes::describe_recorded;
pub use weights::weigh;
pub use whole::{Gap, gaps, refuted, spoken, within_tolerance};

use crate::audit::recorded::{Carried, OwnDistance};

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

/// What an answer rests on.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// The values are equal, and nothing was audited.
    Equal,
    /// A tolerance that the user gave.
    Tolerance {
        /// Whether it holds.
        within: bool,
    },
    /// What is not there.
    Lacking(&'static str),
    /// So many of the reference's rows are not there.
    LackingRows(u64),
    /// So many of its tensors are of steps that the other side has not.
    OtherSteps(u64),
    /// Two shapes of a row.
    Shapes {
        /// The candidate's.
        candidate: Vec<usize>,
        /// The reference's.
        reference: Vec<usize>,
    },
    /// NaN and Inf in the candidate.
    Nonfinite {
        /// How many.
        count: Unfinite,
        /// Where they come from, in words.
        from: &'static str,
    },
    /// So many NaN and Inf in the reference alone.
    ReferenceNonfinite(u64),
    /// The output alone is known, and farther from an exact forward pass than rounding explains.
    BeyondPass(OwnDistance),
    /// Nothing that it is computed from is known.
    Alone,
    /// The sides differ, and nothing was audited.
    Differs,
    /// There is no row of it.
    NotRecorded,
    /// Nodes before it were not looked at, and what rounding carries through them is not known.
    Unseen {
        /// From the reference.
        distance: f64,
    },
    /// Nodes before it were not looked at; what rounding carries through them was simulated.
    Carried {
        /// What the simulation says.
        carried: Carried,
        /// From the reference, where there is one.
        distance: Option<f64>,
        /// Whether mistakes would show.
        sharp: bool,
        /// What else is known.
        local: Box<Why>,
    },
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

/// Names the model of a side whose dump does not by the file that it was judged by.
pub fn name_models(report: &mut Report, gguf: &Gguf) {
    let file = gguf.path().file_name().map(|name| name.to_string_lossy().into_owned());
    let architecture = gguf.str("general.architecture").ok().flatten();
    for side in std::iter::once(&mut report.candidate).chain(&mut report.reference) {
        let model = &mut side.model;
        if model.file.is_none() && model.name.is_none() {
            model.file.clone_from(&file);
            model.architecture = model.architecture.take().or(architecture.map(str::to_owned));
        }
    }
}

/// Puts the report together.
pub fn assemble(parts: Parts) -> Report {
    let coverage = coverage(&parts);
    let whys: Vec<Why> = parts.comparisons.iter().map(|c| rows_there(&parts, c).why).collect();
    let mut entries: Vec<Entry> =
        parts.comparisons.iter().map(|comparison| entry(&parts, comparison)).collect();
    let bracket = bracket::bracket(&entries, parts.judgement.rows_audited.is_some());
    if let Some((at, text)) = &bracket {
        *entries[*at].evidence.get_or_insert_default() += &format!("; {text}");
    }
    let first = entries.iter().find(|entry| entry.verdict.is_fault());
    let first_divergence = first.map(|entry| FirstDivergence {
        checkpoint: entry.id,
        layer: entry.layer,
        verdict: entry.verdict,
        inputs: Vec::new(),
        diagnosis: Vec::new(),
        residual: None,
        tried: Vec::new(),
        reproduce: None,
    });
    let origins = entries.iter().filter(|e| e.verdict == CheckpointVerdict::Origin).map(|e| e.id).collect();
    let whole = whole::Whole {
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
    let (obstacles, accepted) = whole::spoken(&parts.gaps, parts.allow_missing);
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
    let judged = known.unwrap_or_else(|| numbers::by_numbers(comparison));
    match comparison.status {
        crate::compare::Status::MissingRows(rows) if judged.verdict.is_healthy() => {
            Judged { verdict: CheckpointVerdict::Missing, why: Why::LackingRows(rows), ..judged }
        }
        // Here nobody has judged them by themselves.
        crate::compare::Status::OtherSteps(tensors) if judged.verdict.is_healthy() => {
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

#[cfg(test)]
mod tests;
