//! Values of sources in the types that an arithmetic reads them in: weights, and keys and values of a cache.

use std::borrow::Cow;

use parity_graph::Op;

use super::storage_types::{self, STEPS, is_one_step, is_rounded, narrow};
use crate::arithmetic::{Arithmetic, Flash, Fresh, Packed, Storing, bounded_by, round};
use crate::engine::op_by_op::Carried;
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::ops::bound::{storage, storage_unit};
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided};

/// The slots of attention's keys, and of its mask.
const KEYS: usize = 1;
const MASK: usize = 3;
/// Stands for scores among the slots of sources that are disturbed.
const SCORES: usize = usize::MAX - 2;
/// Of the scale.
const SCALE: usize = usize::MAX - 3;

/// Values of sources as an arithmetic has them, where that is not as they lie in memory.
pub struct Narrowed {
    /// By slot, with their shape.
    slots: Vec<Option<(Vec<f64>, [usize; 4])>>,
    /// The type that keys and values have for the kernel of an attention that looks at it.
    keys: Option<DType>,
    /// From which row on keys and values are read as they are.
    fresh: Option<usize>,
}

impl Narrowed {
    /// Weights in the type that the engine keeps them in, and what attention reads in that of its cache. Weights of
    /// products are rounded where they are decoded.
    pub fn of(op: &Op, args: &Args<'_, f64>, arithmetic: &Arithmetic) -> Narrowed {
        let rounded = |slot: usize, source: &Source<'_, f64>| -> Option<(Vec<f64>, [usize; 4])> {
            let kept = kept_in(op, slot, source, arithmetic)?;
            let mut values = source.values().into_owned();
            kept.store(&mut values);
            if arithmetic.storing == Storing::Flushed {
                round::flush(&mut values);
            }
            Some((values, source.shape()))
        };
        let fresh = fresh_in(op, args, arithmetic);
        let packed = |slot: usize, source: &Source<'_, f64>| {
            let packed = packed_in(op, slot, arithmetic)?;
            let (mut values, shape) = (source.values().into_owned(), source.shape());
            packed.keep(shape, &mut values, &mut vec![0.0; shape.iter().product()]);
            Some((values, shape))
        };
        let rounded = |slot: usize, source: &Source<'_, f64>| {
            let (mut values, shape) = packed(slot, source).or_else(|| rounded(slot, source))?;
            if let Some(first) = fresh.filter(|_| is_cached(slot)) {
                refresh(first, shape, &source.values(), &mut values);
            }
            Some((values, shape))
        };
        let slots = args.sources.iter().enumerate();
        let by_type = *op == Op::FlashAttn
            && matches!(arithmetic.flash, Flash::ByRow | Flash::Split(_) | Flash::NativeF16);
        let keys = narrow(arithmetic.cache).filter(|_| by_type);
        Narrowed { slots: slots.map(|(slot, source)| rounded(slot, source.as_ref()?)).collect(), keys, fresh }
    }

    /// By slot, how far these values may be from a producer's where the sources of `args` may be `carried` from what it
    /// had: a value whose last bits are not known may be rounded to the next number of the type.
    pub fn carried<'b>(
        &self,
        op: &Op,
        args: &Args<'_, f64>,
        arithmetic: &Arithmetic,
        carried: &'b [Option<Carried>],
    ) -> Cow<'b, [Option<Carried>]> {
        let mut out = Cow::Borrowed(carried);
        for (slot, source) in args.sources.iter().enumerate() {
            if let Some((source, packed)) = source.as_ref().zip(packed_in(op, slot, arithmetic)) {
                let all = out.to_mut();
                all.resize(all.len().max(slot + 1), None);
                all[slot] = Some(held_in(packed, source, all[slot].take(), arithmetic));
                continue;
            }
            let source = source.as_ref().filter(|_| carried.get(slot).is_some_and(Option::is_some));
            let is_rounded = self.slots.get(slot).is_some_and(Option::is_some);
            let Some((source, kept)) = source
                .filter(|_| is_rounded)
                .and_then(|source| Some((source, kept_in(op, slot, source, arithmetic)?)))
            else {
                continue;
            };
            let Some(Some(Carried { error, .. })) = out.to_mut().get_mut(slot) else { continue };
            *error = stored_apart(kept, &source.values(), error);
        }
        out
    }

    /// What is rounded to the type of a cache before it is read, as it is before that: by slot.
    pub fn cached(op: &Op, args: &Args<'_, f64>, arithmetic: &Arithmetic) -> Vec<(usize, Vec<f64>)> {
        let of = |(slot, source): (usize, &Option<Source<'_, f64>>)| {
            let source = source.as_ref().filter(|source| !matches!(source.data, Data::Weight(_)))?;
            kept_in(op, slot, source, arithmetic)?;
            Some((slot, source.values().into_owned()))
        };
        args.sources.iter().enumerate().filter_map(of).collect()
    }

    /// Takes other values in the place of those of a slot, rounded to the type of the cache.
    pub fn put(&mut self, slot: usize, mut values: Vec<f64>, arithmetic: &Arithmetic) {
        if let Some(Some((own, shape))) = self.slots.get_mut(slot) {
            let before = self.fresh.filter(|_| is_cached(slot)).map(|first| (first, values.clone()));
            arithmetic.cache.store(&mut values);
            if let Some((first, before)) = before {
                refresh(first, *shape, &before, &mut values);
            }
            *own = values;
        }
    }

    /// Takes other values in the place of a source.
    pub fn replace(&mut self, slot: usize, values: Vec<f64>, shape: [usize; 4]) {
        if let Some(own) = self.slots.get_mut(slot) {
            *own = Some((values, shape));
        }
    }

    /// Disturbs what an op of several steps reads by what a narrow type rounds in between; `draw` gives numbers in [-1, 1)
    /// by slot and element.
    pub fn disturb(
        &mut self,
        op: &Op,
        args: &Args<'_, f64>,
        kept: Storage,
        draw: impl Fn(usize, usize) -> f64,
    ) {
        let Some(dtype) = narrow(kept).filter(|_| !is_one_step(op)) else { return };
        for (slot, (source, narrowed)) in args.sources.iter().zip(&mut self.slots).enumerate() {
            let Some(source) = source.as_ref().filter(|source| is_rounded(op, slot, source)) else {
                continue;
            };
            let (values, _) = narrowed.get_or_insert_with(|| (source.values().into_owned(), source.shape()));
            for (i, value) in values.iter_mut().enumerate() {
                *value += STEPS.sqrt() * storage(dtype, *value) * draw(slot, i);
            }
            // A score is rounded as a whole, as if all of its key were off by one factor: what its products sum to may be many times
            // what their errors do. The scale of all is rounded once.
            if *op == Op::FlashAttn && slot == KEYS {
                let scale = 1.0 + storage_unit(kept) * draw(SCALE, 0);
                for (row, key) in values.chunks_mut(source.shape()[3].max(1)).enumerate() {
                    let factor = scale * (1.0 + STEPS.sqrt() * storage_unit(kept) * draw(SCORES, row));
                    key.iter_mut().for_each(|value| *value *= factor);
                }
            }
        }
    }

    /// Disturbs keys and values that a cache rounds in a way that is bounded alone, within that bound, and those of one that is known
    /// that lie in the middle between two numbers, to the other of them; `draw` as above.
    pub fn scatter(
        &mut self,
        op: &Op,
        args: &Args<'_, f64>,
        arithmetic: &Arithmetic,
        draw: impl Fn(usize, usize) -> f64,
    ) {
        let share = |draw: f64| if bounded_by(arithmetic.packed).is_none() { draw.signum() } else { draw };
        for (slot, source) in args.sources.iter().enumerate() {
            let Some((source, packed)) = source.as_ref().zip(packed_in(op, slot, arithmetic)) else {
                continue;
            };
            let mut values = source.values().into_owned();
            let mut error = vec![0.0; values.len()];
            packed.keep(source.shape(), &mut values, &mut error);
            values
                .iter_mut()
                .zip(error)
                .enumerate()
                .for_each(|(i, (x, off))| *x += off * share(draw(slot, i)));
            if let Some(first) = self.fresh {
                refresh(first, source.shape(), &source.values(), &mut values);
            }
            self.replace(slot, values, source.shape());
        }
    }

    /// The sources, with these values in place of their own.
    pub fn sources<'b>(&'b self, args: &'b Args<'_, f64>) -> Vec<Option<Source<'b, f64>>> {
        let mut sources = args.replaced(|slot| {
            let (values, shape) = self.slots.get(slot)?.as_ref()?;
            Some(Strided::whole(values, *shape))
        });
        if let Some(dtype) = self.keys {
            sources.iter_mut().skip(1).take(2).flatten().for_each(|source| source.dtype = dtype);
        }
        sources
    }
}

