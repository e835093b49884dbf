//! A change of the values of a tensor: element by element, row by row, or of the places where they lie.
//!
//! An edit knows nothing but extents and values, so that it is the same one in our own engine, in the audit and in the
//! memory of llama.cpp. What it has to know of a graph, such as how many elements a token has, is part of it.

use std::ops::Range;

use half::{bf16, f16};

/// A 16-bit type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Narrow {
    /// IEEE binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
}

/// See the module. Rows of `row` elements are those of tokens, which lie side by side.
#[derive(Clone, Debug, PartialEq)]
pub enum Edit {
    /// x + a
    Add(f32),
    /// x · a
    Multiply(f32),
    /// x²
    Square,
    /// (x + a) mod n: indices.
    AddModulo(i32, i32),
    /// map[x]: indices.
    Map(Vec<u32>),
    /// 1/x
    Reciprocal,
    /// Every value is replaced by a.
    Set(f32),
    /// x less the first value: positions that start at 0 again.
    FromFirst,
    /// x + a where the first value is above 0: positions of a step that is not the first.
    AddLater(f32),
    /// c·tanh(x/c)
    SoftCap(f32),
    /// x between -c and c.
    Clamp(f32),
    /// Rounded to a narrower type.
    Round(Narrow),
    /// The bits of one 16-bit type, read as the other.
    Reinterpret {
        /// The type that they are written in.
        from: Narrow,
    },
    /// Values beyond the limit are infinite; the largest ones where there is none.
    Overflow(Option<f32>),
    /// Elements moved by this many places along the fastest axis, round the end of each row.
    Rotate(i32),
    /// The first n elements of each row move one place on: the last of them is lost, the first becomes zero.
    Lag(usize),
    /// Some columns of every `row` elements are a.
    SetColumns {
        /// Elements of a row.
        row: usize,
        /// Which.
        columns: Range<usize>,
        /// What they become.
        to: f32,
    },
    /// Column c of each row takes what column `order[c]` held; a row has as many elements as the list.
    Columns(Vec<u32>),
    /// Along an axis, counted from the fastest, place i takes what place `order[i]` held.
    Gather {
        /// Which.
        axis: usize,
        /// As many as there are afterwards.
        order: Vec<u32>,
    },
    /// (R, C) read as if it were (C, R).
    Transposed,
    /// Each row takes what the row before it held; the first one stays.
    RowsBehind {
        /// Elements of a row.
        row: usize,
    },
    /// Each row takes what the first one held.
    FirstRow {
        /// Elements of a row.
        row: usize,
    },
    /// Rows lie so many values apart, and are read as if they lay side by side.
    Stride {
        /// Elements of a row.
        row: usize,
        /// How far apart.
        stride: usize,
    },
    /// (T, H, E) laid out as (H, T, E), and read as (T, H, E).
    HeadsFirst {
        /// E
        width: usize,
        /// H
        heads: usize,
    },
    /// The value in the middle of the last row is NaN.
    Nan {
        /// Elements of a row.
        row: usize,
    },
    /// The last row holds numbers of any size.
    Garbage {
        /// Elements of a row.
        row: usize,
    },
    /// Rows of a mask (0 where a position is seen, -inf where not): a window is wider by one position, or narrower.
    Window {
        /// Whether it is wider.
        wider: bool,
    },
    /// Rows of a mask see so many positions fewer, up to their own, or so many of their step behind it.
    MaskShift(i64),
    /// Rows of a mask see so many cells behind their own, whether their step wrote them or not.
    Next(usize),
    /// Rows of a mask see the last n positions up to their own.
    Last(usize),
    /// Rows of a mask do not see what was cached before their step.
    OwnStep,
    /// Rows of a mask see only what was cached before their step, if there is any.
    BeforeStep,
    /// Rows of a mask see all of their step.
    WholeStep,
    /// Rows of a mask do not see these positions.
    Hidden(Range<usize>),
    /// Rows of a mask see so many cells behind those of their step.
    Behind(usize),
    /// Rows of a mask see what the row so many places on sees, round the end of the step.
    RowsTurned(i32),
}

