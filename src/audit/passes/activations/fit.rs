//! How much of the errors of a product is that of what it multiplies, and how that looks.

use rayon::prelude::*;

use super::WEIGHT_MAX;
use crate::audit::OF_EIGHT_BITS;
use crate::gguf::TensorRef;
use crate::tensor::Matrix;

/// Outputs for each input that are looked at.
const OUTPUTS: usize = 4;
/// Steps of the method of conjugate gradients: noise is nearly fitted after a few.
const STEPS: usize = 32;
/// Share of chance that errors of what was multiplied leave at most: in f32, and where results are rounded to a narrow type.
const LEFT: [f64; 2] = [1.0 / 4.0, 1.0 / 2.0];
/// Columns that hold Δx at least: a block of an outlier alone has twice as many.
const COLUMNS_MIN: f64 = 16.0;
/// Rows from which on it is asked whether a column is off alike in all of them: chance makes 1/T of its squares look so.
const ROWS_MIN: usize = 4;
/// Share of |Δx|² above which something that is no rounding is in it.
const MOSTLY: f64 = 0.5;
/// How far Δx/x may be from -1 in a column whose values are rounded to 0.
const TO_ZERO: f64 = 0.1;

/// Errors of a product as W·Δx.
pub struct Fit<'a> {
    /// Squares that are left of the errors, relative to what chance would leave.
    left: f64,
    /// (T, k)
    moved: Matrix<f64>,
    /// (T, k) what was multiplied.
    inputs: &'a Matrix<f64>,
}

impl Fit<'_> {
    /// Of errors (T, n) of a product of a weight (n, k) with inputs (T, k).
    pub fn of<'a>(weight: &TensorRef<'_>, errors: &Matrix<f64>, inputs: &'a Matrix<f64>) -> Fit<'a> {
        let (n, k) = (weight.rows(), weight.cols());
        let count = n.min(OUTPUTS * k).min(WEIGHT_MAX / k);
        let outputs: Vec<usize> = (0..count).map(|i| i * n / count).collect();
        let mut values = vec![0.0_f32; count * k];
        values
            .par_chunks_mut(k)
            .zip(&outputs)
            .for_each(|(row, &output)| weight.decode_rows(output..output + 1, row));
        let (mut left, mut all, mut moved) = (0.0, 0.0, Vec::with_capacity(errors.rows * k));
        for row in 0..errors.rows {
            let errors: Vec<f64> = outputs.iter().map(|output| errors.row(row)[*output]).collect();
            all += dot(&errors, &errors);
            let (found, rest) = least_squares(&values, k, errors);
            left += dot(&rest, &rest);
            moved.extend(found);
        }
        let chance = 1.0 - k as f64 / count as f64;
        Fit { left: left / all / chance, moved: Matrix::new(errors.rows, k, moved), inputs }
    }

    /// Whether that is how rounding of what is multiplied looks: small, no factor of it or of a column, nothing that is added to
    /// all rows, and not of a few columns alone. Results may be rounded to a narrow type.
    pub fn is_rounding(&self, is_narrow: bool) -> bool {
        let (moved, inputs) = (&self.moved, self.inputs);
        let all = dot(&moved.data, &moved.data);
        let size = (all / dot(&inputs.data, &inputs.data)).sqrt();
        let along = (0..moved.rows).map(|row| {
            let squared = dot(inputs.row(row), inputs.row(row));
            if squared > 0.0 { dot(moved.row(row), inputs.row(row)).powi(2) / squared } else { 0.0 }
        });
        let is_factor = along.sum::<f64>() > MOSTLY * all;
        let is_small = self.left <= LEFT[usize::from(is_narrow)] && size <= OF_EIGHT_BITS;
        is_small && !is_factor && self.columns() >= COLUMNS_MIN && !(self.alike_in_rows() > MOSTLY * all)
    }

    /// How many columns hold Δx: (Σ e)² / Σ e² of their squares e.
    fn columns(&self) -> f64 {
        let squares = (0..self.moved.cols)
            .map(|column| (0..self.moved.rows).map(|row| self.moved.row(row)[column].powi(2)).sum::<f64>());
        let (sum, squared) = squares.fold((0.0, 0.0), |(sum, squared), e| (sum + e, squared + e * e));
        sum * sum / squared
    }

    /// Squares of Δx that are a factor of their column, or added to it, in all rows alike, the larger of both; but for columns
    /// whose values are rounded to 0, and 0 where there are too few rows.
    fn alike_in_rows(&self) -> f64 {
        let Matrix { rows, cols, .. } = self.moved;
        if rows < ROWS_MIN {
            return 0.0;
        }
        let (mut factors, mut added) = (0.0, 0.0);
        for column in 0..cols {
            let [mut both, mut of_inputs, mut sum] = [0.0; 3];
            for row in 0..rows {
                let (moved, input) = (self.moved.row(row)[column], self.inputs.row(row)[column]);
                (both, of_inputs, sum) = (both + moved * input, of_inputs + input * input, sum + moved);
            }
            if of_inputs > 0.0 && (both / of_inputs + 1.0).abs() > TO_ZERO {
                factors += both * both / of_inputs;
                added += sum * sum / rows as f64;
            }
        }
        factors.max(added)
    }
}

