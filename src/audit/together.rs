//! What errors of sums have in common whose order nobody knows.
//!
//! In any order sums in f16 may be off by several per cent, and a factor of 1.005 hides in each of them. But their roundings
//! are independent of one another, and a factor f, or an offset, is common: to all outputs, to a row, to some columns side by
//! side (a head), or to one column. With errors e, exact values y and bounds b it is Σ e·y/b² over Σ y²/b². If roundings alone
//! are at work, each e has either sign alike, so that Σ e·y/b² is within `DEVIATIONS` times the root of Σ (e·y/b²)²: whatever
//! the sizes of the errors are, once that many are looked at that they could all point one way. Of a few columns that cannot
//! be told from their own errors: what all errors of the node come to, each over its bound, stands for theirs, and columns are
//! `ALIKE` in that. Rows that were recorded alike were rounded alike, and count as one.

use hashbrown::HashSet;

use crate::ops::bound::{CONFIDENCE, UNIT_F32};

/// [`CONFIDENCE`] roundings that are uniform in ± 1 are so many standard deviations: √3 each.
const DEVIATIONS: f64 = CONFIDENCE * 1.732_050_807_568_877_2;
/// By how much errors of columns, over their bounds, may be larger than those of the whole node.
const ALIKE: f64 = 2.0;
/// Values from which their own errors say how large these are: a common factor makes the root of their number of it.
const OWN: usize = 64;
/// Columns side by side that are looked at together: heads are multiples of it.
const BESIDE: usize = 32;

/// What is known of a node's values, row by row of `width`.
pub struct Values<'a> {
    /// As they were recorded.
    pub recorded: &'a [f64],
    /// Exact ones.
    pub exact: &'a [f64],
    /// Up to how much each may be off.
    pub bound: &'a [f64],
    /// Elements of a row.
    pub width: usize,
    /// Terms of each sum.
    pub terms: usize,
}

/// By how much each of the additions of a sum may be cut off, relative: matrix units cut what they add up in f32, and to the
/// same side, which is a factor that all sums have in common.
const CUT: f64 = 2.0 * UNIT_F32;

/// What is summed over values, with w = y/b of a factor and 1/b of an offset: (e/b)²; e/b·w, its square, w²; e/b·1/b, its square,
/// 1/b², |w·1/b|.
type Terms = [f64; 8];

/// Sums over some values.
#[derive(Clone, Copy, Default)]
struct Sums {
    count: usize,
    of: Terms,
    first: usize,
}

impl Sums {
    fn add(&mut self, element: usize, terms: &Terms) {
        self.join(&Sums { count: 1, of: *terms, first: element });
    }

    /// Adds what was summed elsewhere.
    fn join(&mut self, other: &Sums) {
        if self.count == 0 {
            self.first = other.first;
        }
        self.count += other.count;
        self.of.iter_mut().zip(&other.of).for_each(|(sum, other)| *sum += other);
    }

    /// What is common beyond what additions may be `cut`, over what independent roundings come to: by what these values are off themselves, or by what values
    /// of the node are, over their bounds.
    fn over(&self, of_node: f64, cut: f64) -> f64 {
        let ratio = |[common, own, weights, sizes]: [f64; 4]| {
            let common = (common.abs() - cut * sizes).max(0.0);
            let spread = match self.count >= OWN {
                true => own.sqrt(),
                // What rounding may be in any order is enough in any case.
                false => (ALIKE * of_node).min(1.0 / DEVIATIONS) * weights.sqrt(),
            };
            if common == 0.0 { 0.0 } else { common / (DEVIATIONS * spread) }
        };
        let [_, along, own, w, offset, own_offset, ones, sizes] = self.of;
        ratio([along, own, w, w]).max(ratio([offset, own_offset, ones, sizes]))
    }
}