impl Edit {
    /// Applies the edit to values in logical order with the extents `ne`, fastest axis first; what does not fit them
    /// stays as it is.
    pub fn apply(&self, ne: &mut [usize; 4], values: &mut Vec<f64>) {
        match self {
            Edit::AddModulo(..) | Edit::Map(_) => self.indices(values),
            Edit::FromFirst | Edit::AddLater(_) => self.positions(values),
            Edit::Overflow(limit) => overflow(*limit, values),
            Edit::Gather { axis, order } => gather(*axis, order, ne, values),
            Edit::Transposed => transposed(*ne, values),
            Edit::Window { wider } => window(ne[0], values, *wider),
            Edit::MaskShift(_)
            | Edit::Next(_)
            | Edit::Last(_)
            | Edit::OwnStep
            | Edit::BeforeStep
            | Edit::WholeStep
            | Edit::Hidden(_) => self.mask(ne[0], values),
            Edit::Behind(cells) => behind(ne[0], values, *cells),
            Edit::RowsTurned(by) => rows_turned(ne[0], values, *by),
            Edit::Rotate(_) | Edit::Lag(_) | Edit::SetColumns { .. } | Edit::Columns(_) => {
                self.rows(ne[0], values);
            }
            Edit::RowsBehind { .. }
            | Edit::FirstRow { .. }
            | Edit::Stride { .. }
            | Edit::HeadsFirst { .. }
            | Edit::Nan { .. }
            | Edit::Garbage { .. } => self.token_rows(values),
            _ => values.iter_mut().for_each(|x| *x = self.element(*x)),
        }
    }

    /// Whether a value depends on its own one alone, whatever the others are.
    pub fn is_by_element(&self) -> bool {
        matches!(
            self,
            Edit::Add(_)
                | Edit::Multiply(_)
                | Edit::Square
                | Edit::Reciprocal
                | Edit::Set(_)
                | Edit::SoftCap(_)
                | Edit::Clamp(_)
                | Edit::Round(_)
                | Edit::Reinterpret { .. }
        )
    }

    /// Whether a value depends on those of its own row alone.
    pub fn is_within_rows(&self) -> bool {
        let moves =
            matches!(self, Edit::Rotate(_) | Edit::Lag(_) | Edit::SetColumns { .. } | Edit::Columns(_));
        moves || self.is_by_element()
    }

    fn element(&self, x: f64) -> f64 {
        match self {
            Edit::Add(a) => x + f64::from(*a),
            Edit::Multiply(a) => x * f64::from(*a),
            Edit::Square => x * x,
            Edit::Reciprocal => x.recip(),
            Edit::Set(a) => f64::from(*a),
            Edit::SoftCap(c) => f64::from(*c) * (x / f64::from(*c)).tanh(),
            Edit::Clamp(c) => x.clamp(-f64::from(c.abs()), f64::from(c.abs())),
            Edit::Round(Narrow::F16) => f16::from_f64(x).to_f64(),
            Edit::Round(Narrow::Bf16) => nearest_bf16(x).to_f64(),
            Edit::Reinterpret { from: Narrow::F16 } => bf16::from_bits(f16::from_f64(x).to_bits()).to_f64(),
            Edit::Reinterpret { from: Narrow::Bf16 } => f16::from_bits(nearest_bf16(x).to_bits()).to_f64(),
            _ => x,
        }
    }

    fn indices(&self, values: &mut [f64]) {
        let index = |x: f64| match self {
            Edit::AddModulo(a, n) => (x + f64::from(*a)).rem_euclid(f64::from((*n).max(1))),
            Edit::Map(map) => map.get(x as usize).map_or(x, |to| f64::from(*to)),
            _ => x,
        };
        values.iter_mut().for_each(|x| *x = index(*x));
    }

    fn positions(&self, values: &mut [f64]) {
        let Some(&first) = values.first() else { return };
        let by = match self {
            Edit::FromFirst => -first,
            Edit::AddLater(a) if first > 0.0 => f64::from(*a),
            _ => 0.0,
        };
        values.iter_mut().for_each(|x| *x += by);
    }

