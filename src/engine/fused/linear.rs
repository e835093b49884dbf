//! Matrix products with decoded weights.

use std::ops::Range;

use rayon::prelude::*;

use crate::arithmetic::product::product;
use crate::arithmetic::round::{self, Rounding};
use crate::gguf::TensorRef;
use crate::numerics::{Numerics, Storage};
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// Weight elements that one thread decodes at most before it multiplies, 4 MiB of f32: the activations are packed
/// anew for every tile.
const TILE_ELEMENTS: usize = 1 << 20;
/// Tiles of a weight at least, where it has enough rows: work for that many threads. The number of threads itself
/// must not matter: another tile may be added up in another order.
const TILES: usize = 64;
/// Rows of a tile at least: fewer keep no register busy.
const TILE_ROWS_MIN: usize = 64;
/// Rows of logits that are computed at a time, counted from the step's first: where whole blocks are left out, the
/// others have the same bits.
pub const LOGIT_ROWS: usize = 64;

/// out[t, o] = Σ_i x[t, i]·w[o, i] over the leading `columns` of i; x (T, I), w (O, I), `at_once` rows at a time.
/// The activations are rounded first as `numerics` says.
pub fn execute<S: Scalar>(
    weight: &TensorRef<'_>,
    columns: Option<usize>,
    x: View<'_, S>,
    at_once: usize,
    numerics: &Numerics,
) -> Matrix<S> {
    let rounding = Rounding::of(numerics.products, weight.info.dtype);
    let how = How { weights: round::weight_storage(numerics.products), columns, at_once };
    if rounding == Rounding::None {
        return multiply(weight, how, x);
    }
    let rounded = round::activations(rounding, x);
    let mut out = multiply(weight, how, rounded.values.view());
    if rounding == Rounding::Q8_1 && rounded.sums.cols > 0 {
        add_minima(weight, &rounded.sums, &mut out);
    }
    out
}

/// Adds the product of what Q8_1 block sums have over the sums of their values with the minima of the
/// weight's blocks: sums (T, I/32).
fn add_minima<S: Scalar>(weight: &TensorRef<'_>, sums: &Matrix<S>, out: &mut Matrix<S>) {
    let minima: Vec<S> = crate::gguf::minima(weight.info.dtype, weight.bytes);
    for t in 0..out.rows {
        let sums = sums.row(t);
        for (out, minima) in out.row_mut(t).iter_mut().zip(minima.chunks_exact(sums.len())) {
            *out += sums.iter().zip(minima).map(|(&s, &m)| s * m).sum::<S>();
        }
    }
}

/// How rows meet a weight.
#[derive(Clone, Copy)]
struct How {
    /// What the decoded weights are rounded to.
    weights: Storage,
    /// The leading columns that are multiplied; all where absent.
    columns: Option<usize>,
    /// Rows at a time.
    at_once: usize,
}

/// The product alone.
fn multiply<S: Scalar>(weight: &TensorRef<'_>, how: How, x: View<'_, S>) -> Matrix<S> {
    let (rows, cols) = (weight.rows(), weight.cols());
    assert_eq!(x.cols, cols, "the graph was built with the weight's shape");
    let k = how.columns.unwrap_or(cols).min(cols);
    if k == 0 {
        return Matrix::zeros(x.rows, rows);
    }
    // Not cleared: one core would do that while the others wait.
    let mut out = Vec::with_capacity(x.rows * rows);
    let target = Target(out.as_mut_ptr());
    let tile_rows = rows.div_ceil(TILES).clamp(TILE_ROWS_MIN, (TILE_ELEMENTS / cols).max(TILE_ROWS_MIN));
    let tiles: Vec<Range<usize>> =
        (0..rows).step_by(tile_rows).map(|start| start..(start + tile_rows).min(rows)).collect();
    tiles.into_par_iter().for_each(|tile| {
        S::with_scratch(tile.len() * cols, |decoded| {
            weight.decode_rows(tile.clone(), decoded);
            how.weights.store(decoded);
            for first in (0..x.rows).step_by(how.at_once) {
                let x = x.after(first).first(how.at_once);
                // SAFETY: tiles are disjoint column ranges of `out`, which outlives the loop.
                unsafe {
                    product(target.at(first * rows + tile.start), rows, decoded, tile.len(), cols, k, x)
                };
            }
        });
    });
    // SAFETY: each tile has written its columns of every row.
    unsafe { out.set_len(x.rows * rows) };
    Matrix::new(x.rows, rows, out)
}

/// The output, written by several threads in disjoint columns.
#[derive(Clone, Copy)]
struct Target<S>(*mut S);

impl<S> Target<S> {
    /// # Safety
    /// `element` lies within the output.
    unsafe fn at(self, element: usize) -> *mut S {
        // SAFETY: by the caller's promise.
        unsafe { self.0.add(element) }
    }
}

// SAFETY: threads write to disjoint elements only, see `execute`.
unsafe impl<S: Send> Send for Target<S> {}
// SAFETY: as above.
unsafe impl<S: Send> Sync for Target<S> {}
