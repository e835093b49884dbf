//! ARANGE: `dst[i] = start + step·i`.
//!
//! No source; the result is (1, 1, 1, ceil((stop - start) / step)). Words: start, stop, step. In f32, whatever computes
//! it: a product, rounded, and a sum, rounded (ggml-cpu/ops.cpp). The two are exact of whole numbers.

use parity_graph::Op;

use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Arange,
    formula: "an arithmetic sequence: start + step·i",
    explained: "nothing",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Exact,
    carry: |_args, exact, _slot, _error| vec![0.0; exact.len()],
};

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    let [start, stop, step] = std::array::from_fn(|word| args.params.float(word));
    let count = ((stop - start) / step).ceil();
    if count != args.elements() as f32 || args.shape[3] != args.elements() {
        return Err(args.misfit(format!("{count} values in a row, from {start} to {stop} by {step}")));
    }
    Ok((0..args.elements()).map(|i| S::from_f32(start + step * i as f32)).collect())
}