/// What values have in common over what rounding explains of it: of the whole, by row, by columns. Each with an element
/// where it is. Only what is `looked_at` counts.
pub fn factors(values: &Values<'_>, looked_at: &dyn Fn(usize) -> bool) -> Vec<(usize, f64)> {
    let Values { recorded, exact, bound, width, terms } = *values;
    if width == 0 {
        return Vec::new();
    }
    let mut seen = HashSet::new();
    let is_new = |row: &usize| {
        let own = &recorded[row * width..][..width];
        seen.insert(own.iter().map(|value| value.to_bits()).collect::<Vec<u64>>())
    };
    let distinct: Vec<usize> = (0..recorded.len() / width).filter(is_new).collect();
    let mut rows = vec![Sums::default(); distinct.len()];
    let mut columns = vec![Sums::default(); width];
    let mut beside = vec![Sums::default(); width.div_ceil(BESIDE)];
    // Block by block of columns, whose sums stay at hand.
    for ((block, of_block), columns) in beside.iter_mut().enumerate().zip(columns.chunks_mut(BESIDE)) {
        for (row, of_row) in distinct.iter().zip(&mut rows) {
            let mut own = Sums::default();
            for (i, of_column) in columns.iter_mut().enumerate() {
                let element = row * width + block * BESIDE + i;
                let one = 1.0 / bound[element];
                let (error, w) = ((recorded[element] - exact[element]) * one, exact[element] * one);
                if !(error.is_finite() && w.is_finite() && one.is_finite()) || !looked_at(element) {
                    continue;
                }
                let (along, offset) = (error * w, error * one);
                let size = (w * one).abs();
                let squares = [error * error, along * along, w * w, offset * offset, one * one];
                let [errors, own_along, weights, own_offset, ones] = squares;
                let terms = [errors, along, own_along, weights, offset, own_offset, ones, size];
                own.add(element, &terms);
                of_column.add(element, &terms);
            }
            of_row.join(&own);
            of_block.join(&own);
        }
    }
    let mut node = Sums::default();
    rows.iter().for_each(|of_row| node.join(of_row));
    let of_node = (node.of[0] / node.count.max(1) as f64).sqrt();
    let cut = CUT * terms as f64;
    let all = std::iter::once(node).chain(rows).chain(beside).chain(columns);
    all.filter(|sums| sums.count > 0).map(|sums| (sums.first, sums.over(of_node, cut))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    /// Uniform in [-1, 1).
    fn draw(seed: usize, i: usize) -> f64 {
        let bits = random::mixed((seed as u64).wrapping_mul(random::GAMMA) ^ random::mixed(i as u64 + 1));
        (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// (exact, bound, recorded) of `rows` of `width`, with errors of a fiftieth of the bounds, times `f` of an element.
    fn node(seed: usize, [rows, width]: [usize; 2], f: impl Fn(usize) -> f64) -> [Vec<f64>; 3] {
        let exact: Vec<f64> = (0..rows * width).map(|i| draw(seed, i) + draw(seed + 7, i)).collect();
        let bound: Vec<f64> = exact.iter().map(|y| 0.08 * (0.8 + y.abs())).collect();
        // Errors of columns and rows are alike within a factor of two.
        let size = |i: usize| (0.7 + 0.6 * ((i % width) % 2) as f64) * (0.7 + 0.6 * ((i / width) % 2) as f64);
        let recorded = exact.iter().zip(&bound).enumerate();
        let recorded =
            recorded.map(|(i, (y, b))| y * f(i) + b * size(i) * draw(seed + 99, i) / 50.0).collect();
        [exact, bound, recorded]
    }

    fn worst([exact, bound, recorded]: &[Vec<f64>; 3], width: usize) -> (usize, f64) {
        let values = Values { recorded, exact, bound, width, terms: 0 };
        factors(&values, &|_| true).into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    }

    #[test]
    fn independent_roundings_have_nothing_in_common() {
        for seed in 0..200 {
            for shape in [[1, 128], [2, 64], [17, 128], [40, 256], [64, 96], [5, 8], [3, 1]] {
                let (_, over) = worst(&node(1000 * seed + 3, shape, |_| 1.0), shape[1]);
                assert!(over <= 1.0, "{shape:?}: {over}");
            }
        }
    }

    #[test]
    fn rows_that_are_alike_count_as_one() {
        let [exact, bound, recorded] = node(5, [1, 64], |_| 1.0);
        let many = [exact, bound, recorded].map(|row| row.repeat(400));
        assert!(worst(&many, 64).1 <= 1.0);
    }

    #[test]
    fn a_factor_is_found_far_below_the_bound_of_a_value() {
        let shape @ [rows, width] = [40, 128];
        for seed in 0..20 {
            let all = |_| 1.005;
            let row = |i: usize| if i / width == 17 { 1.005 } else { 1.0 };
            let head = |i: usize| if (64..96).contains(&(i % width)) { 1.005 } else { 1.0 };
            let column = |i: usize| if i % width == 77 { 1.005 } else { 1.0 };
            let found = worst(&node(seed, shape, all), width);
            assert!(found.1 > 1.0, "all: {found:?}");
            let found = worst(&node(seed, shape, row), width);
            assert!(found.1 > 1.0 && found.0 == 17 * width, "row: {found:?}");
            let found = worst(&node(seed, shape, head), width);
            assert!(found.1 > 1.0, "head: {found:?}");
            let found = worst(&node(seed, [4 * rows, width], column), width);
            assert!(found.1 > 1.0 && found.0 == 77, "column: {found:?}");
        }
    }

    #[test]
    fn what_matrix_units_cut_off_is_no_factor() {
        let [exact, bound, _] = node(9, [5, 512], |_| 1.0);
        let recorded: Vec<f64> = exact.iter().map(|y| y * (1.0 - 0.5 * CUT * 64.0)).collect();
        let over = |terms| {
            let values = Values { recorded: &recorded, exact: &exact, bound: &bound, width: 512, terms };
            factors(&values, &|_| true).into_iter().fold(0.0, |most, (_, over)| f64::max(most, over))
        };
        assert!(over(64) <= 1.0 && over(0) > 1.0, "{} {}", over(64), over(0));
    }

    #[test]
    fn an_offset_is_found() {
        let mut node = node(8, [40, 128], |_| 1.0);
        node[2].iter_mut().for_each(|value| *value += 0.004);
        assert!(worst(&node, 128).1 > 1.0);
    }
}
