//! SET_ROWS: `dst[a, b, s1[a mod c2, b mod c1, i], :] = s0[a, b, i, :]`, all other rows those of s2.
//!
//! s0 (a, b, r, d) new rows, s1 (1, c2, c1, r) of I64 or I32, s2 (a, b, n, d) the destination: the result is all of it.
//! Values are converted to its type, F16 and BF16 to nearest even (ggml-cpu/ops.cpp). Which one stays of rows that are
//! named twice is not defined; here it is the last.

use parity_graph::Op;

use super::movement::{self, Movement, Read, index};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = movement::rule::<SetRows>(
    Op::SetRows,
    "rows written into a tensor at given indices, converted to its type",
    movement::MOVED,
    Check::Exact,
);

enum SetRows {}

impl Movement for SetRows {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        let ([a, b, r, d], [one, c2, c1, ids]) = (args.source(0)?.shape(), args.source(1)?.shape());
        let divides = |count: usize, of: usize| count > 0 && of.is_multiple_of(count);
        let written = args.source(2)?.shape() == args.shape && [args.shape[0], args.shape[1]] == [a, b];
        if one == 1 && ids == r && divides(c2, a) && divides(c1, b) && written && args.shape[3] == d {
            return Ok(());
        }
        Err(args.misfit("rows (a, b, r, d), indices (1, c2, c1, r), and a destination (a, b, n, d)"))
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let [a, b, place] = row;
        let ids = args.source(1)?;
        let [_, c2, c1, r] = ids.shape();
        let named = ids.row([0, a % c2, b % c1]);
        for i in (0..r).rev() {
            if index(args, named[i], args.shape[2])? == place {
                out.extend_from_slice(&read(0, [a, b, i]));
                return Ok(());
            }
        }
        out.extend_from_slice(&read(2, row));
        Ok(())
    }
}
