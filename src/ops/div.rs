//! DIV: `dst[i] = s0[i] / s1[i mod ne1]`.
//!
//! s0 (a, b, c, d), s1 any shape whose extents divide s0's: it is repeated, modulo in every axis. The result has s0's
//! shape. One operation in f32, rounded to the result's type (ggml-cpu/binary-ops.cpp). Division
//! by zero gives infinities and NaN.

use parity_graph::Op;

use super::Rule;
use super::binary::{self, Binary};
use crate::scalar::Scalar;

pub const RULE: Rule = binary::rule::<Div>(
    Op::Div,
    "one tensor divided by another, element by element: a / b, where b repeats to the shape of a",
    "one rounding of the quotient in f32; on a GPU up to five",
);

enum Div {}

impl Binary for Div {
    fn value<S: Scalar>(a: S, b: S) -> S {
        a / b
    }

    /// |da / b|, |y·db / b|
    fn carry(slot: usize, _a: f64, b: f64, y: f64, e: f64) -> f64 {
        e / b.abs() * if slot == 0 { 1.0 } else { y.abs() }
    }
}
