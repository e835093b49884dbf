//! Range, size and oddities of many values.

use std::ops::Range;

use rayon::prelude::*;
use serde::Serialize;

use crate::gguf::TensorRef;

/// Values that are summed side by side, so that the sums vectorise.
const LANES: usize = 8;
/// Values that one parallel task reads, about.
const VALUES_PER_TASK: usize = 1 << 16;

/// Of some values. NaN and infinities are counted and otherwise left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Number of values.
    pub values: u64,
    /// Least finite value.
    pub min: Option<f32>,
    /// Greatest finite value.
    pub max: Option<f32>,
    /// Root mean square of the finite values.
    pub rms: Option<f64>,
    /// Number of NaN.
    pub nan: u64,
    /// Number of infinities.
    pub inf: u64,
    /// Number of zeros of either sign.
    pub zero: u64,
    /// Matrix rows that hold a NaN or an infinity.
    pub nonfinite_rows: u64,
    /// Matrix rows of nothing but zeros.
    pub zero_rows: u64,
    /// Matrix rows of one value, not zero.
    pub constant_rows: u64,
}

impl Stats {
    /// Whether there is more than one value, and all are the same finite number.
    pub fn is_constant(&self) -> bool {
        self.values > 1 && self.nan + self.inf == 0 && self.min == self.max
    }

    /// Whether all values are zero.
    pub fn is_zero(&self) -> bool {
        self.values > 0 && self.zero == self.values
    }
}

/// What kind of row was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// Different finite values.
    Plain,
    /// With a NaN or an infinity.
    Nonfinite,
    /// All zero.
    Zero,
    /// All the same, not zero.
    Constant,
}

/// Sums from which [`Stats`] come.
#[derive(Clone, Debug)]
pub struct Sums {
    stats: Stats,
    sum_squares: f64,
}

impl Sums {
    /// Of no values.
    pub fn new() -> Sums {
        let stats = Stats {
            values: 0,
            min: None,
            max: None,
            rms: None,
            nan: 0,
            inf: 0,
            zero: 0,
            nonfinite_rows: 0,
            zero_rows: 0,
            constant_rows: 0,
        };
        Sums { stats, sum_squares: 0.0 }
    }

    /// Adds one row.
    pub fn add_row(&mut self, row: &[f32]) -> RowKind {
        let len = row.len() as u64;
        let nonfinite = count(row, |value| !value.is_finite());
        let (min, max, zero) = if nonfinite == 0 {
            self.add_finite(row)
        } else {
            self.add_finite(&row.iter().copied().filter(|value| value.is_finite()).collect::<Vec<_>>())
        };
        let kind = match len {
            _ if nonfinite > 0 => RowKind::Nonfinite,
            2.. if zero == len => RowKind::Zero,
            2.. if min == max => RowKind::Constant,
            _ => RowKind::Plain,
        };
        let stats = &mut self.stats;
        let nan = if nonfinite > 0 { count(row, f32::is_nan) } else { 0 };
        stats.values += len;
        stats.nan += nan;
        stats.inf += nonfinite - nan;
        stats.nonfinite_rows += u64::from(kind == RowKind::Nonfinite);
        stats.zero_rows += u64::from(kind == RowKind::Zero);
        stats.constant_rows += u64::from(kind == RowKind::Constant);
        kind
    }

    /// Adds finite values to range and size. Returns their least, their greatest and the number of zeros.
    fn add_finite(&mut self, values: &[f32]) -> (f32, f32, u64) {
        let mut min = [f32::INFINITY; LANES];
        let mut max = [f32::NEG_INFINITY; LANES];
        let mut squares = [0f64; LANES];
        let mut add = |lane: usize, value: f32| {
            min[lane] = if value < min[lane] { value } else { min[lane] };
            max[lane] = if value > max[lane] { value } else { max[lane] };
            squares[lane] += f64::from(value) * f64::from(value);
        };
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, value) in chunk.iter().enumerate() {
                add(lane, *value);
            }
        }
        rest.iter().enumerate().for_each(|(lane, value)| add(lane, *value));
        let min = min.into_iter().fold(f32::INFINITY, f32::min);
        let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let zero = count(values, |value| value == 0.0);
        let stats = &mut self.stats;
        stats.zero += zero;
        if !values.is_empty() {
            stats.min = Some(stats.min.map_or(min, |old| old.min(min)));
            stats.max = Some(stats.max.map_or(max, |old| old.max(max)));
        }
        self.sum_squares += squares.iter().sum::<f64>();
        (min, max, zero)
    }

    /// The sums of both.
    #[must_use]
    pub fn and(self, other: Sums) -> Sums {
        let (a, b) = (self.stats, other.stats);
        let either = |a: Option<f32>, b: Option<f32>, pick: fn(f32, f32) -> f32| match (a, b) {
            (Some(a), Some(b)) => Some(pick(a, b)),
            _ => a.or(b),
        };
        let stats = Stats {
            values: a.values + b.values,
            min: either(a.min, b.min, f32::min),
            max: either(a.max, b.max, f32::max),
            rms: None,
            nan: a.nan + b.nan,
            inf: a.inf + b.inf,
            zero: a.zero + b.zero,
            nonfinite_rows: a.nonfinite_rows + b.nonfinite_rows,
            zero_rows: a.zero_rows + b.zero_rows,
            constant_rows: a.constant_rows + b.constant_rows,
        };
        Sums { stats, sum_squares: self.sum_squares + other.sum_squares }
    }

    /// Range and size of what was added.
    pub fn stats(&self) -> Stats {
        let finite = self.stats.values - self.stats.nan - self.stats.inf;
        let rms = (finite > 0).then(|| (self.sum_squares / finite as f64).sqrt());
        Stats { rms, ..self.stats }
    }
}

