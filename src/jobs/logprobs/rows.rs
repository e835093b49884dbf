//! Rows of log-probabilities: which position and which columns they are of, and what they leave open of the logits.

use std::collections::HashMap;
use std::path::Path;

use crate::error::{Error, Result};
use crate::foreign::logprobs::{Columns, LogProbs, Start, Token};
use crate::gguf::Gguf;
use crate::ops::bound::{CONFIDENCE, UNIT_F32};
use crate::report::words::count;
use crate::tokenizer::Tokenizer;
use parity_dump::POSITIONS_MAX;

/// Roundings of a log-softmax in f32, of numbers as large as a logit: the difference from the largest, the logarithm of
/// the sum, the difference from that.
const LOG_SOFTMAX_ROUNDINGS: f64 = 3.0;

/// What the words of a vocabulary are called.
#[derive(Default)]
pub struct Words {
    ids: HashMap<Vec<u8>, Vec<u32>>,
    first: Option<u32>,
}

impl Words {
    /// Of a model file, where there is one and it has a vocabulary that parity reads.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of(model: Option<&Path>) -> Result<Words> {
        let Some(model) = model else { return Ok(Words::default()) };
        let Ok(tokenizer) = Tokenizer::from_gguf(&Gguf::open(model)?) else { return Ok(Words::default()) };
        let mut ids: HashMap<Vec<u8>, Vec<u32>> = HashMap::new();
        for id in 0..tokenizer.n_tokens() as u32 {
            let bytes = tokenizer.bytes(id).unwrap_or_default().into_owned();
            if !bytes.is_empty() {
                ids.entry(bytes).or_default().push(id);
            }
        }
        Ok(Words { ids, first: tokenizer.first() })
    }

    /// The token, where only one has this name.
    fn id(&self, token: &Token) -> Option<u32> {
        match token {
            Token::Id(id) => Some(*id),
            Token::Bytes(bytes) => match self.ids.get(bytes).map(Vec::as_slice) {
                Some([id]) => Some(*id),
                _ => None,
            },
        }
    }
}

/// Log-probabilities at positions.
pub struct Said<'a> {
    /// Where they come from.
    pub source: &'a LogProbs,
    /// By position, up to the last row's.
    pub tokens: Vec<u32>,
    /// In order of position.
    pub rows: Vec<Row>,
}

/// What is known of the next token at one position.
pub struct Row {
    /// Of the token that it comes behind.
    pub position: u32,
    /// Column and log-probability.
    pub known: Vec<(usize, f64)>,
    half_unit: f64,
    floor: f64,
    /// Whether these are all columns.
    whole: bool,
}

