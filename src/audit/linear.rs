//! Exact products of several recordings' activations with one weight, which is decoded once.

use std::ops::Range;

use rayon::prelude::*;

use crate::gguf;
use crate::model::weights::Weight;
use crate::ops::linear::product;
use crate::ops::round::{Rounding, to_bf16, to_f16};
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// Weight elements that one thread decodes at a time: 1 MiB of f64 and half of it in f32.
const TILE_ELEMENTS: usize = 1 << 17;

/// Rows that meet one weight in the same way.
pub struct Job {
    /// (T, I) activations, rounded as their producer does.
    pub x: Matrix<f64>,
    /// (T, I/32), or no columns: see [`crate::ops::round::Rounded::sums`].
    pub sums: Matrix<f64>,
    /// Columns of the weight that are wanted too, with the minima of their blocks.
    pub columns: Vec<usize>,
    /// What the producer rounds decoded weights to.
    pub weights: Rounding,
    /// How Σ is to be taken of the magnitudes.
    pub magnitude: Magnitude,
}

/// What a bound needs to know of the terms of a product.
pub enum Magnitude {
    /// Nothing.
    None,
    /// Σ_i |w[o, i]|·m[t, i] for m (T, I), non-negative. Where blocks of the weight have a minimum, what
    /// cancels between the minimum and the quants is added: twice |minimum|·max(|Σm'|, max|m'|) over each group, with m'
    /// the signed values behind m.
    Sum {
        /// (T, I)
        values: Matrix<f64>,
        /// (T, I) the same with signs.
        signed: Matrix<f64>,
    },
    /// sqrt(Σ_i (w[o, i]·m[t, i])²)
    Quadrature(Matrix<f64>),
}

/// What a [`Job`] asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Product {
    /// (T, O)
    pub exact: Matrix<f64>,
    /// (T, O), or nothing.
    pub magnitude: Matrix<f64>,
    /// (columns, O)
    pub columns: Matrix<f64>,
    /// (columns, O) minima of the blocks that the columns lie in, where there are sums.
    pub minima: Matrix<f64>,
}

/// Runs all jobs in one pass over the weight.
pub fn products(weight: &Weight<'_>, jobs: &[Job]) -> Vec<Product> {
    let cols = weight.cols();
    let tile_rows = (TILE_ELEMENTS / cols.max(1)).clamp(8, 512);
    let tiles: Vec<Range<usize>> = (0..weight.rows())
        .step_by(tile_rows)
        .map(|start| start..(start + tile_rows).min(weight.rows()))
        .collect();
    let prepared: Vec<Prepared> = jobs.iter().map(|job| Prepared::new(job, weight.dtype())).collect();
    let parts: Vec<Vec<Product>> = tiles
        .par_iter()
        .map(|tile| {
            let mut w = vec![0f64; tile.len() * cols];
            weight.decode_rows(tile.clone(), &mut w);
            let tile = Tile { weight, rows: tile.clone(), w: &w };
            jobs.iter().zip(&prepared).map(|(job, prepared)| tile.run(job, prepared)).collect()
        })
        .collect();
    (0..jobs.len()).map(|job| assemble(parts.iter().map(|part| &part[job]))).collect()
}

/// A job's magnitudes in f32: a bound needs no more.
struct Prepared {
    magnitude: Option<Matrix<f32>>,
    /// (T, I/group) what meets the minima.
    groups: Matrix<f64>,
}

impl Prepared {
    fn new(job: &Job, dtype: gguf::DType) -> Self {
        let single = |m: &Matrix<f64>, square: bool| {
            let value = |m: &f64| if square { (m * m).to_f32() } else { m.to_f32() };
            Matrix::new(m.rows, m.cols, m.data.iter().map(value).collect())
        };
        let magnitude = match &job.magnitude {
            Magnitude::None => None,
            Magnitude::Sum { values, .. } => Some(single(values, false)),
            Magnitude::Quadrature(m) => Some(single(m, true)),
        };
        let groups = match (&job.magnitude, gguf::minimum_group(dtype)) {
            (Magnitude::Sum { signed, .. }, Some(group)) => group_sums(signed, group),
            _ => Matrix::default(),
        };
        Prepared { magnitude, groups }
    }
}

/// Twice max(|Σx|, max|x|) over each group of columns, (T, I/group).
fn group_sums(x: &Matrix<f64>, group: usize) -> Matrix<f64> {
    let of = |x: &[f64]| {
        let largest = x.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        2.0 * x.iter().sum::<f64>().abs().max(largest)
    };
    Matrix::new(x.rows, x.cols / group, x.data.chunks_exact(group).map(of).collect())
}