/// How many values there are of a kind; rows are shorter than 2^32.
fn count(values: &[f32], is: impl Fn(f32) -> bool) -> u64 {
    values.iter().map(|value| u32::from(is(*value))).sum::<u32>().into()
}

/// Decodes all of a tensor on all threads; `fold` takes (sum so far, row number, row), `merge` two sums.
///
/// The tensor's type is decodable.
pub fn over_rows<T: Send>(
    tensor: TensorRef<'_>,
    start: impl Fn() -> T + Sync + Send,
    fold: impl Fn(T, usize, &[f32]) -> T + Sync,
    merge: impl Fn(T, T) -> T + Sync + Send,
) -> T {
    // A tensor without values may still announce any number of rows.
    let (rows, cols) = if tensor.info.elements() == 0 { (0, 1) } else { (tensor.rows(), tensor.cols()) };
    let rows_per_task = (VALUES_PER_TASK / cols).max(1);
    let task = |rows: Range<usize>| {
        let mut values = vec![0f32; rows.len() * cols];
        tensor.decode_rows(rows.clone(), &mut values);
        rows.zip(values.chunks_exact(cols)).fold(start(), |sum, (row, values)| fold(sum, row, values))
    };
    (0..rows.div_ceil(rows_per_task))
        .into_par_iter()
        .map(|index| task(index * rows_per_task..rows.min((index + 1) * rows_per_task)))
        .reduce(&start, merge)
}

/// Range and size of a tensor; `None` where its type is not decodable.
pub fn of_tensor(tensor: TensorRef<'_>) -> Option<Stats> {
    let add = |mut sums: Sums, _, row: &[f32]| {
        sums.add_row(row);
        sums
    };
    tensor.info.dtype.is_decodable().then(|| over_rows(tensor, Sums::new, add, Sums::and).stats())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_rows_are_told_apart() {
        let mut sums = Sums::new();
        let mut row = vec![1.0f32; 19];
        assert_eq!(sums.add_row(&row), RowKind::Constant);
        row[18] = -3.0;
        assert_eq!(sums.add_row(&row), RowKind::Plain);
        row[17] = f32::NAN;
        row[3] = f32::NEG_INFINITY;
        assert_eq!(sums.add_row(&row), RowKind::Nonfinite);
        assert_eq!(sums.add_row(&[0.0, -0.0]), RowKind::Zero);
        assert_eq!(sums.add_row(&[7.0]), RowKind::Plain);
        let stats = sums.stats();
        assert_eq!((stats.min, stats.max), (Some(-3.0), Some(7.0)));
        assert_eq!((stats.values, stats.nan, stats.inf, stats.zero), (60, 1, 1, 2));
        assert_eq!((stats.nonfinite_rows, stats.zero_rows, stats.constant_rows), (1, 1, 1));
        let squares = 19.0 + (18.0 + 9.0) + (16.0 + 9.0) + 49.0;
        assert!((stats.rms.unwrap() - f64::sqrt(squares / 58.0)).abs() < f64::EPSILON * 4.0);
    }

    #[test]
    fn nothing_finite_has_no_range() {
        let mut sums = Sums::new();
        sums.add_row(&[f32::NAN; 3]);
        let stats = sums.and(Sums::new()).stats();
        assert_eq!((stats.min, stats.max, stats.rms, stats.nan), (None, None, None, 3));
        assert!(!stats.is_constant());
    }
}
