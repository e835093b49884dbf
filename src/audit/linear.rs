//! Exact products of several recordings' activations with one weight, which is decoded once.

use std::ops::Range;

use rayon::prelude::*;

use crate::arithmetic::product::{group_sums, product};
use crate::arithmetic::round;
use crate::gguf;
use crate::model::weights::Weight;
use crate::numerics::Storage;
use crate::scalar::{Scalar, in_lanes, vectorized};
use crate::tensor::{Matrix, View};

/// Weight elements that one thread decodes at a time: 1 MiB of f64 and half of it in f32.
const TILE_ELEMENTS: usize = 1 << 17;
/// Rows of a weight that are decoded at a time at least: products of fewer keep no register busy.
const TILE_ROWS_MIN: usize = 64;

/// Rows that meet one weight in the same way.
pub struct Job {
    /// (T, I) activations, rounded as their producer does.
    pub x: Matrix<f64>,
    /// (T, I/32), or no columns: see [`crate::arithmetic::round::Rounded::sums`].
    pub sums: Matrix<f64>,
    /// Columns of the weight that are wanted too, with the minima of their blocks.
    pub columns: Vec<usize>,
    /// What the producer rounds decoded weights to.
    pub weights: Storage,
    /// How Σ is to be taken of the magnitudes.
    pub magnitude: Magnitude,
}

/// What a bound needs to know of the terms of a product.
pub enum Magnitude {
    /// Nothing.
    None,
    /// Σ_i |w[o, i]|·m[t, i] for m (T, I), non-negative.
    Sum(Matrix<f64>),
    /// sqrt(Σ_i (w[o, i]·m[t, i])²)
    Quadrature(Matrix<f64>),
    /// [`Magnitude::Quadrature`] of the activations themselves. Where groups of the weight share a minimum,
    /// what cancels between it and the quants is added: twice minimum·max(|Σx|, max|x|) of each group.
    Terms,
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
    let tile_rows = (TILE_ELEMENTS / cols.max(1)).clamp(TILE_ROWS_MIN, 512);
    let tiles: Vec<Range<usize>> = (0..weight.rows())
        .step_by(tile_rows)
        .map(|start| start..(start + tile_rows).min(weight.rows()))
        .collect();
    let stacks = Stacks::new(jobs, cols, weight.dtype());
    let parts: Vec<Vec<Product>> = tiles
        .par_iter()
        .map(|tile| {
            f64::with_scratch(tile.len() * cols, |w| {
                weight.decode_rows(tile.clone(), w);
                Tile { weight, rows: tile.clone(), w }.run(jobs, &stacks)
            })
        })
        .collect();
    (0..jobs.len()).map(|job| assemble(parts.iter().map(|part| &part[job]))).collect()
}

/// The rows of all jobs, by what of the weight they meet, so that each meets a tile in one product.
struct Stacks {
    /// Activations that meet the weight, by what it is rounded to.
    values: Vec<(Storage, Stack<f64>)>,
    /// Squares that meet the squared weight.
    squares: Stack<f32>,
    /// Magnitudes that meet those of the weight.
    sums: Stack<f32>,
    /// For each job (T, I/group) what meets the minima; see [`Magnitude::Terms`].
    groups: Vec<Matrix<f64>>,
}

/// Rows of several jobs, one under the other.
#[derive(Default)]
struct Stack<S> {
    x: Matrix<S>,
    /// Which rows are those of a job.
    jobs: Vec<(usize, Range<usize>)>,
}

impl<S: Scalar> Stack<S> {
    fn add(&mut self, job: usize, x: View<'_, S>) {
        self.jobs.push((job, self.x.rows..self.x.rows + x.rows));
        self.x.append(x);
    }
}

impl Stacks {
    fn new(jobs: &[Job], cols: usize, dtype: gguf::DType) -> Self {
        let mut stacks = Stacks {
            values: Vec::new(),
            squares: Stack::default(),
            sums: Stack::default(),
            groups: vec![Matrix::default(); jobs.len()],
        };
        // A bound needs no more than f32.
        let single = |m: &Matrix<f64>, f: fn(f64) -> f64| {
            Matrix::new(m.rows, m.cols, m.data.iter().map(|m| f(*m).to_f32()).collect())
        };
        for (index, job) in jobs.iter().enumerate() {
            assert_eq!(job.x.cols, cols, "activations are as wide as the weight");
            match stacks.values.iter_mut().find(|(weights, _)| *weights == job.weights) {
                Some((_, stack)) => stack.add(index, job.x.view()),
                None => {
                    let mut stack = Stack::default();
                    stack.add(index, job.x.view());
                    stacks.values.push((job.weights, stack));
                }
            }
            match &job.magnitude {
                Magnitude::None => {}
                Magnitude::Sum(m) => stacks.sums.add(index, single(m, f64::abs).view()),
                Magnitude::Quadrature(m) => stacks.squares.add(index, single(m, |m| m * m).view()),
                Magnitude::Terms => {
                    stacks.squares.add(index, single(&job.x, |m| m * m).view());
                    if let Some(group) = gguf::minimum_group(dtype) {
                        stacks.groups[index] = group_sums(&job.x, group);
                    }
                }
            }
        }
        stacks
    }
}

/// Some decoded rows of the weight.
struct Tile<'a> {
    weight: &'a Weight<'a>,
    rows: Range<usize>,
    /// (rows, I)
    w: &'a [f64],
}

