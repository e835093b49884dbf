//! The numbers of one pair of tensors, gathered row by row in f64.

use crate::engine::RowStats;
use crate::report::{Nonfinite, Numbers, ToleranceNeeded, Worst};
use crate::scalar::vectorized;

use super::Tolerance;

/// Sums over the rows of candidate a and reference b.
#[derive(Clone, Debug, Default)]
pub struct Accumulator {
    tolerance: Tolerance,
    n: u64,
    sum_abs: f64,
    sum_square: f64,
    sum_aa: f64,
    sum_bb: f64,
    sum_ab: f64,
    positive: u64,
    differing: u64,
    beyond: u64,
    rtol_needed: f64,
    worst: Option<WorstElement>,
    nonfinite: Nonfinite,
    rows: Vec<(u32, f64)>,
}

#[derive(Clone, Copy, Debug)]
struct WorstElement {
    difference: f64,
    position: u32,
    column: usize,
    candidate: f32,
    reference: f32,
}

impl Accumulator {
    /// Nothing yet.
    pub fn new(tolerance: Tolerance) -> Self {
        Accumulator { tolerance, ..Accumulator::default() }
    }

    /// Adds the row at `position`: a of the candidate, b of the reference, same length.
    pub fn row(&mut self, position: u32, a: &[f32], b: &[f32]) {
        self.add(position, a, b);
    }

    /// [`Accumulator::row`] of only some `columns` of the row.
    pub fn row_at(&mut self, position: u32, columns: &[usize], a: &[f32], b: &[f32]) {
        let before = self.worst.map(|worst| worst.difference);
        self.add(position, a, b);
        if let Some(worst) = self.worst.as_mut().filter(|worst| Some(worst.difference) != before) {
            worst.column = columns.get(worst.column).copied().unwrap_or(worst.column);
        }
    }

    fn add(&mut self, position: u32, a: &[f32], b: &[f32]) {
        debug_assert_eq!(a.len(), b.len());
        let mut row = vectorized(
            #[inline(always)]
            || row_sums(a, b),
        );
        if !(row.squared_a + row.squared_b).is_finite() {
            row = finite_part(a, b);
        }
        if row.max > self.largest() {
            locate(&mut row, a, b);
        }
        self.compared_row(position, a.len(), &row);
        self.count_beyond(a, b);
    }

    /// The largest difference so far; less than any where there is none.
    fn largest(&self) -> f64 {
        self.worst.map_or(-1.0, |worst| worst.difference)
    }

    /// Adds a row of `width` elements that has been compared already; it is compared with no tolerance.
    pub fn compared_row(&mut self, position: u32, width: usize, row: &RowStats) {
        self.n += width as u64;
        self.nonfinite.candidate += u64::from(row.nonfinite_a);
        self.nonfinite.reference += u64::from(row.nonfinite_b);
        self.sum_abs += row.abs_error;
        self.sum_square += row.squared_error;
        self.sum_aa += row.squared_a;
        self.sum_bb += row.squared_b;
        self.sum_ab += row.product;
        self.positive += u64::from(row.positive);
        self.differing += u64::from(row.differing);
        self.rtol_needed = self.rtol_needed.max(row.ratio);
        if row.max > self.largest()
            && let Ok(column) = usize::try_from(row.column)
            && column < width
        {
            let (difference, candidate, reference) = (row.max, row.a, row.b);
            self.worst = Some(WorstElement { difference, position, column, candidate, reference });
        }
        self.rows.push((position, relative(row.squared_error, row.squared_b)));
    }

    /// Counts NaN and Inf of the candidate in a row that the reference does not have.
    pub fn count_unfinite(&mut self, count: u64) {
        self.nonfinite.candidate += count;
    }

    fn count_beyond(&mut self, a: &[f32], b: &[f32]) {
        let Tolerance { rtol, atol, .. } = self.tolerance;
        if rtol.is_none() && atol.is_none() {
            return;
        }
        let (rtol, atol) = (rtol.unwrap_or(0.0), atol.unwrap_or(0.0));
        let within = |a: f32, b: f32| {
            let (a, b) = (f64::from(a), f64::from(b));
            (a - b).abs() <= atol + rtol * b.abs()
        };
        self.beyond += a.iter().zip(b).filter(|&(&a, &b)| !within(a, b)).count() as u64;
    }

    /// Token rows so far.
    pub fn n_rows(&self) -> usize {
        self.rows.len()
    }

    /// NaN and Inf so far.
    pub fn nonfinite(&self) -> Nonfinite {
        self.nonfinite
    }

