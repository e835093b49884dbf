//! How errors of the sources of products are carried on.

use rayon::prelude::*;

use super::super::bound::CONFIDENCE;
use super::{Power, Problem, TWO_ROUNDINGS, half_sums, limited};
use crate::arithmetic::narrow;
use crate::arithmetic::round::{self, Rounding};
use crate::tensor::Matrix;

/// Rows of a matrix that are decoded at a time.
const ALONG_ROWS: usize = 64;

impl Problem<'_, '_, f64> {
    /// What independent errors of the rows come to that are up to `unit` times their values.
    pub fn off(&self, unit: f64) -> Vec<f64> {
        let errors = Matrix::new(
            self.x.values.rows,
            self.x.values.cols,
            self.x.values.data.iter().map(|x| unit * x.abs()).collect(),
        );
        self.magnitudes(Power::Two, &errors, None).into_iter().map(|off| CONFIDENCE * off).collect()
    }

    /// By row of the result y: (Σ_i (x_i·Σ_o w[o, i]·y[o])²)^½, what errors of the rows of source 1, relative to their
    /// values and independent, come to along y.
    pub fn along(&self, y: &[f64]) -> Vec<f64> {
        let (m, k) = (self.outputs(), self.x.values.cols);
        let mut out = vec![0.0; self.rows];
        for meeting in &self.meetings {
            let mut sums = vec![vec![0.0; k]; meeting.pairs.len()];
            for start in (0..m).step_by(ALONG_ROWS) {
                let tile = start..(start + ALONG_ROWS).min(m);
                let mut w = vec![0f64; tile.len() * k];
                self.read(meeting.matrix, tile.clone(), &mut w);
                sums.par_iter_mut().zip(&meeting.pairs).for_each(|(sums, (_, row))| {
                    for (w, y) in w.chunks_exact(k.max(1)).zip(&y[row * m..][tile.clone()]) {
                        sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += w * y);
                    }
                });
            }
            for (sums, (x, row)) in sums.iter().zip(&meeting.pairs) {
                let squares = sums.iter().zip(self.x.values.row(*x)).map(|(sum, x)| (sum * x).powi(2));
                out[*row] = squares.sum::<f64>().sqrt();
            }
        }
        out
    }

    /// An error of the matrices meets the rows as they were rounded.
    pub fn carry_matrices(&self, error: &[f64]) -> Vec<f64> {
        self.magnitudes(Power::One, &self.x.values, Some(error))
    }

    /// An error (·, k) of the rows meets the matrices. Where rows are rounded, what was moved may be rounded to
    /// the other side: two roundings of up to half a step, independent of one another and of their neighbours.
    /// `x` is the source before it was rounded.
    pub fn carry_rows(&self, x: &[f64], error: &[f64]) -> Vec<f64> {
        let (rows, k) = (self.x.values.rows, self.x.values.cols);
        if let Some(round) = single(self.rounding) {
            let side = |sign: f64| {
                let moved = x.iter().zip(error).map(|(x, e)| round(x + sign * limited(*e)));
                Matrix::new(rows, k, moved.collect())
            };
            let (low, high) = (side(-1.0), side(1.0));
            if let Some(sums) = self.half_sums {
                let between = half_sums::Between { low: &low, high: &high };
                let off = |sum: half_sums::Sum| (sum.high - sum.value).max(sum.value - sum.low).max(0.0);
                return self.in_half(sums, Some(&between)).into_iter().map(off).collect();
            }
            let sides = low.data.iter().zip(&high.data).zip(&self.x.values.data);
            let off = sides.map(|((low, high), x)| limited((high - x).max(x - low)));
            return self.magnitudes(Power::One, &Matrix::new(rows, k, off.collect()), None);
        }
        let error = Matrix::new(rows, k, error.iter().map(|e| limited(*e)).collect());
        let mut out = self.magnitudes(Power::One, &error, None);
        let block = self.rounding.block(k);
        let fits = k.is_multiple_of(block);
        if self.rounding != Rounding::None && fits && error.data.iter().any(|e| *e > 0.0) {
            let moved: Vec<f64> = x.iter().zip(&error.data).map(|(x, e)| x.abs() + e).collect();
            let mut steps = round::half_steps(self.rounding, &Matrix::new(rows, k, moved));
            for (steps, error) in steps.data.chunks_mut(block).zip(error.data.chunks(block)) {
                if error.iter().all(|e| *e == 0.0) {
                    steps.fill(0.0);
                }
            }
            let rounded = self.magnitudes(Power::Two, &steps, None);
            out.iter_mut().zip(rounded).for_each(|(out, r)| *out += CONFIDENCE * TWO_ROUNDINGS * r);
        }
        out
    }
}

/// Rounding of single values, whose sides can be seen of each.
fn single(rounding: Rounding) -> Option<fn(f64) -> f64> {
    Some(match rounding {
        Rounding::F16 => round::to_f16::<f64>,
        Rounding::Bf16 => round::to_bf16::<f64>,
        Rounding::Tf32 => |x| f64::from(narrow::tf32(x as f32)),
        Rounding::Tf32Away => |x| f64::from(narrow::tf32_away(x as f32)),
        Rounding::Tf32Cut => |x| f64::from(narrow::tf32_cut(x as f32)),
        Rounding::Pair => |x| f64::from(narrow::pair(x as f32)),
        _ => return None,
    })
}
