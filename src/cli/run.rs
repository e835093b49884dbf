//! `parity run`: the instrumented engine on a prompt, compared with llama.cpp.

use std::path::{Path, PathBuf};

use super::Outcome;
use super::output::OutputArgs;
use super::progress::Progress;
use super::shared::{self, AuditArgs, ModelArgs, SelectArgs, ToleranceArgs};
use crate::engine::device::Device;
use crate::error::{Error, Result};
use crate::faults::inject::{self, Spec};
use crate::foreign;
use crate::jobs::run::{RunOptions, run};
use crate::model::Model;
use crate::numerics::Numerics;
use crate::recorded;
use crate::report::Report;
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
    /// Where to run: auto, cpu, cuda, cuda:N
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
    inject: Vec<Spec>,
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
    pub fn read(&self, model: &Model) -> Result<(Option<String>, Vec<u32>)> {
        let text = self.text()?;
        let tokens = match &text {
            Some(text) => Tokenizer::from_gguf(&model.gguf)?.encode(text)?,
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
    if let Some(report) = of_its_graph(args, path.as_deref())? {
        return args.output.deliver(folder, report);
    }
    let model = shared::model(path.as_ref())?;
    let (prompt, tokens) = args.prompt.read(&model)?;
    let options = RunOptions {
        tokens,
        prompt,
        n_predict: args.n_predict,
        reference: args.reference.clone(),
        dump: args.dump.clone(),
        device: args.device,
        numerics: args.numerics,
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        chunk: args.chunk,
        allow_missing: args.select.allow_missing,
        pictures: folder.is_some(),
        isolated: args.isolate,
        audit: args.audit.rows(),
    };
    let mut graph = model.graph.clone();
    let planted = inject::plant(&mut graph, &args.inject, &model)?;
    let progress = Progress::new("running");
    let mut report = run(&model, &graph, &options, &|done, all| progress.set(done, all))?;
    drop(progress);
    for fault in planted {
        report.notes.push(format!("{} was injected: {}", fault.fault, fault.sentence));
    }
    args.output.deliver(folder, report)
}

/// Runs the graph that a reference brings, where parity has none of its own for the model.
fn of_its_graph(args: &Args, path: Option<&Path>) -> Result<Option<Report>> {
    let (Some(path), Some(reference)) = (path, &args.reference) else { return Ok(None) };
    let dump = foreign::open(reference, &foreign::Options::default())?;
    if Model::open(path).is_ok() {
        return Ok(None);
    }
    let Err(foreign) = recorded::open(path, &[&dump])? else { return Ok(None) };
    if args.prompt.is_given() || args.n_predict.is_some() || args.chunk.is_some() {
        return Err(Error::file(path, "is of an architecture that is run by a recorded graph, in its steps")
            .expected("--reference alone")
            .found("a prompt, -n or --chunk")
            .hint("record that prompt with llama.cpp, and name it with --reference"));
    }
    if !args.inject.is_empty() || args.isolate || args.dump.is_some() {
        return Err(Error::file(path, "is of an architecture that is run by a recorded graph")
            .expected("neither --inject nor --isolate nor --dump"));
    }
    let options = recorded::RunOptions {
        selection: args.select.selection()?,
        tolerances: args.tolerance.tolerances()?,
        numerics: args.numerics,
        allow_missing: args.select.allow_missing,
    };
    recorded::run(&dump, &foreign, &options).map(Some)
}
