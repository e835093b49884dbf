//! Tokens that an engine chose, each the likeliest one.
//!
//! The text is forced, so one prefill says what a hypothesis would have chosen at every place. Rounding moves logits
//! before the largest is taken; noise of Gumbel's distribution with scale τ makes that choice a softmax at temperature
//! τ, and has a standard deviation of π·τ/√6.

use rayon::prelude::*;

use super::spelling::Spelling;
use super::{Evidence, Noise, Score, UNTHOUGHT, digest};
use crate::error::Result;
use crate::ops::bound::CONFIDENCE;
use crate::tokenizer::Tokenizer;

/// Standard deviation of Gumbel noise of scale 1: π/√6.
const GUMBEL: f64 = 1.282_549_830_161_864;

/// Tokens behind a prompt.
pub struct Chosen {
    /// Position of the prompt's last token.
    pub first: usize,
    /// The tokens, in order.
    pub tokens: Vec<u32>,
    /// Where tokens were read from a text; ids that were seen are exact.
    pub text: Option<Spelling>,
}

impl Chosen {
    /// A text behind a prompt whose last token is at `first`, in the tokens that its tokenizer makes of it.
    ///
    /// # Errors
    /// A text that has no tokens.
    pub fn text(first: usize, tokenizer: Tokenizer, text: &[u8]) -> Result<Chosen> {
        let (tokens, text) = Spelling::new(tokenizer, text)?;
        Ok(Chosen { first, tokens, text: Some(text) })
    }
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

    fn ceiling(&self, _noise: &Noise) -> f64 {
        0.0
    }

    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score {
        let noise = &noise.of(logits);
        // In other tokens the text may end before the rows do.
        let rows: Vec<&[f32]> = logits.chunks(noise.width).take(self.tokens.len()).collect();
        let floor = (UNTHOUGHT / noise.width as f64).ln();
        let seen: Vec<Row> = rows.par_iter().enumerate().map(|(t, row)| self.row(t, row)).collect();
        // By row: its log-likelihood under each amount of noise.
        let by_row = seen.par_iter().zip(&rows).enumerate().map(|(t, (seen, row))| {
            let temperatures = noise.levels().map(|(way, times)| times * noise.by_way[way][t] / GUMBEL);
            seen.log_likelihoods(row, &temperatures.collect::<Vec<_>>())
        });
        let by_row: Vec<Vec<f64>> = by_row.collect();
        let of_level = |level: usize| by_row.iter().map(|levels| levels[level].max(floor)).sum();
        let best = noise.best_of((0..noise.levels().count()).map(of_level));
        let sigma = &noise.by_way[best.0];
        // Two logits are off by as much each; where many tokens tie, none is a choice.
        let is_hit = |t: usize| {
            let is_chosen = by_row[t][best.0] >= UNTHOUGHT.ln();
            is_chosen && seen[t].short <= CONFIDENCE * std::f64::consts::SQRT_2 * sigma[t]
        };
        let hit: Vec<bool> = (0..rows.len()).map(is_hit).collect();
        let otherwise = seen.iter().enumerate().find_map(|(t, row)| Some((t, row.otherwise?)));
        let otherwise = otherwise.filter(|(t, _)| hit[..=*t].iter().all(|hit| *hit));
        Score { otherwise, ..Score::of(&hit, best, digest(logits, noise.width)) }
    }

    fn respelt(&self, t: usize, token: u32) -> Option<Box<dyn Evidence>> {
        let (tokens, text) = self.text.as_ref()?.respelt(&self.tokens, t, token)?;
        Some(Box::new(Chosen { first: self.first, tokens, text: Some(text) }))
    }

    fn tokens(&self) -> &[u32] {
        &self.tokens
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
    /// The token of the largest, where that is another one that the text begins with too.
    otherwise: Option<u32>,
}

impl Row {
    /// Logarithms of the token's share of the softmax at temperatures, each of them above nothing.
    fn log_likelihoods(&self, row: &[f32], temperatures: &[f64]) -> Vec<f64> {
        if let Some(is_first) = self.is_first {
            let own = if is_first { OF_SEARCH.ln() } else { f64::NEG_INFINITY };
            return vec![own; temperatures.len()];
        }
        let scales = temperatures.iter().map(|temperature| 1.0 / temperature.max(f64::MIN_POSITIVE));
        let sums = self.sums(row, temperatures);
        let one = |(scale, sum): (f64, f64)| match self.short * scale < NOTHING {
            true => (self.own - self.largest) * scale - sum.ln(),
            false => f64::NEG_INFINITY,
        };
        scales.zip(sums).map(one).collect()
    }

    /// Of a softmax at each temperature, what its exponentials come to, of which the largest is 1. One that follows on its half is a
    /// square root of that one, term by term.
    fn sums(&self, row: &[f32], temperatures: &[f64]) -> Vec<f64> {
        let halves = |pair: &[f64]| pair[0] * 2.0 == pair[1];
        let chained = temperatures.windows(2).rev().take_while(|pair| halves(pair)).count();
        let (alone, chain) = temperatures.split_at(temperatures.len() - chained.min(temperatures.len()));
        let mut out: Vec<f64> = alone.iter().map(|temperature| self.sum(row, *temperature)).collect();
        let Some(widest) = chain.last() else { return out };
        let scale = 1.0 / widest.max(f64::MIN_POSITIVE);
        let mut sums = vec![[0.0; LANES]; chain.len()];
        for values in row.chunks(LANES) {
            let mut terms = [0.0; LANES];
            for (term, value) in terms.iter_mut().zip(values) {
                *term = ((f64::from(*value) - self.largest) * scale).exp();
            }
            for sum in sums.iter_mut().rev() {
                for (sum, term) in sum.iter_mut().zip(&mut terms) {
                    *sum += *term;
                    *term *= *term;
                }
            }
        }
        out.extend(sums.iter().map(|sum| sum.iter().sum::<f64>()));
        out
    }

    fn sum(&self, row: &[f32], temperature: f64) -> f64 {
        let scale = 1.0 / temperature.max(f64::MIN_POSITIVE);
        let least = self.largest - NOTHING * temperature;
        let near = row.iter().map(|z| f64::from(*z)).filter(|z| *z >= least);
        near.map(|z| ((z - self.largest) * scale).exp()).sum()
    }
}

/// How often a search for the largest of what has none ends where it began; others end at the last, or fail.
const OF_SEARCH: f64 = 0.5;
/// Sums side by side.
const LANES: usize = 8;
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
        let otherwise = self.text.as_ref().and_then(|text| text.otherwise(t, self.tokens[t], best.0));
        if otherwise.is_some() {
            own = best.1;
        }
        let has_none = row.iter().any(|z| z.is_nan()) || row.iter().all(|z| *z == row[0]);
        let is_first = has_none.then(|| self.tokens[t] == 0);
        let short = if is_first == Some(true) { 0.0 } else { best.1 - own };
        Row { own, largest: best.1, short, is_first, otherwise }
    }
}
