//! Holds rows against a recording of which only some values are known, as a program printed them.
//!
//! A printed value stands for every value that is printed so. What is compared with it is therefore the one of
//! these that comes closest: a difference is what printing does not explain.

use super::{Accumulator, Tolerance};
use crate::checkpoint::Checkpoint;
use crate::ops::bound::{CONFIDENCE, UNIT_F32};
use crate::report::{Seen, SumCheck};
use parity_dump::seen::SeenPart;

/// The comparison of one checkpoint while its rows come.
#[derive(Clone, Debug)]
pub struct Partial<'a> {
    checkpoint: Checkpoint,
    parts: &'a [SeenPart],
    sums: Accumulator,
    seen: u64,
    of: u64,
    totals: Vec<Total>,
}

/// Sums over the rows of one part.
#[derive(Clone, Copy, Debug, Default)]
struct Total {
    rows: usize,
    terms: usize,
    value: f64,
    size: f64,
    /// Σ of squared differences that printing does not explain.
    square: f64,
    seen: usize,
}

impl<'a> Partial<'a> {
    /// Nothing yet, against `parts` of `checkpoint`.
    pub fn new(checkpoint: Checkpoint, parts: &'a [SeenPart], tolerance: Tolerance) -> Self {
        let totals = vec![Total::default(); parts.len()];
        let sums = Accumulator::new(tolerance);
        Partial { checkpoint, parts, sums, seen: 0, of: 0, totals }
    }

    /// Adds the candidate's row at `position`. Whether its width is that of the printed one.
    pub fn row(&mut self, position: u32, row: &[f32]) -> bool {
        for (part, total) in self.parts.iter().zip(&mut self.totals) {
            let Ok(at) = part.rows.binary_search_by_key(&position, |row| row.position) else { continue };
            if part.width(self.checkpoint, position) != Some(row.len()) {
                return false;
            }
            let printed = &part.rows[at];
            let columns: Vec<usize> = printed.columns.iter().map(|&column| column as usize).collect();
            let whole: Vec<f32> = columns.iter().map(|&column| row[column]).collect();
            let values = printed.values.iter().zip(&whole);
            let nearest: Vec<f32> =
                values.map(|(value, own)| nearest(*value, part.half_unit, *own)).collect();
            let of_seen = part.sum.is_some_and(|sum| sum.of_seen);
            total.add(if of_seen { &whole } else { row }, &whole, &nearest);
            self.seen += whole.len() as u64;
            self.of += row.len() as u64;
            self.sums.row_at(position, &columns, &whole, &nearest);
        }
        true
    }

    /// The numbers of what was seen, and how much that is.
    pub fn finish(self) -> (Accumulator, Seen) {
        let parts = self.parts.iter().zip(&self.totals);
        let checks =
            parts.filter(|(part, total)| total.rows == part.rows.len()).filter_map(|(part, total)| {
                let sum = part.sum?;
                let bound = total.bound(part.half_unit, sum.half_unit);
                let reference = sum.value.unwrap_or(f64::NAN);
                Some(SumCheck { candidate: total.value, reference, bound, terms: total.terms as u64 })
            });
        // The worst one speaks for all; a NaN is the worst, and stays it.
        let stays =
            |worst: &SumCheck, check: &SumCheck| worst.over().is_nan() || check.over() <= worst.over();
        let sum = checks.reduce(|worst, check| if stays(&worst, &check) { worst } else { check });
        let seen = Seen { values: self.seen, of: self.of, sum };
        (self.sums, seen)
    }
}

impl Total {
    fn add(&mut self, added: &[f32], own: &[f32], printed: &[f32]) {
        self.rows += 1;
        self.terms += added.len();
        for &value in added {
            self.value += f64::from(value);
            self.size += f64::from(value.abs());
        }
        self.seen += own.len();
        self.square +=
            own.iter().zip(printed).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
    }

    /// By how much two sums may differ whose terms agree as far as was seen: the sum's last digit; the rounding
    /// of adding up in f32, which errs by up to u of the sum so far at each of n terms; and the terms'
    /// own differences. These are as large as the seen ones and, carried on from one place, may all point
    /// one way; or they are hidden by the terms' last digits and independent.
    fn bound(&self, half_unit: f64, sum_half_unit: f64) -> f64 {
        let root = (self.terms as f64).sqrt();
        let adding = CONFIDENCE * root * UNIT_F32 * self.size;
        let differing = (self.square / self.seen.max(1) as f64).sqrt();
        // A value is uniform within half a unit of what is printed of it.
        let hidden = half_unit / 3f64.sqrt();
        sum_half_unit + adding + self.terms as f64 * differing + CONFIDENCE * root * hidden
    }
}

