//! `parity run`: the instrumented engine on a prompt, compared with llama.cpp.

use std::path::PathBuf;

use super::Outcome;
use super::output::OutputArgs;
use super::progress::Progress;
use super::shared::{self, AuditArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::engine::device::Device;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::jobs::run::{RunOptions, run};
use crate::numerics::Numerics;
use crate::tokenizer::Tokenizer;

/// Flags of `parity run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Decode steps after the prompt, each compared: the reference's tokens, or greedy
    #[arg(short, long, value_name = "N")]
    n_predict: Option<usize>,
    /// Dump to compare with. Without it, parity looks for one of this model and these tokens, and records one if it can
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,
    /// Keep what the engine computed as a dump in this folder
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Replace the dump that is in that folder
    #[arg(long, requires = "dump")]
    force: bool,
    /// Where to run: auto, cpu, cuda, cuda:N, cuda:0,cuda:1 (layers split over several GPUs), cuda:all
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: Device,
    /// The engine's arithmetic: f32 (decoded weights, everything in f32), f64, llama-cpu (rounds as llama.cpp's CPU backend
    /// does), f16 (on a GPU: tensor cores, as engines ship)
    #[arg(long, value_name = "WORDS", default_value_t)]
    numerics: Numerics,
    /// Compute the prompt in pieces of N tokens
    #[arg(long, value_name = "N", value_parser = shared::at_least_one())]
    chunk: Option<usize>,
    /// Give each node the reference's inputs, so that no error is carried from node to node
    #[arg(long)]
    isolate: bool,
    /// Make a mistake on purpose, to see what parity says of it: FAULT[=VALUE][@LAYER or @CHECKPOINT]; `parity faults` lists them; several allowed
    #[arg(long, value_name = "FAULT")]
    inject: Vec<String>,
    /// Threads; all cores where absent
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    threads: Option<usize>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    tolerance: ToleranceArgs,
    #[command(flatten)]
    audit: AuditArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// What to run on.
#[derive(clap::Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// Prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File that holds the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Token ids instead of a text: 1,2,3
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
    shared::set_threads(args.threads)?;
    let folder = args.output.folder()?;
    if let Some(dir) = &args.dump {
        shared::room_for_a_dump("--dump", dir, args.force)?;
    }
    let path = args.model.path()?;
    let file = shared::model_file(path.as_deref())?;
    let (prompt, tokens) = args.prompt.read(file.gguf())?;
    let options = RunOptions {
        prompt,
        tokens,
        n_predict: args.n_predict,
        reference: args.reference.clone(),
        dump: args.dump.clone(),
        device: args.device.clone(),
        numerics: args.numerics,
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        chunk: args.chunk,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        isolated: args.isolate,
        audit: args.audit.rows(),
        inject: args.inject.iter().map(|text| text.parse()).collect::<Result<_>>()?,
    };
    let progress = Progress::new("running");
    let report = run(&file, &options, &|done, all| progress.set(done, all))?;
    drop(progress);
    args.output.deliver(folder, report)
}
