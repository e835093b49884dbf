//! From logits to tokens: does the difference change what the model says?

use crate::report::{Chosen, Flip, TokenReport, TopToken};
use crate::scalar::{self, in_lanes, vectorized};

/// How many of the most likely tokens of a row are compared with each other.
const TOP_K: usize = 10;

/// Sums over the rows of candidate logits a and reference logits b, each (V,).
#[derive(Clone, Debug, Default)]
pub struct TokenSums {
    rows: Vec<LogitRow>,
}

#[derive(Clone, Debug)]
struct LogitRow {
    position: u32,
    kl: f64,
    top_overlap: usize,
    flip: Option<Flip>,
    top: Vec<TopToken>,
    chosen: Option<Chosen>,
}

impl TokenSums {
    /// Adds the row at `position`.
    pub fn row(&mut self, position: u32, a: &[f32], b: &[f32]) {
        let (top_a, top_b) = (top(a), top(b));
        let flip = match (top_a.first(), top_b.first()) {
            (Some(&own), Some(&theirs)) if own != theirs => Some(flip(position, a, b, own, theirs)),
            _ => None,
        };
        let top = top_b.iter().map(|&token| TopToken {
            token: token as u32,
            text: None,
            candidate: f64::from(a[token]),
            reference: f64::from(b[token]),
        });
        let chosen = top_a.first().zip(top_b.first()).map(|(&own, &theirs)| Chosen {
            position,
            candidate: own as u32,
            reference: theirs as u32,
        });
        let top_overlap = top_a.iter().filter(|token| top_b.contains(token)).count();
        self.rows.push(LogitRow {
            position,
            kl: divergence(b, a),
            top_overlap,
            flip,
            top: top.collect(),
            chosen,
        });
    }

    /// Adds the rows of another part of the same pair.
    pub fn merge(&mut self, other: TokenSums) {
        self.rows.extend(other.rows);
    }

    /// The numbers; `None` where no row was compared.
    pub fn report(mut self) -> Option<TokenReport> {
        self.rows.sort_by_key(|row| row.position);
        let n = self.rows.len() as f64;
        let top_k = self.rows.first()?.top.len();
        let flips = self.rows.iter().filter(|row| row.flip.is_some()).count();
        let overlap: usize = self.rows.iter().map(|row| row.top_overlap).sum();
        let first_flip = self.rows.iter().find(|row| row.flip.is_some());
        let shown = first_flip.or(self.rows.last());
        Some(TokenReport {
            top1_agree: 1.0 - flips as f64 / n,
            kl_mean: self.rows.iter().map(|row| row.kl).sum::<f64>() / n,
            kl_max: self.rows.iter().map(|row| row.kl).fold(0.0, max_nan),
            top_k_agree: overlap as f64 / (n * top_k.max(1) as f64),
            top_k,
            first_flip: first_flip.and_then(|row| row.flip.clone()),
            top: shown.map_or(Vec::new(), |row| row.top.clone()),
            chosen: self.rows.iter().filter_map(|row| row.chosen).collect(),
            kl_rows: self.rows.iter().map(|row| (row.position, row.kl)).collect(),
        })
    }
}

/// The larger number; NaN where either is.
fn max_nan(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

/// Whether rounding can have made the difference: each of two logits may move by the row's largest error, so
/// a margin of up to twice that can turn round.
fn flip(position: u32, a: &[f32], b: &[f32], own: usize, theirs: usize) -> Flip {
    let difference = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs();
    let logit_error = a.iter().zip(b).map(difference).fold(0.0, max_nan);
    let margin = f64::from(b[theirs]) - f64::from(b[own]);
    Flip {
        position,
        candidate: own as u32,
        reference: theirs as u32,
        margin,
        logit_error,
        explained_by_error: margin <= 2.0 * logit_error,
    }
}

/// Indices of the largest values, largest first; of equal ones the smaller index, as a greedy sampler takes it.
fn top(logits: &[f32]) -> Vec<usize> {
    let mut top: Vec<usize> = Vec::with_capacity(TOP_K + 1);
    for (index, &value) in logits.iter().enumerate() {
        let full = top.len() == TOP_K;
        if value.is_nan() || full && logits[top[TOP_K - 1]] >= value {
            continue;
        }
        let at = top.partition_point(|&other| logits[other] >= value);
        top.insert(at, index);
        top.truncate(TOP_K);
    }
    top
}

/// KL(P ‖ Q) = Σ P ln(P/Q) of the softmaxes P and Q of two rows of logits p and q, nats.
///
/// With Z = Σ e^p and Z' = Σ e^q this is Σ e^p (p - q) / Z - ln Z + ln Z'.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let largest = |x: &[f32]| f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let (max_p, max_q) = (largest(p), largest(q));
    let [z_p, z_q, moved] = vectorized(
        #[inline(always)]
        || partitions(p, q, max_p, max_q),
    );
    let divergence = moved / z_p - (max_p + z_p.ln()) + (max_q + z_q.ln());
    // Never below zero but for rounding.
    if divergence < 0.0 { 0.0 } else { divergence }
}

