//! Attention whose scores are off by one factor, or capped, which narrow values show only together.
//!
//! An engine that rounds scores to bf16 may be off by all of what attention gives, where scores are large: 1.1 times the scale
//! hides in each output. But a rounding of a score has either sign, and the factor is common. Of each query of each head the
//! error's direction is compared with the direction d that its output moves in with the scale: c = Σ e·d over the lengths of
//! both, between -1 and 1. Of roundings Σ c stays within `DEVIATIONS` times the root of Σ c² [6]; with a factor every c is
//! about one. An exponential of large errors leans to one side: by half of their variance to second order, beside the errors themselves
//! in quadrature over the positions that share the weight. That much is allowed for, and the one factor that a kernel may have
//! rounded: its scale, kept in the engine's type. What is nearest to it of all errors, up to one rounding, is taken off them.

use std::collections::HashSet;

use parity_graph::Op;

use super::storage_types::{STEPS, is_followed};
use crate::arithmetic::bounded_by;
use crate::numerics::Storage;
use crate::ops::Args;
use crate::ops::bound::{CONFIDENCE, storage_unit};
use crate::ops::flash::{InCommon, in_common};

/// [`CONFIDENCE`] roundings that are uniform in ± 1 are so many standard deviations: √3 each.
pub const DEVIATIONS: f64 = CONFIDENCE * 1.732_050_807_568_877_2;

/// What the errors of a node have in common with either direction, over what rounding explains of that, each with an element
/// where it shows. Nothing of nodes but attention in a narrow type at whose steps nobody knows what is rounded, and nothing
/// where queries and keys were rounded only when they were recorded: the rounding of a key is common to all that read it.
pub fn over(
    op: &Op,
    args: &Args<'_, f64>,
    [recorded, exact]: [&[f64]; 2],
    looked_at: &dyn Fn(usize) -> bool,
) -> Vec<(usize, f64)> {
    let bounded = bounded_by(args.arithmetic.packed);
    let narrow = args.arithmetic.narrow;
    let is_known = bounded.is_none() && (narrow == Storage::F32 || is_followed(op, args.arithmetic));
    if *op != Op::FlashAttn || is_known {
        return Vec::new();
    }
    let width = args.shape[3].max(1);
    let off_by = STEPS.sqrt() * bounded.unwrap_or_else(|| storage_unit(narrow)) / 3f64.sqrt();
    let mut seen = HashSet::new();
    let mut rows: Vec<(usize, Vec<f64>, InCommon)> = Vec::new();
    for (row, common) in in_common(args).into_iter().enumerate() {
        let start = row * width;
        let (recorded, exact) = (&recorded[start..start + width], &exact[start..start + width]);
        let bits = recorded.iter().map(|value| value.to_bits()).collect::<Vec<u64>>();
        if looked_at(start) && seen.insert(bits) {
            let errors = recorded.iter().zip(exact).map(|(recorded, exact)| recorded - exact).collect();
            rows.push((start, errors, common));
        }
    }
    take_rounded_scale(&mut rows, storage_unit(narrow));
    // Of a cache nobody knows how little it is off by but from what it comes to.
    let shown = bounded.map_or(f64::INFINITY, |_| off_by_each(&rows));
    let mut of = [Common::default(); 2];
    for (start, errors, common) in &rows {
        let leans = ((off_by * common.largest).min(shown) * common.spread.sqrt() / 2.0).min(1.0);
        of.iter_mut().zip(&common.moves).for_each(|(of, moves)| of.add(*start, along(errors, moves), leans));
    }
    of.into_iter().map(|of| (of.element, of.over())).collect()
}

/// Takes off the errors what they have of a scale that is off by up to `unit`, relative: the least squares of all rows.
fn take_rounded_scale(rows: &mut [(usize, Vec<f64>, InCommon)], unit: f64) {
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along: f64 = rows.iter().map(|(_, errors, common)| sum(errors, &common.moves[0])).sum();
    let squares: f64 = rows.iter().map(|(.., common)| sum(&common.moves[0], &common.moves[0])).sum();
    let off = along / squares;
    if off.is_finite() {
        let off = off.clamp(-unit, unit);
        for (_, errors, common) in rows {
            errors.iter_mut().zip(&common.moves[0]).for_each(|(error, moves)| *error -= off * moves);
        }
    }
}

/// How far scores are off each, if that is all that outputs are off by: the root mean square over rows.
fn off_by_each(rows: &[(usize, Vec<f64>, InCommon)]) -> f64 {
    let squares = rows.iter().filter(|(.., common)| common.apart > 0.0);
    let squares =
        squares.map(|(_, errors, common)| errors.iter().map(|e| e * e).sum::<f64>() / common.apart.powi(2));
    let (sum, count) = squares.fold((0.0, 0), |(sum, count), square| (sum + square, count + 1));
    if count == 0 { f64::INFINITY } else { (sum / f64::from(count)).sqrt() }
}

/// What rows have in common.
#[derive(Clone, Copy, Default)]
struct Common {
    sum: f64,
    squares: f64,
    /// What may be common to roundings.
    leans: f64,
    /// Where a row's errors lie most along it, and by how much.
    element: usize,
    most: f64,
}

impl Common {
    fn add(&mut self, element: usize, along: Option<f64>, leans: f64) {
        let Some(along) = along else { return };
        self.sum += along;
        self.squares += along * along;
        self.leans += leans;
        if along.abs() > self.most {
            (self.element, self.most) = (element, along.abs());
        }
    }

    fn over(&self) -> f64 {
        let common = (self.sum.abs() - self.leans).max(0.0);
        if common == 0.0 { 0.0 } else { common / (DEVIATIONS * self.squares.sqrt()) }
    }
}

/// Σ e·d over the lengths of both; nothing where either is none.
fn along(errors: &[f64], moves: &[f64]) -> Option<f64> {
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along = sum(errors, moves) / (sum(errors, errors) * sum(moves, moves)).sqrt();
    along.is_finite().then_some(along)
}
