//! What was seen, read from files.

use std::ops::Range;
use std::path::{Path, PathBuf};

use parity_graph::weights::{TOKEN_EMBD, weight};

use super::evidence::{Chosen, Drawn, Evidence, Logits, SaidRows, Sampling, Spelling};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::files;
use crate::foreign;
use crate::foreign::array::Array;
use crate::foreign::logprobs::{self, LogProbs};
use crate::foreign::read::{is_safetensors, logits_of};
use crate::gguf::Gguf;
use crate::jobs::logprobs::{Said, Words, normaliser};
use crate::ops::bound::{CONFIDENCE, UNIT_BF16};
use crate::tokenizer::Tokenizer;

/// What is given.
#[derive(Clone, Debug)]
pub enum Observed {
    /// Text behind the prompt; each token was the likeliest one, or drawn.
    Text(Vec<u8>, Option<Sampling>),
    /// Tokens behind the prompt.
    Tokens(Vec<u32>, Option<Sampling>),
    /// Logits, of some positions.
    Logits(PathBuf, Option<Range<usize>>),
    /// Log-probabilities of a server.
    LogProbs(PathBuf),
}

/// What was seen, and the tokens that it is about: those of the prompt, and those behind it.
pub struct Read {
    /// What was seen.
    pub evidence: Box<dyn Evidence>,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens behind it.
    pub forced: Vec<u32>,
    /// How many of all these each step computed, where that is told.
    pub steps: Option<Vec<usize>>,
}

/// Reads what was seen behind `prompt`, which is empty where a file is to say it.
///
/// # Errors
/// A file that is none of these, tokens that nobody says, nothing that was seen.
pub fn observed(gguf: &Gguf, prompt: &[u32], text: Option<&str>, what: &Observed) -> Result<Read> {
    if let Observed::Tokens(tokens, _) = what
        && let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary(gguf))
    {
        return Err(Error::new("tokens", "a token beyond the vocabulary")
            .expected(format!("up to {}", vocabulary(gguf).saturating_sub(1)))
            .found(token));
    }
    match what {
        Observed::Tokens(tokens, None) => {
            chosen(prompt, |first| Ok(Chosen { first, tokens: tokens.clone(), text: None }))
        }
        Observed::Text(seen, None) => {
            let behind = behind(text, seen);
            chosen(prompt, |first| Chosen::text(first, Tokenizer::from_gguf(gguf)?, behind))
        }
        Observed::Tokens(tokens, Some(how)) => {
            chosen(prompt, |first| Ok(Drawn { first, tokens: tokens.clone(), text: None, sampling: *how }))
        }
        Observed::Text(seen, Some(how)) => {
            let (tokens, text) = Spelling::new(Tokenizer::from_gguf(gguf)?, behind(text, seen))?;
            chosen(prompt, |first| Ok(Drawn { first, tokens, text: Some(text), sampling: *how }))
        }
        Observed::Logits(path, rows) => match logprobs::read(path)? {
            Some(said) => of_server(gguf, prompt, said),
            None => of_logits(gguf, prompt, path, rows.clone()),
        },
        Observed::LogProbs(path) => match logprobs::read(path)? {
            Some(said) => of_server(gguf, prompt, said),
            None => Err(Error::file(path, "holds no log-probabilities")
                .expected("an answer of a server with \"logprobs\", or what llama-perplexity --save-all-logits writes")
                .hint("--logits FILE takes logits, --text FILE text")),
        },
    }
}

fn nothing_in_front() -> Error {
    Error::new("prompt", "nothing stands in front of what was seen")
        .expected("at least one token")
        .found("none")
        .hint("-p PROMPT or --tokens 1,2,3, as the engine was given it")
}

/// Tokens behind a prompt, whose last position is given.
fn chosen<E: Evidence + 'static>(prompt: &[u32], of: impl FnOnce(usize) -> Result<E>) -> Result<Read> {
    let evidence = of(prompt.len().checked_sub(1).ok_or_else(nothing_in_front)?)?;
    if evidence.tokens().is_empty() {
        return Err(Error::new("output", "holds no token")
            .expected("text or tokens behind the prompt")
            .found("none"));
    }
    let forced = evidence.tokens().to_vec();
    Ok(Read { evidence: Box::new(evidence), prompt: prompt.to_vec(), forced, steps: None })
}