    fn rows(&self, width: usize, values: &mut [f64]) {
        match self {
            Edit::Rotate(by) => {
                for row in values.chunks_mut(width.max(1)) {
                    let by = usize::try_from(i64::from(*by).rem_euclid(row.len() as i64)).unwrap_or(0);
                    row.rotate_right(by);
                }
            }
            Edit::Lag(n) => {
                for row in values.chunks_mut(width.max(1)) {
                    let moved = (*n).min(row.len());
                    row[..moved].rotate_right(moved.min(1));
                    row.iter_mut().take(moved.min(1)).for_each(|first| *first = 0.0);
                }
            }
            Edit::SetColumns { row, columns, to } => {
                for row in values.chunks_mut((*row).max(1)) {
                    let within = row.get_mut(columns.clone()).into_iter().flatten();
                    within.for_each(|value| *value = f64::from(*to));
                }
            }
            Edit::Columns(order) => {
                for row in values.chunks_exact_mut(order.len().max(1)) {
                    let old = row.to_vec();
                    for (value, from) in row.iter_mut().zip(order) {
                        *value = old.get(*from as usize).copied().unwrap_or(*value);
                    }
                }
            }
            _ => {}
        }
    }

    fn token_rows(&self, values: &mut [f64]) {
        let len = values.len();
        match *self {
            Edit::RowsBehind { row } if row < len => values.copy_within(..len - row, row),
            Edit::FirstRow { row } if row > 0 => {
                (row..len).for_each(|i| values[i] = values[i % row]);
            }
            Edit::Stride { row, stride } if row > 0 && stride > 0 => {
                let old = values.to_vec();
                let read = |at: usize| match stride >= row {
                    true if at % stride < row => old[at / stride * row + at % stride],
                    true => 0.0,
                    false => old[at / row * stride + at % row],
                };
                values.iter_mut().enumerate().for_each(|(at, value)| *value = read(at));
            }
            Edit::HeadsFirst { width, heads } if width * heads > 0 && len.is_multiple_of(width * heads) => {
                let (old, tokens) = (values.to_vec(), len / (width * heads));
                for (at, value) in values.iter_mut().enumerate() {
                    let (block, e) = (at / width, at % width);
                    let (head, token) = (block / tokens, block % tokens);
                    *value = old[(token * heads + head) * width + e];
                }
            }
            Edit::Nan { row } if row > 0 && row <= len => values[len - row + row / 2] = f64::NAN,
            Edit::Garbage { row } if row <= len => garbage(&mut values[len - row..]),
            _ => {}
        }
    }

    fn mask(&self, width: usize, values: &mut [f64]) {
        const HIDDEN: f64 = f64::NEG_INFINITY;
        let seen = |row: &[f64]| -> Vec<usize> { (0..row.len()).filter(|&c| row[c].is_finite()).collect() };
        let width = width.max(1);
        let first = values.chunks(width).map(seen).find(|seen| !seen.is_empty()).unwrap_or_default();
        // What the first row sees besides itself was there before its step.
        let before = first.len().saturating_sub(1);
        let cached = &first[..before];
        let end = values.chunks(width).filter_map(|row| seen(row).last().copied()).max().unwrap_or(0);
        for row in values.chunks_mut(width) {
            let own = seen(row);
            let Some(&last) = own.last() else { continue };
            let mut hide = |columns: &[usize]| columns.iter().for_each(|&c| row[c] = HIDDEN);
            match *self {
                Edit::MaskShift(by) if by < 0 => {
                    let fewer = usize::try_from(-by).unwrap_or(usize::MAX).min(own.len());
                    hide(&own[own.len() - fewer..]);
                }
                Edit::MaskShift(by) => {
                    let more = usize::try_from(by).unwrap_or(0);
                    row[last..=last.saturating_add(more).min(end)].fill(0.0);
                }
                Edit::Next(more) => row[last..=last.saturating_add(more).min(width - 1)].fill(0.0),
                Edit::Last(n) => hide(&own[..own.len().saturating_sub(n)]),
                Edit::OwnStep => hide(cached),
                Edit::BeforeStep if before > 0 => {
                    let of_step: Vec<usize> = own.into_iter().filter(|c| !cached.contains(c)).collect();
                    hide(&of_step);
                }
                Edit::WholeStep => row[last..=end].fill(0.0),
                Edit::Hidden(ref columns) => {
                    let hidden: Vec<usize> = own.into_iter().filter(|c| columns.contains(c)).collect();
                    hide(&hidden);
                }
                _ => {}
            }
        }
    }
}

