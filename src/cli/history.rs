//! `parity history`: since when something is worse, from what `parity gate --history` has written.

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use super::Outcome;
use super::output::print;
use super::shared::{Format, FormatArgs};
use crate::error::{Error, Result};
use crate::history::{History, Run, page, trend};
use crate::report::files::Folder;
use crate::report::json;
use crate::select::patterns;
use crate::text::tell;

/// Name and version of what `--json` prints.
const SCHEMA: &str = "parity-history/1";

const EXAMPLES: &str = "\
Examples:
  parity gate suite.toml --history history.sqlite
  parity history history.sqlite
  parity history history.sqlite --checkpoint 'blk.7.*' --html history.html";

/// Flags of `parity history`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// History: what `parity gate --history` wrote
    history: PathBuf,
    /// Only these suites; may be repeated
    #[arg(long, value_name = "GLOB")]
    suite: Vec<String>,
    /// Only cases whose names match; may be repeated
    #[arg(long, value_name = "GLOB")]
    case: Vec<String>,
    /// Only these checkpoints; may be repeated
    #[arg(long, value_name = "GLOB")]
    checkpoint: Vec<String>,
    /// Only runs on these machines; may be repeated
    #[arg(long, value_name = "GLOB")]
    machine: Vec<String>,
    /// Also write a page with the trends of every checkpoint
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    format: FormatArgs<Format>,
}

#[derive(Serialize)]
struct Found<'a> {
    schema: &'static str,
    runs: &'a [Run],
    worse: &'a [trend::Worse],
}

/// Runs the command. Exit code 0, also where something is worse: the gate is what fails.
pub fn main(args: &Args) -> Outcome {
    let history = History::read(&args.history)?;
    let fits = |flag: &str, globs: &[String]| -> Result<_> {
        let set = patterns(flag, globs)?;
        let all = globs.is_empty();
        Ok(move |text: &str| all || set.is_match(text))
    };
    let [suites, cases] = [fits("--suite", &args.suite)?, fits("--case", &args.case)?];
    let [checkpoints, machines] =
        [fits("--checkpoint", &args.checkpoint)?, fits("--machine", &args.machine)?];
    let mut runs = history.runs()?;
    runs.retain(|run| suites(&run.suite) && machines(&run.machine));
    // The KL of the tokens is of no checkpoint.
    let tokens = args.checkpoint.is_empty();
    let wanted = |case: &str, id: Option<&str>| cases(case) && id.map_or(tokens, &checkpoints);
    let mut series = history.series(wanted)?;
    series.retain(|series| suites(&series.suite) && machines(&series.machine));
    if series.is_empty() {
        return Err(Error::file(&args.history, "nothing in it is asked for")
            .expected("a run with measures that --suite, --case, --checkpoint and --machine let through")
            .found(format!("{} runs", history.runs()?.len())));
    }
    let worse = trend::worse(&runs, &series);
    if let Some(file) = &args.html {
        let title =
            args.history.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let page = page(&title, &runs, &series, &worse)?;
        let written = Folder::write_path(file, &page)?;
        tell(format_args!("page: {}", written.display()));
    }
    print(&match args.format.format() {
        Format::Table => trend::render(&runs, &worse),
        Format::Json => json::render(&Found { schema: SCHEMA, runs: &runs, worse: &worse })?,
    })?;
    Ok(ExitCode::SUCCESS)
}