/// A text behind a prompt, which may stand in front of it, as programs print it.
fn behind<'a>(prompt: Option<&str>, seen: &'a [u8]) -> &'a [u8] {
    prompt.and_then(|prompt| seen.strip_prefix(prompt.as_bytes())).unwrap_or(seen)
}

fn of_server(gguf: &Gguf, prompt: &[u32], said: LogProbs) -> Result<Read> {
    let words = Words::of(Some(gguf.path()))?;
    let given = (!prompt.is_empty()).then_some(prompt);
    // It is read once and looked at until the program ends.
    let said: &'static LogProbs = Box::leak(Box::new(said));
    let said = Said::new(said, given, &words)?;
    let tokens = said.tokens.clone();
    let known = prompt.len().min(tokens.len());
    let (front, forced) =
        if known == 0 { (tokens, Vec::new()) } else { (tokens[..known].to_vec(), tokens[known..].to_vec()) };
    Ok(Read { evidence: Box::new(SaidRows { said }), prompt: front, forced, steps: None })
}

/// Rows of logits, at positions one behind the other.
struct Seen {
    /// Of prompt and output, where the file says them.
    tokens: Option<Vec<u32>>,
    /// (n, V)
    values: Vec<f32>,
    width: usize,
    /// Position of the first row, where the file says it.
    first: Option<usize>,
    /// How many tokens each step had, where the file says it.
    steps: Option<Vec<usize>>,
}

fn of_logits(gguf: &Gguf, prompt: &[u32], path: &Path, rows: Option<Range<usize>>) -> Result<Read> {
    let seen = match of_dump(gguf, prompt, path, rows.as_ref())? {
        Some(seen) => seen,
        None => of_array(path, vocabulary(gguf))?,
    };
    let n = seen.values.len() / seen.width;
    let mut tokens = match (prompt.is_empty(), &seen.tokens) {
        (true, Some(tokens)) => tokens.clone(),
        (false, Some(tokens)) if seen.first.is_some() => tokens.clone(),
        _ => prompt.to_vec(),
    };
    if tokens.is_empty() {
        return Err(nothing_in_front());
    }
    let end = tokens.len();
    let rows = match seen.first {
        Some(first) => first..first + n,
        None => rows.unwrap_or(end.saturating_sub(n)..end),
    };
    if rows.len() != n || rows.end > end {
        return Err(Error::file(path, "has another number of rows than there are positions")
            .expected(format!("{} for positions {}..{} of {end} tokens", rows.len(), rows.start, rows.end))
            .found(format!("{n} rows of {}", seen.width))
            .hint("--rows A..B says which positions they are of, the first 0 and B not among them; where some are of the output, \
                   --tokens has its tokens behind the prompt's"));
    }
    let normalised = is_normalised(path, &seen)?;
    let Seen { values, width, steps, .. } = seen;
    let evidence = Logits { kind: "logits", first: rows.start, values, width, normalised };
    // The last step of several tokens ends the prefill.
    let steps = steps.filter(|steps| steps.len() > 1);
    let prefill = steps.as_ref().map_or(end, |steps| {
        let last = steps.iter().rposition(|tokens| *tokens > 1).unwrap_or(0);
        steps[..=last].iter().sum()
    });
    let forced = tokens.split_off(prefill);
    Ok(Read { evidence: Box::new(evidence), prompt: tokens, forced, steps })
}

/// How far probabilities may be from 1 together: as bf16 rounds the largest.
const OFF: f64 = CONFIDENCE * UNIT_BF16;

/// Whether rows are log-probabilities.
///
/// # Errors
/// Probabilities, of which most say nothing.
fn is_normalised(path: &Path, seen: &Seen) -> Result<bool> {
    let rows = || seen.values.chunks(seen.width);
    let is_one = |row: &[f32]| {
        let sum: f64 = row.iter().map(|p| f64::from(*p)).sum();
        row.iter().all(|p| *p >= 0.0) && (sum - 1.0).abs() <= OFF
    };
    if rows().all(is_one) {
        return Err(Error::file(path, "holds probabilities")
            .expected("logits, or their log-softmax")
            .found("rows of which each adds up to 1")
            .hint("dump what the softmax is taken of"));
    }
    Ok(rows().all(|row| normaliser(row).1.abs() <= OFF))
}

