//! Log-probabilities, as servers and `llama-perplexity` give them: the log-softmax of logits, rounded, often of the
//! likeliest tokens alone. What each value says is an interval; `jobs::logprobs` makes logits of them.

pub mod ask;
mod perplexity;
mod server;

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A token, as a format names it.
#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    /// By its number.
    Id(u32),
    /// By the bytes that it stands for.
    Bytes(Vec<u8>),
}

/// Which entries of the vocabulary a row has values of.
#[derive(Clone, Debug, PartialEq)]
pub enum Columns {
    /// All, in their order.
    All,
    /// These.
    Some(Vec<Token>),
}

/// What is known of the next token at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which token the row comes behind, by its place among the tokens; behind a prompt, by its place among the prompt's
    /// last and the tokens.
    pub index: usize,
    /// What the values are of.
    pub columns: Columns,
    /// Natural logarithms of probabilities.
    pub values: Vec<f64>,
    /// By how much writing a value down may have moved it.
    pub half_unit: f64,
    /// Values down to here say only that the probability is no larger.
    pub floor: f64,
}

/// Where the tokens that a format holds begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At position 0.
    Text,
    /// Behind a prompt, which it does not hold.
    Prompt,
}

/// One sequence of tokens and what was said of it.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// The file.
    pub path: PathBuf,
    /// Which format it has.
    pub format: &'static str,
    /// Who wrote it, where the format says so.
    pub producer: String,
    /// How such engines compute where nobody declares it, the sharpest first, in the words of `numerics`.
    pub arithmetics: &'static [&'static str],
    /// Where `tokens` begin.
    pub start: Start,
    /// In order, as far as they are said.
    pub tokens: Vec<Option<Token>>,
    /// Whether the first token stands for the beginning of a text where the model's tokenizer puts one.
    pub bos: bool,
    /// By index.
    pub rows: Vec<Row>,
    /// What a reader must know.
    pub notes: Vec<String>,
}

/// The log-probabilities at `path`; `None` where there is another kind of file.
///
/// # Errors
/// A file of one of these formats that is damaged, or holds no log-probabilities.
pub fn read(path: &Path) -> Result<Option<LogProbs>> {
    if !path.is_file() {
        return Ok(None);
    }
    let mut head = Vec::new();
    let file = parity_dump::open_regular(path, "cannot be opened")?;
    let read = file.take(HEAD_BYTES).read_to_end(&mut head);
    read.map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    if head.starts_with(perplexity::MAGIC) {
        return perplexity::read(path).map(Some);
    }
    match head.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'{') if is_text(&head) => server::read(path),
        _ => Ok(None),
    }
}

/// Whether bytes begin a text: numbers may begin with what looks like one.
fn is_text(head: &[u8]) -> bool {
    std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true)
}

/// Bytes in which a format shows.
const HEAD_BYTES: u64 = 64;
