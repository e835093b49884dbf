//! Attention of few queries on CUDA over keys in blocks (ggml-cuda/fattn-vec.cuh, fattn-common.cuh).
//!
//! Scaled queries become blocks of 8 bits with a scale in f32, beside the sum of what was not yet rounded. A thread adds
//! up four products of integers and multiplies them by both scales. Where the quants of keys have an offset, eight
//! threads add an eighth of offset·sum each. The threads of a key are added up, softmax and values are in f32.

use std::borrow::Cow;

use super::super::bound::{CONFIDENCE, UNIT_F32, accumulation};
use super::row::Attention;
use crate::arithmetic::{Flash, Vector};

/// Values in a block (`QK8_1`).
const BLOCK: usize = 32;
/// Values of a thread.
const OWN: usize = 4;
/// A query's scale is a quotient that is approximate, and a thread multiplies by it.
const SCALE_ROUNDINGS: f64 = 5.0;
/// A thread's product with the query's scale, the addition of its share of the offset, the product with the key's scale,
/// and as many additions as there are threads one after the other.
const THREAD_ROUNDINGS: f64 = 3.0 + 5.0;
/// A sum of four values, and of eight threads in pairs.
const SUM_STEPS: usize = 3 + 3;

impl Attention<'_, '_, f64> {
    /// Whether keys are multiplied as integers.
    fn in_integers(&self) -> bool {
        self.kind == Flash::Vector(Vector::Integers)
    }

    /// Absolute error of a score that is added up so, beyond that of a sum of products; 0 of other kernels.
    pub fn of_integers(&self, query: usize, k: &[f64]) -> f64 {
        if !self.in_integers() {
            return 0.0;
        }
        let (q, sums) = (self.q.row(query), self.sums.row(query));
        let (mut scales, mut squares) = (0.0, 0.0);
        for ((q, k), excess) in q.chunks(BLOCK).zip(k.chunks(BLOCK)).zip(sums) {
            let offset = self.minimum(k);
            let terms = q.iter().zip(k).map(|(q, k)| q * (k - offset));
            scales += terms.sum::<f64>().abs();
            let sum = (q.iter().sum::<f64>() + excess).abs();
            let share = offset.abs() * sum * OWN as f64 / BLOCK as f64;
            for (q, k) in q.chunks(OWN).zip(k.chunks(OWN)) {
                let own: f64 = q.iter().zip(k).map(|(q, k)| (q * (k - offset)).abs()).sum();
                squares += THREAD_ROUNDINGS * (CONFIDENCE * UNIT_F32 * (own + share)).powi(2);
            }
            let length = q.iter().map(|q| q * q).sum::<f64>().sqrt();
            squares += (offset * accumulation(SUM_STEPS, UNIT_F32) * (length + sum)).powi(2);
        }
        self.scale.abs() * (SCALE_ROUNDINGS * UNIT_F32 * scales + squares.sqrt())
    }

    /// By how much a query's value moves a score, and so does half a step of it: a key's value, or what is multiplied
    /// apart of it.
    pub fn reach<'k>(&self, k: &'k [f64]) -> Cow<'k, [f64]> {
        if !self.in_integers() {
            return Cow::Borrowed(k);
        }
        let blocks = k.chunks(BLOCK).map(|k| (k, self.minimum(k)));
        Cow::Owned(
            blocks.flat_map(|(k, offset)| k.iter().map(move |k| (k - offset).abs() + offset.abs())).collect(),
        )
    }

    /// How far a score moves where what the blocks of a key have in common is off by as much as their values.
    pub fn of_offsets(&self, query: usize, error: &[f64]) -> f64 {
        if !self.in_integers() {
            return 0.0;
        }
        let blocks = error.chunks(BLOCK).map(|error| error.iter().copied().fold(0.0, f64::max));
        blocks.zip(self.sums.row(query)).map(|(error, excess)| error * excess.abs()).sum()
    }
}
