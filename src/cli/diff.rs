//! `parity diff`: two dumps held against each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{AuditArgs, SelectArgs, ToleranceArgs};
use crate::audit::{Options, audit};
use crate::checkpoint::Checkpoint;
use crate::compare::{self, Comparison};
use crate::dump::{self, Recording};
use crate::error::{Error, Result};
use crate::evidence;
use crate::faults::tokens::{self, Vocabulary};
use crate::findings::{self, Judgement, Parts};
use crate::model::{Model, spelt};
use crate::record::import::is_partial;
use crate::recorded;
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
    if is_partial(&candidate) {
        let path = args.candidate.display();
        return Err(Error::file(&args.candidate, "holds printed values, which can be a reference only")
            .expected("a whole dump first, printed values second")
            .hint(format!("parity diff DUMP {path}, or parity run -m MODEL --reference {path}")));
    }
    let model = match args.model.as_deref().map(|path| recorded::open(path, &reference)).transpose()? {
        Some(Err(foreign)) => {
            let sides = recorded::Sides { candidate: &candidate, reference: &reference };
            let (selection, tolerances) = (args.select.selection()?, args.tolerance.tolerances()?);
            let report =
                recorded::diff(&sides, &foreign, &selection, &tolerances, args.select.allow_missing)?;
            return args.output.deliver(folder, report);
        }
        Some(Ok(model)) => Some(model),
        None => None,
    };
    if let Some(model) = &model {
        model.refuse_other(&args.candidate, &candidate.manifest().model)?;
        model.refuse_other(&args.reference, &reference.manifest().model)?;
    }
    let wanted = wanted(args, &candidate, &reference, model.as_ref())?;
    let details = match &folder {
        Some(_) => wanted.iter().filter_map(|c| detail(*c, &candidate, &reference, GRID)).collect(),
        None => Vec::new(),
    };
    let comparisons = compare::recordings(&candidate, &reference, &wanted, &args.tolerance.tolerances()?);
    let judgement = match &model {
        Some(model) => judge(args, model, &candidate, &reference, &comparisons)?,
        None => Judgement::default(),
    };
    let mut report = findings::assemble(Parts {
        judgement,
        comparisons,
        tokens: compare::tokens(&candidate, &reference),
        notes: notes(&candidate, &reference, model.as_ref())?,
        candidate: findings::side(&candidate, shown(&args.candidate)),
        reference: Some(findings::side(&reference, shown(&args.reference))),
        allow_missing: args.select.allow_missing,
    });
    report.details = details;
    args.output.deliver(folder, report)
}

/// The selected checkpoints of either dump, and of the model where it is given.
fn wanted(args: &Args, candidate: &Dump, reference: &Dump, model: Option<&Model>) -> Result<Vec<Checkpoint>> {
    let selection = args.select.selection()?;
    let mut all: BTreeSet<Checkpoint> = candidate.checkpoints().chain(reference.checkpoints()).collect();
    all.extend(candidate.seen_checkpoints().chain(reference.seen_checkpoints()));
    all.extend(model.iter().flat_map(|model| model.graph.checkpoints()));
    let n_layers = all.iter().filter_map(|c| c.layer_index()).max().map_or(0, |last| last as usize + 1);
    Ok(all.into_iter().filter(|c| selection.wants(*c, n_layers)).collect())
}

/// Audits both sides, unless told not to: at a sample of the common rows, and at rows that stand out.
fn judge(
    args: &Args,
    model: &Model,
    candidate: &Dump,
    reference: &Dump,
    comparisons: &[Comparison],
) -> Result<Judgement> {
    let Some(rows) = args.audit.rows() else { return Ok(Judgement::default()) };
    let mut positions: BTreeSet<u32> = rows.positions(&candidate.manifest().steps).into_iter().collect();
    let common = compare::common_positions(Recording::tokens(candidate), Recording::tokens(reference));
    positions.retain(|position| *position < common);
    positions.extend(evidence::outliers(comparisons, &positions).into_values());
    let positions: Vec<u32> = positions.into_iter().collect();
    let wanted: BTreeSet<Checkpoint> = comparisons.iter().map(|comparison| comparison.checkpoint).collect();
    let options =
        Options { positions: &positions, wants: &|checkpoint| wanted.contains(&checkpoint), isolated: false };
    let sides: &[&dyn Recording] = if is_partial(reference) { &[candidate] } else { &[candidate, reference] };
    let audits = audit(sides, &model.gguf, &model.graph, &options)?;
    evidence::weigh(model, sides, comparisons, Some(&audits))
}

fn shown(path: &Path) -> Option<String> {
    Some(path.display().to_string())
}

/// What a reader must know of the two dumps.
fn notes(candidate: &Dump, reference: &Dump, model: Option<&Model>) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for (side, dump) in [("candidate", candidate), ("reference", reference)] {
        if !dump.manifest().complete {
            notes.push(format!("the {side} is an interrupted recording; what is whole in it is compared"));
        }
        notes.extend(dump::names_not_understood(dump, side));
    }
    let [ours, theirs] = [candidate, reference].map(|dump| &dump.manifest().model);
    if ours.fingerprint.as_ref().zip(theirs.fingerprint.as_ref()).is_some_and(|(a, b)| a != b) {
        notes.push(format!(
            "the dumps are of two models, whose weights differ too: {} and {}",
            spelt(ours),
            spelt(theirs)
        ));
    }
    let (ours, theirs) = (Recording::tokens(candidate), Recording::tokens(reference));
    let common = compare::common_positions(ours, theirs) as usize;
    if common < ours.len().min(theirs.len()) {
        notes.push(format!("only the {common} tokens that both sides have in common are compared"));
        match model {
            Some(model) => notes.extend(tokens::said(ours, theirs, &model.gguf)),
            None => notes.extend(tokens::sentences(tokens::diagnose(ours, theirs, Vocabulary::default()))),
        }
    }
    Ok(notes)
}
