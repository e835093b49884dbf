//! What the gated functions have in common: where gate and up stand, and how their errors join.

use parity_graph::Op;
use rayon::prelude::*;

use super::bound::{finite, storage};
use super::convert::{convert, spread};
use super::source::{Args, rows};
use super::unary::Setting;
use super::{Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

/// Word `swapped`.
const SWAPPED: usize = 1;

/// A function of gate and up, evaluated in f32.
pub(super) trait Gated {
    /// f(g, u)
    fn value<S: Scalar>(setting: Setting<'_>, gate: S, up: S) -> S;
    /// How far rounding moves f(g, u) = y in f32, absolute.
    fn rounding(setting: Setting<'_>, gate: f64, up: f64, y: f64) -> f64;
    /// How far errors of up to `eg` and `eu` of gate and up move f(g, u), absolute.
    fn carry(setting: Setting<'_>, gate: f64, up: f64, eg: f64, eu: f64) -> f64;
}

/// The rule of such an op.
pub(super) const fn rule<F: Gated>(op: Op, formula: &'static str, explained: &'static str) -> Rule {
    Rule {
        op,
        formula,
        explained,
        single: compute::<F, f32>,
        double: compute::<F, f64>,
        check: Check::Bound(bound::<F>),
        carry: carry::<F>,
    }
}

/// Errors f(g)·u moves by: |u|·Δf + |f|·eu + Δf·eu.
pub(super) fn product_carry(f: f64, df: f64, u: f64, du: f64) -> f64 {
    df * u.abs() + f.abs() * du + df * du
}

/// What `f` makes of the number of each element, its gate and its up, in the order of the result: two sources of its
/// shape, or one whose rows are gate and up one behind the other (exchanged where `swapped` is set).
fn each<S: Scalar>(args: &Args<'_, S>, f: impl Fn(usize, S, S) -> S + Sync) -> Result<Vec<S>> {
    let first = args.source(0)?;
    let [a, b, c, d] = args.shape;
    let second = args.get(1);
    match second {
        Some(second) if first.shape() != args.shape || second.shape() != args.shape => {
            return Err(args.misfit("two sources of the result's shape"));
        }
        None if first.shape() != [a, b, c, 2 * d] => {
            return Err(args.misfit("one source with rows of twice the result's"));
        }
        _ => {}
    }
    let swapped = args.params.int(SWAPPED) != 0;
    let mut out = vec![S::ZERO; args.elements()];
    let places: Vec<[usize; 3]> = rows(args.shape).collect();
    out.par_chunks_mut(d.max(1)).zip(&places).enumerate().for_each(|(index, (out, &row))| {
        let one = first.row(row);
        let other = second.map(|second| second.row(row));
        let (gate, up) = match &other {
            Some(up) => (&one[..], &up[..]),
            None if swapped => (&one[d..], &one[..d]),
            None => one.split_at(d),
        };
        for (i, (out, (&gate, &up))) in out.iter_mut().zip(gate.iter().zip(up)).enumerate() {
            *out = f(index * d + i, gate, up);
        }
    });
    Ok(out)
}

fn compute<F: Gated, S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let setting = Setting::of(args);
    each(args, |_, gate, up| convert(args.dtype, F::value(setting, gate, up)))
}

fn bound<F: Gated>(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let setting = Setting::of(args);
    let bound = each(args, |i, gate, up| {
        let y = exact[i];
        finite(y, F::rounding(setting, gate, up, y) + storage(args.dtype, y))
    });
    bound.unwrap_or_else(|_| vec![0.0; exact.len()])
}

fn carry<F: Gated>(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let setting = Setting::of(args);
    let d = args.shape[3].max(1);
    let one = args.get(1).is_none();
    let errors = |i: usize| match (one, slot) {
        (true, 0) => {
            let start = i / d * 2 * d + i % d;
            let (gate, up) = (error[start], error[start + d]);
            if args.params.int(SWAPPED) == 0 { (gate, up) } else { (up, gate) }
        }
        (false, 0) => (error[i], 0.0),
        (false, 1) => (0.0, error[i]),
        _ => (0.0, 0.0),
    };
    let moved = each(args, |i, gate, up| {
        let (y, (eg, eu)) = (exact[i], errors(i));
        let moved = F::carry(setting, gate, up, eg, eu);
        finite(y, spread(args.dtype, F::value(setting, gate, up), moved))
    });
    moved.unwrap_or_else(|_| vec![0.0; exact.len()])
}
