//! CONT: the elements of s0 in logical order, without gaps.
//!
//! s0 of any shape and strides; the result may have another shape of as many elements. Exact, converted to the
//! result's type (ggml-cpu/ops.cpp, `ggml_compute_forward_dup`).

use parity_graph::Op;

use super::movement::{self, Movement, Read, in_order, same_count};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = movement::rule::<Cont>(Op::Cont, "a contiguous copy", movement::MOVED, Check::Exact);

enum Cont {}

impl Movement for Cont {
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
