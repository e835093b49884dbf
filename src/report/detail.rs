//! A small picture of one checkpoint's difference, computed row by row: a grid of signed magnitudes, two
//! histograms and the worst elements. What the HTML report draws; a [`super::Report`] holds no tensors.

use parity_dump::{Dump, Recorded};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;

/// Largest grid of an ordinary checkpoint, (rows, columns): 28 layers of these make about 2 MB of HTML.
pub const GRID: [usize; 2] = [48, 80];
/// Largest grid of the checkpoints that a reader looks at first.
pub const GRID_FINE: [usize; 2] = [96, 160];
/// Worst elements that are kept.
const WORST: usize = 8;
/// Decades below the largest difference that a grid tells apart.
const DECADES: f64 = 6.0;
/// Levels of magnitude on each side of zero.
const LEVELS: f64 = 31.0;
/// One character per level, the base64 alphabet: level 32 is no difference, 0 is NaN or Inf.
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Level of equal values.
const EQUAL: i32 = 32;
/// Biased exponents of an f32: one histogram bin for each power of two.
const EXPONENTS: usize = 256;

/// The picture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Detail {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Token rows, columns of a row.
    pub shape: [usize; 2],
    /// Positions of the first and the last row.
    pub positions: [u32; 2],
    /// Where the difference is.
    pub grid: Grid,
    /// How large it is, and how large the values are.
    pub histogram: Histogram,
    /// The elements that differ most, worst first.
    pub worst: Vec<Element>,
}

/// Signed differences, candidate minus reference: each cell shows the largest one among its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Cells along the token rows.
    pub rows: usize,
    /// Cells along the columns.
    pub cols: usize,
    /// The largest |a-b|; 0 where nothing differs.
    pub top: f64,
    /// Decades below `top` that the 31 levels cover.
    pub decades: f64,
    /// `rows · cols` characters of the base64 alphabet, row by row: its 32nd (`g`) is equality, those after
    /// it positive and those before it negative differences by magnitude, the first (`A`) is NaN or Inf.
    pub cells: String,
}

/// Counts by powers of two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Bin i counts magnitudes in [2^(low+i), 2^(low+i+1)).
    pub low: i32,
    /// Of |a-b|.
    pub difference: Vec<u64>,
    /// Of |b|.
    pub reference: Vec<u64>,
    /// Elements with a = b.
    pub equal: u64,
    /// Elements where a or b is NaN or Inf.
    pub nonfinite: u64,
}

/// One element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Element {
    /// Slowest axis first; the token row is given by its position.
    pub index: Vec<usize>,
    /// The candidate's value; null where it is not finite.
    pub candidate: Option<f64>,
    /// The reference's value; null where it is not finite.
    pub reference: Option<f64>,
}

/// The picture of what two dumps hold of one checkpoint; `None` where they share no row or differ in shape.
///
/// Holds one row of each dump at a time. `limit` is [`GRID`] or [`GRID_FINE`].
pub fn detail(
    checkpoint: Checkpoint,
    candidate: &Dump,
    reference: &Dump,
    limit: [usize; 2],
) -> Option<Detail> {
    let (ours, theirs) = (candidate.get(checkpoint)?, reference.get(checkpoint)?);
    let pairs: Vec<(usize, usize)> = shared_rows(ours, theirs);
    let positions: Vec<u32> = ours.positions().collect();
    let mut sketch = Sketch::new(checkpoint, pairs.len(), &ours.row_shape(), limit)?;
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for (row, other) in pairs {
        candidate.row(ours, row, &mut a);
        reference.row(theirs, other, &mut b);
        if a.len() != b.len() {
            return None;
        }
        sketch.row(positions[row], &a, &b);
    }
    Some(sketch.finish())
}

fn shared_rows(ours: &Recorded, theirs: &Recorded) -> Vec<(usize, usize)> {
    ours.positions().enumerate().filter_map(|(row, p)| Some((row, theirs.find(p)?))).collect()
}

/// A [`Detail`] in the making: rows go in, in order of position.
pub struct Sketch {
    checkpoint: Checkpoint,
    axes: Vec<usize>,
    rows: usize,
    seen: usize,
    width: usize,
    positions: [u32; 2],
    grid: [usize; 2],
    /// (grid rows, grid columns): the signed difference of largest magnitude, NaN where one is not finite.
    cells: Vec<f32>,
    difference: Vec<u64>,
    reference: Vec<u64>,
    equal: u64,
    nonfinite: u64,
    /// Worst first; (magnitude, position, column, a, b).
    worst: Vec<(f32, u32, usize, f32, f32)>,
}

