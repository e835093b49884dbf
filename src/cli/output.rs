//! Where a report goes: standard output in one format, and a folder in all of them.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{Outcome, exit_code};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::references::quoted;
use crate::report::files::{Folder, timestamp};
use crate::report::table::Terminal;
use crate::report::{Report, github, json, markdown, table};
use crate::text::{tell, without_commands};

/// How a report is shown and kept.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Print a table, json or markdown
    #[arg(long, value_enum, default_value_t, hide_possible_values = true)]
    format: ReportFormat,
    /// Also write a report into this folder
    ///
    /// report.html for people, report.json, report.csv, junit.xml and summary.md (docs/report.md).
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum ReportFormat {
    /// Text for people
    #[default]
    Table,
    /// JSON for programs: docs/report.md
    Json,
    /// Markdown for a CI summary
    Markdown,
}

impl OutputArgs {
    /// The folder for reports, tried before the work begins.
    pub fn folder(&self) -> Result<Option<Folder>> {
        self.report.as_deref().map(Folder::create).transpose()
    }

    /// Shows and keeps a report; the exit code is that of its verdict.
    pub fn deliver(&self, folder: Option<Folder>, mut report: Report) -> Outcome {
        report.created = Some(timestamp());
        report.command = Some(command_line(&[]));
        if let Some(first) = &mut report.first_divergence {
            first.reproduce = Some(reproduce(first.checkpoint));
        }
        if let Some(folder) = &folder {
            folder.write(&report)?;
            tell(format_args!("report: {}", folder.path().join("report.html").display()));
        }
        if github::is_active() {
            tell(github::render(&report, "parity").trim_end());
        }
        let text = match self.format {
            ReportFormat::Table => table::render(&report, &Terminal::of_stdout()),
            ReportFormat::Json => json::render(&report)?,
            ReportFormat::Markdown => markdown::render(&report),
        };
        print(&text)?;
        Ok(exit_code(report.verdict))
    }
}

impl OutputArgs {
    /// Shows what is no report of a comparison: as `text`, or as it is for programs.
    pub fn show(&self, value: &impl Serialize, text: impl FnOnce(&Terminal) -> String) -> Result<()> {
        print(&match self.format {
            ReportFormat::Json => json::render(value)?,
            ReportFormat::Table | ReportFormat::Markdown => text(&Terminal::of_stdout()),
        })
    }
}

const DUMP: &str = "--dump";
const FORCE: &str = "--force";

/// The command line as it can be typed again, without the flags (each with a value) in `without`.
fn command_line(without: &[&str]) -> String {
    let mut words = vec!["parity".to_owned()];
    let mut args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        let flag = arg.split_once('=').map_or(arg.as_str(), |(flag, _)| flag);
        if flag == FORCE && without.contains(&DUMP) {
            // Says what may happen to a dump that is not written again.
        } else if !without.contains(&flag) {
            words.push(quoted(&arg));
        } else if flag == arg {
            args.next();
        }
    }
    words.join(" ")
}

/// The command that shows one checkpoint alone.
fn reproduce(checkpoint: Checkpoint) -> String {
    let layer = checkpoint.layer_index().map(|layer| format!(" --layer {layer}")).unwrap_or_default();
    let rest = command_line(&["--layer", "--checkpoint", "--report", "--format", DUMP]);
    format!("{rest}{layer} --checkpoint {checkpoint}")
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    let text = if github::is_active() { without_commands(text) } else { text.into() };
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::new("standard output", format!("cannot be written: {e}"))),
    }
}