impl<'a> Said<'a> {
    /// Finds tokens and columns; `given` are the tokens of the prompt.
    ///
    /// # Errors
    /// Tokens that nobody says; rows without a token, or with none of the vocabulary's.
    pub fn new(source: &'a LogProbs, given: Option<&[u32]>, words: &Words) -> Result<Said<'a>> {
        let mut tokens = tokens(source, given.unwrap_or_default(), words)?;
        let behind = given.map_or(0, <[u32]>::len).saturating_sub(1);
        let offset = if source.start == Start::Prompt { behind } else { 0 };
        let mut rows: Vec<Row> = Vec::with_capacity(source.rows.len());
        for row in &source.rows {
            let position = row.index + offset;
            if !(position < tokens.len() && position < POSITIONS_MAX) {
                return Err(Error::file(&source.path, "has a row behind its last token")
                    .expected(format!("at most {}", count(tokens.len(), "row")))
                    .found(format!("one at position {position}")));
            }
            let known: Vec<(usize, f64)> = match &row.columns {
                Columns::All => row.values.iter().copied().enumerate().collect(),
                Columns::Some(tokens) => {
                    let ids = tokens.iter().map(|token| words.id(token));
                    ids.zip(&row.values).filter_map(|(id, value)| Some((id? as usize, *value))).collect()
                }
            };
            if known.is_empty() {
                return Err(Error::file(
                    &source.path,
                    "names no token of this model's vocabulary in one of its rows",
                )
                .expected("token ids, or texts of tokens, and the model that has them")
                .found(format!("{:?}", row.columns).chars().take(SHOWN).collect::<String>())
                .hint("-m MODEL.gguf; vLLM: \"return_tokens_as_token_ids\": true"));
            }
            let (half_unit, floor) = (row.half_unit, row.floor);
            rows.push(Row {
                position: position as u32,
                known,
                half_unit,
                floor,
                whole: row.columns == Columns::All,
            });
        }
        rows.sort_by_key(|row| row.position);
        let last = rows.last().map_or(0, |row| row.position as usize + 1);
        tokens.truncate(last);
        Ok(Said { source, tokens, rows })
    }

    /// How many columns there are, where all were said.
    pub fn width(&self) -> Option<usize> {
        self.rows.iter().find(|row| row.whole).map(|row| row.known.len())
    }

    /// Refuses a row of another vocabulary than of `width` entries.
    pub fn fits(&self, row: &Row, width: usize) -> Result<()> {
        let beyond = row.known.iter().find(|(column, _)| *column >= width);
        if beyond.is_none() && (!row.whole || row.known.len() == width) {
            return Ok(());
        }
        Err(Error::file(&self.source.path, "is of another vocabulary than the model")
            .expected(count(width, "entry"))
            .found(
                beyond
                    .map_or_else(|| count(row.known.len(), "entry"), |(column, _)| format!("token {column}")),
            ))
    }

    /// What a reader must know.
    pub fn notes(&self) -> Vec<String> {
        let values: usize = self.rows.iter().map(|row| row.known.len()).sum();
        let said = format!(
            "read as {}: {values} values of {}; they say logits up to one number a row, as exactly as they were written \
             down, and nothing else was looked at",
            self.source.format,
            count(self.rows.len(), "row"),
        );
        std::iter::once(said).chain(self.source.notes.clone()).collect()
    }
}

/// Characters of an error that shows what it found.
const SHOWN: usize = 80;

/// All tokens in the order of their positions.
fn tokens(source: &LogProbs, given: &[u32], words: &Words) -> Result<Vec<u32>> {
    let behind: &[Option<Token>] = match source.start {
        Start::Text => source.tokens.get(given.len()..).unwrap_or_default(),
        Start::Prompt if given.is_empty() => {
            return Err(Error::file(&source.path, "does not say what was asked")
                .expected("the tokens of the prompt")
                .hint(
                    "--tokens 1,2,3; `parity inspect MODEL -p PROMPT --format json` says them as \"tokens\"",
                ));
        }
        Start::Prompt => &source.tokens,
    };
    let mut tokens = given.to_vec();
    for token in behind {
        let id = token.as_ref().and_then(|token| words.id(token));
        tokens.push(id.ok_or_else(|| {
            Error::file(&source.path, format!("does not say which token stands at position {}", tokens.len()))
                .expected("a token id, or a text that is one token's alone")
                .found(token.as_ref().map_or("none".to_owned(), |token| format!("{token:?}")))
                .hint("-m MODEL.gguf has the texts; vLLM: \"return_tokens_as_token_ids\": true")
        })?);
    }
    if let (true, Some(first), Some(token)) = (source.bos, words.first, tokens.first_mut()) {
        *token = first;
    }
    Ok(tokens)
}

impl Row {
    /// What writing a value down may have moved it by: its last digit, and a log-softmax in f32, of which a server adds
    /// the terms up one by one.
    fn width(&self, value: f64, largest: f64, columns: usize) -> f64 {
        let summing = CONFIDENCE * (columns as f64).sqrt() * UNIT_F32;
        self.half_unit + summing + LOG_SOFTMAX_ROUNDINGS * UNIT_F32 * (largest.abs() + value.abs())
    }

    /// For each known column the logit nearest to the one of `base` (V,) that is written down as what was said, with the
    /// number that log-probabilities lack taken from `base`: as far from its own as the row's own differences explain,
    /// since the logarithm of the sum is off by an average of what the logits are off by.
    pub fn nearest(&self, base: &[f64]) -> Vec<f64> {
        let (largest, normaliser) = normaliser(base);
        let told = self.known.iter().filter(|(_, value)| *value > self.floor);
        let mut apart: Vec<f64> = told.map(|(column, value)| base[*column] - value).collect();
        apart.sort_by(f64::total_cmp);
        let middle = apart.get(apart.len() / 2).copied().unwrap_or(normaliser);
        let spread = rms(apart.iter().map(|distance| distance - middle));
        let free = CONFIDENCE * spread + self.width(largest - normaliser, largest, base.len());
        let shift = if (middle - normaliser).abs() <= free { middle } else { normaliser };
        let one = |(column, value): &(usize, f64)| {
            let (own, said) = (base[*column], value + shift);
            let width = self.width(*value, largest, base.len());
            let hidden = *value <= self.floor && own <= said + width;
            match hidden || (own - said).abs() <= width {
                true => own,
                false => said + width.copysign(own - said),
            }
        };
        self.known.iter().map(one).collect()
    }

