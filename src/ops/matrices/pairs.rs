//! Products of operands that are sums of two bf16: those of the lesser parts with one another are left out.

use std::ops::Range;

use super::Problem;
use crate::arithmetic::narrow;
use crate::arithmetic::round::Rounding;
use crate::scalar::{Scalar, each};
use crate::tensor::{Matrix, View};

/// What the nearest bf16 leaves of rows, where they are rounded to such sums.
pub fn lesser<S: Scalar>(rounding: Rounding, x: View<'_, S>) -> Option<Matrix<S>> {
    let mut x = (rounding == Rounding::Pair).then(|| x.to_matrix())?;
    each(&mut x.data, narrow::lesser);
    Some(x)
}

impl Problem<'_, '_, f64> {
    /// Columns of a matrix and, where operands are sums of two, those of its lesser parts behind them.
    pub fn columns(&self) -> usize {
        self.x.values.cols * if self.lesser.is_some() { 2 } else { 1 }
    }

    /// Rows of so many columns: the lesser parts negative, so that a product with [`Problem::row`] is the whole result.
    pub fn read_columns(&self, matrix: usize, rows: Range<usize>, out: &mut [f32]) {
        if self.lesser.is_none() {
            return self.read(matrix, rows, out);
        }
        let k = self.x.values.cols;
        let [mut whole, mut lesser] = [vec![0.0; rows.len() * k], vec![0.0; rows.len() * k]];
        self.read(matrix, rows.clone(), &mut whole);
        self.decode(matrix, rows, &mut lesser);
        each(&mut lesser, narrow::lesser);
        for ((out, whole), lesser) in
            out.chunks_mut(2 * k.max(1)).zip(whole.chunks(k.max(1))).zip(lesser.chunks(k.max(1)))
        {
            out[..k].copy_from_slice(whole);
            out[k..].iter_mut().zip(lesser).for_each(|(out, lesser)| *out = -lesser);
        }
    }

    /// What meets such a row.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let lesser = self.lesser.as_ref().map_or(&[][..], |lesser| lesser.row(row));
        self.x.values.row(row).iter().chain(lesser).map(|x| *x as f32).collect()
    }
}

impl<S: Scalar> Problem<'_, '_, S> {
    /// Takes the products of the lesser parts of both sides away from a result.
    pub(super) fn without_lesser(&self, out: &mut [S]) {
        let Some(x) = &self.lesser else { return };
        let read = |matrix: usize, rows: Range<usize>, out: &mut [S]| {
            self.decode(matrix, rows, out);
            each(out, narrow::lesser);
            1.0
        };
        let products = self.run(x.view(), read, |value, _| value);
        out.iter_mut().zip(products).for_each(|(out, product)| *out += S::from_f64(-product.to_f64()));
    }
}
