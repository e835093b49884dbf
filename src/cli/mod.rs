//! The commands: flags as they are typed, turned into options as they are meant. One file per command.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Result;
use crate::inspect::against::{RENDER_TEMPLATE, render_template};
use crate::report::Verdict;
use crate::text::tell;

mod ab;
mod audit;
mod bench;
mod diff;
mod diff_reports;
mod doctor;
mod explain;
mod faults;
mod gate;
mod guess;
#[cfg(feature = "history")]
mod history;
mod inspect;
mod manual;
mod map;
mod output;
mod port;
mod progress;
mod record;
mod record_builtin;
#[cfg(feature = "remote")]
mod remote;
mod rpc;
mod run;
mod shared;
mod testcase;
mod threads;

/// Finds the first tensor where an LLM inference engine leaves llama.cpp, says whether that is rounding or a bug, and
/// names the bug.
#[derive(Parser)]
#[command(version, max_term_width = 100, after_help = BEGIN)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const BEGIN: &str = "\
Begin with (no GPU, no llama.cpp and no download needed):
  parity run -p \"def read_lines(path):\"
  parity run -p \"def read_lines(path):\" --inject rope.base=10000@2
  parity doctor

Your engine: docs/your-engine.md. Flags of a command: parity COMMAND -h
Exit codes: 0 parity, 1 divergence, 2 could not judge.";

#[derive(Subcommand)]
enum Command {
    /// Run parity's own engine on a prompt, and compare every tensor with llama.cpp's.
    Run(run::Args),
    /// Run a llama.cpp program and record its tensors.
    Record(record::Args),
    /// Stand between a client and a ggml-rpc-server, and record what is computed
    RpcProxy(rpc::ProxyArgs),
    /// Compute for clients of ggml's RPC, op by op
    RpcServer(rpc::ServerArgs),
    /// Compare a llama.cpp program with itself: flags, devices, builds, or the same run again.
    Ab(ab::Args),
    /// Compare two dumps; with a model (-m), audit both.
    Diff(diff::Args),
    /// Recompute every node of a dump in f64, and say which are wrong.
    Audit(audit::Args),
    /// Measure the speed of parity's engine, with and without recording.
    Bench(bench::Args),
    /// List the faults that parity can name and inject.
    Faults(faults::Args),
    /// Find the mistake behind an output: text, tokens, logits or log-probabilities.
    Guess(guess::Args),
    /// Run a suite of cases, for CI.
    Gate(gate::Args),
    /// Say since when something is worse, from what gates measured.
    #[cfg(feature = "history")]
    History(history::Args),
    /// Say what got better or worse between two reports.
    DiffReports(diff_reports::Args),
    /// Show what a GGUF file or a dump holds, and what looks wrong in it.
    Inspect(inspect::Args),
    /// Find by values which tensor of a dump is which checkpoint.
    Map(map::Args),
    /// Compare a conversion with its original: config, tokens, weights, tensors.
    Port(port::Args),
    /// Put a dump where others can read it: s3://, https://, a folder.
    #[cfg(feature = "remote")]
    Push(remote::PushArgs),
    /// Fetch a dump, or some layers of it.
    #[cfg(feature = "remote")]
    Pull(remote::PullArgs),
    /// Explain a checkpoint of a report: what it computes, what was found, where to look.
    Explain(explain::Args),
    /// Make of a wrong node a test that upstream can run, and a file to replay.
    Testcase(testcase::Args),
    /// Show what is here (GPU, llama.cpp, models), and what to install.
    Doctor(doctor::Args),
    /// Print completions for a shell.
    Completions(manual::CompletionArgs),
    /// Write man pages into a folder.
    Man(manual::ManArgs),
    /// Render a chat template of another's, apart from everything else.
    #[command(hide = true, name = RENDER_TEMPLATE)]
    RenderTemplate,
}

impl Command {
    /// How many threads it is to use.
    fn threads(&self) -> Option<usize> {
        match self {
            Command::Run(args) => args.threads,
            Command::Ab(args) => args.threads,
            Command::Audit(args) => args.threads,
            Command::Bench(args) => args.threads,
            Command::Guess(args) => args.threads,
            Command::Map(args) => args.threads,
            _ => None,
        }
    }
}

/// Parses the arguments, runs the command, and says how it went.
pub fn main() -> ExitCode {
    // SAFETY: nothing has started a thread yet.
    let settings = unsafe { crate::settings::load() };
    let cli = Cli::parse_from(std::env::args_os().map(two_letters));
    let ready = settings.and_then(|()| threads::start(cli.command.threads()));
    let outcome = ready.and_then(|()| match cli.command {
        Command::Run(args) => run::main(&args),
        Command::Record(args) => record::main(&args),
        Command::RpcProxy(args) => rpc::proxy(&args),
        Command::RpcServer(args) => rpc::server(&args),
        Command::Ab(args) => ab::main(&args),
        Command::Diff(args) => diff::main(&args),
        Command::Audit(args) => audit::main(&args),
        Command::Bench(args) => bench::main(&args),
        Command::Faults(args) => faults::main(&args),
        Command::Guess(args) => guess::main(&args),
        Command::Gate(args) => gate::main(&args),
        #[cfg(feature = "history")]
        Command::History(args) => history::main(&args),
        Command::DiffReports(args) => diff_reports::main(&args),
        Command::Inspect(args) => inspect::main(&args),
        Command::Map(args) => map::main(&args),
        Command::Port(args) => port::main(&args),
        #[cfg(feature = "remote")]
        Command::Push(args) => remote::push(&args),
        #[cfg(feature = "remote")]
        Command::Pull(args) => remote::pull(&args),
        Command::Explain(args) => explain::main(&args),
        Command::Testcase(args) => testcase::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
        Command::RenderTemplate => render_template().map(|()| ExitCode::SUCCESS),
    });
    crate::remote::tidy();
    match outcome {
        Ok(code) => code,
        Err(error) => {
            tell(format_args!("error: {error}"));
            exit_code(Verdict::Undecided)
        }
    }
}

/// llama.cpp spells some flags with one dash and two letters.
fn two_letters(arg: OsString) -> OsString {
    if arg == "-hf" { OsString::from("--hf-repo") } else { arg }
}

/// The exit code of a report's verdict.
fn exit_code(verdict: Verdict) -> ExitCode {
    ExitCode::from(verdict.exit_code())
}

/// What every command returns.
type Outcome = Result<ExitCode>;
