//! CONCAT: s0, then s1, along one axis.
//!
//! s0 and s1 are of one shape but for that axis, in which the result has the sum of both. Words: dim (0 is the fastest
//! axis). Exact (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::movement::{self, Movement, Read};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = movement::rule::<Concat>(
    Op::Concat,
    "two tensors one behind the other, along one axis",
    movement::MOVED,
    Check::Exact,
);

enum Concat {}

impl Movement for Concat {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        let (a, b) = (args.source(0)?.shape(), args.source(1)?.shape());
        let Some(along) = axis(args) else {
            return Err(args.misfit("an axis from 0 to 3 in its word `dim`"));
        };
        let fits = |axis: usize| {
            if axis == along {
                a[axis] + b[axis] == args.shape[axis]
            } else {
                a[axis] == args.shape[axis] && b[axis] == args.shape[axis]
            }
        };
        if (0..4).all(fits) {
            return Ok(());
        }
        Err(args.misfit("two sources that stand one behind the other in the result"))
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let (shape, along) = (args.source(0)?.shape(), axis(args));
        match along {
            Some(3) => {
                out.extend_from_slice(&read(0, row));
                out.extend_from_slice(&read(1, row));
            }
            Some(along) if row[along] >= shape[along] => {
                let mut behind = row;
                behind[along] -= shape[along];
                out.extend_from_slice(&read(1, behind));
            }
            _ => out.extend_from_slice(&read(0, row)),
        }
        Ok(())
    }
}

/// The axis, slowest first.
fn axis<S: Scalar>(args: &Args<'_, S>) -> Option<usize> {
    usize::try_from(args.params.int(0)).ok().and_then(|dim| 3usize.checked_sub(dim))
}
