//! FILL: `dst = value`.
//!
//! s0 gives the shape only and is never read. Words: value. Converted to the result's type (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::convert::convert;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Fill,
    formula: "one value everywhere",
    explained: "nothing",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Exact,
    carry: |_args, exact, _slot, _error| vec![0.0; exact.len()],
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    Ok(vec![convert(args.dtype, S::from_f32(args.params.float(0))); args.elements()])
}