/// Of the values that are printed as `value`, the nearest to `own`.
fn nearest(value: Option<f32>, half_unit: f64, own: f32) -> f32 {
    let Some(value) = value else { return f32::NAN };
    // Decimal digits were rounded to f32 when they were read.
    let width = half_unit + f64::from(value.abs()) * UNIT_F32;
    let (own_wide, value) = (f64::from(own), f64::from(value));
    if (own_wide - value).abs() <= width {
        own
    } else if own_wide > value {
        (value + width) as f32
    } else {
        (value - width) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Kind;
    use parity_dump::seen::{SeenRow, SeenSum};

    fn part(values: &[(u32, f32)], sum: f64, of_seen: bool) -> SeenPart {
        let (columns, values) = values.iter().map(|(column, value)| (*column, Some(*value))).unzip();
        SeenPart {
            row_shape: vec![4],
            half_unit: 0.5e-4,
            rows: vec![SeenRow { position: 3, columns, values }],
            sum: Some(SeenSum { value: Some(sum), half_unit: 0.5e-6, of_seen }),
        }
    }

    fn held(part: SeenPart, row: &[f32]) -> (Accumulator, Seen) {
        let parts = [part];
        let checkpoint = Checkpoint::layer(Kind::FfnOut, 0);
        let mut partial = Partial::new(checkpoint, &parts, Tolerance::default());
        assert!(partial.row(3, row));
        partial.finish()
    }

    #[test]
    fn what_is_printed_so_is_equal_and_what_is_not_differs_by_the_rest() {
        let row = [0.12344, 9.0, 9.0, -2.0];
        let (sums, seen) = held(part(&[(0, 0.1234), (3, -2.0)], 16.12344, false), &row);
        assert_eq!((seen.values, seen.of), (2, 4));
        assert_eq!(sums.numbers(&[4]).unwrap().abs_err_max, 0.0);
        let (sums, _) = held(part(&[(0, 0.1234), (3, -2.1)], 16.0, false), &row);
        let numbers = sums.numbers(&[4]).unwrap();
        assert_eq!(numbers.worst.index, [3, 3], "the column is the tensor's, not that of the seen values");
        approx::assert_relative_eq!(numbers.abs_err_max, 0.1 - 0.5e-4, max_relative = 1e-3);
    }

    #[test]
    fn a_sum_shows_what_no_seen_value_does() {
        let row = [0.1234, 9.0, 9.0, -2.0];
        let same = held(part(&[(0, 0.1234), (3, -2.0)], 16.1234, false), &row).1.sum.unwrap();
        assert!(same.over() <= 1.0, "{same:?}");
        let other = held(part(&[(0, 0.1234), (3, -2.0)], 16.2234, false), &row).1.sum.unwrap();
        assert!(!(other.over() <= 1.0), "{other:?}");
        let printed = held(part(&[(0, 0.1234), (3, -2.0)], -1.8766, true), &row).1.sum.unwrap();
        assert!(printed.over() <= 1.0 && printed.terms == 2, "{printed:?}");
        let nan = held(part(&[], f64::NAN, false), &row).1.sum.unwrap();
        assert!(!(nan.over() <= 1.0));
    }

    #[test]
    fn a_sum_that_is_no_number_speaks_for_those_behind_it() {
        let good = part(&[(0, 0.1234), (3, -2.0)], 16.1234, false);
        let row = [0.1234, 9.0, 9.0, -2.0];
        let later = SeenPart { rows: vec![SeenRow { position: 4, ..good.rows[0].clone() }], ..good.clone() };
        let parts = [SeenPart { sum: Some(SeenSum { value: None, ..good.sum.unwrap() }), ..good }, later];
        let mut partial = Partial::new(Checkpoint::layer(Kind::FfnOut, 0), &parts, Tolerance::default());
        assert!(partial.row(3, &row) && partial.row(4, &row));
        assert!(!(partial.finish().1.sum.unwrap().over() <= 1.0));
    }

    #[test]
    fn a_nan_never_agrees() {
        let mut printed = part(&[(0, 1.0)], 1.0, false);
        printed.rows[0].values[0] = None;
        let (sums, _) = held(printed, &[1.0, 0.0, 0.0, 0.0]);
        assert_eq!(sums.nonfinite().reference, 1);
        let (sums, seen) = held(part(&[(0, 1.0)], 1.0, false), &[f32::NAN, 0.0, 0.0, 0.0]);
        assert_eq!(sums.nonfinite().candidate, 1);
        assert!(!(seen.sum.unwrap().over() <= 1.0));
    }
}
