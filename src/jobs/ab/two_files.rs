//! Runs of two model files, as of one model in two types of weights: each side is judged by its own file.

use parity_dump::Dump;

use super::side::Recorded;
use crate::audit::AuditRows;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::jobs::audit::{self, audit};
use crate::jobs::diff::{self, diff};
use crate::report::{CheckpointVerdict, Entry, FirstDivergence, Report, Verdict};

/// What numbers say of two runs, and what each file says of its own run.
///
/// # Errors
/// A model file that cannot be read, a graph that cannot.
pub fn compare(
    [b, a]: [&Recorded; 2],
    [candidate, reference]: [&mut Dump; 2],
    options: &diff::Options,
) -> Result<Report> {
    let rows: AuditRows = options.audit.unwrap_or_default();
    let (selection, allow_missing) = (options.selection.clone(), options.allow_missing);
    let how = audit::Options { selection, rows, allow_missing };
    let ours = audit(candidate, &ModelFile::open(&b.model)?, &how)?;
    let theirs = audit(reference, &ModelFile::open(&a.model)?, &how)?;
    let mut report = diff(candidate, reference, None, options)?;
    for entry in &mut report.checkpoints {
        let of = |report: &'_ Report| report.checkpoints.iter().find(|other| other.id == entry.id).cloned();
        let (ours, theirs) = (of(&ours), of(&theirs));
        merge(entry, ours, theirs);
    }
    conclude(&mut report, &ours, &theirs);
    report.notes.push(format!(
        "the sides are of two files, and each was judged by its own: {} and {}",
        a.model.display(),
        b.model.display()
    ));
    Ok(report)
}

/// What was found of a checkpoint in each side's own audit.
fn merge(entry: &mut Entry, ours: Option<Entry>, theirs: Option<Entry>) {
    let healthy = |side: &Option<Entry>| side.as_ref().is_some_and(|side| side.verdict.is_healthy());
    let both = healthy(&ours) && healthy(&theirs);
    if let Some(theirs) = theirs {
        if theirs.verdict.is_fault() {
            (entry.verdict, entry.evidence) = (CheckpointVerdict::Reference, theirs.evidence);
            entry.diagnosis = theirs.diagnosis;
        }
        entry.local.reference = theirs.local.candidate;
        (entry.op, entry.inputs) = (theirs.op, theirs.inputs);
    }
    if let Some(ours) = ours {
        if ours.verdict.is_fault() {
            (entry.verdict, entry.evidence) = (ours.verdict, ours.evidence);
            entry.diagnosis = ours.diagnosis;
        }
        entry.local.candidate = ours.local.candidate;
    }
    if both && entry.verdict == CheckpointVerdict::Undecided {
        entry.verdict = CheckpointVerdict::Match;
        entry.evidence = Some("each side computes what its own file says".to_owned());
    }
}

/// The whole: a side that is wrong, graphs that differ, or a side that could not be judged.
fn conclude(report: &mut Report, ours: &Report, theirs: &Report) {
    report.origins.clone_from(&ours.origins);
    let of_reference = || {
        let first = theirs.first_divergence.clone()?;
        Some(FirstDivergence { verdict: CheckpointVerdict::Reference, ..first })
    };
    if let Some(first) = ours.first_divergence.clone().or_else(of_reference) {
        report.diverge(first);
        return;
    }
    // Graphs that differ have made it one already.
    if report.verdict == Verdict::Divergence {
        return;
    }
    let undecided = [ours, theirs].into_iter().find(|side| side.verdict != Verdict::Parity);
    (report.verdict, report.reason) = match (undecided, report.gaps.first()) {
        (Some(side), _) => (side.verdict, side.reason.clone()),
        (None, Some(gap)) => (Verdict::Undecided, Some(gap.clone())),
        (None, None) => {
            let said = "each side computes what its own file says, to within rounding".to_owned();
            (Verdict::Parity, Some(said))
        }
    };
}