/// Some decoded rows of the weight.
struct Tile<'a> {
    weight: &'a Weight<'a>,
    rows: Range<usize>,
    /// (rows, I)
    w: &'a [f64],
}

impl Tile<'_> {
    fn run(&self, job: &Job, prepared: &Prepared) -> Product {
        let mut exact = match job.weights {
            Rounding::F16 => {
                self.multiply(&self.w.iter().map(|&w| to_f16(w)).collect::<Vec<_>>(), job.x.view())
            }
            Rounding::Bf16 => {
                self.multiply(&self.w.iter().map(|&w| to_bf16(w)).collect::<Vec<_>>(), job.x.view())
            }
            _ => self.multiply(self.w, job.x.view()),
        };
        let mut minima = Matrix::default();
        if job.sums.cols > 0 {
            let stored = self.weight.stored().row_bytes(self.rows.clone());
            let all: Vec<f64> = gguf::minima(self.weight.dtype(), stored);
            let blocks = job.sums.cols;
            add_products(&job.sums, &all, |minimum| minimum, &mut exact);
            let block = self.weight.cols() / blocks;
            minima = self.pick(&job.columns, |row, column| all[row * blocks + column / block]);
        }
        let cols = self.weight.cols();
        Product {
            exact,
            magnitude: self.magnitude(job, prepared),
            columns: self.pick(&job.columns, |row, column| self.w[row * cols + column]),
            minima,
        }
    }

    fn magnitude(&self, job: &Job, prepared: &Prepared) -> Matrix<f64> {
        let Some(m) = &prepared.magnitude else { return Matrix::default() };
        let quadrature = matches!(job.magnitude, Magnitude::Quadrature(_));
        let value = |w: &f64| if quadrature { (w * w).to_f32() } else { w.to_f32().abs() };
        let w: Vec<f32> = self.w.iter().map(value).collect();
        let sums = self.multiply(&w, m.view());
        let widened =
            sums.data.iter().map(|&sum| if quadrature { f64::from(sum).sqrt() } else { f64::from(sum) });
        let mut out = Matrix::new(sums.rows, sums.cols, widened.collect());
        if prepared.groups.cols > 0 {
            let stored = self.weight.stored().row_bytes(self.rows.clone());
            let minima: Vec<f64> = gguf::minima(self.weight.dtype(), stored);
            add_products(&prepared.groups, &minima, f64::abs, &mut out);
        }
        out
    }

    /// x·wᵀ, (T, rows).
    fn multiply<S: Scalar>(&self, w: &[S], x: View<'_, S>) -> Matrix<S> {
        let (n, cols) = (self.rows.len(), self.weight.cols());
        assert!(x.cols == cols && w.len() == n * cols, "activations are as wide as the weight");
        let mut out = Matrix::zeros(x.rows, n);
        if x.rows > 0 {
            // SAFETY: `out` holds (x.rows, n), row-major with stride n.
            unsafe { product(out.data.as_mut_ptr(), n, w, n, cols, cols, x) };
        }
        out
    }

    fn pick(&self, columns: &[usize], value: impl Fn(usize, usize) -> f64) -> Matrix<f64> {
        let values = columns.iter().flat_map(|&column| (0..self.rows.len()).map(move |row| (row, column)));
        Matrix::new(columns.len(), self.rows.len(), values.map(|(row, column)| value(row, column)).collect())
    }
}

/// out[t, o] += Σ_b a[t, b]·f(minima[o, b])
fn add_products(a: &Matrix<f64>, minima: &[f64], f: impl Fn(f64) -> f64, out: &mut Matrix<f64>) {
    for t in 0..a.rows {
        for (out, minima) in out.row_mut(t).iter_mut().zip(minima.chunks_exact(a.cols)) {
            *out += a.row(t).iter().zip(minima).map(|(a, m)| a * f(*m)).sum::<f64>();
        }
    }
}

/// The tiles' outputs side by side.
fn assemble<'a>(parts: impl Iterator<Item = &'a Product> + Clone) -> Product {
    let join = |part: fn(&Product) -> &Matrix<f64>| {
        let rows = parts.clone().map(|p| part(p).rows).max().unwrap_or(0);
        let cols = parts.clone().map(|p| part(p).cols).sum();
        let mut out = Matrix::zeros(rows, cols);
        let mut start = 0;
        for part in parts.clone().map(part) {
            for row in 0..part.rows {
                out.row_mut(row)[start..start + part.cols].copy_from_slice(part.row(row));
            }
            start += part.cols;
        }
        out
    };
    Product {
        exact: join(|p| &p.exact),
        magnitude: join(|p| &p.magnitude),
        columns: join(|p| &p.columns),
        minima: join(|p| &p.minima),
    }
}
