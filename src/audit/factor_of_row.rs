//! Rows that are off by one factor, which narrow values show only together.
//!
//! Where values are kept, or were recorded, in f16 or bf16, a factor of a few of their roundings hides in each of them. But
//! roundings are independent of one another, and a factor f is common to all of a row. By least squares it is Σ e·y/b² over
//! Σ y²/b², with errors e, exact values y and their bounds b, and is known the better the more values there are. Roundings
//! move it by their bounds in quadrature. Values that were recorded alike may have been rounded alike (heads that read one
//! value, say): they count as one.
//!
//! What a norm carries that was not recorded is as independent, but for the scale of its row: an engine may round that too, and what it
//! reads may have been rounded when it was recorded, which moves the scale by what single values have of the row's squares.
//!
//! A rotation leaves the length of a pair of channels as it is, so that along y errors of its angle do not count. Up to four
//! roundings of a pair's length do for each of its values; those of its cosine and its sine all heads have in common.

use std::collections::BTreeMap;
use std::ops::Range;

use parity_graph::Op;

use super::storage_types;
use crate::numerics::Storage;
use crate::ops::Args;
use crate::ops::bound::{CONFIDENCE, storage_unit};
use crate::ops::source::{Data, Source};

/// What is known of the values of a node.
pub struct Values<'a> {
    /// As they were recorded.
    pub recorded: &'a [f64],
    /// Exact ones.
    pub exact: &'a [f64],
    /// Up to how much each may be off by itself, see [`widen`].
    pub own: &'a [f64],
    /// What its sources carry: an error that values may have in common.
    pub carried: Option<&'a [f64]>,
    /// What a norm is kept in that carries it, of which values have its scale in common alone.
    pub norm: Option<Storage>,
}

/// Whether values are narrow, and it is known what the errors of a row have in common: not of softmax, attention,
/// and factors of whole tensors.
pub fn is_known(op: &Op, args: &Args<'_, f64>, norm: Option<Storage>) -> bool {
    let weight = |slot: usize| args.get(slot).filter(|source| matches!(source.data, Data::Weight(_)));
    let known = match op {
        Op::Add | Op::Swiglu | Op::Rope => true,
        // A weight may have been rounded, and lie in memory then.
        Op::Mul => (0..2).filter_map(|slot| args.get(slot)).any(is_of_columns),
        Op::MulMat => weight(0).is_some(),
        _ => false,
    };
    known && (kept(args) != Storage::F32 || norm.is_some())
}

/// Whether a source has a value for each column, which all rows meet.
fn is_of_columns(source: &Source<'_, f64>) -> bool {
    let [rest @ .., columns] = source.shape();
    columns > 1 && rest == [1; 3]
}

fn kept(args: &Args<'_, f64>) -> Storage {
    args.arithmetic.recorded.unwrap_or(args.arithmetic.narrow)
}

/// Makes the bound of f32 that of narrow values, each by itself: `widened` but for what the outputs of a product have in
/// common, its rows that were rounded when they were recorded.
pub fn widen(op: &Op, args: &Args<'_, f64>, exact: &[f64], own: &mut [f64], widened: &[f64]) {
    match op {
        // Parts of a sum are rounded by themselves, and their bound is already as many times the root of their squares as that
        // of a row will be: counted twice it hid a weight times 1.01.
        Op::MulMat if args.arithmetic.parts > 1 => {
            for ((own, widened), y) in own.iter_mut().zip(widened).zip(exact) {
                let one = *own + storage_types::rounding(kept(args), *y);
                *own = one + (widened - one).max(0.0) / CONFIDENCE;
            }
        }
        Op::MulMat => {
            own.iter_mut().zip(exact).for_each(|(own, y)| *own += storage_types::rounding(kept(args), *y))
        }
        Op::Rope => {
            let unit = storage_unit(kept(args));
            // Channels that are not turned are copied, and say nothing.
            own.fill(f64::INFINITY);
            for_each_pair(op, args, exact, |_, pair, length| {
                pair.into_iter().for_each(|i| own[i] = PAIR_ROUNDINGS.sqrt() * unit * length);
            });
        }
        _ => own.copy_from_slice(widened),
    }
}

/// Roundings that a value of a pair meets by itself, as variances of shares of the pair's length: of a value as it was
/// recorded or of two products, and of their sum.
const PAIR_ROUNDINGS: f64 = 2.0;

/// Sees every pair of channels that are turned together: its number within its row of heads, where its values lie, and its
/// length.
fn for_each_pair(op: &Op, args: &Args<'_, f64>, exact: &[f64], mut see: impl FnMut(usize, [usize; 2], f64)) {
    let pairs = crate::ops::rotated_pairs(op, args).unwrap_or_default();
    for (head, values) in exact.chunks_exact(args.shape[3].max(1)).enumerate() {
        for (number, pair) in pairs.iter().enumerate() {
            let length = pair.iter().map(|channel| values[*channel].powi(2)).sum::<f64>().sqrt();
            see(number, pair.map(|channel| head * args.shape[3] + channel), length);
        }
    }
}

