//! REPEAT: `dst[i] = s0[i mod ne]`, modulo in every axis.
//!
//! s0 of any shape whose extents divide the result's. Exact (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::movement::{self, Movement, Read};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule =
    movement::rule::<Repeat>(Op::Repeat, "a tensor tiled to a larger shape", movement::MOVED, Check::Exact);

enum Repeat {}

impl Movement for Repeat {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        let shape = args.source(0)?.shape();
        if (0..4).all(|axis| shape[axis] > 0 && args.shape[axis].is_multiple_of(shape[axis])) {
            return Ok(());
        }
        Err(args.misfit("a source that repeats to the result"))
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let shape = args.source(0)?.shape();
        let tile = read(0, std::array::from_fn(|axis| row[axis] % shape[axis]));
        (0..args.shape[3] / shape[3]).for_each(|_| out.extend_from_slice(&tile));
        Ok(())
    }
}
