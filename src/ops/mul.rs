//! MUL: `dst[i] = s0[i] · s1[i mod ne1]`.
//!
//! s0 (a, b, c, d), s1 any shape whose extents divide s0's: it is repeated, modulo in every axis. The result has s0's
//! shape. One operation in f32, rounded to the result's type (ggml-cpu/binary-ops.cpp).

use parity_graph::Op;

use super::Rule;
use super::binary::{self, Binary};
use crate::scalar::Scalar;

pub const RULE: Rule = binary::rule::<Mul>(
    Op::Mul,
    "two tensors multiplied element by element: a · b, where b repeats to the shape of a",
    binary::ONCE,
);

enum Mul {}

impl Binary for Mul {
    fn value<S: Scalar>(a: S, b: S) -> S {
        a * b
    }

    /// An error of one source times the other.
    fn carry(slot: usize, a: f64, b: f64, _y: f64, e: f64) -> f64 {
        e * if slot == 0 { b.abs() } else { a.abs() }
    }
}
