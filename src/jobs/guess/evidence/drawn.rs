//! Tokens that were drawn at a temperature, as llama.cpp's sampler draws them: top-k, top-p, min-p, temperature, then the
//! token at which the cumulative probability reaches a random number (llama-sampler.cpp, `llama_sampler_dist_apply`).
//!
//! With the seed that number is known, and so is the token, but for rounding of the probabilities. Without it only the
//! whole text speaks: how far its surprise lies from what the model expects.

use super::spelling::Spelling;
use super::{Evidence, Noise, Score, UNTHOUGHT, digest};
use crate::ops::bound::CONFIDENCE;

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Above 0.
    pub temperature: f64,
    /// The likeliest so many; all at 0.
    pub top_k: usize,
    /// The likeliest that come to this probability together.
    pub top_p: f64,
    /// Those that are at least so many times as likely as the likeliest.
    pub min_p: f64,
    /// Of the random numbers.
    pub seed: Option<u32>,
}

/// Tokens behind a prompt that were drawn.
pub struct Drawn {
    /// Position of the prompt's last token.
    pub first: usize,
    /// In order.
    pub tokens: Vec<u32>,
    /// Where tokens were read from a text.
    pub text: Option<Spelling>,
    /// How.
    pub sampling: Sampling,
}

impl Evidence for Drawn {
    fn kind(&self) -> &'static str {
        "sampled tokens"
    }

    fn rows(&self) -> usize {
        self.tokens.len()
    }

    fn first(&self) -> usize {
        self.first
    }

    fn ceiling(&self, _noise: &Noise) -> f64 {
        // Where no number is known, what was drawn is a surprise to the right model too.
        if self.sampling.seed.is_some() { 0.0 } else { f64::NEG_INFINITY }
    }

    fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score {
        let noise = &noise.of(logits);
        let n = self.tokens.len();
        let numbers = self.sampling.seed.map(|seed| Uniform::new(seed).take(n).collect::<Vec<f64>>());
        let mut others: Vec<(usize, u32)> = Vec::new();
        let seen = logits.chunks(noise.width).zip(&self.tokens).enumerate().map(|(t, (row, &token))| {
            let kept = Kept::of(row, self.sampling);
            // A text may have been drawn in other tokens.
            let drawn = numbers.as_ref().and_then(|numbers| kept.drawn(numbers[t]));
            let other =
                self.text.as_ref().zip(drawn).and_then(|(text, drawn)| text.otherwise(t, token, drawn));
            others.extend(other.map(|other| (t, other)));
            Seen::of(row, &kept, other.unwrap_or(token))
        });
        let seen: Vec<Seen> = seen.collect();
        let floor = (UNTHOUGHT / noise.width as f64).ln();
        let spread =
            |way: usize, times: f64, t: usize| times * noise.by_way[way][t] / self.sampling.temperature;
        let of = |way: usize, times: f64| -> f64 {
            let one = |(t, seen): (usize, &Seen)| match &numbers {
                Some(numbers) => seen.at(numbers[t], spread(way, times, t)),
                None => seen.probability(spread(way, times, t)),
            };
            seen.iter().enumerate().map(|one_seen| one(one_seen).ln().max(floor)).sum()
        };
        let best = noise.best(of);
        let hit: Vec<bool> = match &numbers {
            Some(numbers) => {
                let all = seen.iter().zip(numbers).enumerate();
                all.map(|(t, (seen, number))| seen.is_hit(*number, spread(best.0, 1.0, t))).collect()
            }
            None => typical(&seen),
        };
        let otherwise = others.first().copied().filter(|(t, _)| hit[..=*t].iter().all(|hit| *hit));
        Score { otherwise, ..Score::of(&hit, best, digest(logits, noise.width)) }
    }

    fn respelt(&self, t: usize, token: u32) -> Option<Box<dyn Evidence>> {
        let (tokens, text) = self.text.as_ref()?.respelt(&self.tokens, t, token)?;
        Some(Box::new(Drawn { first: self.first, tokens, text: Some(text), sampling: self.sampling }))
    }
}