/// Rows of a mask, of so many cells, see `more` behind the last that any row of their step sees.
fn behind(width: usize, values: &mut [f64], more: usize) {
    let width = width.max(1);
    let last = values.chunks(width).filter_map(|row| row.iter().rposition(|x| x.is_finite())).max();
    let Some(first) = last.map(|last| last + 1) else { return };
    for row in values.chunks_mut(width).filter(|row| row.iter().any(|x| x.is_finite())) {
        let end = (first + more).min(row.len());
        row[first.min(end)..end].fill(0.0);
    }
}

/// Rows of a mask, of so many cells, see what the row `by` places on sees; rows behind the step's own, which see nothing, stay.
fn rows_turned(width: usize, values: &mut [f64], by: i32) {
    let width = width.max(1);
    let rows = values.chunks(width).take_while(|row| row.iter().any(|x| x.is_finite())).count();
    let of_step = values.get_mut(..rows * width).unwrap_or_default();
    let by = i64::from(by).rem_euclid(rows.max(1) as i64) as usize;
    of_step.rotate_left(by * width);
}

/// Keys or values (extents `ne`: E, positions, heads) as they are before those of the step are written, where it is not
/// the first: a mask whose rows have `width` places tells which ones they are.
pub fn unwritten(ne: [usize; 4], values: &mut [f64], (width, mask): (usize, &[f64]), held: bool) {
    let mut rows = mask
        .chunks(width.max(1))
        .map(|row| (0..row.len()).filter(|&c| row[c].is_finite()).collect::<Vec<usize>>());
    let Some(first) = rows.find(|seen| !seen.is_empty()) else { return };
    let (Some(&before), Some(&own)) = (first.iter().rev().nth(1), first.last()) else { return };
    let end = rows.filter_map(|seen| seen.last().copied()).fold(own, usize::max);
    let [columns, places, ..] = ne;
    if columns == 0 || end >= places {
        return;
    }
    for head in values.chunks_exact_mut(columns * places) {
        for place in own..=end {
            match held {
                true => head.copy_within(before * columns..(before + 1) * columns, place * columns),
                false => head[place * columns..(place + 1) * columns].fill(0.0),
            }
        }
    }
}

/// The nearest number of bf16 to one of f32; `from_f64` leaves out the lowest three bits of such a one, and rounds what lies just
/// above the middle down.
fn nearest_bf16(x: f64) -> bf16 {
    bf16::from_f32(x as f32)
}

/// Values beyond a limit, or the largest ones, become infinite.
fn overflow(limit: Option<f32>, values: &mut [f64]) {
    let finite = values.iter().map(|x| x.abs()).filter(|x| x.is_finite());
    let largest = finite.fold(0.0, f64::max);
    let over = |x: f64| limit.map_or(largest > 0.0 && x >= largest, |limit| x > f64::from(limit));
    values.iter_mut().filter(|x| over(x.abs())).for_each(|x| *x = f64::INFINITY.copysign(*x));
}

fn gather(axis: usize, order: &[u32], ne: &mut [usize; 4], values: &mut Vec<f64>) {
    let extent = ne[axis];
    if order.is_empty() || order.iter().any(|&from| from as usize >= extent) {
        return;
    }
    let within: usize = ne[..axis].iter().product();
    let mut out = Vec::with_capacity(values.len() / extent * order.len());
    for outer in values.chunks_exact(within * extent) {
        order.iter().for_each(|&from| out.extend_from_slice(&outer[from as usize * within..][..within]));
    }
    ne[axis] = order.len();
    *values = out;
}

/// w[r, c] = buffer[c·R + r], matrix by matrix.
fn transposed([columns, rows, ..]: [usize; 4], values: &mut [f64]) {
    for matrix in values.chunks_exact_mut((columns * rows).max(1)) {
        let old = matrix.to_vec();
        for (at, value) in matrix.iter_mut().enumerate() {
            *value = old[at % columns * rows + at / columns];
        }
    }
}

