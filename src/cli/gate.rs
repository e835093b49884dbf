//! `parity gate`: a suite of cases against their baseline, for CI.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;

use super::output::print;
use super::progress::Progress;
use super::shared::at_least_one;
use super::{Outcome, exit_code};
use crate::error::{Error, Result};
use crate::gate::baseline::Baseline;
use crate::gate::execute::Engine;
use crate::gate::judge::Against;
use crate::gate::schedule::{self, Pace, Shard};
use crate::gate::suite::Suite;
use crate::gate::times::{self, Times};
use crate::gate::{CaseResult, GateReport, ProblemKind, Status, merge, missing, read, render};
#[cfg(feature = "history")]
use crate::history::{self, History};
use crate::report::files::{Folder, timestamp};
use crate::report::{Report, Verdict, github};
use crate::text::tell;

/// Exit code that `git bisect run` takes for "this revision cannot be tested".
const BISECT_SKIP: u8 = 125;

const EXAMPLES: &str = "\
Examples:
  parity gate suites/shipped.toml --report out
  parity gate suite.toml --accept
  parity gate suite.toml --shard 2/5 --report shard-2
  parity gate merge shard-*/gate.json --report out";

/// Flags of `parity gate`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<GateCommand>,
    /// Suite: a TOML file (docs/ci.md)
    #[arg(required = true)]
    suite: Option<PathBuf>,
    /// Also write the results into this folder: gate.json, junit.xml, report.sarif, summary.md, and a report of each case that fails
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Add this run to the baseline; refused if a case fails
    #[arg(long)]
    accept: bool,
    /// Compare with this baseline instead of the suite's, and name the checkpoints that changed
    #[arg(long, value_name = "BASELINE", conflicts_with = "accept")]
    since: Option<PathBuf>,
    /// Run one part of the suite: 2/5 is the second of five
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Cut shards so that they take equally long: times.json of earlier runs, or the folders that hold it
    ///
    /// Every shard must be given the same times. A case that is new counts as the mean of the others.
    #[arg(long, value_name = "FILE", requires = "shard")]
    times: Vec<PathBuf>,
    /// Append what was measured to this history, for `parity history`
    ///
    /// An SQLite file, made where there is none. The commit is what PARITY_COMMIT, GITHUB_SHA, CI_COMMIT_SHA or git say, the
    /// machine what PARITY_MACHINE or its host name.
    #[cfg(feature = "history")]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// Run only the cases whose names match; may be repeated
    #[arg(long, value_name = "GLOB", conflicts_with = "accept")]
    case: Vec<String>,
    /// Cases at a time
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = at_least_one())]
    jobs: usize,
    /// Retry a case that does not pass up to N times; retries are shown
    #[arg(long, value_name = "N", default_value_t = 0)]
    retries: u32,
    /// Exit with 125 if the suite could not be judged, as `git bisect run` needs
    #[arg(long)]
    bisect: bool,
}

#[derive(Subcommand)]
enum GateCommand {
    /// Put the results of shards together.
    Merge(MergeArgs),
}

#[derive(clap::Args)]
struct MergeArgs {
    /// gate.json files, or the folders that hold them
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// Folder for the merged results
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Append the merged results to this history
    #[cfg(feature = "history")]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    match (&args.command, &args.suite) {
        (Some(GateCommand::Merge(args)), _) => merge_results(args),
        (None, Some(suite)) => run(args, suite),
        (None, None) => Err(Error::new("parity gate", "no suite is given").expected("a TOML file")),
    }
}

fn merge_results(args: &MergeArgs) -> Outcome {
    let folder = args.report.as_deref().map(Folder::create).transpose()?;
    let parts = args.results.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let mut merged = merge(parts)?;
    let mut times = Times::default();
    for path in &args.results {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        if folder.join(times::FILE).is_file() {
            times.extend(Times::read(&folder.join(times::FILE))?);
        }
    }
    merged.cases.iter_mut().for_each(|case| case.seconds = times.seconds(&case.id));
    deliver(&merged, folder.as_ref())?;
    #[cfg(feature = "history")]
    remember(args.history.as_deref(), &merged)?;
    Ok(exit_code(merged.verdict()))
}

