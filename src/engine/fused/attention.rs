//! Grouped-query attention (Ainslie et al., arXiv 2305.13245) with a causal mask, in three steps that can be
//! executed one by one or as one, with the same bits.

use std::ops::Range;

use rayon::prelude::*;

use super::Rows;
use crate::arithmetic::round::{AttentionRounding, stored};
use crate::engine::fused::graph::{Anchor, Attention, BySteps, Edge, Mask, ScoreLimit};
use crate::numerics::{Numerics, Storage};
use crate::scalar::{Placed, Scalar, gemm};
use crate::tensor::{Matrix, View};

/// q·k, unscaled and unmasked: q (T, H·E), k (S, K·E), out (T, H·S).
pub fn scores<S: Scalar>(op: &Attention, q: View<'_, S>, k: View<'_, S>, numerics: &Numerics) -> Matrix<S> {
    let rounding = AttentionRounding::of(numerics);
    let (q, k) = (Stored::new(rounding.q, q), Stored::new(rounding.kv, k));
    let (q, k) = (q.view(), k.view());
    let heads = per_head(op, |head| head_scores(op, head, q, k));
    interleave(q.rows, k.rows, &heads)
}

/// Softmax of scaled, masked scores, (T, H·S) to (T, H·S).
pub fn softmax<S: Scalar>(op: &Attention, scores: View<'_, S>, rows: Rows<'_>) -> Matrix<S> {
    let cached = scores.cols / op.heads;
    let mut out = scores.to_matrix();
    for t in 0..scores.rows {
        let visible = visible(op.mask, rows, t, cached);
        for row in out.row_mut(t).chunks_exact_mut(cached.max(1)) {
            softmax_row(op, &visible, row);
        }
    }
    out
}

/// Probabilities times values: probs (T, H·S), v (S, K·E), out (T, H·E).
pub fn context<S: Scalar>(
    op: &Attention,
    probs: View<'_, S>,
    v: View<'_, S>,
    numerics: &Numerics,
) -> Matrix<S> {
    let rounding = AttentionRounding::of(numerics);
    let (probs, v) = (Stored::new(rounding.probs, probs), Stored::new(rounding.kv, v));
    let (probs, v) = (probs.view(), v.view());
    let heads = per_head(op, |head| {
        let mut own = Matrix::zeros(probs.rows, v.rows);
        for t in 0..probs.rows {
            own.row_mut(t).copy_from_slice(&probs.row(t)[head * v.rows..(head + 1) * v.rows]);
        }
        head_context(op, head, own.view(), v)
    });
    interleave(probs.rows, op.head_width, &heads)
}

/// All three: q (T, H·E), k and v (S, K·E), out (T, H·E).
pub fn fused<S: Scalar>(
    op: &Attention,
    q: View<'_, S>,
    k: View<'_, S>,
    v: View<'_, S>,
    rows: Rows<'_>,
    numerics: &Numerics,
) -> Matrix<S> {
    let rounding = AttentionRounding::of(numerics);
    let (q, k, v) = (Stored::new(rounding.q, q), Stored::new(rounding.kv, k), Stored::new(rounding.kv, v));
    let (q, k, v) = (q.view(), k.view(), v.view());
    // Probabilities of a tile of query rows at a time: those of a long prompt would fill the memory.
    let heads = per_head(op, |head| {
        let mut out = Matrix::default();
        for start in (0..q.rows).step_by(TILE_ROWS) {
            let tile = rows_of(q, start..(start + TILE_ROWS).min(q.rows));
            let mut probs = head_scores(op, head, tile, k);
            for t in 0..tile.rows {
                softmax_row(op, &visible(op.mask, rows, start + t, k.rows), probs.row_mut(t));
            }
            let probs = Stored::new(rounding.probs, probs.view());
            out.append(head_context(op, head, probs.view(), v).view());
        }
        out
    });
    interleave(q.rows, op.head_width, &heads)
}

/// Query rows of a head that are computed at once. Products of more rows are cut at its multiples, so that a tile
/// has the bits that it has within the whole.
pub(crate) const TILE_ROWS: usize = 128;

/// Some rows of a matrix.
fn rows_of<S>(view: View<'_, S>, rows: Range<usize>) -> View<'_, S> {
    View { rows: rows.len(), cols: view.cols, data: &view.data[rows.start * view.cols..rows.end * view.cols] }
}

/// A value that is copied only where it is rounded.
enum Stored<'a, S> {
    AsGiven(View<'a, S>),
    Rounded(Matrix<S>),
}

impl<'a, S: Scalar> Stored<'a, S> {
    fn new(storage: Storage, value: View<'a, S>) -> Self {
        match storage {
            Storage::F32 => Stored::AsGiven(value),
            _ => Stored::Rounded(stored(storage, value)),
        }
    }

    fn view(&self) -> View<'_, S> {
        match self {
            Stored::AsGiven(view) => *view,
            Stored::Rounded(matrix) => matrix.view(),
        }
    }
}

/// The positions that row t sees of `cached`: none behind its step, which are not computed yet.
pub(crate) fn visible(mask: BySteps<Mask>, rows: Rows<'_>, t: usize, cached: usize) -> Range<usize> {
    let step = &rows.steps[t];
    let at = |edge: Edge| {
        let from = match edge.from {
            Anchor::Start => 0,
            Anchor::Step => step.start,
            Anchor::Row => rows.positions[t],
            Anchor::End => step.end,
        };
        (i64::from(from) + edge.offset).clamp(0, cached as i64) as usize
    };
    let Mask { first, behind } = mask.at(step.start);
    at(first)..at(behind).min(step.end as usize).max(at(first))
}

