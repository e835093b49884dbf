//! The product of matrices in memory that everything is built on, and what meets the minima of blocks.

use crate::scalar::{Placed, Scalar, gemm, in_lanes, vectorized};
use crate::tensor::{Matrix, View};

/// Fewer rows than this are packed instead of the matrix that they meet.
pub const FEW_ROWS: usize = 64;

/// dst[t·stride + o] = Σ_{i<k} x[t, i]·w[o, i] for the `n_out` rows of a tile w (n_out, cols).
///
/// # Safety
/// `dst` is valid for writes at t·stride + o for all t < x.rows, o < n_out.
pub(crate) unsafe fn product<S: Scalar>(
    dst: *mut S,
    stride: usize,
    w: &[S],
    n_out: usize,
    cols: usize,
    k: usize,
    x: View<'_, S>,
) {
    // Seen column-major: dst (O x T) = w (O x k, row-major) times xᵀ (k x T, column-major).
    // SAFETY: the strides describe `w`, `x` and, by the caller's promise, `dst`.
    unsafe {
        gemm(
            [n_out, x.rows, k],
            Placed { at: dst, row: 1, col: stride },
            Placed { at: w.as_ptr(), row: cols, col: 1 },
            Placed { at: x.data.as_ptr(), row: 1, col: x.cols },
        );
    }
}

/// x·wᵀ, (T, rows): w (rows, k).
pub fn multiply<T: Scalar>(w: &[T], rows: usize, k: usize, x: View<'_, T>) -> Vec<T> {
    let mut out = vec![T::ZERO; x.rows * rows];
    if k == 0 || out.is_empty() {
        return out;
    }
    if x.rows >= FEW_ROWS {
        // SAFETY: `out` holds (T, rows), row-major with stride `rows`; `w` and `x` are as wide as `k`.
        unsafe { product(out.as_mut_ptr(), rows, w, rows, k, k, x) };
        return out;
    }
    // As w·xᵀ only x, the smaller one, has to be packed.
    let mut columns = vec![T::ZERO; out.len()];
    // SAFETY: `columns` holds (rows, T), row-major with stride T.
    unsafe { product(columns.as_mut_ptr(), x.rows, x.data, x.rows, k, k, View::new(rows, k, w)) };
    for (o, column) in columns.chunks_exact(x.rows).enumerate() {
        column.iter().enumerate().for_each(|(t, value)| out[t * rows + o] = *value);
    }
    out
}

/// Twice max(|Σx|, max|x|) over each group of columns, (T, I/group).
pub fn group_sums(x: &Matrix<f64>, group: usize) -> Matrix<f64> {
    let mut out = Matrix::zeros(x.rows, x.cols / group);
    vectorized(
        #[inline(always)]
        || {
            for (out, x) in out.data.iter_mut().zip(x.data.chunks_exact(group)) {
                let mut largest = 0f64;
                for x in x {
                    largest = if x.abs() > largest { x.abs() } else { largest };
                }
                *out = 2.0 * in_lanes(x, x, |x, _| x).abs().max(largest);
            }
        },
    );
    out
}
