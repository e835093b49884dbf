//! What each op of a recorded graph computes: one file per op, one rule each, and a table of all.
//!
//! A rule reads its sources through strides, as ggml's kernels do, and computes the whole result in f32, as an
//! engine would, or in f64, as the judge does. It says what rounding explains of a result (`bound`), and how an error
//! of a source carries on (`carry`). An op without a rule is undecided by name; everything around it is still judged.
//!
//! Shapes are slowest axis first and always have four axes: ggml's `ne` reversed.

pub mod bound;
pub mod source;

mod binary;
mod convert;
mod glu;
mod matrices;
mod movement;
mod order;
mod rope_angles;
mod unary;

mod abs;
mod add;
mod add_id;
mod arange;
mod argsort;
mod clamp;
mod concat;
mod cont;
mod cpy;
mod div;
mod dsv4_hc_comb;
mod dsv4_hc_post;
mod dsv4_hc_pre;
mod dup;
mod exp;
mod fill;
pub mod flash;
mod gated_delta_net;
mod geglu;
mod geglu_erf;
mod gelu;
mod gelu_erf;
mod get_rows;
mod im2col;
mod l2_norm;
mod lightning_indexer;
mod mul;
mod mul_mat;
mod mul_mat_id;
mod norm;
mod pool_2d;
mod reglu;
mod relu;
mod repeat;
mod rms_norm;
mod rope;
mod rope_back;
mod scale;
mod set_rows;
mod sgn;
mod sigmoid;
mod silu;
mod soft_max;
mod softplus;
mod sqr;
mod sqrt;
mod ssm_conv;
mod ssm_scan;
mod sub;
mod sum_rows;
mod swiglu;
mod swiglu_clamp;
mod swiglu_oai;
mod tanh;
mod top_k;
#[cfg(test)]
#[path = "tests/trial.rs"]
mod trial;

pub use matrices::{Problem, rounding_of};
pub use source::{Args, Source, Strided};

use parity_graph::Op;

use crate::error::Result;
use crate::scalar::Scalar;