/// scores (S,) to probabilities in place; what is not visible becomes 0.
fn softmax_row<S: Scalar>(op: &Attention, visible: &Range<usize>, row: &mut [S]) {
    let scale = S::from_f64(op.scale);
    let (before, rest) = row.split_at_mut(visible.start);
    let (seen, after) = rest.split_at_mut(visible.len());
    before.fill(S::ZERO);
    after.fill(S::ZERO);
    seen.iter_mut().for_each(|score| *score *= scale);
    if op.limit != ScoreLimit::None {
        seen.iter_mut().for_each(|score| *score = limited(op.limit, *score));
    }
    if !op.softmax || seen.is_empty() {
        return;
    }
    let max = seen.iter().copied().reduce(S::max_nan).unwrap_or(S::ZERO);
    seen.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f64 = seen.iter().map(|p| p.to_f64()).sum();
    let inverse = S::from_f64(1.0 / sum);
    seen.iter_mut().for_each(|p| *p *= inverse);
}

/// A scaled score, kept small.
pub(crate) fn limited<S: Scalar>(limit: ScoreLimit, score: S) -> S {
    match limit {
        ScoreLimit::None => score,
        // In f64: what an engine rounds of it is the judge's business.
        ScoreLimit::SoftCap(cap) => S::from_f64(cap * (score.to_f64() / cap).tanh()),
        ScoreLimit::Clamp(limit) => S::from_f64(score.to_f64().clamp(-limit, limit)),
    }
}

/// The key/value head that a query head reads.
pub(crate) fn kv_head(op: &Attention, head: usize) -> usize {
    (head / op.group) % op.kv_heads
}

/// (T, S) scores of one head.
fn head_scores<S: Scalar>(op: &Attention, head: usize, q: View<'_, S>, k: View<'_, S>) -> Matrix<S> {
    let width = op.head_width;
    let mut out = Matrix::zeros(q.rows, k.rows);
    let q_head = Strided { data: &q.data[(head * width).min(q.data.len())..], row: q.cols, col: 1 };
    let k_head =
        Strided { data: &k.data[(kv_head(op, head) * width).min(k.data.len())..], row: 1, col: k.cols };
    multiply(&mut out, width, q_head, k_head);
    out
}

/// (T, E) context of one head: probs (T, S) times v.
fn head_context<S: Scalar>(op: &Attention, head: usize, probs: View<'_, S>, v: View<'_, S>) -> Matrix<S> {
    let width = op.head_width;
    let start = (kv_head(op, head) * width).min(v.data.len());
    let mut out = Matrix::zeros(probs.rows, width);
    let finite = |value: &S| value.to_f64().is_finite();
    if v.data.iter().all(finite) {
        let p = Strided { data: probs.data, row: probs.cols, col: 1 };
        multiply(&mut out, v.rows, p, Strided { data: &v.data[start..], row: v.cols, col: 1 });
        return out;
    }
    // 0·NaN is NaN: where the values are not all finite, what is masked must not be multiplied at all.
    for t in 0..probs.rows {
        for (s, &p) in probs.row(t).iter().enumerate().filter(|(_, p)| **p != S::ZERO) {
            let value = &v.row(s)[start..start + width];
            out.row_mut(t).iter_mut().zip(value).for_each(|(out, &v)| *out += p * v);
        }
    }
    out
}

/// A matrix within a larger one: element (r, c) at r·row + c·col.
#[derive(Clone, Copy)]
struct Strided<'a, S> {
    data: &'a [S],
    row: usize,
    col: usize,
}

/// out = a·b over `k` inner elements; out (m, n) row-major, a tile of rows at a time.
fn multiply<S: Scalar>(out: &mut Matrix<S>, k: usize, a: Strided<'_, S>, b: Strided<'_, S>) {
    let (m, n) = (out.rows, out.cols);
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(a.data.len() > (m - 1) * a.row + (k - 1) * a.col, "a holds m x k");
    assert!(b.data.len() > (k - 1) * b.row + (n - 1) * b.col, "b holds k x n");
    for (tile, out) in out.data.chunks_mut(TILE_ROWS * n).enumerate() {
        let a_tile = &a.data[tile * TILE_ROWS * a.row..];
        // SAFETY: the strides stay within the three buffers, checked above; the tile lies within both a and out.
        unsafe {
            gemm(
                [out.len() / n, n, k],
                Placed { at: out.as_mut_ptr(), row: n, col: 1 },
                Placed { at: a_tile.as_ptr(), row: a.row, col: a.col },
                Placed { at: b.data.as_ptr(), row: b.row, col: b.col },
            );
        }
    }
}

/// One result per query head, in parallel.
fn per_head<S: Scalar>(op: &Attention, f: impl Fn(usize) -> Matrix<S> + Send + Sync) -> Vec<Matrix<S>> {
    (0..op.heads).into_par_iter().map(f).collect()
}

/// Heads of (T, width) side by side, (T, H·width).
fn interleave<S: Scalar>(rows: usize, width: usize, heads: &[Matrix<S>]) -> Matrix<S> {
    let mut out = Matrix::zeros(rows, heads.len() * width);
    for t in 0..rows {
        for (head, target) in heads.iter().zip(out.row_mut(t).chunks_exact_mut(width.max(1))) {
            target.copy_from_slice(head.row(t));
        }
    }
    out
}
