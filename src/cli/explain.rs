//! `parity explain`: one checkpoint of a report, in sentences.

use std::path::PathBuf;
use std::process::ExitCode;

use super::Outcome;
use super::output::print;
use crate::error::Error;
use crate::jobs::explain::explain;
use crate::report::json;
use crate::report::words::wrap;
use crate::text::printable_lines;

const EXAMPLES: &str = "\
Examples:
  parity run -p \"def read_lines(path):\" --inject rope.base=10000@2 --report out
  parity explain blk.2.q_rope --in out";

/// Flags of `parity explain`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Checkpoint, e.g. blk.2.q_rope [default: the first divergence]
    checkpoint: Option<String>,
    /// What --report DIR wrote: the folder, or its report.json
    #[arg(long = "in", value_name = "REPORT", default_value = "report")]
    report: PathBuf,
}

/// Columns of the text.
const WIDTH: usize = 100;

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let report = json::read(&args.report)?;
    let checkpoint = match (&args.checkpoint, &report.first_divergence) {
        (Some(name), _) => name.clone(),
        (None, Some(first)) => first.checkpoint.to_string(),
        (None, None) => {
            return Err(Error::file(&args.report, "has no divergence to explain")
                .hint("parity explain CHECKPOINT --in REPORT"));
        }
    };
    let paragraphs = explain(&report, &checkpoint)?;
    let wrapped: Vec<String> =
        paragraphs.iter().map(|text| wrap(&printable_lines(text), WIDTH).join("\n")).collect();
    print(&(wrapped.join("\n\n") + "\n"))?;
    Ok(ExitCode::SUCCESS)
}