    /// Whether every element and the whole are within the user's tolerance; a NaN never is.
    pub fn within_tolerance(&self) -> bool {
        let nmse = self.sum_square / self.sum_bb;
        let exact = self.sum_square == 0.0;
        let finite = self.nonfinite == Nonfinite::default();
        finite && self.beyond == 0 && self.tolerance.nmse.is_none_or(|limit| exact || nmse <= limit)
    }

    /// The numbers; `shape` is that of one row, e.g. [H, E]. `None` where no element was compared.
    pub fn numbers(mut self, shape: &[usize]) -> Option<Numbers> {
        if self.n == 0 {
            return None;
        }
        self.rows.sort_by_key(|row| row.0);
        let unfinite = self.nonfinite.candidate.max(self.nonfinite.reference);
        let finite = self.n.saturating_sub(unfinite).max(1) as f64;
        // Without a pair that is finite on both sides there is no worst one, and nothing was measured.
        let measured = |value: f64| if self.worst.is_some() { value } else { f64::NAN };
        let rel_l2 = measured(relative(self.sum_square, self.sum_bb));
        let norms = self.sum_aa.sqrt() * self.sum_bb.sqrt();
        let worst =
            self.worst.map_or(Worst { index: vec![], candidate: None, reference: None }, |worst| Worst {
                index: index(worst.position, worst.column, shape),
                candidate: Some(f64::from(worst.candidate)),
                reference: Some(f64::from(worst.reference)),
            });
        Some(Numbers {
            n: self.n,
            abs_err_max: self.worst.map_or(f64::NAN, |worst| worst.difference),
            abs_err_mean: measured(self.sum_abs / finite),
            rmse: measured((self.sum_square / finite).sqrt()),
            rel_l2,
            nmse: rel_l2 * rel_l2,
            cosine: (norms > 0.0).then(|| self.sum_ab / norms),
            sign_positive: (self.differing > 0).then(|| self.positive as f64 / self.differing as f64),
            tolerance_needed: ToleranceNeeded {
                rtol: Some(measured(self.rtol_needed)).filter(|rtol| rtol.is_finite()),
                atol: self.worst.map_or(f64::NAN, |worst| worst.difference),
            },
            row_rel_l2: self.rows.iter().map(|&(position, rel_l2)| (position, measured(rel_l2))).collect(),
            worst,
            nonfinite: self.nonfinite,
        })
    }
}

/// ‖a-b‖ / ‖b‖ from squared sums; 0 for equal rows, also where b is 0, and as large as can be written where
/// only b is 0 (JSON has no infinity).
fn relative(square: f64, bb: f64) -> f64 {
    if square == 0.0 { 0.0 } else { (square / bb).sqrt().min(f64::MAX.sqrt()) }
}

/// Position and indices within the row, slowest axis first.
pub fn index(position: u32, column: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![position as usize];
    let mut rest = column;
    for axis in 1..=shape.len() {
        let stride: usize = shape[axis..].iter().product::<usize>().max(1);
        index.push(rest / stride);
        rest %= stride;
    }
    index
}

/// Finds the first column with the maximum; the one behind the last where no pair is finite.
fn locate(row: &mut RowStats, a: &[f32], b: &[f32]) {
    let at = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs() == row.max;
    let column = a.iter().zip(b).position(at);
    row.column = column.unwrap_or(a.len()) as i64;
    if let Some(column) = column {
        (row.a, row.b) = (a[column], b[column]);
    }
}

/// The sums over the elements that are finite on both sides; the others are counted.
fn finite_part(a: &[f32], b: &[f32]) -> RowStats {
    let both: (Vec<f32>, Vec<f32>) =
        a.iter().zip(b).filter(|(a, b)| a.is_finite() && b.is_finite()).map(|(a, b)| (*a, *b)).unzip();
    let nonfinite = |x: &[f32]| x.iter().filter(|x| !x.is_finite()).count() as u32;
    RowStats { nonfinite_a: nonfinite(a), nonfinite_b: nonfinite(b), ..row_sums(&both.0, &both.1) }
}

/// Elements of a row that are added at a time, each to sums of its own: they become vector instructions.
const LANES: usize = 8;

/// The sums of [`RowStats`] in lanes.
#[derive(Default)]
struct Lanes {
    abs_error: [f64; LANES],
    squared_error: [f64; LANES],
    squared_a: [f64; LANES],
    squared_b: [f64; LANES],
    product: [f64; LANES],
    max: [f64; LANES],
    positive: [f64; LANES],
    differing: [f64; LANES],
    /// Of all lanes: a division is dear and the maximum seldom grows.
    ratio: f64,
}

