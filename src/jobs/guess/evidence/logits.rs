//! Logits themselves, or hidden states.

use super::{Evidence, Noise, Score, difference, digest, rms};
use crate::jobs::logprobs::normaliser;
use crate::ops::bound::CONFIDENCE;

/// Independent numbers in the rounding errors of a row, at least: logits are a matmul of one row of as many numbers as
/// a model is wide, of which all errors of earlier layers are a part.
pub const INDEPENDENT: f64 = 8.0;

/// Rows of logits.
pub struct Logits {
    /// What they are, for a reader.
    pub kind: &'static str,
    /// Position of the first.
    pub first: usize,
    /// (n, V)
    pub values: Vec<f32>,
    /// V
    pub width: usize,
    /// Whether rows are what a log-softmax makes of logits.
    pub normalised: bool,
}

impl Evidence for Logits {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn rows(&self) -> usize {
        self.values.len() / self.width.max(1)
    }

    fn first(&self) -> usize {
        self.first
    }

    fn ceiling(&self, noise: &Noise) -> f64 {
        of_distances(vec![0.0; self.rows()], noise, Vec::new()).log_likelihood
    }

    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score {
        let both = logits.chunks(noise.width).zip(self.values.chunks(self.width));
        let apart = |(a, b): (&[f32], &[f32])| {
            let off = if self.normalised { normaliser(a).1 } else { 0.0 };
            // A vocabulary that was padded: what both have.
            rms(a.iter().zip(b).map(|both| difference(both) - off))
        };
        of_distances(both.map(apart).collect(), noise, digest(logits, noise.width))
    }

    fn factor(&self, logits: &[f32]) -> Option<f64> {
        if self.normalised {
            return None;
        }
        let width = logits.len() / self.rows().max(1);
        let rows = logits.chunks(width.max(1)).zip(self.values.chunks(self.width));
        let pairs = rows.flat_map(|(a, b)| a.iter().zip(b)).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let (ab, aa) = pairs.fold((0.0, 0.0), |(ab, aa), (a, b)| (ab + a * b, aa + a * a));
        Some(ab / aa).filter(|factor| factor.is_finite())
    }
}

/// What distances of rows, absolute, say.
pub fn of_distances(rows: Vec<f64>, noise: &Noise, digest: Vec<f64>) -> Score {
    let of = |way: usize, times: f64| -> f64 {
        let one = |(t, distance): (usize, &f64)| {
            let sigma = times * noise.by_way[way][t];
            -INDEPENDENT * (sigma.ln() + 0.5 * (distance / sigma).powi(2))
        };
        rows.iter().enumerate().map(one).sum()
    };
    let best = noise.best(of);
    // A coarser arithmetic than the likeliest one explains as well what it explains.
    let widest = |t: usize| noise.by_way.iter().map(|way| way[t]).fold(0.0, f64::max);
    let hit: Vec<bool> = rows.iter().enumerate().map(|(t, d)| *d <= CONFIDENCE * widest(t)).collect();
    let size = rms(noise.size.iter().take(rows.len()).copied());
    Score { distance: Some(rms(rows.into_iter()) / size), ..Score::of(&hit, best, digest) }
}
