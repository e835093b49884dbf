//! Weights as kernels on integers multiply them: raw quants with their scales, and minima apart.

use rayon::prelude::*;

use super::super::source::Data;
use super::Problem;
use crate::arithmetic::cache_blocks;
use crate::arithmetic::cuda_blocks::Form;
use crate::gguf::{self, DType};
use crate::scalar::Scalar;
use crate::scalar::half;

/// Rounds to f16 where the form says so.
fn rounded(form: Form, value: f64) -> f64 {
    if form.half { half(value) } else { value }
}

/// Decoded values become scale·q, with the scale as the kernel has it.
pub fn apply<T: Scalar>(form: Form, dtype: DType, stored: &[u8], out: &mut [T]) {
    let Some(group) = form.group else { return };
    for (values, (scale, minimum)) in out.chunks_exact_mut(group).zip(gguf::groups(dtype, stored)) {
        let by = if scale == 0.0 { 0.0 } else { rounded(form, scale) / scale };
        values.iter_mut().for_each(|value| *value = T::from_f64((value.to_f64() - minimum) * by));
    }
}

/// Values of a cache without what their blocks have in common.
pub fn apart<T: Scalar>(dtype: DType, group: usize, out: &mut [T]) {
    for values in out.chunks_exact_mut(group) {
        let (_, minimum) = cache_blocks::group(dtype, values);
        values.iter_mut().for_each(|value| *value = T::from_f64(value.to_f64() - minimum));
    }
}

/// The minima as the kernel has them.
pub fn minima<T: Scalar>(form: Form, dtype: DType, stored: &[u8], out: &mut [T]) {
    for (out, (_, minimum)) in out.iter_mut().zip(gguf::groups(dtype, stored)) {
        *out = T::from_f64(rounded(form, minimum));
    }
}

impl<S: Scalar> Problem<'_, '_, S> {
    /// (rows, m), where the products of scales, and of minimum and sum, are rounded to f16: Σ over blocks of
    /// I·h(w.d·d) + h(w.m·s), with I a sum of integers.
    pub(super) fn in_half_products(&self) -> Vec<S> {
        let Some(group) = self.group() else { return vec![S::ZERO; self.rows * self.outputs()] };
        let (m, k) = (self.outputs(), self.x.values.cols);
        let mut out = vec![S::ZERO; self.rows * m];
        for meeting in &self.meetings {
            let first = meeting.matrix * m;
            let rows: Vec<Vec<f64>> = (first..first + m)
                .into_par_iter()
                .map(|row| {
                    let (mut quants, groups) = self.decoded(row, k, group);
                    for (values, (scale, minimum)) in quants.chunks_exact_mut(group).zip(&groups) {
                        let by = if *scale == 0.0 { 0.0 } else { 1.0 / scale };
                        values.iter_mut().for_each(|value| *value = (*value - minimum) * by);
                    }
                    meeting.pairs.iter().map(|(x, _)| self.blocks(*x, &quants, &groups, group)).collect()
                })
                .collect();
            for (o, values) in rows.iter().enumerate() {
                for ((_, row), value) in meeting.pairs.iter().zip(values) {
                    out[row * m + o] = S::from_f64(*value);
                }
            }
        }
        out
    }

    /// A row of the matrices, and scales and minima of its groups.
    fn decoded(&self, row: usize, k: usize, group: usize) -> (Vec<f64>, Vec<(f64, f64)>) {
        let dtype = self.weight.dtype;
        match &self.weight.data {
            Data::Weight(weight) => {
                let mut values = vec![0.0; k];
                weight.decode_rows(row..row + 1, &mut values);
                (values, gguf::groups(dtype, weight.row_bytes(row..row + 1)))
            }
            Data::Values(values) => {
                let [_, b, m, _] = self.weight.shape();
                let values = values.row([row / m / b, row / m % b, row % m]);
                let values: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
                let groups = values.chunks_exact(group).map(|block| cache_blocks::group(dtype, block));
                let groups = groups.collect();
                (values, groups)
            }
        }
    }

    /// One output of a row.
    fn blocks(&self, row: usize, quants: &[f64], groups: &[(f64, f64)], group: usize) -> f64 {
        let (x, sums) = (self.x.values.row(row), self.x.sums.row(row));
        let blocks = x.chunks_exact(group).zip(quants.chunks_exact(group)).zip(groups).zip(sums);
        blocks
            .map(|(((x, quants), (scale, minimum)), sum)| {
                let step = self.step(x);
                let terms = x.iter().zip(quants).map(|(x, quant)| x.to_f64() * quant);
                let integers = if step == 0.0 { 0.0 } else { terms.sum::<f64>() / step };
                integers * half(scale * step) + half(minimum * sum.to_f64())
            })
            .sum()
    }

    /// The scale of a block of rounded values: its largest is 127 of them.
    fn step(&self, x: &[S]) -> f64 {
        let largest = x.iter().fold(0.0, |max: f64, x| max.max(x.to_f64().abs()));
        largest / f64::from(crate::arithmetic::round::QUANT_MAX)
    }
}
