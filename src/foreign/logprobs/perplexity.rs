//! What `llama-perplexity --save-all-logits` (or `--kl-divergence-base`) writes: `_logits_`, n_ctx, V and the number of
//! chunks (i32), their tokens (i32), and for each position of the second half of a chunk but its last a row of
//! `2·⌈V/2⌉ + 4` u16: scale and smallest value (f32 each), then V multiples of the scale above that value.

use std::path::Path;

use super::{Columns, LogProbs, Row, Start, Token};
use crate::error::{Error, Result};
use crate::foreign::read::map as mapped;
use crate::memory;
use crate::ops::bound::UNIT_F32;

/// What a file begins with.
pub const MAGIC: &[u8] = b"_logits_";
/// n_ctx, V, chunks.
const HEADER: usize = MAGIC.len() + 3 * size_of::<i32>();
/// Scale and smallest value, in u16.
const PREFIX: usize = 4;
/// Steps between the smallest and the largest value.
const LEVELS: f64 = 65535.0;
/// Roundings in f32 of what is divided by the scale before it becomes a whole number.
const ROUNDINGS: f64 = 3.0;

/// How llama.cpp computes: on the CPU and on CUDA, with its usual cache.
const ARITHMETICS: [&str; 3] = ["f32", "llama-cpu kv=f16", "llama-cuda kv=f16"];

/// The first chunk of a file. The others begin texts of their own.
///
/// # Errors
/// A file that is shorter or longer than its header says.
pub fn read(path: &Path) -> Result<LogProbs> {
    let bytes = mapped(path)?;
    let bytes = bytes.as_slice();
    let damaged = |expected: String| {
        Error::file(path, "is damaged")
            .expected(expected)
            .found(format!("{} bytes", bytes.len()))
            .hint("llama-perplexity was stopped, or the file was not copied to its end: write it again")
    };
    let header =
        bytes.get(MAGIC.len()..HEADER).ok_or_else(|| damaged(format!("{HEADER} bytes of header")))?;
    let extents: Vec<usize> = integers(header).into_iter().filter_map(|n| usize::try_from(n).ok()).collect();
    let &[n_ctx, vocabulary, chunks] = extents.as_slice() else {
        return Err(damaged("numbers of tokens, of a vocabulary, of chunks".to_owned()));
    };
    let first = n_ctx / 2;
    let rows = n_ctx.saturating_sub(1).saturating_sub(first);
    if rows == 0 || vocabulary == 0 || chunks == 0 {
        return Err(damaged(format!(
            "rows and a vocabulary, not {n_ctx} tokens, {vocabulary} entries, {chunks} chunks"
        )));
    }
    let row_bytes = vocabulary
        .div_ceil(2)
        .checked_mul(2)
        .and_then(|n| n.checked_add(PREFIX)?.checked_mul(size_of::<u16>()));
    let sizes = || {
        let tokens = n_ctx.checked_mul(chunks)?.checked_mul(size_of::<i32>())?;
        let values = row_bytes?.checked_mul(rows)?.checked_mul(chunks)?;
        Some((tokens, tokens.checked_add(values)?.checked_add(HEADER)?))
    };
    let (tokens, all) = sizes().ok_or_else(|| damaged("a size that a file can have".to_owned()))?;
    if bytes.len() != all {
        return Err(damaged(format!("{all} bytes, of {chunks} times {n_ctx} tokens")));
    }
    let decoded = (rows * vocabulary * size_of::<f64>()) as u64;
    memory::require(
        &path.display().to_string(),
        &[("its log-probabilities", decoded)],
        "a smaller context: -c 128",
    )?;
    let ids = integers(&bytes[HEADER..HEADER + n_ctx * size_of::<i32>()]);
    let ids = ids.into_iter().take(first + rows).map(|id| {
        u32::try_from(id)
            .map(|id| Some(Token::Id(id)))
            .map_err(|_| damaged(format!("token ids from 0 on, not {id}")))
    });
    let row_bytes = row_bytes.unwrap_or(0);
    let row = |row: usize| {
        let at = HEADER + tokens + row * row_bytes;
        decoded_row(first + row, &bytes[at..at + row_bytes], vocabulary)
    };
    let mut notes = Vec::new();
    if chunks > 1 {
        notes
            .push(format!("the first of {chunks} chunks was looked at: the others begin texts of their own"));
    }
    Ok(LogProbs {
        path: path.to_owned(),
        format: "llama-perplexity's log-probabilities",
        producer: "llama.cpp".to_owned(),
        arithmetics: &ARITHMETICS,
        start: Start::Text,
        tokens: ids.collect::<Result<Vec<Option<Token>>>>()?,
        bos: true,
        rows: (0..rows).map(row).collect(),
        notes,
    })
}

fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn decoded_row(index: usize, bytes: &[u8], vocabulary: usize) -> Row {
    let float =
        |at: usize| f64::from(f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
    let (scale, smallest) = (float(0), float(4));
    let steps = bytes[PREFIX * size_of::<u16>()..].chunks_exact(2).take(vocabulary);
    let value = |step: &[u8]| smallest + scale * f64::from(u16::from_le_bytes([step[0], step[1]]));
    // Half a step, and what rounding in f32 adds to it at the largest.
    let half_unit = scale * (0.5 + LEVELS * ROUNDINGS * UNIT_F32);
    Row { index, columns: Columns::All, values: steps.map(value).collect(), half_unit, floor: smallest }
}
