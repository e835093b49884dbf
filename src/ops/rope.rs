//! Rotary position embedding (Su et al., arXiv 2104.09864).

use rayon::prelude::*;

use super::Rows;
use crate::model::graph::{Pairing, Rope, RopePosition};
use crate::model::weights::Weight;
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// Turns pair i of every head by position · base^(-2i/dims) / freqs[i]; x (T, heads·E).
///
/// Angles are computed in f64 whatever the scalar: they grow with the position, and so would their error.
pub fn execute<S: Scalar>(
    rope: &Rope,
    freqs: Option<&Weight<'_>>,
    x: View<'_, S>,
    rows: Rows<'_>,
) -> Matrix<S> {
    let freqs = super::vector::<f64>(freqs);
    let half = rope.dims / 2;
    let rates: Vec<f64> = (0..half)
        .map(|i| rope.base.powf(-2.0 * i as f64 / rope.dims as f64) / freqs.get(i).copied().unwrap_or(1.0))
        .collect();
    let mut out = x.to_matrix();
    out.data.par_chunks_mut(x.cols.max(1)).enumerate().for_each(|(t, row)| {
        let position = turned_position(rope.position, rows, t);
        let turns: Vec<(S, S)> = rates
            .iter()
            .map(|rate| (position * rate).sin_cos())
            .map(|(sin, cos)| (S::from_f64(f64::from(rope.sign) * sin), S::from_f64(cos)))
            .collect();
        for _ in 0..rope.times {
            for head in row.chunks_exact_mut(rope.head_width) {
                turn(rope.pairing, &turns, head);
            }
        }
    });
    out
}

/// The position that row t is turned by.
fn turned_position(position: RopePosition, rows: Rows<'_>, t: usize) -> f64 {
    let own = f64::from(rows.positions[t]);
    match position {
        RopePosition::Own => own,
        RopePosition::Shift(shift) => own + shift as f64,
        RopePosition::Zero => 0.0,
        RopePosition::InStep => own - f64::from(rows.steps[t].start),
        RopePosition::ShiftInDecode(_) if rows.steps[t].start == 0 => own,
        RopePosition::ShiftInDecode(shift) => own + shift as f64,
        RopePosition::Scaled(numerator, denominator) => own * f64::from(numerator) / f64::from(denominator),
    }
}

/// One head, (E,), in place.
fn turn<S: Scalar>(pairing: Pairing, turns: &[(S, S)], head: &mut [S]) {
    for (i, &(sin, cos)) in turns.iter().enumerate() {
        let (first, second) = match pairing {
            Pairing::Half => (i, i + turns.len()),
            Pairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos - b * sin;
        head[second] = a * sin + b * cos;
    }
}