impl Sketch {
    /// Expects `rows` rows whose shape is `row_shape`, e.g. [H, E]. `None` where there is nothing to draw.
    pub fn new(
        checkpoint: Checkpoint,
        rows: usize,
        row_shape: &[usize],
        limit: [usize; 2],
    ) -> Option<Sketch> {
        let width: usize = row_shape.iter().product();
        if rows == 0 || width == 0 {
            return None;
        }
        let grid = [rows.min(limit[0]), width.min(limit[1])];
        Some(Sketch {
            checkpoint,
            axes: row_shape.to_vec(),
            rows,
            seen: 0,
            width,
            positions: [0; 2],
            grid,
            cells: vec![0.0; grid[0] * grid[1]],
            difference: vec![0; EXPONENTS],
            reference: vec![0; EXPONENTS],
            equal: 0,
            nonfinite: 0,
            worst: Vec::with_capacity(WORST + 1),
        })
    }

    /// Adds the row at token `position`: candidate `a` and reference `b`, (width,). Rows of attention
    /// matrices may be narrower, (H, position + 1).
    pub fn row(&mut self, position: u32, a: &[f32], b: &[f32]) {
        if self.seen == 0 {
            self.positions[0] = position;
        }
        self.positions[1] = position;
        let [grid_rows, grid_cols] = self.grid;
        let cell_row = (self.seen.min(self.rows - 1) * grid_rows / self.rows) * grid_cols;
        self.seen += 1;
        for column in 0..grid_cols {
            let from = column * a.len() / grid_cols;
            let to = (column + 1) * a.len() / grid_cols;
            let largest = self.cell(position, a, b, from..to);
            let cell = &mut self.cells[cell_row + column];
            if !cell.is_nan() && (largest.is_nan() || largest.abs() > cell.abs()) {
                *cell = largest;
            }
        }
    }

    /// Counts the elements of one cell of one row; returns the difference of largest magnitude.
    fn cell(&mut self, position: u32, a: &[f32], b: &[f32], columns: std::ops::Range<usize>) -> f32 {
        let mut largest = 0.0f32;
        for column in columns {
            let (x, y) = (a[column], b[column]);
            self.reference[exponent(y)] += 1;
            if !(x.is_finite() && y.is_finite()) {
                self.nonfinite += 1;
                largest = f32::NAN;
                self.remember((f32::INFINITY, position, column, x, y), a.len());
                continue;
            }
            // Through f64: two large values of opposite sign do not overflow on the way.
            let d = (f64::from(x) - f64::from(y)) as f32;
            if d == 0.0 {
                self.equal += 1;
                continue;
            }
            self.difference[exponent(d)] += 1;
            if d.abs() > largest.abs() {
                largest = d;
            }
            if self.worst.len() < WORST || d.abs() > self.worst[WORST - 1].0 {
                self.remember((d.abs(), position, column, x, y), a.len());
            }
        }
        largest
    }

    fn remember(&mut self, element: (f32, u32, usize, f32, f32), width: usize) {
        // Attention rows, (H, position + 1), are narrower than the tensor's: the column is kept as if they were not.
        let last_axis = self.axes.last().copied().unwrap_or(1);
        let narrow = last_axis * width / self.width;
        let column = match narrow {
            0 => element.2,
            narrow => element.2 / narrow * last_axis + element.2 % narrow,
        };
        let place = self.worst.partition_point(|kept| kept.0 >= element.0);
        if place < WORST {
            self.worst.insert(place, (element.0, element.1, column, element.3, element.4));
            self.worst.truncate(WORST);
        }
    }

