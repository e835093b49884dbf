//! Log-probabilities of the likeliest tokens, as servers say them.

use super::logits::of_distances;
use super::{Evidence, Noise, Score, digest};
use crate::jobs::logprobs::Said;

/// What a server said, at places one behind the other; nothing may have been said at some.
pub struct SaidRows<'a> {
    /// What was said.
    pub said: Said<'a>,
}

impl SaidRows<'_> {
    fn last(&self) -> usize {
        self.said.rows.last().map_or(0, |row| row.position as usize)
    }
}

impl SaidRows<'_> {
    /// The noise of the rows of which something was said.
    fn of_rows(&self, noise: &Noise) -> Noise {
        let rows = || self.said.rows.iter().map(|row| row.position as usize - self.first());
        let pick = |all: &Vec<f64>| rows().filter_map(|t| all.get(t).copied()).collect::<Vec<f64>>();
        Noise {
            width: noise.width,
            by_way: noise.by_way.iter().map(pick).collect(),
            size: pick(&noise.size),
            digests: noise.digests.clone(),
            doublings: noise.doublings,
        }
    }
}

impl Evidence for SaidRows<'_> {
    fn kind(&self) -> &'static str {
        "log-probabilities"
    }

    fn rows(&self) -> usize {
        self.last() + 1 - self.first()
    }

    fn first(&self) -> usize {
        self.said.rows.first().map_or(0, |row| row.position as usize)
    }

    fn ceiling(&self, noise: &Noise) -> f64 {
        of_distances(vec![0.0; self.said.rows.len()], &self.of_rows(noise), Vec::new()).log_likelihood
    }

    fn weigh(&self, logits: &[f32], noise: &Noise) -> Score {
        let (mut distances, mut at) = (Vec::new(), Vec::new());
        for row in &self.said.rows {
            let t = row.position as usize - self.first();
            let Some(own) = logits.get(t * noise.width..(t + 1) * noise.width) else { break };
            let own: Vec<f64> = own.iter().map(|z| f64::from(*z)).collect();
            let (apart, _) = row.apart(&own);
            distances.push(if apart.is_nan() { f64::INFINITY } else { apart });
            at.push(t);
        }
        let found = of_distances(distances, &self.of_rows(noise), digest(logits, noise.width));
        Score { first_miss: found.first_miss.map(|miss| at[miss]), ..found }
    }
}
