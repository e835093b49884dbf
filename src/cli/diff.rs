//! `parity diff`: two dumps, compared.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::progress::TimeArgs;
use super::shared::{self, AuditArgs, ForeignArgs, LoraArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::engine::fused::file::ModelFile;
use crate::foreign;
use crate::jobs::diff::{Options, diff};
use crate::jobs::logprobs::{self, Beside};
use crate::numerics::Numerics;
use crate::remote;

const EXAMPLES: &str = "\
Examples:
  parity diff mine reference -m model.gguf
  parity diff mine reference -m model.gguf --layer 0..3 --report out
  parity diff mine reference --rtol 1e-3 --atol 1e-5";

/// Flags of `parity diff`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Dump to judge: a folder, or any format in docs/dumps.md
    candidate: PathBuf,
    /// Dump to compare with, usually of llama.cpp
    reference: PathBuf,
    /// Arithmetic of the candidate
    ///
    /// For example f32, or "bf16 storage=bf16 kv=bf16" (docs/dumps.md). It overrides what the dump declares. If
    /// neither declares it, parity infers it from the values.
    #[arg(long, value_name = "WORDS")]
    numerics: Option<Numerics>,
    /// Ask for equal bits
    ///
    /// The first difference of bits is a divergence, whether or not rounding explains it; parity says what moved it: the
    /// batch, the kernel, the type of the cache, the choice of experts.
    #[arg(long)]
    bitwise: bool,
    /// Look at one sequence alone [default: all]
    ///
    /// By its id in llama.cpp; rows of the others are what it was computed beside.
    #[arg(long, value_name = "N")]
    sequence: Option<u32>,
    /// Arithmetic of the reference
    #[arg(long, value_name = "WORDS")]
    reference_numerics: Option<Numerics>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    foreign: ForeignArgs,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    time: TimeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let waiting = args.time.start();
    let path = args.model.path()?;
    let selection = args.select.selection()?;
    let candidate = remote::local(&args.candidate, &selection)?;
    let reference = remote::local(&args.reference, &selection)?;
    if let Some(said) = foreign::logprobs::read(&candidate)? {
        let (tokens, allow_missing) = (args.foreign.given_tokens(), args.select.allow_missing);
        let how = logprobs::Options { model: path.clone(), tokens, numerics: args.numerics, allow_missing };
        let other = foreign::logprobs::read(&reference)?;
        let report = match &other {
            Some(other) => logprobs::judge(&said, Some(Beside::Said(other)), &how)?,
            None => {
                let untold = foreign::Options { model: path, ..foreign::Options::default() };
                let reference = shared::open_declared(&reference, &untold, args.reference_numerics)?;
                logprobs::judge(&said, Some(Beside::Recording(&reference)), &how)?
            }
        };
        return args.output.deliver(folder, report);
    }
    let told = args.foreign.options(path.as_deref());
    let untold = foreign::Options { model: path.clone(), ..foreign::Options::default() };
    // A map is of the side that is another engine's.
    let turned = told.is_told() && foreign::is_native(&candidate);
    let (ours, theirs) = if turned { (&untold, &told) } else { (&told, &untold) };
    let mut candidate = shared::open_declared(&candidate, ours, args.numerics)?;
    let mut reference = shared::open_declared(&reference, theirs, args.reference_numerics)?;
    for side in [&mut candidate, &mut reference] {
        args.sequence.map_or(Ok(()), |sequence| side.choose_sequence(sequence))?;
    }
    let file = path.as_deref().map(|path| args.lora.applied(ModelFile::open(path)?)).transpose()?;
    let options = Options {
        selection,
        tolerances: args.tolerance.tolerances()?,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        bitwise: args.bitwise,
        no_text: args.output.no_text(),
        audit: args.audit.rows(),
    };
    let report = diff(&mut candidate, &mut reference, file.as_ref(), &options)?;
    args.output.deliver(folder, waiting.end(report))
}
