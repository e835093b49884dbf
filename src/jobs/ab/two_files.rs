//! Runs of two model files, as of one model in two types of weights: each side is judged by its own file.

use parity_dump::Dump;

use rayon::prelude::*;

use super::side::Recorded;
use crate::audit::AuditRows;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::gguf::{Gguf, TensorInfo, TensorRef};
use crate::jobs::audit::{self, audit};
use crate::jobs::diff::{self, diff};
use crate::report::words::count;
use crate::report::{CheckpointVerdict, Entry, FirstDivergence, Report, Verdict};

/// What numbers say of two runs, and what each file says of its own run.
///
/// # Errors
/// A model file that cannot be read, a graph that cannot.
pub fn compare(
    [of_candidate, of_reference]: [&ModelFile; 2],
    [candidate, reference]: [&mut Dump; 2],
    options: &diff::Options,
) -> Result<Report> {
    let rows: AuditRows = options.audit.unwrap_or_default();
    let (selection, allow_missing) = (options.selection.clone(), options.allow_missing);
    let how = audit::Options { selection, rows, allow_missing };
    let ours = audit(candidate, of_candidate, &how)?;
    let theirs = audit(reference, of_reference, &how)?;
    let mut report = diff(candidate, reference, None, options)?;
    for entry in &mut report.checkpoints {
        let of = |report: &'_ Report| report.checkpoints.iter().find(|other| other.id == entry.id).cloned();
        let (ours, theirs) = (of(&ours), of(&theirs));
        merge(entry, ours, theirs);
    }
    conclude(&mut report, &ours, &theirs);
    Ok(report)
}

/// In what the models of two sides are not the same.
pub struct Apart {
    /// Tensors of both files that have one type and other numbers, in the order of the first.
    weights: Vec<String>,
    /// Whether one side alone has an adapter, or another one.
    adapters: bool,
}

/// Whether two sides are of two models, byte by byte of their tensors; `None` where they are of one.
///
/// # Errors
/// A file whose metadata cannot be read.
pub fn apart(one: &ModelFile, other: &ModelFile) -> Result<Option<Apart>> {
    let (one, other) = (one.gguf(), other.gguf());
    let adapters = |gguf: &Gguf| gguf.adapters().map(|adapter| adapter.path().to_owned()).collect::<Vec<_>>();
    let adapters = adapters(one) != adapters(other);
    if one.path().canonicalize().ok() == other.path().canonicalize().ok() {
        return Ok(adapters.then_some(Apart { weights: Vec::new(), adapters }));
    }
    let pairs = one.tensors().map(|info| (info, one.tensor(&info.name), other.tensor(&info.name)));
    let pairs: Vec<_> = pairs.collect();
    let is_other = |info: &TensorInfo, one: Option<TensorRef<'_>>, other: Option<TensorRef<'_>>| {
        let both = one.zip(other);
        both.filter(|(one, other)| one.info.dtype == other.info.dtype && one.bytes != other.bytes)
            .map(|_| info.name.clone())
    };
    let weights: Vec<String> =
        pairs.par_iter().filter_map(|(info, one, other)| is_other(info, *one, *other)).collect();
    let same = |one: Option<TensorRef<'_>>, other: Option<TensorRef<'_>>| {
        one.zip(other).is_some_and(|(one, other)| one.info.dtype == other.info.dtype)
    };
    let is_one = weights.is_empty()
        && !adapters
        && one.tensors().len() == other.tensors().len()
        && pairs.iter().all(|(_, one, other)| same(*one, *other))
        && one.metadata() == other.metadata();
    Ok((!is_one).then_some(Apart { weights, adapters }))
}

/// Says that the sides are of two models. Types are a difference of arithmetic; other numbers in one type, and an adapter of one
/// side alone, are what the values differ by.
pub fn add(report: &mut Report, apart: &Apart, [a, b]: [&Recorded; 2]) {
    report.notes.push(format!(
        "the sides are of two files, and each was judged by its own: {} and {}",
        a.model.display(),
        b.model.display()
    ));
    let weights = apart.weights.first().map(|first| {
        let weights = count(apart.weights.len(), "weight");
        format!("the files are of two models: {weights} of one type with other numbers, first {first}")
    });
    let adapters = || {
        let has = |side: &Recorded| if side.adapters.is_empty() { "none" } else { "an adapter" };
        format!("the sides run with other adapters (LoRA): A with {}, B with {}", has(a), has(b))
    };
    let Some(said) = weights.or_else(|| apart.adapters.then(adapters)) else { return };
    report.answer.push(said.clone());
    report.diverge_by(said);
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
