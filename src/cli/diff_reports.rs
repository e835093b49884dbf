//! `parity diff-reports`: did parity get better or worse between two reports?

use std::path::PathBuf;

use super::output::print;
use super::shared::{Format, FormatArgs};
use super::{Outcome, exit_code};
use crate::error::{Error, Result};
use crate::report::diff::{diff, render};
use crate::report::{Report, Verdict, json};
use crate::select::patterns;

const EXAMPLES: &str = "\
Examples:
  parity diff-reports yesterday today
  parity diff-reports old/report.json new/report.json --allow 'blk.*.ffn_out'";

/// Flags of `parity diff-reports`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Earlier report: report.json, or its folder
    old: PathBuf,
    /// Later report
    new: PathBuf,
    /// Checkpoints that may change; may be repeated
    #[arg(long, value_name = "GLOB")]
    allow: Vec<String>,
    #[command(flatten)]
    format: FormatArgs<Format>,
}

/// Runs the command: exit code 0 where nothing got worse, 1 where something did, 2 where the two reports have
/// nothing in common.
pub fn main(args: &Args) -> Outcome {
    let (old, new) = (json::read(&args.old)?, json::read(&args.new)?);
    comparable(&old, &new)?;
    let found = diff(&old, &new, &patterns("--allow", &args.allow)?);
    let text = match args.format.format() {
        Format::Table => render(&found),
        Format::Json => {
            serde_json::to_string_pretty(&found).map_err(|e| Error::new("standard output", e))? + "\n"
        }
    };
    print(&text)?;
    Ok(exit_code(if found.worse { Verdict::Divergence } else { Verdict::Parity }))
}

fn comparable(old: &Report, new: &Report) -> Result<()> {
    let (before, after) = (&old.candidate.model, &new.candidate.model);
    if before.fingerprint.is_some() && after.fingerprint.is_some() && before.fingerprint != after.fingerprint
    {
        let name =
            |model: &parity_dump::ModelInfo| model.file.clone().or(model.name.clone()).unwrap_or_default();
        return Err(Error::new("parity diff-reports", "the reports are of different models")
            .expected(name(before))
            .found(name(after)));
    }
    let common = old.checkpoints.iter().any(|entry| new.checkpoints.iter().any(|other| other.id == entry.id));
    if !common {
        return Err(Error::new("parity diff-reports", "the reports have no checkpoint in common"));
    }
    Ok(())
}
