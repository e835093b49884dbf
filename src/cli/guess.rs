//! `parity guess`: the mistake behind an output, where no tensor is there.

use std::io::Read as _;
use std::path::PathBuf;

use parity_dump::Dump;
use tempfile::NamedTempFile;

use super::progress::Progress;
use super::run::PromptArgs;
use super::shared::{self, Format, FormatArgs, LoraArgs, ModelArgs};
use super::{Outcome, exit_code, output};
use crate::engine::device::{self, Device};
use crate::error::{Error, Result};
use crate::files;
use crate::foreign::logprobs::ask::Question;
use crate::gguf::Gguf;
use crate::jobs::guess::{self, Known, Observed, Read, Sampling, guess, observed};
use crate::model;
use crate::report::json;

const EXAMPLES: &str = "\
Examples:
  parity guess -m model.gguf -p \"def read_lines(path):\" --text output.txt
  parity guess -m model.gguf --tokens 1,2,3 --tokens-seen 4,5,6,7
  parity guess -m model.gguf -p \"Hello\" --logits logits.npy --format json
  parity guess -m model.gguf -p \"Hello\" --logprobs answer.json

Exit codes: 0 a healthy engine says this, 1 a known mistake explains it, 2 nothing does.";

/// Flags of `parity guess`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    seen: SeenArgs,
    /// Another file that the engine may have loaded: another quantisation, another conversion; may be given several times
    #[arg(long, value_name = "FILE", conflicts_with = "hidden")]
    other: Vec<PathBuf>,
    /// Recording of llama.cpp over prompt and output in one step: its graph is executed
    ///
    /// For architectures that parity has no builder for: parity record -o DIR -- PROGRAM, with both as its prompt.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["hidden", "other", "discriminate"])]
    reference: Option<PathBuf>,
    /// Positions of the rows of --logits: A..B
    ///
    /// The first position is 0, and B is not among them. Without it they are the last ones of the prompt.
    #[arg(long, value_name = "A..B", requires = "logits", value_parser = positions)]
    rows: Option<std::ops::Range<usize>>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Tokens that the server of --url is asked for
    #[arg(short, long, value_name = "N", default_value_t = 32, requires = "url", value_parser = few())]
    n_predict: usize,
    /// Model that the server of --url is asked for, where it has several
    #[arg(long, value_name = "NAME", requires = "url")]
    server_model: Option<String>,
    /// Where several mistakes explain the output, look for a prompt that tells them apart
    #[arg(long)]
    discriminate: bool,
    /// What multiplies by the weights: auto, cpu, cuda or cuda:N
    ///
    /// The rest is computed on the CPU.
    #[arg(long, default_value_t, value_name = "DEVICE")]
    device: Device,
    /// Threads [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = shared::at_least_one())]
    pub threads: Option<usize>,
    #[command(flatten)]
    format: FormatArgs<Format>,
}

/// What was seen of the engine.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
#[command(next_help_heading = "What was seen")]
struct SeenArgs {
    /// File with the text behind the prompt, - for standard input
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Token ids behind the prompt: 1,2,3 or @FILE
    #[arg(long, value_name = "IDS")]
    tokens_seen: Option<String>,
    /// File with logits
    ///
    /// npy, npz, safetensors, raw f32, llama-debug's, llama-perplexity's, or a dump; (T, V), or the last rows of the prompt.
    /// What says its steps, as dumps do, is taken for rows of a prefill and of decode steps; all else for one pass.
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// File with log-probabilities: a server's answer
    #[arg(long, value_name = "FILE")]
    logprobs: Option<PathBuf>,
    /// Dump with hidden states
    ///
    /// Outputs of layers, in any format of docs/dumps.md.
    #[arg(long, value_name = "DUMP")]
    hidden: Option<PathBuf>,
    /// OpenAI-compatible server: it is asked for a short continuation
    ///
    /// POST /v1/completions, with log-probabilities. The key is what PARITY_API_KEY holds.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
}

/// How the text was sampled.
#[derive(clap::Args)]
#[command(next_help_heading = "Sampled text, as llama.cpp's flags")]
struct SamplingArgs {
    /// Temperature; at 0 each token was the likeliest one
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = not_negative)]
    temp: f64,
    /// Seed: with it every token is known
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// The likeliest N tokens; all at 0
    #[arg(long, value_name = "N", default_value_t = 40)]
    top_k: usize,
    /// The likeliest tokens of this probability together
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = not_negative)]
    top_p: f64,
    /// Tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = not_negative)]
    min_p: f64,
}

