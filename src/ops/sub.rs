//! SUB: `dst[i] = s0[i] - s1[i mod ne1]`.
//!
//! s0 (a, b, c, d), s1 any shape whose extents divide s0's: it is repeated, modulo in every axis. The result has s0's
//! shape. One operation in f32, rounded to the result's type (ggml-cpu/binary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::binary::{self, Binary};
use crate::scalar::Scalar;

pub const RULE: Rule = binary::rule::<Sub>(
    Op::Sub,
    "the difference of two tensors: a - b, where b repeats to the shape of a",
    binary::ONCE,
);

enum Sub {}

impl Binary for Sub {
    fn value<S: Scalar>(a: S, b: S) -> S {
        a - b
    }

    /// An error of either source is the result's.
    fn carry(_slot: usize, _a: f64, _b: f64, _y: f64, e: f64) -> f64 {
        e
    }
}