impl Lanes {
    #[inline(always)]
    fn add(&mut self, a: [f32; LANES], b: [f32; LANES]) {
        // What rounding takes from the product must not hide a larger quotient.
        let ratio = self.ratio * (1.0 - 4.0 * f64::EPSILON);
        let mut larger = false;
        for lane in 0..LANES {
            let (a, b) = (f64::from(a[lane]), f64::from(b[lane]));
            let d = a - b;
            let abs = d.abs();
            self.abs_error[lane] += abs;
            self.squared_error[lane] += d * d;
            self.squared_a[lane] += a * a;
            self.squared_b[lane] += b * b;
            self.product[lane] += a * b;
            // `abs` is no NaN here; the comparison compiles to a maximum.
            self.max[lane] = if abs > self.max[lane] { abs } else { self.max[lane] };
            self.positive[lane] += if d > 0.0 { 1.0 } else { 0.0 };
            self.differing[lane] += if abs > 0.0 { 1.0 } else { 0.0 };
            // 0/0 counts as nothing, x/0 as infinite.
            larger |= abs > ratio * b.abs();
        }
        if larger {
            let pairs = a.iter().zip(&b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
            let ratios = pairs.filter(|(a, b)| a != b).map(|(a, b)| (a - b).abs() / b.abs());
            self.ratio = ratios.fold(self.ratio, f64::max);
        }
    }

    fn total(&self) -> RowStats {
        let sum = |lanes: &[f64; LANES]| lanes.iter().sum::<f64>();
        RowStats {
            abs_error: sum(&self.abs_error),
            squared_error: sum(&self.squared_error),
            squared_a: sum(&self.squared_a),
            squared_b: sum(&self.squared_b),
            product: sum(&self.product),
            max: self.max.iter().copied().fold(0.0, f64::max),
            ratio: self.ratio,
            positive: sum(&self.positive) as u32,
            differing: sum(&self.differing) as u32,
            ..RowStats::default()
        }
    }
}

/// Where an element is not finite the sums of squares are not: see [`finite_part`].
#[inline(always)]
fn row_sums(a: &[f32], b: &[f32]) -> RowStats {
    let mut lanes = Lanes::default();
    let ((chunks_a, rest_a), (chunks_b, rest_b)) = (a.as_chunks(), b.as_chunks());
    for (a, b) in chunks_a.iter().zip(chunks_b) {
        lanes.add(*a, *b);
    }
    // Zeros on both sides add nothing.
    let (mut last_a, mut last_b) = ([0.0; LANES], [0.0; LANES]);
    last_a[..rest_a.len()].copy_from_slice(rest_a);
    last_b[..rest_b.len()].copy_from_slice(rest_b);
    lanes.add(last_a, last_b);
    lanes.total()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(a: &[f32], b: &[f32]) -> Numbers {
        let mut sums = Accumulator::new(Tolerance::default());
        sums.row(3, a, b);
        sums.numbers(&[2, a.len() / 2]).unwrap()
    }

    #[test]
    fn the_numbers_are_those_of_the_definitions() {
        let n = numbers(&[1.0, 2.0, 3.0, 4.5], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!((n.n, n.abs_err_max, n.abs_err_mean), (4, 0.5, 0.125));
        approx::assert_relative_eq!(n.rel_l2, (0.25f64 / 30.0).sqrt());
        approx::assert_relative_eq!(n.nmse, 0.25 / 30.0, max_relative = 1e-15);
        assert_eq!(n.worst.index, [3, 1, 1]);
        assert_eq!((n.worst.candidate, n.worst.reference), (Some(4.5), Some(4.0)));
        assert_eq!(n.tolerance_needed, ToleranceNeeded { rtol: Some(0.125), atol: 0.5 });
        assert_eq!(n.sign_positive, Some(1.0));
    }

    #[test]
    fn a_nan_is_counted_and_never_within_tolerance() {
        let mut sums = Accumulator::new(Tolerance { rtol: Some(9.0), atol: Some(9.0), nmse: Some(9.0) });
        sums.row(0, &[1.0, f32::NAN, 2.0], &[1.0, 1.0, f32::INFINITY]);
        assert_eq!(sums.nonfinite(), Nonfinite { candidate: 1, reference: 1 });
        assert!(!sums.within_tolerance());
        assert_eq!(sums.numbers(&[3]).unwrap().abs_err_max, 0.0);
    }

    #[test]
    fn an_error_against_zeros_is_as_large_as_can_be() {
        let n = numbers(&[1.0, 0.0], &[0.0, 0.0]);
        assert!(n.rel_l2 > 1e100 && n.rel_l2.is_finite());
        assert_eq!((n.cosine, n.tolerance_needed.rtol), (None, None));
    }
}
