//! The memory of an executed graph: one buffer for each tensor that is no view, and what is not known of it.

use std::sync::Arc;

use parity_graph::Op;

use super::Carried;
use super::program::Place;
use crate::arithmetic::cache_blocks;
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::ops::Strided;
use crate::ops::bound::{SUBNORMAL_F16, UNIT_BF16, UNIT_F16};
use crate::ops::source::{contiguous, rows};
use crate::scalar::Scalar;

/// Why values are not known: a sentence about the first node or leaf that they would come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// The sentence.
    pub reason: Arc<str>,
    /// Whether it is about positions whose steps a recording lacks altogether.
    pub is_lost: bool,
}

impl Unknown {
    /// With this reason.
    pub fn new(reason: impl Into<Arc<str>>) -> Unknown {
        Unknown { reason: reason.into(), is_lost: false }
    }

    /// With this reason, which is that steps were not recorded.
    pub fn lost(reason: impl Into<Arc<str>>) -> Unknown {
        Unknown { reason: reason.into(), is_lost: true }
    }

    /// An op that nobody wrote a rule for.
    pub fn no_rule(name: &str, op: &Op) -> Unknown {
        Unknown::new(format!("a rule for {op}, the op of {name}"))
    }
}

/// The memory of one tensor that is no view.
#[derive(Clone, Debug)]
pub struct Buffer<S> {
    /// Its elements, as numbers whatever their type.
    pub data: Vec<S>,
    /// Why they are not what the producer had, where they are not.
    pub unknown: Option<Unknown>,
    /// What of it was computed again, where some was: errors of all elements.
    pub carried: Option<Carried>,
    /// Whether it was kept from a step before.
    pub state: bool,
}

impl<S: Scalar> Buffer<S> {
    /// So many zeros.
    pub fn zeros(elements: usize) -> Self {
        Buffer { data: vec![S::ZERO; elements], unknown: None, carried: None, state: false }
    }

    /// Known values.
    pub fn of(data: Vec<S>) -> Self {
        Buffer { data, unknown: None, carried: None, state: false }
    }

    /// Nothing but the reason why.
    pub fn unknown(reason: Unknown) -> Self {
        Buffer { data: Vec::new(), unknown: Some(reason), carried: None, state: false }
    }

    /// What a tensor at `place` shows of it; `None` where it reaches beyond.
    pub fn view(&self, place: &Place) -> Option<Strided<'_, S>> {
        let Place { offset, shape, strides, .. } = *place;
        (place.end()? <= self.data.len()).then_some(Strided { data: &self.data, offset, shape, strides })
    }

    /// Writes all elements of the tensor at `place`, in logical order; `false` where it reaches beyond.
    pub fn write(&mut self, place: &Place, values: &[S], carried: Option<&Carried>) -> bool {
        if !place.end().is_some_and(|end| end <= self.data.len()) {
            return false;
        }
        scatter(&mut self.data, place, values);
        self.note(carried, |error, carried| match carried {
            Some(carried) => scatter(error, place, &carried.error),
            None => scatter(error, place, &vec![0.0; values.len()]),
        });
        true
    }

    /// Writes one row of the tensor at `place`, which does not reach beyond; `error` of a row that was computed again.
    pub fn write_row(
        &mut self,
        place: &Place,
        row: [usize; 3],
        values: &[S],
        carried: Option<&Carried>,
        from: usize,
    ) {
        scatter_row(&mut self.data, place, row, values);
        self.note(carried, |error, carried| match carried {
            Some(carried) => scatter_row(error, place, row, &carried.error[from..from + values.len()]),
            None => scatter_row(error, place, row, &vec![0.0; values.len()]),
        });
    }

    /// Keeps the errors of what is written, if there are any now or were before.
    fn note(&mut self, new: Option<&Carried>, write: impl FnOnce(&mut [f64], Option<&Carried>)) {
        if new.is_none() && self.carried.is_none() {
            return;
        }
        let elements = self.data.len();
        let known =
            self.carried.get_or_insert_with(|| Carried { error: vec![0.0; elements], through: Vec::new() });
        write(&mut known.error, new);
        known.through.extend(new.into_iter().flat_map(|new| &new.through));
        known.through.sort_unstable();
        known.through.dedup();
    }
}

/// Puts values where a tensor's elements lie, in logical order.
fn scatter<T: Copy>(data: &mut [T], place: &Place, values: &[T]) {
    if place.strides == contiguous(place.shape) {
        data[place.offset..place.offset + values.len()].copy_from_slice(values);
        return;
    }
    let width = place.shape[3].max(1);
    for (row, values) in rows(place.shape).zip(values.chunks(width)) {
        scatter_row(data, place, row, values);
    }
}

fn scatter_row<T: Copy>(data: &mut [T], place: &Place, row: [usize; 3], values: &[T]) {
    let (start, stride) = (place.row(row), place.strides[3]);
    for (i, &value) in values.iter().enumerate() {
        data[start + i * stride] = value;
    }
}

/// Turns values, rows of `width`, into what memory of a type holds of them, and their errors into those of that, if it
/// `rounds`; `false` of a type that is not written.
pub fn hold<S: Scalar>(
    (dtype, rounds): (DType, bool),
    width: usize,
    values: &mut [S],
    carried: &mut Option<Carried>,
) -> bool {
    if !is_written(dtype) || !width.is_multiple_of(dtype.block_len()) {
        return false;
    }
    if !rounds && !is_integer(dtype) {
        return true;
    }
    if is_plain(dtype) {
        carried.iter_mut().for_each(|carried| convert_error(dtype, values, carried));
        convert(dtype, values);
        return true;
    }
    let none = || Carried { error: vec![0.0; values.len()], through: Vec::new() };
    let mut known = carried.take().unwrap_or_else(none);
    cache_blocks::keep(dtype, values, &mut known.error);
    *carried = Some(known).filter(|known| known.error.iter().any(|error| *error != 0.0));
    true
}

/// f16 and bf16 round to nearest, integers towards zero.
fn convert<S: Scalar>(dtype: DType, values: &mut [S]) {
    match dtype {
        DType::F16 => Storage::F16.store(values),
        DType::BF16 => Storage::Bf16.store(values),
        dtype if is_integer(dtype) => {
            values.iter_mut().for_each(|value| *value = S::from_f64(value.to_f64().trunc()));
        }
        _ => {}
    }
}

fn is_integer(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// What an error becomes where values are rounded to memory of a type: both values are rounded.
fn convert_error<S: Scalar>(dtype: DType, values: &[S], carried: &mut Carried) {
    let unit = match dtype {
        DType::F16 => UNIT_F16,
        DType::BF16 => UNIT_BF16,
        _ => return,
    };
    for (error, value) in carried.error.iter_mut().zip(values) {
        if *error > 0.0 {
            *error += 2.0 * (unit * (value.to_f64().abs() + *error) + SUBNORMAL_F16);
        }
    }
}

/// Whether memory of this type holds one number after the other, so that one can be written.
fn is_plain(dtype: DType) -> bool {
    dtype.block_len() == 1
}

/// Whether values can be written to memory of this type.
pub fn is_written(dtype: DType) -> bool {
    is_plain(dtype) || cache_blocks::is_kept(dtype)
}
