//! What functions of one value have in common: the shapes, and how their rounding and slope are asked for.

use parity_graph::{Op, Params};

use super::bound::{finite, storage};
use super::convert::{convert, spread};
use super::source::rows;
use super::{Args, Check, Rule};
use crate::arithmetic::Arithmetic;
use crate::error::Result;
use crate::scalar::Scalar;

/// What a function may depend on beside its value.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    /// The words of the op.
    pub params: &'a Params,
    /// Which roundings are followed.
    pub arithmetic: &'a Arithmetic,
}

impl<'a> Setting<'a> {
    pub(super) fn of<S>(args: &Args<'a, S>) -> Setting<'a> {
        Setting { params: args.params, arithmetic: args.arithmetic }
    }
}

/// A function of one value, evaluated in f32. The result's type is the source's.
pub(super) trait Unary {
    /// f(x)
    fn value<S: Scalar>(setting: Setting<'_>, x: S) -> S;
    /// How far rounding moves f(x) = y in f32, absolute.
    fn rounding(setting: Setting<'_>, x: f64, y: f64) -> f64;
    /// How far an error of up to `e` of x moves f(x), absolute: no estimate, |f(x ± e) - f(x)| is within.
    fn carry(setting: Setting<'_>, x: f64, e: f64) -> f64;
}

/// The rule of such an op.
pub(super) const fn rule<F: Unary>(op: Op, formula: &'static str, explained: &'static str) -> Rule {
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

/// [`Unary::carry`] of a function that only rises or only falls.
pub(super) fn monotone(f: impl Fn(f64) -> f64, x: f64, e: f64) -> f64 {
    let y = f(x);
    (f(x + e) - y).abs().max((f(x - e) - y).abs())
}

/// [`Unary::carry`] of a smooth function: |f'(x)|·e + max|f''|·e²/2, and never more than max|f'|·e.
pub(super) fn smooth(slope: f64, slope_max: f64, curvature_max: f64, e: f64) -> f64 {
    (slope.abs() * e + curvature_max * e * e / 2.0).min(slope_max * e)
}

fn compute<F: Unary, S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let (x, setting) = (args.source(0)?, Setting::of(args));
    if x.shape() != args.shape {
        return Err(args.misfit("a source of the result's shape"));
    }
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        out.extend(x.row(row).iter().map(|&x| convert(args.dtype, F::value(setting, x))));
    }
    Ok(out)
}

fn bound<F: Unary>(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(0) else { return vec![0.0; exact.len()] };
    let setting = Setting::of(args);
    let bound = |(&x, &y): (&f64, &f64)| finite(y, F::rounding(setting, x, y) + storage(args.dtype, y));
    x.values().iter().zip(exact).map(bound).collect()
}

fn carry<F: Unary>(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let Some(x) = args.get(slot).filter(|_| slot == 0) else { return vec![0.0; exact.len()] };
    let setting = Setting::of(args);
    let carried = |((&x, &y), &e): ((&f64, &f64), &f64)| {
        let moved = if e == 0.0 { 0.0 } else { F::carry(setting, x, e) };
        finite(y, spread(args.dtype, F::value(setting, x), moved))
    };
    x.values().iter().zip(exact).zip(error).map(carried).collect()
}
