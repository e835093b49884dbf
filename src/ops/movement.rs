//! What ops have in common that only move values: a row of the result is put together of rows of the sources.

use std::borrow::Cow;

use parity_graph::Op;

use super::convert::{convert, is_convertible, spread};
use super::source::rows;
use super::{Args, Check, Rule};
use crate::error::{Error, Result};
use crate::scalar::Scalar;

/// Gives row (a, b, c) of the source in a slot.
pub(super) type Read<'r, 'd, T> = &'r mut dyn FnMut(usize, [usize; 3]) -> Cow<'d, [T]>;

/// A movement. The same function moves values and their errors.
pub(super) trait Movement {
    /// That the sources fit.
    fn check<S: Scalar>(args: &Args<'_, S>) -> Result<()>;
    /// Appends row (a, b, c) of the result.
    fn row<S: Scalar, T: Scalar>(
        args: &Args<'_, S>,
        row: [usize; 3],
        read: Read<'_, '_, T>,
        out: &mut Vec<T>,
    ) -> Result<()>;
}

/// What rounding explains of what is only moved.
pub(super) const MOVED: &str = "nothing: every bit is the source's, converted to the result's type";

/// The rule of such an op.
pub(super) const fn rule<M: Movement>(
    op: Op,
    formula: &'static str,
    explained: &'static str,
    check: Check,
) -> Rule {
    Rule {
        op,
        formula,
        explained,
        single: compute::<M, f32>,
        double: compute::<M, f64>,
        check,
        carry: carry::<M>,
    }
}

/// The values, converted to the result's type.
pub(super) fn compute<M: Movement, S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    if !is_convertible(args.dtype) {
        return Err(Error::new(args.name, format!("its values are stored as {}", args.dtype))
            .expected("F32, F16, BF16 or whole numbers")
            .hint("record again without quantising the cache: leave -ctk and -ctv out"));
    }
    let mut out = moved::<M, S, S>(args, &mut |slot, row| match args.get(slot) {
        Some(source) => source.row(row),
        None => Cow::Borrowed(&[]),
    })?;
    out.iter_mut().for_each(|value| *value = convert(args.dtype, *value));
    Ok(out)
}

fn moved<M: Movement, S: Scalar, T: Scalar>(args: &Args<'_, S>, read: Read<'_, '_, T>) -> Result<Vec<T>> {
    M::check(args)?;
    let mut out = Vec::with_capacity(args.elements());
    for row in rows(args.shape) {
        M::row(args, row, read, &mut out)?;
    }
    Ok(out)
}

/// An error moves with its value, and past a rounding where the result's type is narrower.
pub(super) fn carry<M: Movement>(
    args: &Args<'_, f64>,
    exact: &[f64],
    slot: usize,
    error: &[f64],
) -> Vec<f64> {
    let nothing = vec![0.0; exact.len()];
    let values = |slot: usize, row: [usize; 3]| match args.get(slot) {
        Some(source) => source.row(row),
        None => Cow::Borrowed(&[][..]),
    };
    let errors = |from: usize, row: [usize; 3]| {
        let Some(source) = args.get(from) else { return Cow::Borrowed(&[][..]) };
        let [_, b, c, d] = source.shape();
        let start = ((row[0] * b + row[1]) * c + row[2]) * d;
        if from == slot { Cow::Borrowed(&error[start..start + d]) } else { Cow::Owned(vec![0.0; d]) }
    };
    let values = moved::<M, f64, f64>(args, &mut { values });
    let errors = moved::<M, f64, f64>(args, &mut { errors });
    let (Ok(values), Ok(errors)) = (values, errors) else { return nothing };
    values.iter().zip(errors).map(|(&value, e)| spread(args.dtype, value, e)).collect()
}

/// An index that must lie below `count`.
pub(super) fn index<S: Scalar>(args: &Args<'_, S>, index: S, count: usize) -> Result<usize> {
    let index = index.to_f64();
    if index >= 0.0 && index < count as f64 && index.fract() == 0.0 {
        return Ok(index as usize);
    }
    Err(Error::new(args.name, format!("picks row {index}"))
        .expected(format!("a whole number from 0 to {}", count.saturating_sub(1)))
        .hint("are the recorded indices whole? `parity inspect` shows what was recorded"))
}

/// Row (a, b, c) of a result whose elements, in logical order, are those of source 0.
pub(super) fn in_order<S: Scalar, T: Scalar>(
    args: &Args<'_, S>,
    row: [usize; 3],
    read: Read<'_, '_, T>,
    out: &mut Vec<T>,
) -> Result<()> {
    let [_, b, c, d] = args.shape;
    let [_, sb, sc, sd] = args.source(0)?.shape();
    let start = ((row[0] * b + row[1]) * c + row[2]) * d;
    let mut at = start;
    while at < start + d {
        let (source, from) = (at / sd, at % sd);
        let len = (sd - from).min(start + d - at);
        let values = read(0, [source / sc / sb, source / sc % sb, source % sc]);
        out.extend_from_slice(&values[from..from + len]);
        at += len;
    }
    Ok(())
}

/// That source 0 has as many elements as the result.
pub(super) fn same_count<S: Scalar>(args: &Args<'_, S>) -> Result<()> {
    if args.source(0)?.shape().iter().product::<usize>() == args.elements() {
        return Ok(());
    }
    Err(args.misfit("a source of as many elements as the result"))
}
