//! Signed sums of attention's rows: with r over the columns of V, out·r = Σ_m softmax(z)_m · (v_m·r). The products with r
//! are computed once for all rows, so that a row costs its scores and no more.

use rayon::prelude::*;

use super::super::source::Args;
use super::row::Attention;
use crate::error::Result;

/// Signed sums of a row: what cancels in one seldom does in another.
pub const SUMS: usize = 2;

/// An attention whose rows are looked at by their signed sums.
pub struct Signed<'b, 'a> {
    attention: Attention<'b, 'a, f64>,
    /// (B'', Hv, M) v·r, for each r
    values: Vec<[f64; SUMS]>,
}

/// The signed sum of a row, and how large what it is made of is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// Σ softmax(z)·(v·r)
    pub expected: f64,
    /// Root of Σ softmax(z)·(v·r)²
    pub size: f64,
}

impl Sum {
    /// What errors are measured against.
    pub fn whole(&self) -> f64 {
        self.expected.abs() + self.size
    }
}

impl<'b, 'a> Signed<'b, 'a> {
    /// Takes an attention; `factors` (DV,) are r, for each sum.
    ///
    /// # Errors
    /// Sources that do not fit together.
    pub fn new(args: &'b Args<'a, f64>, factors: &[Vec<f64>; SUMS]) -> Result<Self> {
        let attention = Attention::new(args)?;
        let [batches, heads, positions, _] = attention.v.shape();
        let product = |i: usize| -> [f64; SUMS] {
            let row = attention.v.row([i / positions / heads, i / positions % heads, i % positions]);
            factors.each_ref().map(|factors| row.iter().zip(factors).map(|(v, r)| v * r).sum())
        };
        let values = (0..batches * heads * positions).into_par_iter().map(product).collect();
        Ok(Signed { attention, values })
    }

    /// Batch, head, query: the sums of its row. A row that sees nothing is 0.
    pub fn of(&self, [b, h, n]: [usize; 3]) -> [Sum; SUMS] {
        let row = self.attention.row(b, h, n);
        let [_, heads, positions, _] = self.attention.v.shape();
        let max = row.seen.iter().map(|seen| seen.z).chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
        let mut total = row.sink.map_or(0.0, |sink| (sink - max).exp());
        let mut sums = [[0.0; 2]; SUMS];
        for seen in &row.seen {
            let [b, h, m] = self.attention.cached(self.attention.v, row.at, seen.position);
            let (weight, values) = ((seen.z - max).exp(), &self.values[(b * heads + h) * positions + m]);
            total += weight;
            for ([sum, square], value) in sums.iter_mut().zip(values) {
                *sum += weight * value;
                *square += weight * value * value;
            }
        }
        sums.map(|[sum, square]| match total {
            0.0 => Sum { expected: 0.0, size: 0.0 },
            total => Sum { expected: sum / total, size: (square / total).sqrt() },
        })
    }
}
