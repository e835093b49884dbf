//! Where a report goes: standard output in one format, and a folder in all of them.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Outcome, exit_code};
use crate::error::{Error, Result};
use crate::report::files::{Folder, timestamp};
use crate::report::table::Layout;
use crate::report::{Report, github, json, markdown, table};

/// How a report is shown and kept.
#[derive(Args)]
pub struct OutputArgs {
    /// What standard output carries
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Folder for the report in every format: JSON, CSV, HTML, JUnit, Markdown
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
    /// The folder for reports, tried before the work begins.
    pub fn folder(&self) -> Result<Option<Folder>> {
        self.report.as_deref().map(Folder::create).transpose()
    }

    /// Shows and keeps a report; the exit code is that of its verdict.
    pub fn deliver(&self, folder: Option<Folder>, mut report: Report) -> Outcome {
        report.created = Some(timestamp());
        report.command = Some(command_line());
        if let Some(folder) = &folder {
            folder.write(&report)?;
            eprintln!("report: {}", folder.path().join("report.html").display());
        }
        if github::is_active() {
            eprint!("{}", github::render(&report, "parity"));
        }
        let text = match self.format {
            Format::Table => table::render(&report, &Layout::of_stdout()),
            Format::Json => json::render(&report)?,
            Format::Markdown => markdown::render(&report),
        };
        print(&text)?;
        Ok(exit_code(report.verdict))
    }
}

/// The command line as it can be typed again.
fn command_line() -> String {
    let quote = |arg: String| {
        let plain = |c: char| c.is_alphanumeric() || "-_./:=,@+%".contains(c);
        if !arg.is_empty() && arg.chars().all(plain) {
            arg
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    let args = std::env::args_os().skip(1).map(|arg| quote(arg.to_string_lossy().into_owned()));
    std::iter::once("parity".to_owned()).chain(args).collect::<Vec<_>>().join(" ")
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::new("standard output", format!("cannot be written: {e}"))),
    }
}
