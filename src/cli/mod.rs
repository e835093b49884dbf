//! The commands: flags as they are typed, turned into options as they are meant. One file per command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Result;
use crate::report::Verdict;

mod audit;
mod bench;
mod diff;
mod diff_reports;
mod faults;
mod gate;
mod inspect;
mod output;
mod progress;
mod record;
mod record_builtin;
mod run;
mod shared;

/// Finds the first tensor where an LLM inference engine leaves llama.cpp, says whether that is rounding or
/// a bug, and names the bug.
#[derive(Parser)]
#[command(version, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 parity, 1 divergence, 2 could not judge.";

#[derive(Subcommand)]
enum Command {
    /// Run the instrumented engine on a prompt and hold it against llama.cpp, checkpoint by checkpoint.
    Run(run::Args),
    /// Run a llama.cpp program and record its tensors.
    Record(record::Args),
    /// Compare two dumps; with the model, audit both.
    Diff(diff::Args),
    /// One dump against exact arithmetic: which nodes are wrong, and by how much.
    Audit(audit::Args),
    /// How fast the instrumented engine is, traced or not, beside a llama.cpp.
    Bench(bench::Args),
    /// The mistakes that parity can name, and plant.
    Faults(faults::Args),
    /// Run a suite of cases against its baseline, for CI.
    Gate(gate::Args),
    /// Whether parity got better or worse between two reports.
    DiffReports(diff_reports::Args),
    /// What a GGUF file or a dump holds, and what looks wrong in it.
    Inspect(inspect::Args),
}

/// Parses the arguments, runs the command, and says how it went.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Run(args) => run::main(&args),
        Command::Record(args) => record::main(&args),
        Command::Diff(args) => diff::main(&args),
        Command::Audit(args) => audit::main(&args),
        Command::Bench(args) => bench::main(&args),
        Command::Faults(args) => faults::main(&args),
        Command::Gate(args) => gate::main(&args),
        Command::DiffReports(args) => diff_reports::main(&args),
        Command::Inspect(args) => inspect::main(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            exit_code(Verdict::Undecided)
        }
    }
}

/// The exit code of a report's verdict.
fn exit_code(verdict: Verdict) -> ExitCode {
    ExitCode::from(verdict.exit_code())
}

/// What every command returns.
type Outcome = Result<ExitCode>;
