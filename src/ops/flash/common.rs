//! How attention moves with what all of its scores may have wrong in common: their scale, or a cap.

use rayon::prelude::*;

use super::super::source::Args;
use super::explain::weights;
use super::row::Attention;

/// One query of one head.
pub struct InCommon {
    /// (DV,) Each: how its output moves with the logarithm of the scale, and with a cap that is far above its scores, up to a
    /// factor.
    pub moves: [Vec<f64>; 2],
    /// How far it moves where scores are off by one each, in either direction alike: the root of Σ p²·|v - y|².
    pub apart: f64,
    /// Its largest score.
    pub largest: f64,
    /// Over how many positions its weights are spread: 1/Σ p².
    pub spread: f64,
}

/// Of each row of the result, in their order; none where the sources do not fit together.
pub fn in_common(args: &Args<'_, f64>) -> Vec<InCommon> {
    let Ok(attention) = Attention::new(args) else { return Vec::new() };
    let [b, n, heads, _] = args.shape;
    (0..b * n * heads)
        .into_par_iter()
        .map(|index| of_row(&attention, [index / heads / n, index % heads, index / heads % n]))
        .collect()
}

/// With weights p, an output y = Σ p·v moves with scores that move by w as Σ p·(w - Σ p·w)·v.
fn of_row(attention: &Attention<'_, '_, f64>, [b, h, n]: [usize; 3]) -> InCommon {
    let row = attention.row(b, h, n);
    let (p, _) = weights(&row);
    let moved = [1, 3].map(|power| {
        let w: Vec<f64> = row.seen.iter().map(|seen| seen.scaled.powi(power)).collect();
        let mean: f64 = p.iter().zip(&w).map(|(p, w)| p * w).sum();
        p.iter().zip(w).map(|(p, w)| p * (w - mean)).collect::<Vec<f64>>()
    });
    let mut moves = [(); 2].map(|()| vec![0.0; attention.v.shape()[3]]);
    let values: Vec<_> = row.seen.iter().map(|seen| attention.value(row.at, seen.position)).collect();
    let mut y = vec![0.0; attention.v.shape()[3]];
    for (p, value) in p.iter().zip(&values) {
        y.iter_mut().zip(value.iter()).for_each(|(y, v)| *y += p * v);
    }
    let mut apart = 0.0;
    for (m, value) in values.iter().enumerate() {
        apart += p[m] * p[m] * y.iter().zip(value.iter()).map(|(y, v)| (v - y) * (v - y)).sum::<f64>();
        for (moves, moved) in moves.iter_mut().zip(&moved) {
            moves.iter_mut().zip(value.iter()).for_each(|(sum, v)| *sum += moved[m] * v);
        }
    }
    let largest = row.seen.iter().fold(0.0, |max: f64, seen| max.max(seen.z.abs()));
    let squares: f64 = p.iter().map(|p| p * p).sum();
    InCommon { moves, apart: apart.sqrt(), largest, spread: if squares > 0.0 { 1.0 / squares } else { 1.0 } }
}