/// Moves the far end of a window by one position. Where rows begin to see is where the window ends, if that is not the
/// first column; a row that sees as many positions as such a row is as wide as the window, wherever it begins.
fn window(width: usize, values: &mut [f64], wider: bool) {
    let seen = |row: &[f64]| {
        let first = row.iter().position(|value| *value == 0.0)?;
        Some((first, row.iter().filter(|value| **value == 0.0).count()))
    };
    let rows = values.chunks(width.max(1)).filter_map(seen);
    let Some(size) = rows.filter(|(first, _)| *first > 0).map(|(_, count)| count).max() else { return };
    for row in values.chunks_mut(width.max(1)) {
        match seen(row) {
            Some((first, _)) if wider && first > 0 => row[first - 1] = 0.0,
            Some((first, count)) if !wider && count == size && size > 1 => row[first] = f64::NEG_INFINITY,
            _ => {}
        }
    }
}

/// Magnitudes of garbage: wide enough to look like nothing computed, narrow enough that later nodes do not overflow f32.
const GARBAGE_EXPONENTS: (i32, u64) = (-60, 72);
/// The odd constant of splitmix64.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Numbers of any size from a fixed sequence.
fn garbage(row: &mut [f64]) {
    let mut state = GAMMA;
    for value in row {
        state = state.wrapping_add(GAMMA);
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^= bits >> 31;
        let exponent = GARBAGE_EXPONENTS.0 + ((bits >> 8) % GARBAGE_EXPONENTS.1) as i32;
        let mantissa = 1.0 + f64::from((bits >> 40) as u32) / f64::from(1u32 << 24);
        *value = if bits & 1 == 0 { 1.0 } else { -1.0 } * mantissa * f64::from(exponent).exp2();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of rows of `width` elements after an edit.
    fn edited(edit: &Edit, width: usize, values: &[f64]) -> Vec<f64> {
        let mut values = values.to_vec();
        edit.apply(&mut [width, values.len() / width, 1, 1], &mut values);
        values
    }

    #[test]
    fn edits_are_made_row_by_row() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let rotated = edited(&Edit::Rotate(1), 3, &values);
        assert_eq!(rotated, [3.0, 1.0, 2.0, 6.0, 4.0, 5.0]);
        assert_eq!(edited(&Edit::Map(vec![0, 3, 1, 1]), 2, &[3.0, 1.0, 2.0, 1.0]), [1.0, 3.0, 1.0, 3.0]);
        let values = edited(&Edit::AddModulo(1, 4), 3, &rotated);
        assert_eq!(values, [0.0, 2.0, 3.0, 3.0, 1.0, 2.0]);
        let values = edited(&Edit::SetColumns { row: 3, columns: 2..3, to: 9.0 }, 3, &values);
        assert_eq!(values, [0.0, 2.0, 9.0, 3.0, 1.0, 9.0]);
        let values = edited(&Edit::Square, 3, &values);
        assert_eq!(values, [0.0, 4.0, 81.0, 9.0, 1.0, 81.0]);
        let values = edited(&Edit::Lag(2), 3, &values);
        assert_eq!(values, [0.0, 0.0, 81.0, 0.0, 9.0, 81.0]);
        let values = edited(&Edit::SetColumns { row: 3, columns: 0..2, to: 4.0 }, 3, &values);
        let values = edited(&Edit::Reciprocal, 3, &values);
        assert_eq!(values, [0.25, 0.25, 1.0 / 81.0, 0.25, 0.25, 1.0 / 81.0]);
    }

    #[test]
    fn rows_and_places_change() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(edited(&Edit::RowsBehind { row: 2 }, 2, &values), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(edited(&Edit::FirstRow { row: 2 }, 2, &values), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
        assert_eq!(edited(&Edit::Stride { row: 2, stride: 3 }, 2, &values), [1.0, 2.0, 0.0, 3.0, 4.0, 0.0]);
        assert_eq!(edited(&Edit::Columns(vec![1, 0]), 2, &values), [2.0, 1.0, 4.0, 3.0, 6.0, 5.0]);
        assert_eq!(edited(&Edit::Transposed, 2, &values), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let first = Edit::HeadsFirst { width: 1, heads: 2 };
        assert_eq!(edited(&first, 2, &values), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        let (mut ne, mut wide) = ([2, 3, 1, 1], values.to_vec());
        Edit::Gather { axis: 1, order: vec![2, 0, 0, 1] }.apply(&mut ne, &mut wide);
        assert_eq!((ne, &wide[..]), ([2, 4, 1, 1], &[5.0, 6.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0][..]));
        assert_eq!(edited(&Edit::FromFirst, 3, &[7.0, 8.0, 9.0]), [0.0, 1.0, 2.0]);
        assert_eq!(edited(&Edit::AddLater(2.0), 3, &[0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]);
        assert_eq!(edited(&Edit::AddLater(2.0), 1, &[3.0]), [5.0]);
        assert_eq!(edited(&Edit::Round(Narrow::Bf16), 1, &[1.003]), [1.0]);
    }

    const X: f64 = f64::NEG_INFINITY;

    #[test]
    fn a_window_grows_and_shrinks_at_its_far_end() {
        // A window of two positions over four tokens, and a row that sees nothing.
        let mask = [0.0, X, X, X, 0.0, 0.0, X, X, X, 0.0, 0.0, X, X, X, 0.0, 0.0, X, X, X, X];
        let wide = edited(&Edit::Window { wider: true }, 4, &mask);
        assert_eq!(wide, [0.0, X, X, X, 0.0, 0.0, X, X, 0.0, 0.0, 0.0, X, X, 0.0, 0.0, 0.0, X, X, X, X]);
        let narrow = edited(&Edit::Window { wider: false }, 4, &mask);
        assert_eq!(narrow, [0.0, X, X, X, X, 0.0, X, X, X, X, 0.0, X, X, X, X, 0.0, X, X, X, X]);
        // Without a window nothing changes.
        let whole = [0.0, X, X, 0.0, 0.0, X, 0.0, 0.0, 0.0];
        assert_eq!(edited(&Edit::Window { wider: false }, 3, &whole), whole);
        assert_eq!(edited(&Edit::Window { wider: true }, 3, &whole), whole);
    }

    #[test]
    fn what_lies_just_above_the_middle_is_rounded_up() {
        // 1 + 2⁻⁸ is the middle of 1 and 1 + 2⁻⁷.
        let above = f64::from(1.0f32 + 2f32.powi(-8) + 2f32.powi(-23));
        assert_eq!(Edit::Round(Narrow::Bf16).element(above), 1.0 + 2f64.powi(-7));
        assert_eq!(Edit::Round(Narrow::Bf16).element(1.0 + 2f64.powi(-8)), 1.0);
    }

    #[test]
    fn masks_are_read_by_what_their_first_row_sees() {
        // Two tokens behind two cached ones, and a place that nothing is in yet.
        let mask = [0.0, 0.0, 0.0, X, X, 0.0, 0.0, 0.0, 0.0, X];
        assert_eq!(edited(&Edit::MaskShift(-1), 5, &mask), [0.0, 0.0, X, X, X, 0.0, 0.0, 0.0, X, X]);
        assert_eq!(edited(&Edit::MaskShift(3), 5, &mask), [0.0, 0.0, 0.0, 0.0, X, 0.0, 0.0, 0.0, 0.0, X]);
        assert_eq!(edited(&Edit::WholeStep, 5, &mask), edited(&Edit::MaskShift(1), 5, &mask));
        assert_eq!(edited(&Edit::Next(1), 5, &mask), [0.0, 0.0, 0.0, 0.0, X, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(edited(&Edit::OwnStep, 5, &mask), [X, X, 0.0, X, X, X, X, 0.0, 0.0, X]);
        assert_eq!(edited(&Edit::BeforeStep, 5, &mask), [0.0, 0.0, X, X, X, 0.0, 0.0, X, X, X]);
        assert_eq!(edited(&Edit::Last(2), 5, &mask), [X, 0.0, 0.0, X, X, X, X, 0.0, 0.0, X]);
        assert_eq!(edited(&Edit::Hidden(1..2), 5, &mask), [0.0, X, 0.0, X, X, 0.0, X, 0.0, 0.0, X]);
        // In the first step nothing was cached.
        let first = [0.0, X, X, 0.0, 0.0, X];
        assert_eq!(edited(&Edit::OwnStep, 3, &first), first);
        assert_eq!(edited(&Edit::BeforeStep, 3, &first), first);
    }
}