impl SamplingArgs {
    /// How tokens were drawn, if they were.
    fn sampling(&self) -> Option<Sampling> {
        let SamplingArgs { temp: temperature, seed, top_k, top_p, min_p } = *self;
        (temperature > 0.0).then_some(Sampling { temperature, top_k, top_p, min_p, seed })
    }
}

impl Args {
    /// Asks a server; the file with its answer.
    fn ask(&self, url: &str, text: Option<&str>, tokens: &[u32]) -> Result<NamedTempFile> {
        let no_file = |e: std::io::Error| Error::new("a temporary file", format!("cannot be made: {e}"));
        let file = NamedTempFile::new().map_err(no_file)?;
        let (model, n_predict) = (self.server_model.as_deref(), self.n_predict);
        Question { url, model, text, tokens, n_predict }.ask(file.path())?;
        Ok(file)
    }

    fn observed(&self) -> Result<Observed> {
        if self.rows.is_some() && self.seen.logits.is_none() {
            return Err(
                Error::new("--rows", "says of which positions logits are").expected("--logits with it")
            );
        }
        let sampling = self.sampling.sampling();
        let seen = &self.seen;
        Ok(match (&seen.text, &seen.tokens_seen, &seen.logits, &seen.logprobs) {
            (Some(path), ..) => Observed::Text(text(path)?, sampling),
            (_, Some(ids), ..) => Observed::Tokens(guess::ids(ids)?, sampling),
            (_, _, Some(path), _) => Observed::Logits(path.clone(), self.rows.clone()),
            (.., Some(path)) => Observed::LogProbs(path.clone()),
            _ => {
                return Err(Error::new("output", "nothing was seen")
                    .expected("--text, --tokens-seen, --logits or --logprobs"));
            }
        })
    }
}

/// A server is not asked for more than a short text.
fn few() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=256)
}

/// The bytes of a file, or of standard input.
fn text(path: &std::path::Path) -> Result<Vec<u8>> {
    if path.as_os_str() != "-" {
        return files::read_bytes(path, files::TEXT_BYTES_MAX);
    }
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(files::TEXT_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(|e| Error::new("standard input", format!("cannot be read: {e}")))?;
    Ok(bytes)
}

fn not_negative(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number),
        _ => Err("a number from 0 up".to_owned()),
    }
}

fn positions(text: &str) -> std::result::Result<std::ops::Range<usize>, String> {
    let range = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    range
        .filter(|range: &std::ops::Range<usize>| !range.is_empty())
        .ok_or_else(|| "A..B with A below B".to_owned())
}

/// Runs the command.
pub fn main(args: &Args) -> Outcome {
    let path = args.model.path()?;
    let file = args.lora.applied(shared::model_file(path.as_deref())?)?;
    let gguf = file.gguf();
    let (text, prompt) = args.prompt.read(gguf)?;
    let progress = Progress::new("trying");
    let told = |done: usize, all: usize, best: &str| progress.set_with(done, all, best);
    let on_device = device::multiplier(&args.device, gguf)?;
    let multiplier = on_device.as_deref();
    let found = match &args.seen.hidden {
        Some(dump) => guess::hidden((&file, multiplier), dump, &prompt, &told)?,
        None => {
            let answer =
                args.seen.url.as_deref().map(|url| args.ask(url, text.as_deref(), &prompt)).transpose()?;
            let seen = match &answer {
                Some(answer) => Observed::LogProbs(answer.path().to_owned()),
                None => args.observed()?,
            };
            let read = observed(gguf, &prompt, text.as_deref(), &seen)?;
            let others = args.other.iter().map(|path| Gguf::open(path)).collect::<Result<Vec<_>>>()?;
            let recording = args.reference.as_deref().map(Dump::open).transpose()?;
            if let Some(dump) = &recording {
                model::refuse_other(gguf, dump.path(), &dump.manifest().model)?;
            }
            // A text of the prompt and of what was said behind it is not the prompt's.
            let text = text.filter(|_| read.prompt == prompt);
            let Read { evidence, prompt, forced, steps } = read;
            let (others, recording) = (&others[..], recording.as_ref());
            let known = Known { gguf, multiplier, prompt, text, forced, steps, others, recording };
            guess(&known, &*evidence, args.discriminate, &told)?
        }
    };
    output::print(&match args.format.format() {
        Format::Json => json::render(&found)?,
        Format::Table => guess::render(&found),
    })?;
    Ok(exit_code(found.verdict()))
}