/// Whether a slot of an attention has keys or values.
fn is_cached(slot: usize) -> bool {
    (KEYS..KEYS + 2).contains(&slot)
}

/// From which row on an attention reads keys and values as they are: those of the step's own tokens, of which each sees itself last.
fn fresh_in(op: &Op, args: &Args<'_, f64>, arithmetic: &Arithmetic) -> Option<usize> {
    if *op != Op::FlashAttn || arithmetic.fresh == Fresh::Never {
        return None;
    }
    let (rows, mask) = (args.get(0)?.shape()[2], args.get(MASK)?);
    let (last, own) = args.tokens.map_or((rows.checked_sub(1)?, rows), |(order, all)| (order[rows - 1], all));
    let seen = mask.row([0, 0, rows - 1]).iter().rposition(|mask| *mask != f64::NEG_INFINITY)?;
    let older = seen.checked_sub(last)?;
    arithmetic.fresh.is_in(own, older).then_some(older)
}

/// Puts rows of each head (.., M, D), from the `first` on, back to what they were.
fn refresh(first: usize, [.., rows, width]: [usize; 4], before: &[f64], values: &mut [f64]) {
    let (head, kept) = (rows * width, first.min(rows) * width);
    for (values, before) in values.chunks_mut(head.max(1)).zip(before.chunks(head.max(1))) {
        values[kept..].copy_from_slice(&before[kept..]);
    }
}