/// What a row of logits says of the token that was drawn.
struct Seen {
    /// Cumulative probability in front of it and behind it, among those that may be drawn.
    interval: [f64; 2],
    /// How far below the last of those its logit is, where it is none of them.
    short: f64,
    /// Surprise of the token, and its mean and variance under the distribution.
    surprise: [f64; 3],
}

impl Seen {
    fn of(row: &[f32], kept: &Kept, token: u32) -> Seen {
        let (mut at, mut interval, mut own) = (0.0, None, f64::NAN);
        let (mut mean, mut square) = (0.0, 0.0);
        for &(id, z) in &kept.all {
            let p = kept.probability(z);
            if id == token {
                (interval, own) = (Some([at, at + p]), -p.ln());
            }
            at += p;
            if p > 0.0 {
                mean -= p * p.ln();
                square += p * p.ln().powi(2);
            }
        }
        let z = row.get(token as usize).map_or(f64::NAN, |z| f64::from(*z));
        let short = kept.all.last().map_or(f64::NAN, |(_, last)| last - z);
        if interval.is_none() {
            own = -kept.probability(z).ln();
        }
        Seen {
            interval: interval.unwrap_or([1.0, 1.0]),
            short: if own.is_nan() { f64::NAN } else { short.max(0.0) },
            surprise: [own, mean, square - mean * mean],
        }
    }

    /// Whether it is drawn by a number in [0, 1), with probabilities that are off by `spread`, relative.
    fn is_hit(&self, number: f64, spread: f64) -> bool {
        let [low, high] = self.interval;
        let off = (low - number).max(number - high).max(0.0);
        // A token at the border of those that may be drawn.
        let at_border = self.short <= CONFIDENCE * std::f64::consts::SQRT_2 * spread;
        off <= CONFIDENCE * spread && (high > low || at_border)
    }

    /// Probability that it is drawn by a number that is off by `spread`.
    fn at(&self, number: f64, spread: f64) -> f64 {
        let [low, high] = self.interval;
        let below = |x: f64| {
            0.5 * (1.0 + libm::erf((x - number) / (spread.max(f64::MIN_POSITIVE) * std::f64::consts::SQRT_2)))
        };
        ((below(high) - below(low)) / (below(1.0) - below(0.0))).max(0.0)
    }

    /// Its probability where no number is known; a token that may not be drawn is at most as likely as noise makes it.
    fn probability(&self, spread: f64) -> f64 {
        (-self.surprise[0]).exp() * (-(self.short / spread.max(f64::MIN_POSITIVE)).powi(2) / 2.0).exp()
    }
}

/// The tokens that may be drawn.
struct Kept {
    /// With their logits, the likeliest first.
    all: Vec<(u32, f64)>,
    temperature: f64,
    /// Of all weights, of which the largest is 1.
    sum: f64,
}

impl Kept {
    fn of(row: &[f32], how: Sampling) -> Kept {
        let made = Kept { all: kept(row, how), temperature: how.temperature, sum: 1.0 };
        let sum = made.all.iter().map(|(_, z)| made.probability(*z)).sum();
        Kept { sum, ..made }
    }

    fn probability(&self, z: f64) -> f64 {
        let largest = self.all.first().map_or(0.0, |(_, z)| *z);
        ((z - largest) / self.temperature).exp() / self.sum
    }

    /// The token that a number in [0, 1) draws.
    fn drawn(&self, number: f64) -> Option<u32> {
        let mut at = 0.0;
        let found = self.all.iter().find(|(_, z)| {
            at += self.probability(*z);
            number < at
        });
        found.map(|(id, _)| *id)
    }
}

/// The tokens that may be drawn with their logits, the likeliest first.
fn kept(row: &[f32], how: Sampling) -> Vec<(u32, f64)> {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Of the likeliest token's probability everything below min-p goes: a vocabulary need not be sorted for that.
    let least = if how.min_p > 0.0 { f64::from(largest) + how.min_p.ln() } else { f64::NEG_INFINITY };
    let total: f64 = row.iter().map(|z| f64::from(*z - largest).exp()).sum();
    let mut all: Vec<(u32, f64)> = row.iter().enumerate().map(|(id, z)| (id as u32, f64::from(*z))).collect();
    all.retain(|(_, z)| *z >= least);
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    if how.top_k > 0 {
        all.truncate(how.top_k);
    }
    // top-p counts what top-k left.
    let sum: f64 = match how.top_k {
        0 => total,
        k => largest_sum(row, k, f64::from(largest)),
    };
    if how.top_p < 1.0 {
        let mut at = 0.0;
        let cut = all.iter().position(|(_, z)| {
            at += (z - f64::from(largest)).exp() / sum;
            at >= how.top_p
        });
        all.truncate(cut.map_or(all.len(), |cut| cut + 1));
    }
    all
}