/// The logits of a dump, which says the tokens and steps; nothing where a file is none.
fn of_dump(gguf: &Gguf, prompt: &[u32], path: &Path, wanted: Option<&Range<usize>>) -> Result<Option<Seen>> {
    if !path.is_dir() && !is_safetensors(path) {
        return Ok(None);
    }
    let is_native = foreign::is_native(path);
    let tokens = (!prompt.is_empty() && !is_native).then(|| prompt.to_vec());
    let options = foreign::Options { names: None, tokens, model: Some(gguf.path().to_owned()) };
    let dump = match foreign::open(path, &options) {
        Ok(dump) => dump,
        Err(error) if path.is_dir() => return Err(error),
        Err(_) => return Ok(None),
    };
    let (logits, steps) = (Checkpoint::global(Kind::Logits), &dump.manifest().steps);
    let positions = Recording::positions(&dump, logits);
    if positions.is_empty() && !path.is_dir() {
        return Ok(None);
    }
    let (tokens, in_order) =
        (Recording::tokens(&dump).to_vec(), steps.iter().flat_map(|step| &step.positions));
    if dump.manifest().is_numbered() || !in_order.copied().eq(0..tokens.len() as u32) {
        return Err(Error::file(path, "is of several sequences, or lacks tokens")
            .expected("steps at positions one behind the other, from 0 on"));
    }
    if !tokens.starts_with(prompt) {
        return Err(Error::file(path, "is of another prompt")
            .expected(format!("tokens that begin with {prompt:?}"))
            .found(format!("{tokens:?}"))
            .hint("without -p and --tokens its own are taken"));
    }
    // The last that stand one behind the other.
    let is_wanted = |at: &u32| wanted.is_none_or(|wanted| wanted.contains(&(*at as usize)));
    let positions: Vec<u32> = positions.into_iter().filter(is_wanted).collect();
    let gap = positions.windows(2).rposition(|pair| pair[0] + 1 != pair[1]).map_or(0, |before| before + 1);
    let rows = Recording::gather(&dump, logits, &positions[gap..]).filter(|rows| !rows.data.is_empty());
    let rows = rows.ok_or_else(|| Error::file(path, "holds no logits of these positions"))?;
    let (n, first) = (positions.len() - gap, positions[gap] as usize);
    let width = rows.data.len() / n;
    if width < vocabulary(gguf) {
        return Err(of_another_model(path, vocabulary(gguf), &[n, width]));
    }
    let steps = Some(steps.iter().map(|step| step.positions.len()).collect());
    Ok(Some(Seen { tokens: Some(tokens), width, values: rows.data, first: Some(first), steps }))
}

/// Those of one array, in any format.
fn of_array(path: &Path, vocabulary: usize) -> Result<Seen> {
    let (tokens, array) = logits_of(path, vocabulary)?;
    let (_, width) = shape(path, &array, vocabulary)?;
    Ok(Seen { tokens, values: array.values(), width, first: None, steps: None })
}

/// V
pub fn vocabulary(gguf: &Gguf) -> usize {
    gguf.tensor(&weight(TOKEN_EMBD)).and_then(|table| table.info.shape.first().copied()).unwrap_or(0)
}

/// Numbers in all weights of a model.
pub fn weights(gguf: &Gguf) -> f64 {
    gguf.tensors().map(|tensor| tensor.shape.iter().product::<usize>() as f64).sum()
}

/// Rows and columns of what may have axes of one in front.
fn shape(path: &Path, array: &Array, vocabulary: usize) -> Result<(usize, usize)> {
    let width = array.shape.last().copied().unwrap_or(0);
    let rows = array.shape.iter().rev().skip(1).product::<usize>();
    if width < vocabulary || width == 0 || rows == 0 {
        return Err(of_another_model(path, vocabulary, &array.shape));
    }
    Ok((rows, width))
}

fn of_another_model(path: &Path, vocabulary: usize, shape: &[usize]) -> Error {
    Error::file(path, "does not hold logits of this model")
        .expected(format!("rows of {vocabulary}"))
        .found(format!("{shape:?}"))
}

/// `1,2,3`, or `@FILE` with such numbers in it.
///
/// # Errors
/// What is no number.
pub fn ids(text: &str) -> Result<Vec<u32>> {
    let read = match text.strip_prefix('@') {
        Some(path) => files::read(Path::new(path), files::TEXT_BYTES_MAX)?,
        None => text.to_owned(),
    };
    let parts = read.split(|c: char| c == ',' || c.is_whitespace() || c == '[' || c == ']');
    let ids = parts.filter(|part| !part.is_empty()).map(|part| {
        part.parse().map_err(|_| {
            Error::new("tokens", "holds something that is no token id").expected("numbers: 1,2,3").found(part)
        })
    });
    ids.collect()
}