    /// How far what was said is from `exact`, root mean square over the columns relative to that of all exact logits, and
    /// the column that is farthest.
    pub fn distance(&self, exact: &[f64]) -> (f64, usize) {
        let (apart, worst) = self.apart(exact);
        (apart / rms(exact.iter().copied()), worst)
    }

    /// The same in logits: of exact logits that are all zero, too.
    pub fn apart(&self, exact: &[f64]) -> (f64, usize) {
        let own = self.nearest(exact);
        let apart = || self.known.iter().zip(&own).map(|((column, _), own)| (*column, own - exact[*column]));
        let worst = apart().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).map_or(0, |(column, _)| column);
        (rms(apart().map(|(_, apart)| apart)), worst)
    }

    /// The same of a pass whose roundings were disturbed: over the known columns or over all, whichever is more.
    pub fn spread(&self, exact: &[f64], disturbed: &[f64]) -> f64 {
        let shift = normaliser(exact).1 - normaliser(disturbed).1;
        let apart: Vec<f64> = disturbed.iter().zip(exact).map(|(a, b)| a + shift - b).collect();
        let known = rms(self.known.iter().filter_map(|(column, _)| apart.get(*column).copied()));
        known.max(rms(apart.iter().copied())) / rms(exact.iter().copied())
    }
}

/// The largest of some logits, and the logarithm of the sum of all exponentials.
pub fn normaliser<T: Copy + Into<f64>>(logits: &[T]) -> (f64, f64) {
    let all = || logits.iter().map(|z| -> f64 { (*z).into() });
    let largest = all().fold(f64::NEG_INFINITY, f64::max);
    (largest, largest + all().map(|z| (z - largest).exp()).sum::<f64>().ln())
}

fn rms(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0usize, 0.0), |(n, sum), x| (n + 1, sum + x * x));
    (sum / n.max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(known: &[(usize, f64)], half_unit: f64) -> Row {
        Row { position: 0, known: known.to_vec(), half_unit, floor: -60.0, whole: false }
    }

    const LOGITS: [f64; 5] = [3.0, 1.0, -2.0, 0.5, -70.0];

    fn said(columns: &[usize], moved: f64) -> Vec<(usize, f64)> {
        let normaliser = normaliser(&LOGITS).1;
        columns
            .iter()
            .enumerate()
            .map(|(i, &c)| (c, LOGITS[c] - normaliser + moved * (i as f64 - 0.5)))
            .collect()
    }

    /// Root mean square distance in logits.
    fn far(known: &[(usize, f64)], half_unit: f64) -> f64 {
        row(known, half_unit).distance(&LOGITS).0 * rms(LOGITS.into_iter())
    }

    #[test]
    fn what_is_written_down_so_is_no_difference_and_more_than_that_is() {
        assert_eq!(far(&said(&[0, 1, 2], 1e-4), 2e-4), 0.0);
        // -0.1, 0 and 0.1 beside their middle.
        let distance = far(&said(&[0, 1, 3], 0.1), 1e-4);
        approx::assert_relative_eq!(distance, 0.1 * (2.0f64 / 3.0).sqrt(), max_relative = 1e-2);
    }

    #[test]
    fn a_normaliser_of_other_columns_shows_in_a_single_value() {
        let mut one = said(&[0], 0.0);
        one[0].1 -= 0.3;
        assert!(far(&one, 1e-4) > 0.2);
        let mut all = said(&[0, 1, 2, 3], 0.0);
        all.iter_mut().for_each(|(_, value)| *value -= 0.3);
        assert!(far(&all, 1e-4) > 0.2, "no difference within the row explains it");
    }

    #[test]
    fn below_the_floor_a_value_says_only_that_it_is_no_larger() {
        let mut known = said(&[0, 1], 0.0);
        known.push((4, -60.0));
        assert_eq!(far(&known, 1e-4), 0.0);
        known.push((2, -60.0));
        assert!(far(&known, 1e-4) > 10.0, "-2 is far above -60");
    }

    #[test]
    fn a_nan_is_no_agreement() {
        let mut known = said(&[0, 1], 0.0);
        known[1].1 = f64::NAN;
        assert!(far(&known, 1e-4).is_nan());
    }
}
