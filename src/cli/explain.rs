//! `parity explain`: one checkpoint of a model or of a report, in sentences.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use super::output::print;
use super::shared::ModelArgs;
use crate::error::Error;
use crate::jobs::explain::{Place, explain, of_graph};
use crate::report::json;
use crate::report::words::wrap;
use crate::text::printable_lines;

const EXAMPLES: &str = "\
Examples:
  parity explain blk.2.q_rope
  parity explain blk.0.ffn_moe_out --of recording
  parity run -p \"def read_lines(path):\" --inject rope.base=10000@2 --report out
  parity explain blk.2.q_rope --in out";

/// Flags of `parity explain`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Checkpoint, e.g. blk.2.q_rope [default: the first divergence of the report]
    checkpoint: Option<String>,
    /// What --report DIR wrote: the folder, or its report.json
    ///
    /// Without it, `report` is read where it is there; else what the node computes is told of the model alone.
    #[arg(long = "in", value_name = "REPORT", conflicts_with = "of")]
    report: Option<PathBuf>,
    /// A recording whose own graph has the node
    #[arg(long, value_name = "DUMP")]
    of: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

/// Columns of the text.
const WIDTH: usize = 100;
/// The report that is read where none is named.
const REPORT: &str = "report";

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let place = Place { model: args.model.path()?, recording: args.of.clone() };
    let named = place.model.is_some() || place.recording.is_some();
    let usual = || Some(PathBuf::from(REPORT)).filter(|path| !named && path.exists());
    let paragraphs = match (&args.checkpoint, args.report.clone().or_else(usual)) {
        (Some(checkpoint), None) => of_graph(&place, checkpoint)?,
        (checkpoint, path) => {
            let path = path.unwrap_or_else(|| PathBuf::from(REPORT));
            let report = json::read(&path)?;
            let first = report.first_divergence.as_ref().map(|first| first.checkpoint.to_string());
            let checkpoint = checkpoint.clone().or(first).ok_or_else(|| {
                Error::file(&path, "has no divergence to explain")
                    .hint("parity explain CHECKPOINT --in REPORT")
            })?;
            explain(&report, &place, &checkpoint)?
        }
    };
    let wrapped: Vec<String> =
        paragraphs.iter().map(|text| wrap(&printable_lines(text), WIDTH).join("\n")).collect();
    print(&(wrapped.join("\n\n") + "\n"))?;
    Ok(ExitCode::SUCCESS)
}