fn run(args: &Args, path: &Path) -> Outcome {
    let folder = args.report.as_deref().map(Folder::create).transpose()?;
    let mut suite = Suite::read(path)?;
    let known: BTreeSet<String> = suite.ids().collect();
    suite.only(&args.case)?;
    if args.accept && (args.shard.is_some() || suite.baseline.is_none()) {
        return Err(Error::new("--accept", "there is no whole baseline to write")
            .expected("a suite with `baseline = \"FILE\"`, run without --shard"));
    }
    let file = args.since.as_ref().or(suite.baseline.as_ref());
    if let Some(since) = args.since.as_ref().filter(|path| !path.exists()) {
        return Err(Error::file(since, "there is no such baseline"));
    }
    let mut baseline = file.map(|path| Baseline::read(path)).transpose()?;
    let now = timestamp();
    let today = &now[..10];
    let progress = Progress::new("cases");
    let done = std::sync::atomic::AtomicUsize::new(0);
    let total = suite.n_cases();
    let watch = |result: &CaseResult, report: Option<&Report>| {
        let n = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        progress.set(n, total);
        if let (Some(folder), Some(report)) = (&folder, report) {
            keep(folder, result, report, &now);
        }
    };
    let against = Against { today, baseline: baseline.as_ref(), accepting: args.accept };
    let mut times = Times::default();
    args.times.iter().try_for_each(|path| Times::read(path).map(|read| times.extend(read)))?;
    // What cannot be written to is known before the work begins.
    #[cfg(feature = "history")]
    args.history.as_deref().map(History::append_to).transpose()?;
    let plan =
        Pace { shard: args.shard, times, jobs: args.jobs, retries: args.retries, pictures: folder.is_some() };
    let mut report = schedule::run(&suite, &Engine::default(), &against, &plan, &watch);
    drop(progress);
    // Whatever part of the suite was run: a case that nobody runs any more is no regression that nobody sees.
    let lost = baseline.iter().flat_map(|baseline| baseline.cases.keys()).filter(|id| !known.contains(*id));
    report.cases.extend(lost.filter(|_| !args.accept).map(|id| missing(id)));
    report.created = Some(now.clone());
    if !args.case.is_empty() {
        // A part of the suite: whether a waiver is still needed is for the whole to say.
        report.shard = report.shard.or_else(|| Some(args.case.join(" ")));
    }
    for case in
        report.cases.iter_mut().filter(|case| !matches!(case.status, Status::Passed | Status::Allowed))
    {
        case.next = Some(if is_for_the_baseline(case) {
            format!("parity gate {} --accept", path.display())
        } else {
            format!("parity gate {} --case '{}' --report out", path.display(), case.id)
        });
    }
    deliver(&report, folder.as_ref())?;
    #[cfg(feature = "history")]
    remember(args.history.as_deref(), &report)?;
    if args.accept {
        accept(&report, &suite, baseline.as_mut(), today)?;
    }
    Ok(match report.verdict() {
        Verdict::Undecided if args.bisect => ExitCode::from(BISECT_SKIP),
        verdict => exit_code(verdict),
    })
}

/// Appends a run to a history.
#[cfg(feature = "history")]
fn remember(history: Option<&Path>, report: &GateReport) -> Result<()> {
    let Some(path) = history else { return Ok(()) };
    let mut report = report.clone();
    report.created.get_or_insert_with(timestamp);
    History::append_to(path)?.append(&report, history::commit().as_deref(), &history::machine())
}

/// Whether nothing stands in the way but an entry that the baseline lacks, or has too many.
fn is_for_the_baseline(case: &CaseResult) -> bool {
    let of_baseline = |kind| matches!(kind, ProblemKind::MissingBaseline | ProblemKind::MissingCase);
    !case.problems.is_empty() && case.problems.iter().all(|problem| of_baseline(problem.kind))
}

/// Keeps the report of a case that does not pass. A case's result must not be lost to a full disk.
fn keep(folder: &Folder, result: &CaseResult, report: &Report, now: &str) {
    if !matches!(result.status, Status::Failed | Status::Undecided) {
        return;
    }
    let name = folder_name(&result.id);
    let mut report = report.clone();
    report.created = Some(now.to_owned());
    let written = Folder::create(&folder.path().join("cases").join(name)).and_then(|f| f.write(&report));
    if let Err(error) = written {
        tell(format_args!("warning: {error}"));
    }
}

/// A case's name as one folder's: what is neither a letter, a digit, `-`, `_` nor an inner `.` is spelt `%2f`, so
/// that no two cases share a folder.
fn folder_name(id: &str) -> String {
    let mut name = String::new();
    for (index, c) in id.char_indices() {
        if c.is_alphanumeric() || "-_".contains(c) || (c == '.' && index > 0) {
            name.push(c);
        } else {
            let mut bytes = [0; 4];
            c.encode_utf8(&mut bytes).bytes().for_each(|byte| name += &format!("%{byte:02x}"));
        }
    }
    name
}

fn deliver(report: &GateReport, folder: Option<&Folder>) -> Result<()> {
    if let Some(folder) = folder {
        folder.write_file("gate.json", &render::json(report)?)?;
        folder.write_file("junit.xml", &render::junit(report)?)?;
        folder.write_file("report.sarif", &render::sarif(report)?)?;
        folder.write_file("summary.md", &render::markdown(report))?;
        let times = Times::of(report);
        if !times.is_empty() {
            folder.write_file(times::FILE, &times.render()?)?;
        }
    }
    if github::is_active() {
        tell(render::annotations(report).trim_end());
    }
    print(&render::text(report))
}

/// Writes the baseline, unless a case fails: a failing run never becomes what later runs are compared with.
fn accept(report: &GateReport, suite: &Suite, baseline: Option<&mut Baseline>, today: &str) -> Result<()> {
    let (Some(baseline), Some(path)) = (baseline, &suite.baseline) else { return Ok(()) };
    if report.verdict() != Verdict::Parity {
        return Err(Error::file(path, "the baseline stays as it is: the suite does not pass")
            .hint("waive what may be worse, with a reason and a date, and run --accept again"));
    }
    for case in report.cases.iter().filter(|case| case.status == Status::Passed) {
        baseline.accept(&case.id, &case.measures, today);
    }
    // Cases that are no longer in the suite leave the baseline.
    baseline.cases.retain(|id, _| report.all.contains(id));
    let path = Folder::write_path(path, &baseline.render())?;
    tell(format_args!("baseline: {}", path.display()));
    Ok(())
}
