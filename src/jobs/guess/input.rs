//! What was seen, read from files.

use std::ops::Range;
use std::path::{Path, PathBuf};

use parity_graph::weights::{TOKEN_EMBD, weight};

use super::evidence::{Chosen, Drawn, Evidence, Logits, SaidRows, Sampling, Spelling};
use crate::error::{Error, Result};
use crate::files;
use crate::foreign::array::Array;
use crate::foreign::logprobs::{self, LogProbs};
use crate::foreign::read::logits_of;
use crate::gguf::Gguf;
use crate::jobs::logprobs::{Said, Words};
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
    Ok(Read { evidence: Box::new(evidence), prompt: prompt.to_vec(), forced })
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
    Ok(Read { evidence: Box::new(SaidRows { said }), prompt: front, forced })
}

fn of_logits(gguf: &Gguf, prompt: &[u32], path: &Path, rows: Option<Range<usize>>) -> Result<Read> {
    let (tokens, array) = logits_of(path, vocabulary(gguf))?;
    let prompt = match (prompt.is_empty(), tokens) {
        (true, Some(tokens)) => tokens,
        _ => prompt.to_vec(),
    };
    let (n, width) = shape(path, &array, vocabulary(gguf))?;
    if prompt.is_empty() {
        return Err(nothing_in_front());
    }
    let end = prompt.len();
    let rows = rows.unwrap_or(end.saturating_sub(n)..end);
    if rows.len() != n || rows.end > end {
        return Err(Error::file(path, "has another number of rows than there are positions")
            .expected(format!("{} for positions {}..{} of {end} tokens", rows.len(), rows.start, rows.end))
            .found(format!("{n} rows of {width}"))
            .hint("--rows A..B says which positions they are of, the first 0 and B not among them"));
    }
    let evidence = Logits { kind: "logits", first: rows.start, values: array.values(), width };
    Ok(Read { evidence: Box::new(evidence), prompt, forced: Vec::new() })
}

/// V
pub fn vocabulary(gguf: &Gguf) -> usize {
    gguf.tensor(&weight(TOKEN_EMBD)).and_then(|table| table.info.shape.first().copied()).unwrap_or(0)
}

/// Rows and columns of what may have axes of one in front.
fn shape(path: &Path, array: &Array, vocabulary: usize) -> Result<(usize, usize)> {
    let width = array.shape.last().copied().unwrap_or(0);
    let rows = array.shape.iter().rev().skip(1).product::<usize>();
    if width < vocabulary || width == 0 || rows == 0 {
        return Err(Error::file(path, "does not hold logits of this model")
            .expected(format!("rows of {vocabulary}"))
            .found(format!("{:?}", array.shape)));
    }
    Ok((rows, width))
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
