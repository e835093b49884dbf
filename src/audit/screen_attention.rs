//! Screens the attention of long recordings: a signed sum of each head's columns, computed again in f32.
//!
//! With r over the columns of a head, out·r = Σ_s p_s·(v_s·r): v_s·r is computed once for all rows, so that a row costs
//! its scores and no more.

use rayon::prelude::*;

use super::bounds::storage_unit;
use super::case::Context;
use super::recorded::screen::ALL_HEADS_MAX;
use super::recorded::signed_sum::{dot, factor};
use super::screen::{SEEN, SEEN_ROUNDINGS, Screened};
use crate::arithmetic::round::AttentionRounding;
use crate::dense::Rows;
use crate::dense::attention::{kv_head, limited, visible};
use crate::model::graph::{Attention, Node};
use crate::numerics::Storage;
use crate::tensor::Matrix;

/// Screens `rows` of a fused attention.
pub fn screen(context: &Context<'_>, node: &Node, op: &Attention, rows: &[u32]) -> Screened {
    let Some(&last) = rows.iter().max() else { return Screened::default() };
    let all: Vec<u32> = (0..=last).collect();
    let input = |index: usize, rows: &[u32]| {
        let from = node.inputs[index];
        context.of_input(from).recording.gather(from, rows)
    };
    let (Some(q), Some(k), Some(v)) = (input(0, rows), input(1, &all), input(2, &all)) else {
        return Screened::default();
    };
    let Some(recorded) = context.recording.gather(node.checkpoint, rows) else { return Screened::default() };
    let (width, kv_width) = (op.heads * op.head_width, op.kv_heads * op.head_width);
    if q.cols != width || recorded.cols != width || k.cols != kv_width || v.cols != kv_width {
        return Screened::default();
    }
    let factors: Vec<f32> = (0..op.head_width).map(|column| factor(1, column)).collect();
    let sum = |head: &[f32]| dot(&factors, head) as f32;
    let values: Vec<f32> = v.data.chunks_exact(op.head_width).map(sum).collect();
    let steps: Vec<_> = rows.iter().map(|&position| context.recording.step(position)).collect();
    let tokens = vec![0; rows.len()];
    let look = Look {
        op,
        q: &q,
        k: &k,
        values: &values,
        recorded: &recorded,
        factors: &factors,
        share: share(context),
        rows: Rows { tokens: &tokens, positions: rows, steps: &steps },
    };
    let odd = (0..rows.len()).into_par_iter().filter(|t| !look.is_explained(*t));
    let suspects: Vec<u32> = odd.map(|t| rows[t]).collect();
    Screened::new(rows.len(), suspects.into_iter().collect())
}

/// What is seen, as of elementwise nodes; the cache and its products may be narrower still.
fn share(context: &Context<'_>) -> f32 {
    let rounding = AttentionRounding::of(&context.numerics);
    let narrow = [rounding.q, rounding.kv, rounding.probs, rounding.sums, context.numerics.storage];
    let units = narrow.into_iter().filter(|to| *to != Storage::F32).map(storage_unit);
    let unit = units.fold(context.recorded_unit, f64::max);
    SEEN.max(SEEN_ROUNDINGS * unit as f32)
}

struct Look<'a> {
    op: &'a Attention,
    /// (T, H·E)
    q: &'a Matrix<f32>,
    /// (S, K·E)
    k: &'a Matrix<f32>,
    /// (S, K) v·r
    values: &'a [f32],
    /// (T, H·E)
    recorded: &'a Matrix<f32>,
    /// (E,) r
    factors: &'a [f32],
    share: f32,
    rows: Rows<'a>,
}

impl Look<'_> {
    fn is_explained(&self, t: usize) -> bool {
        let (heads, cached) = (self.op.heads, self.k.rows);
        let looked_at = (heads * ALL_HEADS_MAX / cached.max(1)).clamp(1, heads);
        (0..looked_at).all(|i| self.head(t, (t * looked_at + i) % heads))
    }

    fn head(&self, t: usize, head: usize) -> bool {
        let width = self.op.head_width;
        let columns = head * width..(head + 1) * width;
        let kv = kv_head(self.op, head);
        let q = &self.q.row(t)[columns.clone()];
        let seen = visible(self.op.mask, self.rows, t, self.k.rows);
        let scaled = |s: usize| self.op.scale * dot(q, &self.k.row(s)[kv * width..(kv + 1) * width]);
        let score = |s: usize| limited(self.op.limit, scaled(s));
        let scores: Vec<(usize, f64)> = seen.map(|s| (s, score(s))).collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, (_, z)| max.max(*z));
        let (mut total, mut sum, mut square) = (0.0, 0.0, 0.0);
        for (s, z) in scores {
            let p = f64::from(((z - max) as f32).exp());
            let value = f64::from(self.values[s * self.op.kv_heads + kv]);
            total += p;
            sum += p * value;
            square += p * value * value;
        }
        let (expected, size) = (sum / total, (square / total).sqrt());
        let found = dot(self.factors, &self.recorded.row(t)[columns]);
        // A NaN is not within.
        (found - expected).abs() <= f64::from(self.share) * (expected.abs() + size)
    }
}
