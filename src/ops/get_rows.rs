//! GET_ROWS: `dst[a, b, i, :] = s0[a, b, s1[a, b, i], :]`.
//!
//! s0 (a, b, n, d), s1 (1, a, b, r) of I32; the result is (a, b, r, d), in F32 unless s0 is of I32: rows of F16 and BF16
//! are widened, and those of a block-quantised type decoded, in f32 (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{DECODE_ROUNDINGS, SUBNORMAL_F16, UNIT_F16, UNIT_F32, finite, storage_unit};
use super::convert::is_convertible;
use super::movement::{self, Movement, Read, index};
use super::source::Data;
use super::{Args, Check, Rule, Source};
use crate::error::Result;
use crate::gguf;
use crate::numerics::Storage;
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
    for (i, (out, row)) in out.chunks_mut(width).zip(exact.chunks(width)).enumerate() {
        let largest = row.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let bound = DECODE_ROUNDINGS * UNIT_F32 * largest;
        out.iter_mut().zip(row).for_each(|(out, &y)| *out = finite(y, bound));
        if args.arithmetic.decoded == Storage::F16 {
            out.iter_mut().zip(decoded_in_half(args, i, row)).for_each(|(out, off)| *out += off);
        }
    }
    out
}

/// By how much the values y of the row that is picked at a place may be off where each step of y = scale·q + minimum is rounded
/// to f16: the scale and the product, by u·|y - minimum| each, the minimum and the sum. A scale of a row without minima is taken
/// for a number that is not normal, times the largest quant there is. Values of a table that is taken to be rounded as it is
/// loaded, which is then rounded here first, may fall to the next number.
fn decoded_in_half(args: &Args<'_, f64>, place: usize, row: &[f64]) -> Vec<f64> {
    let (Some(Source { data: Data::Weight(table), .. }), Some(ids)) = (args.get(0), args.get(1)) else {
        return vec![0.0; row.len()];
    };
    let picked = index(args, ids.at([0, 0, 0, place]), table.rows()).unwrap_or_default();
    let groups = gguf::groups(table.info.dtype, table.row_bytes(picked..picked + 1));
    let loaded = storage_unit(table.info.loaded);
    let width = row.len() / groups.len().max(1);
    let off = |(i, &y): (usize, &f64)| {
        let (scale, minimum) = groups.get(i / width).copied().unwrap_or_default();
        let product = (y - minimum).abs();
        let quant = if scale == 0.0 { LARGEST_QUANT } else { product / scale.abs() };
        let steps = UNIT_F16 * (2.0 * product + minimum.abs() + y.abs());
        loaded * y.abs() + steps * (1.0 + UNIT_F16).powi(3) + SUBNORMAL_F16 * (quant + 3.0)
    };
    row.iter().enumerate().map(off).collect()
}

/// Of all types of blocks.
const LARGEST_QUANT: f64 = 128.0;
