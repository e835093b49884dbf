//! `parity doctor`: what is here, and what to install for what is not.

use std::ffi::OsString;
use std::process::ExitCode;

use super::Outcome;
use super::output::print;
use super::shared::{Format, FormatArgs};
use crate::jobs::doctor::{Finding, examine, examine_program};
use crate::report::json;
use crate::report::words::wrap;
use crate::text::printable;

/// Flags of `parity doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Say which way of recording fits this program
    #[arg(value_name = "PROGRAM")]
    program: Option<OsString>,

    #[command(flatten)]
    format: FormatArgs<Format>,
}

/// Runs the command. What is not here is the answer, not a failure.
pub fn main(args: &Args) -> Outcome {
    let findings = match &args.program {
        Some(program) => examine_program(program)?,
        None => examine(),
    };
    print(&match args.format.format() {
        Format::Table => text(&findings),
        Format::Json => json::render(&findings)?,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Columns of the text.
const WIDTH: usize = 80;
/// Columns of the names.
const NAMES: usize = 31;

fn text(findings: &[Finding]) -> String {
    let mut out = String::new();
    for finding in findings {
        let mark = if finding.here { "ok" } else { "--" };
        let mut lines = wrap(&printable(&finding.found), WIDTH - NAMES);
        lines.extend(finding.advice.iter().flat_map(|advice| wrap(advice, WIDTH - NAMES)));
        for (index, line) in lines.iter().enumerate() {
            let head = if index == 0 { format!("{mark} {}", finding.what) } else { String::new() };
            out += &format!("{head:<NAMES$}{line}\n");
        }
    }
    out
}
