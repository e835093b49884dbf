//! `parity diff`: two dumps held against each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{AuditArgs, SelectArgs, ToleranceArgs};
use crate::audit::{Audits, Options, audit};
use crate::checkpoint::Checkpoint;
use crate::compare::{self, Comparison};
use crate::dump::{self, Recording};
use crate::error::Result;
use crate::evidence;
use crate::findings::{self, Parts};
use crate::model::Model;
use crate::report::detail::{GRID, detail};
use parity_dump::Dump;

/// Flags of `parity diff`.
#[derive(clap::Args)]
pub struct Args {
    /// Dump that is judged: a folder, or one .safetensors file
    candidate: PathBuf,
    /// Dump that it is held against
    reference: PathBuf,
    /// JSON file that translates the candidate's tensor names: {"model.norm": "final_norm"}
    #[arg(long, value_name = "FILE")]
    names: Option<PathBuf>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
    /// GGUF model of both dumps: with it both are audited
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let candidate = dump::open(&args.candidate, args.names.as_deref())?;
    let reference = dump::open(&args.reference, None)?;
    let selection = args.select.selection()?;
    let both: BTreeSet<Checkpoint> = candidate.checkpoints().chain(reference.checkpoints()).collect();
    let n_layers = both.iter().filter_map(|c| c.layer_index()).max().map_or(0, |last| last as usize + 1);
    let wanted: Vec<Checkpoint> = both.into_iter().filter(|c| selection.wants(*c, n_layers)).collect();
    let details = match &folder {
        Some(_) => wanted.iter().filter_map(|c| detail(*c, &candidate, &reference, GRID)).collect(),
        None => Vec::new(),
    };
    let comparisons = compare::recordings(&candidate, &reference, &wanted, &args.tolerance.tolerances()?);
    let audits = audits(args, &candidate, &reference, &comparisons)?;
    let mut notes = notes(&candidate, &reference)?;
    notes.extend(audits.iter().flat_map(Audits::notes));
    let mut report = findings::assemble(Parts {
        judged: audits.as_ref().map(|audits| evidence::judged(&comparisons, audits)).unwrap_or_default(),
        comparisons,
        tokens: compare::tokens(&candidate, &reference),
        notes,
        rows_audited: audits.map(|audits| audits.rows_audited()),
        candidate: findings::side(&candidate, shown(&args.candidate)),
        reference: Some(findings::side(&reference, shown(&args.reference))),
        allow_missing: args.select.allow_missing,
        ..Parts::default()
    });
    report.details = details;
    args.output.deliver(folder, report)
}

/// Audits both sides, where the model is given: at a sample of the common rows, and at rows that stand out.
fn audits(
    args: &Args,
    candidate: &Dump,
    reference: &Dump,
    comparisons: &[Comparison],
) -> Result<Option<Audits>> {
    let (Some(path), Some(rows)) = (&args.model, args.audit.rows()) else { return Ok(None) };
    let model = Model::open(path)?;
    let mut positions: BTreeSet<u32> = rows.positions(&candidate.manifest().steps).into_iter().collect();
    let common = compare::common_positions(Recording::tokens(candidate), Recording::tokens(reference));
    positions.retain(|position| *position < common);
    positions.extend(evidence::outliers(comparisons, &positions));
    let positions: Vec<u32> = positions.into_iter().collect();
    let wanted: BTreeSet<Checkpoint> = comparisons.iter().map(|comparison| comparison.checkpoint).collect();
    let options = Options { positions: &positions, wants: &|checkpoint| wanted.contains(&checkpoint) };
    audit(&[candidate, reference], &model.gguf, &model.graph, &options).map(Some)
}

fn shown(path: &Path) -> Option<String> {
    Some(path.display().to_string())
}

/// What a reader must know of the two dumps.
fn notes(candidate: &Dump, reference: &Dump) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for (side, dump) in [("candidate", candidate), ("reference", reference)] {
        if !dump.manifest().complete {
            notes.push(format!("the {side} is an interrupted recording; what is whole in it is compared"));
        }
    }
    let (ours, theirs) = (Recording::tokens(candidate), Recording::tokens(reference));
    let common = compare::common_positions(ours, theirs) as usize;
    if common < ours.len().min(theirs.len()) {
        notes.push(format!(
            "the tokens differ from position {common} on ({} in the candidate, {} in the reference); only what \
             stands before is compared",
            ours[common], theirs[common]
        ));
    }
    Ok(notes)
}
