//! Whether the rows of an embedding table are tokens, told from the values alone.
//!
//! The embeddings of all tokens share a mean vector: the means of a table's columns differ far more
//! than chance lets them. Read the other way round, a column is a stretch of a few whole rows, and the
//! means of stretches hardly differ. Measured (as stored, the other way): 18 and 1.4 for the 4 M model on
//! which the tests run, 148 and 0.8 for SmolLM2 135M, 158 and 1.0 for Qwen2.5 1.5B.

use serde::Serialize;

use super::stats::over_rows;
use crate::gguf::TensorRef;

/// Chance gives a spread of 1 with a deviation of about 1/sqrt(2·columns), 0.05 for 200 columns. Read the
/// wrong way, the healthy tables above have up to 1.4. Twice that is out of reach of both.
const SPREAD_OF_CHANCE: f64 = 2.0 * 1.4;

/// Spread of the column means in units of what chance gives: σ/sqrt(rows).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Columns as the shape says: w[r, c] = buffer[r·C + c].
    pub as_stored: f64,
    /// Columns as in a transposed buffer: w[r, c] = buffer[c·R + r].
    pub transposed: f64,
}

impl Spread {
    /// `Some(true)` where the values lie in the order of the transposed table, `None` where the values
    /// do not say.
    pub fn is_transposed(&self) -> Option<bool> {
        let shared = |spread: f64| spread > SPREAD_OF_CHANCE;
        match (shared(self.as_stored), shared(self.transposed)) {
            (true, false) => Some(false),
            (false, true) => Some(true),
            _ => None,
        }
    }
}

/// Sums over columns in both readings, and over all values.
struct Sums {
    as_stored: Vec<f64>,
    transposed: Vec<f64>,
    total: f64,
    squares: f64,
}

/// Measures a table (R, C) of a decodable type; `None` where it is too small or holds NaN.
pub fn measure(tensor: TensorRef<'_>) -> Option<Spread> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    if rows < 2 || cols < 2 {
        return None;
    }
    let start = || Sums { as_stored: vec![0.0; cols], transposed: vec![0.0; cols], total: 0.0, squares: 0.0 };
    let add = |mut sums: Sums, r: usize, row: &[f32]| {
        for (sum, value) in sums.as_stored.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
        // In the transposed reading column c is the stretch [c·R, (c + 1)·R) of the buffer.
        let mut at = r * cols;
        let mut rest = row;
        while !rest.is_empty() {
            let column = at / rows;
            let (stretch, later) = rest.split_at(rest.len().min((column + 1) * rows - at));
            let sum: f64 = stretch.iter().map(|v| f64::from(*v)).sum();
            sums.transposed[column] += sum;
            sums.total += sum;
            sums.squares += stretch.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>();
            at += stretch.len();
            rest = later;
        }
        sums
    };
    let merge = |mut a: Sums, b: Sums| {
        for (into, from) in [(&mut a.as_stored, &b.as_stored), (&mut a.transposed, &b.transposed)] {
            into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
        }
        Sums { total: a.total + b.total, squares: a.squares + b.squares, ..a }
    };
    let sums = over_rows(tensor, start, add, merge);
    let count = (rows * cols) as f64;
    let mean = sums.total / count;
    let deviation = (sums.squares / count - mean * mean).sqrt();
    let by_chance = deviation / (rows as f64).sqrt();
    let spread = |columns: &[f64]| {
        let squares = columns.iter().map(|sum| (sum / rows as f64 - mean).powi(2)).sum::<f64>();
        (squares / columns.len() as f64).sqrt() / by_chance
    };
    let layout = Spread { as_stored: spread(&sums.as_stored), transposed: spread(&sums.transposed) };
    (layout.as_stored.is_finite() && layout.transposed.is_finite()).then_some(layout)
}
