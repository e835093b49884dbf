//! Where a report goes: standard output in one format, and a folder in all of them.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::shared::{FormatArgs, HasJson};
use super::{Outcome, exit_code};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::references::quoted;
use crate::report::files::{Folder, timestamp};
use crate::report::table::Terminal;
use crate::report::{Report, github, json, markdown, table, words};
use crate::text::{tell, without_commands};

/// How a report is shown and kept.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    #[command(flatten)]
    format: FormatArgs<ReportFormat>,
    /// Also write a report into this folder
    ///
    /// report.html for people, report.json, report.csv, junit.xml, report.sarif and summary.md (docs/report.md).
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Leave the prompt and tokens' text out of reports and dumps
    #[arg(long, hide_short_help = true)]
    no_text: bool,
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

impl HasJson for ReportFormat {
    const JSON: ReportFormat = ReportFormat::Json;
}

impl OutputArgs {
    /// Whether texts are left out.
    pub fn no_text(&self) -> bool {
        self.no_text
    }

    /// The folder for reports, tried before the work begins.
    pub fn folder(&self) -> Result<Option<Folder>> {
        self.report.as_deref().map(Folder::create).transpose()
    }

    /// Shows and keeps a report; the exit code is that of its verdict.
    pub fn deliver(&self, folder: Option<Folder>, report: Report) -> Outcome {
        let report = self.finished(report);
        if let Some(folder) = &folder {
            keep(folder, &report)?;
        }
        let text = match self.format.format() {
            ReportFormat::Table => table::render(&report, &Terminal::of_stdout()),
            ReportFormat::Json => json::render(&report)?,
            ReportFormat::Markdown => markdown::render(&report),
        };
        print(&text)?;
        Ok(exit_code(report.verdict))
    }

    /// Shows and keeps reports of several pairs, by name: `whole` makes one document of them, each pair has one line for
    /// people, and a folder of its own below the one for reports.
    pub fn deliver_all<T: Serialize>(
        &self,
        folder: Option<Folder>,
        reports: Vec<(String, Report)>,
        whole: impl FnOnce(Vec<Report>) -> T,
    ) -> Result<()> {
        let reports: Vec<(String, Report)> =
            reports.into_iter().map(|(name, report)| (name, self.finished(report))).collect();
        for (name, report) in reports.iter().filter(|_| folder.is_some()) {
            let below =
                folder.as_ref().map(|folder| Folder::create(&folder.path().join(name))).transpose()?;
            below.iter().try_for_each(|below| keep(below, report))?;
        }
        let text = match self.format.format() {
            ReportFormat::Json => {
                json::render(&whole(reports.into_iter().map(|(_, report)| report).collect()))?
            }
            ReportFormat::Markdown => {
                reports.iter().map(|(_, report)| markdown::render(report)).collect::<Vec<_>>().join("\n")
            }
            ReportFormat::Table => reports.iter().map(|(name, report)| line(name, report)).collect(),
        };
        print(&text)
    }
}

/// `b2   PARITY: 75 checkpoints within what rounding explains`, and the sentences of its answer.
fn line(name: &str, report: &Report) -> String {
    let answer = words::answer(report);
    let sentences = report.answer.first().map(|first| format!("; {first}")).unwrap_or_default();
    format!("{name:<4} {answer}: {}{sentences}\n", words::because(report))
}

/// Leaves out what tells the text: of tokens, and the commands that had it in them.
fn without_text(report: &mut Report) {
    report.tokens.iter_mut().flat_map(|tokens| &mut tokens.top).for_each(|token| token.text = None);
    let sides = [Some(&mut report.candidate), report.reference.as_mut()];
    for side in sides.into_iter().flatten() {
        side.provenance.remove("command");
    }
    report.next.clear();
}

/// Writes a report into a folder, and says where.
fn keep(folder: &Folder, report: &Report) -> Result<()> {
    folder.write(report)?;
    tell(format_args!("report: {}", folder.path().join("report.html").display()));
    Ok(())
}

impl OutputArgs {
    /// A report with what is known of it at its end.
    fn finished(&self, mut report: Report) -> Report {
        report.created = Some(timestamp());
        report.command = Some(command_line(&[])).filter(|_| !self.no_text);
        if let Some(first) = &mut report.first_divergence {
            first.reproduce = Some(reproduce(first.checkpoint)).filter(|_| !self.no_text);
        }
        if self.no_text {
            without_text(&mut report);
        }
        if github::is_active() {
            tell(github::render(&report, "parity").trim_end());
        }
        report
    }

    /// Shows what is no report of a comparison: as `text`, or as it is for programs.
    pub fn show(&self, value: &impl Serialize, text: impl FnOnce(&Terminal) -> String) -> Result<()> {
        print(&match self.format.format() {
            ReportFormat::Json => json::render(value)?,
            ReportFormat::Table | ReportFormat::Markdown => text(&Terminal::of_stdout()),
        })
    }
}

const DUMP: &str = "--dump";
const FORCE: &str = "--force";
const FORMAT: &str = "--format";
const JSON: &str = "--json";
/// What stands before the command of a program that parity runs.
const SEPARATOR: &str = "--";

/// The command line as it can be typed again, without the flags (each with a value) in `without`.
fn command_line(without: &[&str]) -> String {
    let mut words = vec!["parity".to_owned()];
    let mut args = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    while let Some(arg) = args.next() {
        // What follows is another program's.
        if arg == SEPARATOR {
            words.push(arg);
            words.extend(args.by_ref().map(|arg| quoted(&arg)));
            break;
        }
        let flag = arg.split_once('=').map_or(arg.as_str(), |(flag, _)| flag);
        if flag == JSON && without.contains(&FORMAT) || flag == FORCE && without.contains(&DUMP) {
            // A flag without a value: of a dump that is not written again, or another way to say a format.
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
    let rest = command_line(&["--layer", "--checkpoint", "--report", FORMAT, DUMP]);
    // Before the command of another program, where there is one.
    let (own, program) = match rest.split_once(&format!(" {SEPARATOR} ")) {
        Some((own, program)) => (own.to_owned(), format!(" {SEPARATOR} {program}")),
        None => (rest, String::new()),
    };
    format!("{own}{layer} --checkpoint {checkpoint}{program}")
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