/// What keys and values of attention are kept as, where that is no type of single numbers.
fn packed_in(op: &Op, slot: usize, arithmetic: &Arithmetic) -> Option<Packed> {
    let kept = arithmetic.packed.get(slot.checked_sub(KEYS)?).copied()?;
    kept.filter(|_| *op == Op::FlashAttn)
}

/// How far what such a cache holds may be from what its producer's does. An engine of a narrow type may round that once more as
/// it is read: where its roundings are followed, to either side of what is not known.
fn held_in(
    packed: Packed,
    source: &Source<'_, f64>,
    known: Option<Carried>,
    arithmetic: &Arithmetic,
) -> Carried {
    let mut values = source.values().into_owned();
    let Carried { mut error, through } =
        known.unwrap_or_else(|| Carried { error: vec![0.0; values.len()], through: Vec::new() });
    packed.keep(source.shape(), &mut values, &mut error);
    let Arithmetic { narrow, cache, .. } = *arithmetic;
    match storage_types::is_followed(&Op::FlashAttn, arithmetic) {
        true if cache != Storage::F32 => error = stored_apart(cache, &values, &error),
        true => {}
        false => {
            let rounding = |value: &f64| storage_types::rounding(narrow, *value);
            error.iter_mut().zip(&values).for_each(|(error, value)| *error += rounding(value));
        }
    }
    Carried { error, through }
}

/// How far values may be from what they are in a type, where each is off by an error before.
pub(super) fn stored_apart(kept: Storage, values: &[f64], error: &[f64]) -> Vec<f64> {
    let moved = |sign: f64| {
        let mut ends: Vec<f64> =
            values.iter().zip(error).map(|(value, error)| value + sign * error).collect();
        kept.store(&mut ends);
        ends
    };
    let [low, own, high] = [-1.0, 0.0, 1.0].map(moved);
    let apart = low.into_iter().zip(own).zip(high).map(|((low, own), high)| match (high - own, own - low) {
        (up, down) if up >= down => up,
        (_, down) => down,
    });
    apart.collect()
}

/// The type that an arithmetic rounds a source to before it is read; `None` where it is read as it lies in memory.
fn kept_in(op: &Op, slot: usize, source: &Source<'_, f64>, arithmetic: &Arithmetic) -> Option<Storage> {
    let kept = match (op, &source.data) {
        (Op::FlashAttn, _) if (1..3).contains(&slot) => arithmetic.cache,
        (Op::MulMat, Data::Values(_)) if slot == 0 => arithmetic.cache,
        (Op::MulMat | Op::MulMatId | Op::GetRows, _) => Storage::F32,
        (_, Data::Weight(_)) => arithmetic.narrow,
        _ => Storage::F32,
    };
    Some(kept).filter(|kept| *kept != Storage::F32)
}