/// How much of what errors (T, n) of different rows have in common is what their inputs (T, k) have: 1 where other weights
/// were multiplied, 0 where rows are rounded each by itself.
pub fn linear(errors: &Matrix<f64>, inputs: &Matrix<f64>) -> f64 {
    let pairs = (0..errors.rows).flat_map(|a| (0..a).map(move |b| (a, b)));
    let (both, of_inputs) = pairs.fold((0.0, 0.0), |(both, squared), (a, b)| {
        let (error, input) = (cosine(errors.row(a), errors.row(b)), cosine(inputs.row(a), inputs.row(b)));
        (both + error * input, squared + input * input)
    });
    if of_inputs > 0.0 { both / of_inputs } else { 0.0 }
}

/// The x for which W·x is nearest to `rest`, and what that leaves; W (n, k), row by row. Conjugate gradients on the normal
/// equations (Hestenes and Stiefel, 1952).
fn least_squares(w: &[f32], k: usize, mut rest: Vec<f64>) -> (Vec<f64>, Vec<f64>) {
    let times = |x: &[f64]| -> Vec<f64> {
        w.par_chunks(k).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    // In blocks of a fixed number of rows, so that sums do not depend on how many threads there are.
    const BLOCK: usize = 256;
    let transposed = |y: &[f64]| -> Vec<f64> {
        let parts = w.par_chunks(k * BLOCK).zip(y.par_chunks(BLOCK)).map(|(rows, y)| {
            let mut sum = vec![0.0; k];
            for (row, y) in rows.chunks(k).zip(y) {
                sum.iter_mut().zip(row).for_each(|(sum, w)| *sum += f64::from(*w) * y);
            }
            sum
        });
        let parts: Vec<Vec<f64>> = parts.collect();
        let mut sum = vec![0.0; k];
        parts.iter().for_each(|part| sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x));
        sum
    };
    let mut found = vec![0.0; k];
    let mut gradient = transposed(&rest);
    let mut direction = gradient.clone();
    let mut squared = dot(&gradient, &gradient);
    for _ in 0..STEPS {
        let moved = times(&direction);
        let length = dot(&moved, &moved);
        if !(length > 0.0 && squared > 0.0) {
            break;
        }
        let step = squared / length;
        found.iter_mut().zip(&direction).for_each(|(x, p)| *x += step * p);
        rest.iter_mut().zip(&moved).for_each(|(r, q)| *r -= step * q);
        gradient = transposed(&rest);
        let next = dot(&gradient, &gradient);
        let share = next / squared;
        direction.iter_mut().zip(&gradient).for_each(|(p, s)| *p = s + share * *p);
        squared = next;
    }
    (found, rest)
}

/// Cosine of the angle between two rows; 0 where one is 0.
pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let size = (dot(a, a) * dot(b, b)).sqrt();
    if size > 0.0 { dot(a, b) / size } else { 0.0 }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
