//! Rotary position embedding (Su et al., arXiv 2104.09864).

use rayon::prelude::*;

use super::Rows;
use crate::engine::fused::graph::{Anchor, BySteps, Pairing, Position, Rope};
use crate::gguf::TensorRef;
use crate::numerics::{Numerics, Products};
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};

/// Turns pair i of every head by position · base^(-2i/dims) / freqs[i]; x (T, heads·E).
///
/// Angles are computed in f64 whatever the scalar: they grow with the position, and so would their error.
/// Only llama.cpp on the CPU is followed in how it multiplies them on in f32.
pub fn execute<S: Scalar>(
    rope: &Rope,
    freqs: Option<&TensorRef<'_>>,
    x: View<'_, S>,
    rows: Rows<'_>,
    numerics: &Numerics,
) -> Matrix<S> {
    let freqs = super::nodes::vector::<f64>(freqs);
    let rates = rates(rope, &freqs);
    let mut out = x.to_matrix();
    out.data.par_chunks_mut(x.cols.max(1)).enumerate().for_each(|(t, row)| {
        let position = turned_position(rope.position, rows, t);
        let angles = match numerics.products {
            Products::LlamaCpu => angles_multiplied_on(rope, &freqs, position),
            _ => rates.iter().map(|rate| position * rate).collect(),
        };
        let turns: Vec<(S, S)> = angles
            .iter()
            .map(|angle| angle.sin_cos())
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

/// Angle of each pair at position 1, (dims/2,).
pub(crate) fn rates(rope: &Rope, freqs: &[f64]) -> Vec<f64> {
    (0..rope.dims / 2)
        .map(|i| rope.base.powf(-2.0 * i as f64 / rope.dims as f64) / freqs.get(i).copied().unwrap_or(1.0))
        .collect()
}

/// The angles as llama.cpp's CPU backend has them (ggml-cpu/ops.cpp, `ggml_rope_cache_init`): multiplied on
/// from pair to pair in f32.
fn angles_multiplied_on(rope: &Rope, freqs: &[f64], position: f64) -> Vec<f64> {
    let ratio = f64::powf(f64::from(rope.base as f32), f64::from(-2.0f32 / rope.dims as f32)) as f32;
    let mut angle = position as f32;
    (0..rope.dims / 2)
        .map(|i| {
            let turned = angle / freqs.get(i).copied().unwrap_or(1.0) as f32;
            angle *= ratio;
            f64::from(turned)
        })
        .collect()
}

/// The position that row t is turned by.
fn turned_position(position: BySteps<Position>, rows: Rows<'_>, t: usize) -> f64 {
    let step = &rows.steps[t];
    let Position { from, times: (numerator, denominator), offset } = position.at(step.start);
    let from = match from {
        Anchor::Start => 0,
        Anchor::Step => step.start,
        Anchor::Row => rows.positions[t],
        Anchor::End => step.end,
    };
    let counted = f64::from(rows.positions[t]) - f64::from(from);
    counted * f64::from(numerator) / f64::from(denominator) + offset as f64
}

/// One head, (E,), in place.
fn turn<S: Scalar>(pairing: Pairing, turns: &[(S, S)], head: &mut [S]) {
    for (i, &(sin, cos)) in turns.iter().enumerate() {
        let (first, second) = columns(pairing, i, turns.len());
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos - b * sin;
        head[second] = a * sin + b * cos;
    }
}

/// The two columns of pair `i` of `pairs`.
pub(crate) fn columns(pairing: Pairing, i: usize, pairs: usize) -> (usize, usize) {
    match pairing {
        Pairing::Half => (i, i + pairs),
        Pairing::Interleaved => (2 * i, 2 * i + 1),
    }
}
