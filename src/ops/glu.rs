//! What the gated functions have in common: where gate and up stand, and how their errors join.

use parity_graph::Op;

use super::bound::{finite, storage};
use super::convert::{convert, spread};
use super::source::{Args, rows};
use super::unary::Setting;
use super::{Check, Needed, Rule};
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
pub(super) const fn rule<F: Gated>(op: Op, formula: &'static str) -> Rule {
    Rule {
        op,
        formula,
        single: compute::<F, f32>,
        double: compute::<F, f64>,
        check: Check::Bound(bound::<F>),
        carry: carry::<F>,
        rows: needed,
    }
}

/// Errors f(g)·u moves by: |u|·Δf + |f|·eu + Δf·eu.
pub(super) fn product_carry(f: f64, df: f64, u: f64, du: f64) -> f64 {
    df * u.abs() + f.abs() * du + df * du
}

/// Calls `f` with gate and up of each element, in the order of the result: two sources of its shape, or one whose
/// rows are gate and up one behind the other (exchanged where `swapped` is set).
fn each<S: Scalar>(args: &Args<'_, S>, mut f: impl FnMut(S, S)) -> Result<()> {
    let first = args.source(0)?;
    let [a, b, c, d] = args.shape;
    if let Some(second) = args.get(1) {
        if first.shape() != args.shape || second.shape() != args.shape {
            return Err(args.misfit("two sources of the result's shape"));
        }
        for row in rows(args.shape) {
            first.row(row).iter().zip(second.row(row).iter()).for_each(|(&gate, &up)| f(gate, up));
        }
        return Ok(());
    }
    if first.shape() != [a, b, c, 2 * d] {
        return Err(args.misfit("one source with rows of twice the result's"));
    }
    for row in rows(args.shape) {
        let both = first.row(row);
        let (gate, up) = both.split_at(d);
        let (gate, up) = if args.params.int(SWAPPED) == 0 { (gate, up) } else { (up, gate) };
        gate.iter().zip(up).for_each(|(&gate, &up)| f(gate, up));
    }
    Ok(())
}

fn compute<F: Gated, S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let setting = Setting::of(args);
    let mut out = Vec::with_capacity(args.elements());
    each(args, |gate, up| out.push(convert(args.dtype, F::value(setting, gate, up))))?;
    Ok(out)
}

fn bound<F: Gated>(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let setting = Setting::of(args);
    let mut out = Vec::with_capacity(exact.len());
    let done = each(args, |gate, up| {
        let y = exact[out.len()];
        out.push(finite(y, F::rounding(setting, gate, up, y) + storage(args.dtype, y)));
    });
    if done.is_ok() { out } else { vec![0.0; exact.len()] }
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
    let mut out = Vec::with_capacity(exact.len());
    let done = each(args, |gate, up| {
        let (y, (eg, eu)) = (exact[out.len()], errors(out.len()));
        let moved = F::carry(setting, gate, up, eg, eu);
        out.push(finite(y, spread(args.dtype, F::value(setting, gate, up), moved)));
    });
    if done.is_ok() { out } else { vec![0.0; exact.len()] }
}

fn needed(args: &Args<'_, f64>, slot: usize, row: [usize; 3]) -> Needed {
    if slot < 2 && args.get(slot).is_some() { Needed::Row(row) } else { Needed::Nothing }
}
