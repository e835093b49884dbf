//! Runs of two model files, as of one model in two types of weights: each side is judged by its own file.

use parity_dump::Dump;
use parity_graph::weights::{OUTPUT, weight};
use rayon::prelude::*;

use super::side::Recorded;
use crate::audit::AuditRows;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::gguf::{DType, Gguf, TensorInfo, TensorRef};
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
    /// Tensors that one file alone has, or that have other numbers than their types explain, in the order of the first.
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
        let is_other = match (one, other) {
            (Some(one), Some(other)) => has_other_numbers(&one, &other),
            // Who has no matrix of its own for the output takes that of the embedding.
            _ => info.name != weight(OUTPUT),
        };
        is_other.then(|| info.name.clone())
    };
    let more = other.tensors().filter(|info| one.tensor(&info.name).is_none() && info.name != weight(OUTPUT));
    let more: Vec<String> = more.map(|info| info.name.clone()).collect();
    let weights: Vec<String> =
        pairs.par_iter().filter_map(|(info, one, other)| is_other(info, *one, *other)).collect();
    let weights = [weights, more].concat();
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

/// Values of a row whose largest says how far apart numbers of a type lie: those of the largest blocks that any type has.
const BLOCK: usize = 256;

/// How many steps of a type a number may lie from what it was made of: half a step by rounding, as much by that of a block's own
/// scale, and as much again where the scale was chosen for the others' sake.
const STEPS: f32 = 2.0;

/// The share of a matrix in blocks that may lie farther out: values that were cut, so that the others come nearer.
const CUT: f64 = 1e-3;

/// Steps of a type between the largest number of a block and its negative; of floating point, between a number and twice it.
fn steps(dtype: DType) -> f32 {
    let bits = match dtype.name() {
        "F64" | "F32" => 24,
        "F16" => 11,
        "BF16" => 8,
        name => name.chars().find_map(|digit| digit.to_digit(10)).unwrap_or(1),
    };
    (bits as f32).exp2()
}

/// Whether two tensors of one name hold other numbers: of one type other bytes, of two types more than these explain.
fn has_other_numbers(one: &TensorRef<'_>, other: &TensorRef<'_>) -> bool {
    let [first, second] = [one, other].map(|tensor| tensor.info.dtype);
    if one.info.shape != other.info.shape {
        return true;
    }
    if first == second {
        return one.bytes != other.bytes;
    }
    if !first.is_decodable() || !second.is_decodable() {
        return false;
    }
    let (ours, theirs): (Vec<f32>, Vec<f32>) = (one.decode(), other.decode());
    let step = |dtype: DType, value: f32, largest: f32| {
        let of = if dtype.block_len() == 1 { value.abs() } else { 2.0 * largest };
        of / steps(dtype)
    };
    let beyond = ours.chunks(BLOCK).zip(theirs.chunks(BLOCK)).map(|(ours, theirs)| {
        let largest = ours.iter().chain(theirs).fold(0.0f32, |max, value| max.max(value.abs()));
        let far = |(a, b): (&f32, &f32)| {
            let near = STEPS * (step(first, *a, largest) + step(second, *b, largest));
            !((a - b).abs() <= near + f32::from(half::f16::MIN_POSITIVE_SUBNORMAL))
        };
        ours.iter().zip(theirs).filter(|pair| far(*pair)).count()
    });
    let beyond: usize = beyond.sum();
    let is_exact = [first, second].iter().all(|dtype| dtype.block_len() == 1);
    let allowed = if is_exact { 0.0 } else { CUT * ours.len() as f64 };
    beyond as f64 > allowed
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
        format!("the files are of two models: {weights} with other numbers than types explain, or in one alone, first {first}")
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
