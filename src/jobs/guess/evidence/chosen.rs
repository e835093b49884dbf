//! Tokens that an engine chose, each the likeliest one.
//!
//! The text is forced, so one prefill says what a hypothesis would have chosen at every place. Rounding moves logits
//! before the largest is taken; noise of Gumbel's distribution with scale τ makes that choice a softmax at temperature
//! τ, and has a standard deviation of π·τ/√6.

use super::{Evidence, Noise, Score, UNTHOUGHT, digest};
use crate::ops::bound::CONFIDENCE;

/// Standard deviation of Gumbel noise of scale 1: π/√6.
const GUMBEL: f64 = 1.282_549_830_161_864;

/// Tokens behind a prompt.
pub struct Chosen {
    /// Position of the prompt's last token.
    pub first: usize,
    /// The tokens, in order.
    pub tokens: Vec<u32>,
    /// By token, the bytes of the text from there on, where tokens were read from a text; ids that were seen are exact.
    pub text: Option<Spelling>,
}

/// How tokens are spelt.
pub struct Spelling {
    /// By token of the vocabulary.
    pub of: Vec<Vec<u8>>,
    /// The text behind the prompt.
    pub text: Vec<u8>,
    /// By token that was seen, where it begins.
    pub starts: Vec<usize>,
}

impl Evidence for Chosen {
    fn kind(&self) -> &'static str {
        if self.text.is_some() { "text" } else { "tokens" }
    }

    fn rows(&self) -> usize {
        self.tokens.len()
    }

    fn first(&self) -> usize {
        self.first
    }

    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score {
        let rows: Vec<&[f32]> = logits.chunks(noise.width).collect();
        let floor = (UNTHOUGHT / noise.width as f64).ln();
        let seen: Vec<Row> = rows.iter().enumerate().map(|(t, row)| self.row(t, row)).collect();
        let of = |way: usize, times: f64| -> f64 {
            let all = rows.iter().zip(&seen).enumerate();
            all.map(|(t, (row, seen))| {
                let scale = times * noise.by_way[way][t] / GUMBEL;
                seen.log_likelihood(row, scale).max(floor)
            })
            .sum()
        };
        let best = noise.best(of);
        let sigma = &noise.by_way[best.0];
        // Two logits are off by as much each; where many tokens tie, none is a choice.
        let is_hit = |t: usize| {
            let is_chosen = seen[t].log_likelihood(rows[t], sigma[t] / GUMBEL) >= UNTHOUGHT.ln();
            is_chosen && seen[t].short <= CONFIDENCE * std::f64::consts::SQRT_2 * sigma[t]
        };
        let hit: Vec<bool> = (0..rows.len()).map(is_hit).collect();
        Score::of(&hit, best, digest(logits, noise.width))
    }
}

/// What a row of logits says of the token that was seen.
struct Row {
    /// The logit of the token.
    own: f64,
    /// The largest logit.
    largest: f64,
    /// How far the token's falls short of the largest; NaN where that is not known.
    short: f64,
    /// Where no logit is the largest, they are all alike or one is NaN: whether the token is the one that a search for the
    /// largest begins with.
    is_first: Option<bool>,
}

impl Row {
    /// Logarithm of the token's share of the softmax at a temperature.
    fn log_likelihood(&self, row: &[f32], temperature: f64) -> f64 {
        if let Some(is_first) = self.is_first {
            return if is_first { OF_SEARCH.ln() } else { f64::NEG_INFINITY };
        }
        let scale = 1.0 / temperature.max(f64::MIN_POSITIVE);
        if !(self.short * scale < NOTHING) {
            return f64::NEG_INFINITY;
        }
        let least = self.largest - NOTHING * temperature;
        let near = row.iter().map(|z| f64::from(*z)).filter(|z| *z >= least);
        let sum: f64 = near.map(|z| ((z - self.largest) * scale).exp()).sum();
        (self.own - self.largest) * scale - sum.ln()
    }
}

/// How often a search for the largest of what has none ends where it began; others end at the last, or fail.
const OF_SEARCH: f64 = 0.5;
/// Exponents below this add nothing to a sum of doubles.
const NOTHING: f64 = 40.0;

impl Chosen {
    fn row(&self, t: usize, row: &[f32]) -> Row {
        let value = |token: u32| row.get(token as usize).map_or(f64::NAN, |z| f64::from(*z));
        // A NaN is no logit that anything could be smaller than.
        let best = row.iter().enumerate().fold((0u32, f64::NEG_INFINITY), |best, (i, z)| {
            let z = f64::from(*z);
            if z > best.1 { (i as u32, z) } else { best }
        });
        let mut own = value(self.tokens[t]);
        // A text says which bytes were chosen, and not by which tokens.
        if let Some(spelling) = &self.text
            && let (Some(piece), Some(start)) = (spelling.of.get(best.0 as usize), spelling.starts.get(t))
            && !piece.is_empty()
            && spelling.text.get(*start..).is_some_and(|rest| rest.starts_with(piece))
        {
            own = best.1;
        }
        let has_none = row.iter().any(|z| z.is_nan()) || row.iter().all(|z| *z == row[0]);
        let is_first = has_none.then(|| self.tokens[t] == 0);
        let short = if is_first == Some(true) { 0.0 } else { best.1 - own };
        Row { own, largest: best.1, short, is_first }
    }
}