impl Tile<'_> {
    fn run(&self, jobs: &[Job], stacks: &Stacks) -> Vec<Product> {
        let mut out = vec![Product::default(); jobs.len()];
        for (weights, stack) in &stacks.values {
            let exact = match weights {
                Storage::F32 => self.multiply(self.w, stack.x.view()),
                narrow => self.multiply(&self.weights(*narrow), stack.x.view()),
            };
            split(stack, &exact, &mut out, |product| &mut product.exact);
        }
        if stacks.squares.x.rows > 0 {
            let squares = self.multiply_narrow(|w| w * w, stacks.squares.x.view());
            split(&stacks.squares, &squares, &mut out, |product| &mut product.magnitude);
        }
        if stacks.sums.x.rows > 0 {
            let sums = self.multiply_narrow(f64::abs, stacks.sums.x.view());
            split(&stacks.sums, &sums, &mut out, |product| &mut product.magnitude);
        }
        self.meet_minima(jobs, stacks, &mut out);
        for (job, out) in jobs.iter().zip(&mut out) {
            if matches!(job.magnitude, Magnitude::Terms | Magnitude::Quadrature(_)) {
                out.magnitude.data.iter_mut().for_each(|sum| *sum = sum.sqrt());
            }
            let cols = self.weight.cols();
            out.columns = self.pick(&job.columns, |row, column| self.w[row * cols + column]);
        }
        out
    }

    /// Adds what meets the minima of the weight's blocks, to products and to squared magnitudes.
    fn meet_minima(&self, jobs: &[Job], stacks: &Stacks, out: &mut [Product]) {
        let Some(group) = gguf::minimum_group(self.weight.dtype()) else { return };
        let stored = self.weight.stored().row_bytes(self.rows.clone());
        let minima: Vec<f64> = gguf::minima(self.weight.dtype(), stored);
        let groups = self.weight.cols() / group;
        for ((job, met), out) in jobs.iter().zip(&stacks.groups).zip(out) {
            if job.sums.cols == groups {
                add_products(&job.sums, &minima, |sum, minimum| sum * minimum, &mut out.exact);
                out.minima = self.pick(&job.columns, |row, column| minima[row * groups + column / group]);
            }
            if met.cols == groups {
                let square = |met: f64, minimum: f64| (met * minimum).powi(2);
                add_products(met, &minima, square, &mut out.magnitude);
            }
        }
    }

    /// x·f(w)ᵀ in f32, (T, rows).
    fn multiply_narrow(&self, f: impl Fn(f64) -> f64, x: View<'_, f32>) -> Matrix<f32> {
        f32::with_scratch(self.w.len(), |narrow| {
            vectorized(
                #[inline(always)]
                || {
                    for (narrow, w) in narrow.iter_mut().zip(self.w) {
                        *narrow = f(*w) as f32;
                    }
                },
            );
            self.multiply(narrow, x)
        })
    }

    /// The weight as a producer rounds it.
    fn weights(&self, storage: Storage) -> Vec<f64> {
        let mut weights = self.w.to_vec();
        round::store(storage, &mut weights);
        weights
    }

    /// x·wᵀ, (T, rows).
    fn multiply<S: Scalar>(&self, w: &[S], x: View<'_, S>) -> Matrix<S> {
        let (n, cols) = (self.rows.len(), self.weight.cols());
        let mut out = Matrix::zeros(x.rows, n);
        if x.rows > 0 {
            assert!(x.cols == cols && w.len() == n * cols, "activations are as wide as the weight");
            // Few rows meet many of the weight: as w·xᵀ only x, the smaller one, has to be packed.
            let mut turned = vec![S::ZERO; n * x.rows];
            // SAFETY: `turned` holds (n, x.rows), row-major with stride x.rows.
            unsafe {
                product(turned.as_mut_ptr(), x.rows, x.data, x.rows, cols, cols, View::new(n, cols, w))
            };
            for (o, column) in turned.chunks_exact(x.rows).enumerate() {
                column.iter().enumerate().for_each(|(t, value)| out.data[t * n + o] = *value);
            }
        }
        out
    }

    fn pick(&self, columns: &[usize], value: impl Fn(usize, usize) -> f64) -> Matrix<f64> {
        let n = self.rows.len();
        let mut out = Matrix::zeros(columns.len(), n);
        for (out, &column) in out.data.chunks_exact_mut(n).zip(columns) {
            out.iter_mut().enumerate().for_each(|(row, out)| *out = value(row, column));
        }
        out
    }
}

/// Hands each job its rows of a stack's output.
fn split<S: Scalar>(
    stack: &Stack<S>,
    all: &Matrix<S>,
    out: &mut [Product],
    place: impl Fn(&mut Product) -> &mut Matrix<f64>,
) {
    for (job, rows) in &stack.jobs {
        let values = all.data[rows.start * all.cols..rows.end * all.cols].iter().map(|value| value.to_f64());
        *place(&mut out[*job]) = Matrix::new(rows.len(), all.cols, values.collect());
    }
}

/// out[t, o] += Σ_b f(a[t, b], minima[o, b])
fn add_products(a: &Matrix<f64>, minima: &[f64], f: impl Fn(f64, f64) -> f64, out: &mut Matrix<f64>) {
    vectorized(
        #[inline(always)]
        || {
            for t in 0..a.rows {
                let row = a.row(t);
                for (out, minima) in out.row_mut(t).iter_mut().zip(minima.chunks_exact(row.len())) {
                    *out += in_lanes(row, |a, b| f(a, minima[b]));
                }
            }
        },
    );
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
