//! Products that are summed in parts, each of which is rounded to the type that values are kept in: by the ranks of a
//! tensor-parallel engine, or by kernels that cut columns into blocks.
//!
//! Of n parts p, each is rounded, and so is each of their sums so far, which wander as far as the square root of their number
//! and towards the result. What one rounding explains does not need that: it is taken only where values of most rows are no
//! nearest numbers of the type, since a mistake in a few rows is none of the engine's arithmetic.

use parity_graph::Op;

use super::node::Hypothesis;
use super::storage_types::{is_product, narrow};
use crate::arithmetic::Arithmetic;
use crate::engine::op_by_op::compute;
use crate::numerics::Storage;
use crate::ops::bound::{CONFIDENCE, storage_unit};
use crate::ops::{Args, Rule};

/// How many parts are tried, and what that is called in f16 and in bf16.
const TRIED: [(usize, [&str; 2]); 4] = [
    (2, ["sums over about 2 ranks or parts in f16", "sums over about 2 ranks or parts in bf16"]),
    (4, ["sums over about 4 ranks or parts in f16", "sums over about 4 ranks or parts in bf16"]),
    (8, ["sums over about 8 ranks or parts in f16", "sums over about 8 ranks or parts in bf16"]),
    (16, ["sums over about 16 ranks or parts in f16", "sums over about 16 ranks or parts in bf16"]),
];

/// Of an engine that keeps values in a type, fewest parts first.
pub fn hypotheses(kept: Storage) -> Vec<Hypothesis> {
    let name = |names: [&'static str; 2]| names[usize::from(kept == Storage::Bf16)];
    let of = |(parts, names)| Hypothesis {
        name: name(names),
        arithmetic: Arithmetic { narrow: kept, cache: kept, parts, ..Arithmetic::EXACT },
    };
    TRIED.map(of).to_vec()
}

/// Whether an arithmetic has such sums in f16, by its name.
pub fn is_in_f16(name: &str) -> bool {
    TRIED.iter().any(|(_, [half, _])| *half == name)
}

/// Adds what such sums round to the bound of a product, if it has any: the parts in quadrature come to ‖w∘x‖, and half of
/// the sums so far, of which none is better known, to ‖w∘x‖² + y² each.
pub fn widen(op: &Op, args: &Args<'_, f64>, exact: &[f64], bound: &mut [f64]) {
    let Arithmetic { parts, narrow, .. } = *args.arithmetic;
    if parts <= 1 || !is_product(op, args) {
        return;
    }
    let Ok(problem) = crate::ops::problem(op, args) else { return };
    let (unit, half) = (CONFIDENCE * storage_unit(narrow), parts as f64 / 2.0);
    for ((bound, terms), y) in bound.iter_mut().zip(problem.terms()).zip(exact) {
        *bound += unit * (terms * terms * (1.0 + half) + half * y * y).sqrt();
    }
}

/// By how many times more than one rounding such sums may be off, for screening.
pub fn roundings(arithmetic: &Arithmetic) -> f64 {
    if arithmetic.parts > 1 { (1.0 + arithmetic.parts as f64).sqrt() } else { 1.0 }
}

/// Share of a row's values that are no nearest numbers where it was summed in parts: with two of them it is a third.
const SHOWN: f64 = 1.0 / 8.0;

/// Whether most rows of a product, of `width` values, show that they were summed in parts.
pub fn are_shown(rule: &Rule, args: &Args<'_, f64>, recorded: &[f64], width: usize) -> bool {
    let Some(dtype) = narrow(args.arithmetic.narrow) else { return false };
    let Ok(mut nearest) = compute::<f64>(rule, args) else { return false };
    args.arithmetic.narrow.store(&mut nearest);
    let is_shown = |(row, nearest): (&[f64], &[f64])| {
        let off = row
            .iter()
            .zip(nearest)
            .filter(|(a, b)| (*a - *b).abs() > 0.5 * crate::ops::bound::storage(dtype, **b));
        off.count() as f64 > SHOWN * row.len() as f64
    };
    let rows = recorded.chunks(width.max(1)).zip(nearest.chunks(width.max(1)));
    let shown = rows.map(|pair| usize::from(is_shown(pair))).sum::<usize>();
    2 * shown >= recorded.len().div_ceil(width.max(1))
}