/// Everything that is known of one op. There is no default for any part: forgetting one does not compile.
pub struct Rule {
    /// Which op.
    pub op: Op,
    /// What it computes, for a report: `It computes …`.
    pub formula: &'static str,
    /// What its bound is made of, for a report: `Rounding explains …`.
    pub explained: &'static str,
    /// The result in f32, contiguous, in the shape of [`Args::shape`].
    pub single: fn(&Args<'_, f32>) -> Result<Vec<f32>>,
    /// The result in f64.
    pub double: fn(&Args<'_, f64>) -> Result<Vec<f64>>,
    /// How a recorded result is held to the exact one.
    pub check: Check,
    /// How far an error of source `slot` of up to `error` (absolute, contiguous in the source's shape, not
    /// negative) moves each element of the result.
    pub carry: Carry,
}

/// `(args, exact, slot, error)`: see [`Rule::carry`].
pub type Carry = fn(&Args<'_, f64>, &[f64], usize, &[f64]) -> Vec<f64>;

/// How a recorded result is held to the exact one.
pub enum Check {
    /// Nothing is computed that could round: every bit is the source's, converted to the result's type.
    Exact,
    /// Rounding explains up to so much of each element, absolute, under the arithmetic of [`Args::arithmetic`].
    Bound(fn(&Args<'_, f64>, exact: &[f64]) -> Vec<f64>),
    /// As `Bound`, where the producer rounds on purpose and a value may lie in the middle between two roundings:
    /// the exact result is first settled to the sides that the recorded one shows.
    Settled {
        /// As of [`Check::Bound`].
        bound: fn(&Args<'_, f64>, exact: &[f64]) -> Vec<f64>,
        /// Moves `exact` to the sides of the ties that `recorded` shows.
        settle: fn(&Args<'_, f64>, exact: &mut [f64], recorded: &[f64]),
        /// How far ties may move each element where the result was not recorded; nothing where none does.
        unsettled: fn(&Args<'_, f64>) -> Vec<f64>,
    },
    /// The result is a choice of indices: it is judged by the values that it chose, see [`Choice`].
    Choice(fn(&Args<'_, f64>, recorded: &[f64]) -> Vec<Choice>),
}

/// One row of a discrete result that differs from the exact choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Row of the result, (a, b, c).
    pub row: [usize; 3],
    /// By how much the values that were chosen fall short of those that should have been, at the worst place. NaN
    /// where the row is no choice at all (an index twice, or out of range).
    pub margin: f64,
    /// Up to what margin rounding of the scores explains another choice.
    pub near: f64,
}

/// How many elements of a result are ever written, from the first on: a scan that keeps more states than it has tokens
/// leaves the memory of the others as it was.
pub fn written(op: &Op, args: &Args<'_, f64>) -> usize {
    let slot = match op {
        Op::SsmScan => 1,
        Op::GatedDeltaNet => 2,
        _ => return args.elements(),
    };
    let Some(values) = args.get(slot) else { return args.elements() };
    let [s, t, h, d] = values.shape();
    let kept = usize::try_from(args.params.int(0)).unwrap_or(0).max(1);
    let states = args.elements().saturating_sub(s * t * h * d);
    args.elements() - states / kept * kept.saturating_sub(t)
}

/// Every rule. A new op is one file and one line here.
static RULES: &[&Rule] = &[
    &abs::RULE,
    &add::RULE,
    &add_id::RULE,
    &arange::RULE,
    &argsort::RULE,
    &clamp::RULE,
    &concat::RULE,
    &cont::RULE,
    &cpy::RULE,
    &div::RULE,
    &dsv4_hc_comb::RULE,
    &dsv4_hc_post::RULE,
    &dsv4_hc_pre::RULE,
    &dup::RULE,
    &exp::RULE,
    &fill::RULE,
    &flash::RULE,
    &gated_delta_net::RULE,
    &geglu::RULE,
    &geglu_erf::RULE,
    &gelu::RULE,
    &gelu_erf::RULE,
    &get_rows::RULE,
    &im2col::RULE,
    &l2_norm::RULE,
    &lightning_indexer::RULE,
    &mul::RULE,
    &mul_mat::RULE,
    &mul_mat_id::RULE,
    &norm::RULE,
    &pool_2d::RULE,
    &reglu::RULE,
    &relu::RULE,
    &repeat::RULE,
    &rms_norm::RULE,
    &rope::RULE,
    &rope_back::RULE,
    &scale::RULE,
    &set_rows::RULE,
    &sgn::RULE,
    &sigmoid::RULE,
    &silu::RULE,
    &soft_max::RULE,
    &softplus::RULE,
    &sqr::RULE,
    &sqrt::RULE,
    &ssm_conv::RULE,
    &ssm_scan::RULE,
    &sub::RULE,
    &sum_rows::RULE,
    &swiglu::RULE,
    &swiglu_clamp::RULE,
    &swiglu_oai::RULE,
    &tanh::RULE,
    &top_k::RULE,
];

/// The rule of an op, if it has one.
pub fn rule(op: &Op) -> Option<&'static Rule> {
    RULES.iter().copied().find(|rule| rule.op == *op)
}

/// The matrices of a product and the rows that meet them.
///
/// # Errors
/// An op that is no product, sources that do not fit.
pub fn problem<'b, 'a, S: Scalar>(op: &Op, args: &'b Args<'a, S>) -> Result<Problem<'b, 'a, S>> {
    match op {
        Op::MulMat => mul_mat::problem(args),
        Op::MulMatId => mul_mat_id::problem(args),
        _ => Err(args.misfit("those of a matmul")),
    }
}

/// By what a norm multiplies each of its rows, 1/sqrt(mean square + eps); `None` of any other op.
pub fn scales_of_rows(op: &Op, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let x = args.get(0)?;
    let eps = f64::from(args.params.float(0));
    let rows = source::rows(args.shape);
    match op {
        Op::RmsNorm => Some(rows.map(|row| rms_norm::scale(&x.row(row), eps)).collect()),
        Op::Norm => Some(rows.map(|row| norm::moments(&x.row(row), eps).1).collect()),
        _ => None,
    }
}

/// The channels that a rotation turns together, for every row alike; `None` of any other op.
pub fn rotated_pairs(op: &Op, args: &Args<'_, f64>) -> Option<Vec<[usize; 2]>> {
    if *op == Op::Rope { rope::pairs(args) } else { None }
}

/// All rules.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    RULES.iter().copied()
}

#[cfg(test)]
mod tests;