/// By row of `width` elements: what its errors have in common over what rounding explains of that.
pub fn factors(op: &Op, args: &Args<'_, f64>, values: &Values<'_>, width: usize) -> Vec<f64> {
    let weights: Vec<f64> = values.exact.iter().zip(values.own).map(|(y, own)| weight(*y, *own)).collect();
    let of_sources = match op {
        Op::Rope => Some(of_angles(op, args, values.exact, &weights, width)),
        Op::Mul => values.norm.map(|kept| of_norm(kept, args, values.exact, &weights, width)),
        _ => of_product(op, args, &weights),
    };
    let rows = 0..values.exact.len().checked_div(width).unwrap_or(0);
    rows.map(|row| {
        let of_sources = of_sources.as_ref().map_or(0.0, |rows| rows[row]);
        factor(values, &weights, row * width..(row + 1) * width, of_sources)
    })
    .collect()
}

/// How much a value tells of the factor of its row: as much more as it is less uncertain, y/b². Nothing where it is certain:
/// then it is right, or found wrong by itself.
fn weight(y: f64, own: f64) -> f64 {
    let weight = y / (own * own);
    if weight.is_finite() { weight } else { 0.0 }
}

/// Of one row; `of_sources` is what errors of its sources, which its values have in common, come to in quadrature.
fn factor(values: &Values<'_>, weights: &[f64], row: Range<usize>, of_sources: f64) -> f64 {
    let (mut common, mut carried, mut squares) = (0.0, 0.0, of_sources * of_sources);
    let mut alike: Vec<(u64, f64)> = Vec::with_capacity(row.len());
    for i in row.filter(|i| weights[*i] != 0.0) {
        let (recorded, weight) = (values.recorded[i], weights[i]);
        common += (recorded - values.exact[i]) * weight;
        let off = values.carried.map_or(0.0, |carried| carried[i]) * weight.abs();
        if values.norm.is_some() {
            squares += off * off
        } else {
            carried += off
        }
        alike.push((recorded.abs().to_bits(), values.own[i] * weight.abs()));
    }
    alike.sort_by_key(|(bits, _)| *bits);
    let together = alike.chunk_by(|a, b| a.0 == b.0).map(|one| one.iter().map(|(_, off)| off).sum::<f64>());
    let independent = together.map(|off| off * off).sum::<f64>() + squares;
    match common.abs() {
        0.0 => 0.0,
        common => common / (CONFIDENCE * independent.sqrt() + carried),
    }
}

/// By row of a product: what it comes to, by these weights, that the rows of its source were rounded when they were recorded.
fn of_product(op: &Op, args: &Args<'_, f64>, weights: &[f64]) -> Option<Vec<f64>> {
    let unit = storage_unit(args.arithmetic.recorded.filter(|_| *op == Op::MulMat)?);
    let problem = crate::ops::problem(op, args).ok()?;
    Some(problem.along(weights).into_iter().map(|along| unit * along).collect())
}

/// By row of a norm times a weight: what it comes to, by these weights, that its scale was rounded, and that the values it was made of
/// were.
fn of_norm(kept: Storage, args: &Args<'_, f64>, exact: &[f64], weights: &[f64], width: usize) -> Vec<f64> {
    let unit = storage_unit(kept);
    let shares = |row: &[f64]| {
        let squares = row.iter().map(|x| x * x);
        let [second, fourth] = [1, 2].map(|power| squares.clone().map(|x| x.powi(power)).sum::<f64>());
        if second > 0.0 { fourth.sqrt() / second } else { 0.0 }
    };
    let norm = args.get(0).map(|source| source.values()).unwrap_or_default();
    let rows = exact.chunks(width.max(1)).zip(weights.chunks(width.max(1))).zip(norm.chunks(width.max(1)));
    let of = |((exact, weights), norm): ((&[f64], &[f64]), &[f64])| {
        let factor = unit / CONFIDENCE + unit * shares(norm);
        factor * exact.iter().zip(weights).map(|(y, weight)| (y * weight).abs()).sum::<f64>()
    };
    rows.map(of).collect()
}

/// By row of a rotation: what it comes to, by these weights, that cosine and sine of each pair were rounded, for all heads
/// alike.
fn of_angles(op: &Op, args: &Args<'_, f64>, exact: &[f64], weights: &[f64], width: usize) -> Vec<f64> {
    let unit = storage_unit(kept(args));
    let mut rows: Vec<BTreeMap<usize, f64>> = vec![BTreeMap::new(); exact.len() / width.max(1)];
    for_each_pair(op, args, exact, |number, [a, b], length| {
        if let Some(row) = rows.get_mut(a / width.max(1)) {
            *row.entry(number).or_default() += unit * length * weights[a].hypot(weights[b]);
        }
    });
    rows.iter().map(|pairs| pairs.values().map(|off| off * off).sum::<f64>().sqrt()).collect()
}
