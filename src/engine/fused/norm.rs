//! RMS norm (Zhang and Sennrich, arXiv 1910.07467) and its kin, over groups of columns.

use rayon::prelude::*;

use crate::engine::fused::graph::{Norm, NormStyle};
use crate::gguf::TensorRef;
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// y = x / sqrt(mean(x²) + eps) · w, x (T, G·width). The mean is summed in f64, as llama.cpp does.
pub fn execute<S: Scalar>(norm: &Norm, weight: &TensorRef<'_>, x: View<'_, S>) -> Matrix<S> {
    let weight: Vec<S> = weight.decode();
    let mut out = x.to_matrix();
    out.data.par_chunks_mut(norm.width.max(1)).for_each(|group| group_norm(norm, &weight, group));
    out
}

/// One group of columns, in place.
fn group_norm<S: Scalar>(norm: &Norm, weight: &[S], x: &mut [S]) {
    let n = x.len() as f64;
    let NormStyle { centred, offset, times } = norm.style;
    if centred {
        let mean = S::from_f64(x.iter().map(|x| x.to_f64()).sum::<f64>() / n);
        x.iter_mut().for_each(|x| *x = *x - mean);
    }
    let mean_square = x.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>() / n;
    let scale = S::from_f64(1.0 / (mean_square + norm.eps).sqrt());
    x.iter_mut().for_each(|x| *x *= scale);
    for _ in 0..times {
        match offset {
            0.0 => x.iter_mut().zip(weight).for_each(|(x, &w)| *x *= w),
            offset => x.iter_mut().zip(weight).for_each(|(x, &w)| *x *= S::from_f64(offset) + w),
        }
    }
}
