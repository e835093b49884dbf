//! Records with the llama.cpp that is built into parity (cargo feature `llama-cpp`): no program is needed.

mod context;
mod hook;

use std::path::PathBuf;

use parity_record::kept::Observe;
use parity_record::recorder::Options as Recording;

use super::finish::{self, Finished};
use super::verify::{self, Verified};
use super::{Filter, Summary};
use crate::error::{Error, Result};

use context::Context;

/// What to run and what of it to record.
#[derive(Clone, Debug)]
pub struct BuiltinOptions {
    /// Folder of the dump.
    pub dir: PathBuf,
    /// GGUF model.
    pub model: PathBuf,
    /// Text of the prompt, tokenized by llama.cpp.
    pub prompt: Option<String>,
    /// Token ids, prompt and decode steps, where there is no text.
    pub tokens: Vec<u32>,
    /// Decode steps: the last of the given tokens; greedy behind a text.
    pub n_predict: usize,
    /// Which checkpoints.
    pub filter: Filter,
    /// Threads.
    pub threads: usize,
    /// Whether attention is computed tile by tile.
    pub flash: bool,
    /// ggml's type of cached keys and values.
    pub cache_type: CacheType,
    /// Whether weights may be rearranged for faster kernels.
    pub repack: bool,
    /// Layers on the GPU, where the build has one.
    pub gpu_layers: u32,
    /// Whether to run once more with no node asked for, and compare the logits.
    pub verify: bool,
}

/// Type of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    /// f32: attention without a rounding of its own.
    #[default]
    F32,
    /// f16: llama.cpp's default.
    F16,
    /// bf16
    Bf16,
}

/// Evaluates the prompt and records it.
///
/// # Errors
/// Where the model cannot be loaded or evaluated, or nothing of it is a checkpoint.
pub fn record(options: &BuiltinOptions) -> Result<Summary> {
    let scratch = options.verify.then(|| {
        let made = tempfile::tempdir();
        made.map_err(|e| Error::new("--verify", format!("no temporary folder: {e}")))
    });
    let scratch = scratch.transpose()?;
    let noted = |name: &str| scratch.as_ref().map(|scratch| scratch.path().join(name));
    let recorded = noted("recorded");
    let recording = Recording {
        dir: Some(options.dir.clone()),
        filter: options.filter.clone(),
        hashes: recorded.clone(),
        observe: Observe::Nodes,
        version: Some(context::version()),
        ..Recording::default()
    };
    let (tokens, outcome) = evaluate(options, recording, None)?;
    if !outcome.recording {
        let why = outcome.stopped.unwrap_or_else(|| "no forward pass was seen".to_owned());
        return Err(Error::file(&options.model, "nothing of it was recorded").found(why));
    }
    let mut summary = finish::complete(Finished {
        dir: &options.dir,
        filter: &options.filter,
        model: Some(&options.model),
        prompt: options.prompt.clone(),
        provenance: provenance(options),
        incomplete: outcome.stopped,
        sequences: 1,
        program: None,
    })?;
    if let (Some(recorded), Some(untouched)) = (recorded, noted("untouched")) {
        let only_hashes = Recording { hashes: Some(untouched.clone()), ..Recording::default() };
        evaluate(options, only_hashes, Some(&tokens))?;
        summary.verified = Some(compared(options, &recorded, &untouched)?);
    }
    Ok(summary)
}

fn compared(
    options: &BuiltinOptions,
    recorded: &std::path::Path,
    untouched: &std::path::Path,
) -> Result<Verified> {
    let (recorded, untouched) =
        (verify::read(recorded, &options.model)?, verify::read(untouched, &options.model)?);
    verify::compare(&recorded, &untouched)
        .ok_or_else(|| Error::file(&options.model, "the second run computed no logits to compare"))
}

/// Evaluates the prompt in one pass and each further token in one of its own; `follow` are the tokens of an
/// earlier run. The tokens, and what the recorder said.
fn evaluate(
    options: &BuiltinOptions,
    recording: Recording,
    follow: Option<&[u32]>,
) -> Result<(Vec<u32>, hook::Outcome)> {
    let mut context = Context::new(options)?;
    let (mut tokens, prefill) = match follow {
        Some(tokens) => (tokens.to_vec(), tokens.len().saturating_sub(options.n_predict)),
        None => plan(options, &context)?,
    };
    let total = prefill + options.n_predict;
    context.open(options, prefill, total)?;
    let session = hook::Session::start(recording)?;
    let mut next = context.decode(&tokens[..prefill], 0)?;
    for position in prefill..total {
        if position == tokens.len() {
            tokens.push(next);
        }
        next = context.decode(&tokens[position..=position], position)?;
    }
    tokens.truncate(total);
    Ok((tokens, session.finish()))
}

/// The tokens that are known beforehand, and how many of them are the prompt.
fn plan(options: &BuiltinOptions, context: &Context) -> Result<(Vec<u32>, usize)> {
    let (tokens, prefill) = match &options.prompt {
        Some(text) => {
            let tokens = context.tokenize(text)?;
            let prefill = tokens.len();
            (tokens, prefill)
        }
        None => {
            // With `-n` the last of the given tokens are decoded.
            let prefill = options.tokens.len().checked_sub(options.n_predict);
            (options.tokens.clone(), prefill.unwrap_or(0))
        }
    };
    if prefill == 0 {
        return Err(Error::new("prompt", "there is nothing to evaluate")
            .expected("a text with -p, or more --tokens than -n")
            .found(format!("{} tokens, -n {}", tokens.len(), options.n_predict)));
    }
    context.check(&tokens)?;
    Ok((tokens, prefill))
}

fn provenance(options: &BuiltinOptions) -> Vec<(String, String)> {
    let on = |on: bool| if on { "on" } else { "off" };
    let cache = format!("{:?}", options.cache_type).to_lowercase();
    let how = format!(
        "cache {cache}, flash attention {}, repacked weights {}, {} layers on the GPU",
        on(options.flash),
        on(options.repack),
        options.gpu_layers
    );
    vec![("built in".to_owned(), how), ("logits".to_owned(), "all rows".to_owned())]
}
