//! CPY: element k of s0, in logical order, goes to element k of s1, converted to its type.
//!
//! s0 of any shape and strides, s1 the destination, of as many elements: only where the result is written, its old
//! values are not read (and in a cast it is the node itself). The result has s1's shape. F32 becomes F16 and BF16 to
//! nearest even, whole numbers towards zero (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::movement::{self, Movement, Read, in_order, same_count};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = movement::rule::<Cpy>(
    Op::Cpy,
    "a copy into given memory, converted to its type",
    movement::MOVED,
    Check::Exact,
);

enum Cpy {}

impl Movement for Cpy {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        same_count(args)
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        in_order(args, row, read, out)
    }
}