    /// The picture.
    pub fn finish(self) -> Detail {
        let top = self.cells.iter().filter(|d| d.is_finite()).fold(0.0f32, |top, d| top.max(d.abs()));
        let cells = self.cells.iter().map(|&d| char::from(ALPHABET[level(d, top) as usize])).collect();
        let grid =
            Grid { rows: self.grid[0], cols: self.grid[1], top: f64::from(top), decades: DECADES, cells };
        let is_matrix = self.checkpoint.kind().is_optional();
        let place = |position, column| {
            let mut index = index_of(position, column, &self.axes);
            // (H, T, S): the heads are the slowest axis.
            if is_matrix {
                index.swap(0, 1);
            }
            index
        };
        let worst = self.worst.iter().map(|&(_, position, column, a, b)| Element {
            index: place(position, column),
            candidate: a.is_finite().then_some(f64::from(a)),
            reference: b.is_finite().then_some(f64::from(b)),
        });
        Detail {
            checkpoint: self.checkpoint,
            shape: [self.seen, self.width],
            positions: self.positions,
            worst: worst.collect(),
            grid,
            histogram: histogram(&self.difference, &self.reference, self.equal, self.nonfinite),
        }
    }
}

/// Biased exponent, 0 to 255.
fn exponent(value: f32) -> usize {
    (value.to_bits() >> 23 & 0xff) as usize
}

/// 0 to 63; see [`ALPHABET`].
fn level(difference: f32, top: f32) -> i32 {
    if difference.is_nan() {
        return 0;
    }
    if difference == 0.0 {
        return EQUAL;
    }
    let below = (f64::from(top).log10() - f64::from(difference.abs()).log10()).max(0.0);
    let magnitude = (LEVELS - (below * LEVELS / DECADES).floor()).max(1.0) as i32;
    if difference > 0.0 { EQUAL + magnitude.min(31) } else { EQUAL - magnitude.min(31) }
}

/// The two histograms over the bins that either of them uses. Zeros and NaN have no power of two.
fn histogram(difference: &[u64], reference: &[u64], equal: u64, nonfinite: u64) -> Histogram {
    let used = |bin: &usize| difference[*bin] > 0 || reference[*bin] > 0;
    let finite = 1..EXPONENTS - 1;
    let first = finite.clone().find(used).unwrap_or(1);
    let last = finite.rev().find(used).unwrap_or(first);
    Histogram {
        low: first as i32 - 127,
        difference: difference[first..=last].to_vec(),
        reference: reference[first..=last].to_vec(),
        equal,
        nonfinite,
    }
}

fn index_of(position: u32, column: usize, axes: &[usize]) -> Vec<usize> {
    let mut rest = column;
    let mut inner: Vec<usize> = axes
        .iter()
        .rev()
        .map(|&axis| {
            let at = rest % axis;
            rest /= axis;
            at
        })
        .collect();
    inner.push(position as usize);
    inner.reverse();
    inner
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sketch(rows: usize, row_shape: &[usize], limit: [usize; 2]) -> Sketch {
        Sketch::new("blk.1.q_rope".parse().unwrap(), rows, row_shape, limit).unwrap()
    }

    #[test]
    fn a_single_difference_is_found_in_its_cell_and_as_the_worst_element() {
        let mut picture = sketch(6, &[2, 4], [3, 4]);
        for position in 0..6 {
            let b = [1.0f32; 8];
            let mut a = b;
            if position == 5 {
                a[6] = 0.5;
            }
            picture.row(position, &a, &b);
        }
        let detail = picture.finish();
        assert_eq!(detail.grid.cells, "gggggggggggB", "the last row, the last column, negative, largest");
        assert_eq!(
            detail.worst[0],
            Element { index: vec![5, 1, 2], candidate: Some(0.5), reference: Some(1.0) }
        );
        assert_eq!((detail.worst.len(), detail.histogram.equal), (1, 47));
        assert_eq!(detail.histogram.low, -1);
        assert_eq!(detail.histogram.difference, [1, 0]);
        assert_eq!(detail.histogram.reference, [0, 48]);
    }

    #[test]
    fn levels_fall_with_the_magnitude() {
        assert_eq!(level(1.0, 1.0), 63);
        assert_eq!(level(-1.0, 1.0), 1);
        assert_eq!(level(1e-3, 1.0), EQUAL + 16);
        assert_eq!(level(1e-30, 1.0), EQUAL + 1);
    }

    #[test]
    fn nan_is_a_level_of_its_own_and_the_worst_of_all() {
        let mut picture = sketch(1, &[3], GRID);
        picture.row(7, &[f32::NAN, 2.0, 1.0], &[1.0; 3]);
        let detail = picture.finish();
        assert_eq!(&detail.grid.cells[..1], "A");
        assert_eq!(detail.worst[0], Element { index: vec![7, 0], candidate: None, reference: Some(1.0) });
        assert_eq!(detail.histogram.nonfinite, 1);
    }
}
