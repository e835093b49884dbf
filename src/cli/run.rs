//! `parity run`: the instrumented engine on a prompt, compared with llama.cpp.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::progress::{Progress, TimeArgs};
use super::shared::{self, AuditArgs, LoraArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::engine::device::Device;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::jobs::run::{RunOptions, run};
use crate::numerics::Numerics;
use crate::remote;
use crate::tokenizer::Tokenizer;

const EXAMPLES: &str = "\
Examples:
  parity run -p \"def read_lines(path):\" --layer 0
  parity run -p \"def read_lines(path):\" --inject rope.base=10000@2
  parity run -m model.gguf -p \"Hello\" -n 8 --report out
  parity run -m model.gguf --reference recording --device cuda --numerics f16";

/// Flags of `parity run`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Decode steps after the prompt
    ///
    /// Each step is compared. It takes the reference's next token, or the most likely one if there is none.
    #[arg(short, long, value_name = "N")]
    n_predict: Option<usize>,
    /// Dump to compare with: a folder, s3://…, https://…
    ///
    /// Without it, parity looks for a dump of this model and these tokens. If there is none, it records one with a
    /// llama.cpp on this machine (`parity doctor` says which). Without a prompt, the reference's tokens are used.
    #[arg(help_heading = "Reference and dump", long, value_name = "DIR")]
    reference: Option<PathBuf>,
    /// Arithmetic of the reference
    ///
    /// As for --numerics. It overrides what the reference declares.
    #[arg(help_heading = "Reference and dump", long, value_name = "WORDS", hide_short_help = true)]
    reference_numerics: Option<Numerics>,
    /// Give each node the reference's inputs
    ///
    /// No error is then carried from node to node, so every node that differs is wrong by itself.
    #[arg(help_heading = "Reference and dump", long)]
    isolate: bool,
    /// Keep what the engine computed as a dump
    #[arg(help_heading = "Reference and dump", long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Let --dump replace a dump
    #[arg(help_heading = "Reference and dump", long, requires = "dump", hide_short_help = true)]
    force: bool,
    /// auto, cpu, cuda, cuda:N, or several
    ///
    /// auto is the first NVIDIA GPU if there is one, and else the CPU. cuda:0,cuda:1 and cuda:all split the layers over
    /// several GPUs.
    #[arg(help_heading = "Engine", long, value_name = "DEVICE", default_value_t)]
    device: Device,
    /// f32, f64, f16, bf16, llama-cpu or -cuda
    ///
    /// The engine's arithmetic. f32: decoded weights, everything in f32. f64: the same in f64. llama-cpu, llama-cuda:
    /// rounds as that backend of llama.cpp does. f16, bf16: operands of that type, as a GPU's tensor cores take them.
    /// storage=TYPE, kv=TYPE and flash=on may follow: "bf16 storage=bf16 kv=bf16".
    #[arg(help_heading = "Engine", long, value_name = "WORDS", default_value_t)]
    numerics: Numerics,
    /// Prefill in chunks of N tokens
    #[arg(help_heading = "Engine", long, value_name = "N", value_parser = shared::at_least_one())]
    chunk: Option<usize>,
    /// Inject a fault, a mistake made on purpose
    ///
    /// To see what parity says of it: FAULT or FAULT=VALUE, and @LAYER, @FIRST..LAST or @CHECKPOINT behind either; without
    /// a place it is made everywhere. `parity faults` lists them. The flag may be repeated.
    #[arg(help_heading = "Engine", long, value_name = "FAULT")]
    inject: Vec<String>,
    /// Threads [default: all cores]
    #[arg(help_heading = "Engine", short, long, value_name = "N", value_parser = shared::at_least_one())]
    pub threads: Option<usize>,
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

/// What to run on.
#[derive(clap::Args)]
#[group(multiple = false)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Token ids in place of a text: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub tokens: Vec<u32>,
}

impl PromptArgs {
    /// Whether a prompt was given at all.
    pub fn is_given(&self) -> bool {
        self.prompt.is_some() || self.file.is_some() || !self.tokens.is_empty()
    }

    /// The text, if one was given.
    pub fn text(&self) -> Result<Option<String>> {
        match (&self.prompt, &self.file) {
            (Some(text), _) => Ok(Some(text.clone())),
            (None, Some(path)) => crate::files::read(path, crate::files::TEXT_BYTES_MAX).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The text, and the tokens: none where neither was given.
    pub fn read(&self, gguf: &Gguf) -> Result<(Option<String>, Vec<u32>)> {
        let text = self.text()?;
        let tokens = match &text {
            Some(text) => Tokenizer::from_gguf(gguf)?.encode(text)?,
            None => self.tokens.clone(),
        };
        Ok((text, tokens))
    }
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let folder = args.output.folder()?;
    let waiting = args.time.start();
    let room = |dir: &PathBuf| shared::room_for_a_dump("--dump", dir, args.force);
    let _room = args.dump.as_ref().map(room).transpose()?;
    let path = args.model.path()?;
    let file = args.lora.applied(shared::model_file(path.as_deref())?)?;
    let (prompt, tokens) = args.prompt.read(file.gguf())?;
    let selection = args.select.selection()?;
    let reference = args.reference.as_deref().map(|path| remote::local(path, &selection)).transpose()?;
    let options = RunOptions {
        prompt: prompt.filter(|_| !args.output.no_text()),
        tokens,
        n_predict: args.n_predict,
        reference,
        dump: args.dump.clone(),
        device: args.device.clone(),
        numerics: args.numerics,
        reference_numerics: args.reference_numerics,
        selection,
        tolerances: args.tolerance.tolerances()?,
        chunk: args.chunk,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        isolated: args.isolate,
        no_text: args.output.no_text(),
        audit: args.audit.rows(),
        inject: args.inject.iter().map(|text| shared::mistake(text)).collect::<Result<_>>()?,
    };
    let progress = Progress::new("running");
    let report = run(&file, &options, &|done, all| progress.set(done, all))?;
    drop(progress);
    args.output.deliver(folder, waiting.end(report))
}