/// Σ e^(p - max p), Σ e^(q - max q) and Σ e^(p - max p)·(p - q).
#[inline(always)]
fn partitions(p: &[f32], q: &[f32], max_p: f64, max_q: f64) -> [f64; 3] {
    /// Exponentials at a time: one after the other into a buffer, they become vector instructions.
    const PART: usize = 256;
    let (mut exp_p, mut exp_q) = ([0f64; PART], [0f64; PART]);
    let mut sums = [0f64; 3];
    for (p, q) in p.chunks(PART).zip(q.chunks(PART)) {
        for i in 0..p.len() {
            exp_p[i] = scalar::exp(f64::from(p[i]) - max_p);
        }
        for i in 0..q.len() {
            exp_q[i] = scalar::exp(f64::from(q[i]) - max_q);
        }
        let (exp_p, apart) = (&exp_p[..p.len()], &mut exp_q[..q.len()]);
        sums[0] += in_lanes(exp_p, exp_p, |e, _| e);
        sums[1] += in_lanes(apart, apart, |e, _| e);
        for (apart, (p, q)) in apart.iter_mut().zip(p.iter().zip(q)) {
            // Padding entries may be -inf on both sides; they carry no probability.
            *apart = if *p == f32::NEG_INFINITY { 0.0 } else { f64::from(*p) - f64::from(*q) };
        }
        sums[2] += in_lanes(exp_p, apart, |e, apart| e * apart);
    }
    sums
}

/// The most likely token of a row of logits, the smallest of equal ones.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    top(logits).first().map(|&token| token as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rows: &[(&[f32], &[f32])]) -> TokenReport {
        let mut sums = TokenSums::default();
        for (position, (a, b)) in rows.iter().enumerate() {
            sums.row(position as u32, a, b);
        }
        sums.report().unwrap()
    }

    #[test]
    fn equal_rows_agree() {
        let r = report(&[(&[1.0, 3.0, 2.0], &[1.0, 3.0, 2.0])]);
        assert_eq!((r.top1_agree, r.kl_mean, r.top_k_agree), (1.0, 0.0, 1.0));
        assert_eq!(r.first_flip, None);
        assert_eq!(r.top.iter().map(|t| t.token).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[test]
    fn a_flip_within_the_error_is_explained_and_one_beyond_it_is_not() {
        let near = report(&[(&[1.0, 1.1], &[1.1, 1.0])]).first_flip.unwrap();
        assert!(near.explained_by_error && near.reference == 0 && near.candidate == 1);
        let far = report(&[(&[1.0, 5.0, 5.1], &[1.0, 5.1, 5.0])]).first_flip.unwrap();
        assert!(far.explained_by_error);
        let shifted = report(&[(&[0.0, 1.0], &[3.0, 0.9])]).first_flip.unwrap();
        assert!(shifted.explained_by_error, "margin 2.1, error 3: {shifted:?}");
    }

    #[test]
    fn divergence_is_that_of_the_definition() {
        // p = (1/2, 1/2), q = (1/4, 3/4): ½ ln 2 + ½ ln ⅔.
        let q = [0.25f32.ln(), 0.75f32.ln()];
        approx::assert_relative_eq!(
            divergence(&[0.0, 0.0], &q),
            0.5 * 2f64.ln() + 0.5 * (2f64 / 3.0).ln(),
            max_relative = 1e-6
        );
    }

    #[test]
    fn a_nan_is_never_agreement() {
        let r = report(&[(&[f32::NAN, 1.0], &[2.0, 1.0])]);
        assert_eq!(r.top1_agree, 0.0);
        assert!(r.kl_mean.is_nan());
    }
}
