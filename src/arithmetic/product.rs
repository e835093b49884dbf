//! The product of matrices in memory that everything is built on, and what meets the minima of blocks.

use gemm::{Parallelism, gemm};

use crate::scalar::{Scalar, in_lanes, vectorized};
use crate::tensor::{Matrix, View};

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
            n_out,
            x.rows,
            k,
            dst,
            stride as isize,
            1,
            false,
            w.as_ptr(),
            1,
            cols as isize,
            x.data.as_ptr(),
            x.cols as isize,
            1,
            S::ZERO,
            S::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
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
                *out = 2.0 * in_lanes(x, |x, _| x).abs().max(largest);
            }
        },
    );
    out
}
