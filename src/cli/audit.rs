//! `parity audit`: one dump against exact arithmetic.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::shared::{self, SelectArgs};
use crate::audit::{AuditRows, Options, audit};
use crate::compare::Comparison;
use crate::dump::{self, Recording};
use crate::evidence;
use crate::findings::{self, Parts};
use crate::model::Model;
use crate::report::Report;
use crate::select::Selection;

/// Flags of `parity audit`.
#[derive(clap::Args)]
pub struct Args {
    /// Dump that is judged: a folder, or one .safetensors file
    dump: PathBuf,
    /// GGUF model; the tiny Qwen2 that ships with parity where absent
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// JSON file that translates the dump's tensor names: {"model.norm": "final_norm"}
    #[arg(long, value_name = "FILE")]
    names: Option<PathBuf>,
    /// Token rows to compute again: all, or so many of them
    #[arg(long, value_name = "N", default_value_t)]
    audit_rows: AuditRows,
    /// Threads; all cores where absent
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    shared::set_threads(args.threads)?;
    let folder = args.output.folder()?;
    let recording = dump::open(&args.dump, args.names.as_deref())?;
    let model = shared::model(args.model.as_ref())?;
    let selection = args.select.selection()?;
    let mut report = report(&recording, &model, &selection, args.audit_rows)?;
    report.candidate.path = Some(args.dump.display().to_string());
    args.output.deliver(folder, report)
}

/// Audits one recording.
fn report(
    recording: &dyn Recording,
    model: &Model,
    selection: &Selection,
    rows: AuditRows,
) -> crate::error::Result<Report> {
    let n_layers = model.config.dims.layers;
    let wants = |checkpoint| selection.wants(checkpoint, n_layers);
    let positions = rows.positions(&recording.manifest().steps);
    let options = Options { positions: &positions, wants: &wants };
    let audits = audit(&[recording], &model.gguf, &model.graph, &options)?;
    let comparisons: Vec<Comparison> = model
        .graph
        .checkpoints()
        .filter(|checkpoint| wants(*checkpoint))
        .map(|checkpoint| Comparison::alone(checkpoint, recording.row_shape(checkpoint)))
        .collect();
    Ok(findings::assemble(Parts {
        judgement: evidence::weigh(model, &[recording], &comparisons, Some(&audits))?,
        comparisons,
        candidate: findings::side(recording, None),
        ..Parts::default()
    }))
}
