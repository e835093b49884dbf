//! GET_ROWS: `dst[a, b, i, :] = s0[a, b, s1[a, b, i], :]`.
//!
//! s0 (a, b, n, d), s1 (1, a, b, r) of I32; the result is (a, b, r, d), in F32 unless s0 is of I32: rows of F16 and BF16
//! are widened, and those of a block-quantised type decoded, in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{DECODE_ROUNDINGS, UNIT_F32, finite};
use super::convert::is_convertible;
use super::movement::{self, Movement, Read, index};
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = movement::rule::<GetRows>(
    Op::GetRows,
    "rows of a table picked by index: y[t] = table[index[t]]",
    "nothing of a table in floating point; of blocks three roundings of their decoder, of values up to the \
     row's largest",
    Check::Bound(bound),
);

enum GetRows {}

impl Movement for GetRows {
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
        let ([a, b, _, d], [one, ia, ib, r]) = (args.source(0)?.shape(), args.source(1)?.shape());
        if one == 1 && [a, b] == [ia, ib] && args.shape == [a, b, r, d] {
            return Ok(());
        }
        Err(args.misfit("a table (a, b, n, d), and indices (1, a, b, r) for a result (a, b, r, d)"))
    }

    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let [a, b, i] = row;
        let picked = index(args, args.source(1)?.at([0, a, b, i]), args.source(0)?.shape()[2])?;
        out.extend_from_slice(&read(0, [a, b, picked]));
        Ok(())
    }
}

/// Nothing where the table is floating point; a decoder's roundings of values up to the row's largest for blocks.
fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let blocks = args.get(0).is_some_and(|table| !is_convertible(table.dtype));
    let mut out = vec![0.0; exact.len()];
    if !blocks {
        return out;
    }
    let width = args.shape[3].max(1);
    for (out, row) in out.chunks_mut(width).zip(exact.chunks(width)) {
        let largest = row.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let bound = DECODE_ROUNDINGS * UNIT_F32 * largest;
        out.iter_mut().zip(row).for_each(|(out, &y)| *out = finite(y, bound));
    }
    out
}
