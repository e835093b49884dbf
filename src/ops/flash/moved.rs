//! What errors of its sources do to attention on devices, besides moving it: sums in f16 are rounded to other numbers, and
//! so is a cache that a kernel converts.

use super::super::bound::{SUBNORMAL_F16, UNIT_F16};
use super::super::source::Source;
use super::explain::{in_half, score_errors};
use super::row::{Attention, QueryRow, converts};
use super::sums::Off;

/// Sources that errors may be carried from at once: queries, keys and values.
const TOGETHER: f64 = 3.0;

/// Sums in f16 that devices keep are followed once more with what is moved: by how much more they may be off then. Errors
/// of several sources may come together at one rounding: each is taken as often.
pub fn moved_sums(
    attention: &Attention<'_, '_, f64>,
    row: &QueryRow,
    exact: &[f64],
    moves: &[f64],
    of_value: &(impl Fn(usize) -> Vec<f64> + Sync),
) -> Option<Vec<f64>> {
    let still = score_errors(attention, row);
    let moved: Vec<f64> = still.iter().zip(moves).map(|(error, moved)| error + TOGETHER * moved).collect();
    let values = |position: usize| of_value(position).into_iter().map(|error| TOGETHER * error).collect();
    let near = in_half(attention, row, Off { scores: &still, values: &|_| Vec::new() }, exact)?;
    let far = in_half(attention, row, Off { scores: &moved, values: &values }, exact)?;
    Some(far.iter().zip(near).map(|(far, near)| far - near).collect())
}

/// How far the values of a cache may be off once a kernel has converted them: what is moved may be rounded to another
/// number.
pub fn converted(
    attention: &Attention<'_, '_, f64>,
    source: &Source<'_, f64>,
    error: &[f64],
    values: &[f64],
) -> Vec<f64> {
    let units = if converts(attention.kind, source) { [UNIT_F16, SUBNORMAL_F16] } else { [0.0; 2] };
    let off = |(error, value): (&f64, &f64)| match *error > 0.0 {
        true => error + 2.0 * (units[0] * (value.abs() + error) + units[1]),
        false => 0.0,
    };
    error.iter().zip(values).map(off).collect()
}