/// Σ exp(z - largest) over the k largest.
fn largest_sum(row: &[f32], k: usize, largest: f64) -> f64 {
    let mut all: Vec<f32> = row.to_vec();
    let k = k.min(all.len());
    if k > 0 && k < all.len() {
        all.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    }
    all[..k].iter().map(|z| (f64::from(*z) - largest).exp()).sum()
}

/// Whether the surprise so far is one that draws give, at the usual confidence; from the first token on at which it is
/// not for good.
fn typical(seen: &[Seen]) -> Vec<bool> {
    let mut sums = [0.0; 3];
    let mut all: Vec<bool> = Vec::with_capacity(seen.len());
    for one in seen {
        sums.iter_mut().zip(one.surprise).for_each(|(sum, x)| *sum += x);
        let [surprise, expected, variance] = sums;
        // One nat besides: few draws are not normally distributed.
        all.push(surprise - expected <= CONFIDENCE * (variance + 1.0).sqrt());
    }
    for t in (0..all.len().saturating_sub(1)).rev() {
        all[t] = all[t] || all[t + 1];
    }
    all
}

/// std::uniform_real_distribution<double>(0, 1) on std::mt19937, as libstdc++ has it: two draws of 32 bits, the first the
/// lower one.
struct Uniform {
    state: [u32; 624],
    at: usize,
}

impl Uniform {
    fn new(seed: u32) -> Uniform {
        let mut state = [seed; 624];
        for i in 1..624 {
            let last = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        Uniform { state, at: 624 }
    }

    fn word(&mut self) -> u32 {
        if self.at == 624 {
            for i in 0..624 {
                let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % 624] & 0x7fff_ffff);
                let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[i] = self.state[(i + 397) % 624] ^ (y >> 1) ^ twist;
            }
            self.at = 0;
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }
}

impl Iterator for Uniform {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        let (low, high) = (f64::from(self.word()), f64::from(self.word()));
        Some(((low + high * 2f64.powi(32)) / 2f64.powi(64)).min(1.0f64.next_down()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_standard_library() {
        // The 10000th word of std::mt19937 with its default seed (C++ standard, [rand.predef]).
        let mut words = Uniform::new(5489);
        let last = (0..10_000).map(|_| words.word()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn what_may_be_drawn_is_the_likeliest() {
        let how = Sampling { temperature: 1.0, top_k: 3, top_p: 0.9, min_p: 0.05, seed: None };
        // Of 5, 4, 1, 0 the first three are kept by k; 0.72 and 0.27 of them come to 0.9; 1 is below min-p.
        let kept: Vec<u32> = kept(&[0.0, 5.0, 1.0, 4.0], how).into_iter().map(|(id, _)| id).collect();
        assert_eq!(kept, [1, 3]);
    }

    #[test]
    fn a_number_draws_the_token_in_whose_interval_it_lies() {
        let how = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(1) };
        let row = [2f32.ln(), 1f32.ln(), 1f32.ln()];
        let kept = Kept::of(&row, how);
        assert_eq!([0.3, 0.7, 0.8].map(|number| kept.drawn(number)), [Some(0), Some(1), Some(2)]);
        let first = Seen::of(&row, &kept, 0);
        assert!(first.is_hit(0.3, 1e-6) && !first.is_hit(0.7, 1e-6));
        assert!(first.at(0.3, 1e-6) > 0.99 && first.at(0.7, 1e-6) < 0.01);
        // A number that says nothing leaves the probability.
        approx::assert_relative_eq!(first.at(0.7, 1e6), 0.5, max_relative = 1e-3);
    }
}
