//! `parity audit`: one dump against exact arithmetic.

use std::path::PathBuf;

use super::output::OutputArgs;
use super::progress::{Progress, TimeArgs};
use super::shared::{self, ForeignArgs, LoraArgs, ModelArgs, SelectArgs};
use super::{Outcome, exit_code};
use crate::audit::AuditRows;
use crate::engine::fused::file::ModelFile;
use crate::foreign;
use crate::jobs::audit::{Options, audit, self_test};
use crate::jobs::logprobs;
use crate::numerics::Numerics;
use crate::references;
use crate::remote;
use crate::report::{self, Verdict};
use parity_dump::Dump;

const EXAMPLES: &str = "\
Examples:
  parity audit out -m model.gguf
  parity audit hooks.npz -m model.gguf --tokens 1,2,3 --names map.toml
  parity audit out -m model.gguf --self-test";

/// Flags of `parity audit`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Dump to judge: a folder, or any format in docs/dumps.md
    dump: PathBuf,
    /// Arithmetic of the dump's engine
    ///
    /// For example f32, or "bf16 storage=bf16 kv=bf16" (docs/dumps.md). It overrides what the dump declares. If
    /// neither declares it, parity infers it from the values.
    #[arg(long, value_name = "WORDS")]
    numerics: Option<Numerics>,
    /// Rows to recompute in f64: N, or all
    ///
    /// The other rows are screened, which is faster and sees less (docs/bounds.md).
    #[arg(long, value_name = "N", default_value_t)]
    audit_rows: AuditRows,
    /// Look at one sequence alone [default: all]
    ///
    /// By its id in llama.cpp; rows of the others are what it was computed beside.
    #[arg(long, value_name = "N")]
    sequence: Option<u32>,
    /// Say which mistakes the dump could hide
    ///
    /// Injects every known mistake at every node of the dump, one at a time, and says which ones an audit finds.
    #[arg(long)]
    self_test: bool,
    /// Threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    pub threads: Option<usize>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    foreign: ForeignArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    time: TimeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let waiting = args.time.start();
    let given = args.model.path()?;
    let dump = remote::local(&args.dump, &args.select.selection()?)?;
    if let Some(said) = foreign::logprobs::read(&dump)? {
        let (tokens, allow_missing) = (args.foreign.given_tokens(), args.select.allow_missing);
        let how = logprobs::Options { model: given, tokens, numerics: args.numerics, allow_missing };
        return args.output.deliver(folder, logprobs::judge(&said, None, &how)?);
    }
    let mut recording = shared::open_declared(&dump, &args.foreign.options(given.as_deref()), args.numerics)?;
    args.sequence.map_or(Ok(()), |sequence| recording.choose_sequence(sequence))?;
    let path = match given {
        Some(path) => path,
        None => references::model_of(&dump, &recording.manifest().model)?,
    };
    let file = args.lora.applied(ModelFile::open(&path)?)?;
    let options = Options {
        selection: args.select.selection()?,
        rows: args.audit_rows,
        allow_missing: args.select.allow_missing,
    };
    match args.self_test {
        true => sensitivity(args, &mut recording, &file, &options),
        false => args.output.deliver(folder, waiting.end(audit(&mut recording, &file, &options)?)),
    }
}

/// What the audit can see.
fn sensitivity(args: &Args, recording: &mut Dump, file: &ModelFile, options: &Options) -> Outcome {
    let progress = Progress::new("injecting");
    let found = self_test(recording, file, options, &|done, all| progress.set(done, all))?;
    drop(progress);
    let nothing = found.nodes.iter().all(|node| node.undecided.is_some());
    args.output.show(&found, |layout| report::sensitivity::render(&found, layout))?;
    Ok(exit_code(if nothing { Verdict::Undecided } else { Verdict::Parity }))
}
