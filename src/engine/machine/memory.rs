//! The memory of an executed graph: one buffer for each tensor that is no view, and what is not known of it.

use std::rc::Rc;

use parity_graph::Op;

use super::program::Place;
use crate::arithmetic::round::{to_bf16, to_f16};
use crate::gguf::DType;
use crate::ops::Strided;
use crate::ops::source::{contiguous, rows};
use crate::scalar::Scalar;

/// Why values are not known: a sentence about the first node or leaf that they would come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown(pub Rc<str>);

impl Unknown {
    /// With this reason.
    pub fn new(reason: impl Into<Rc<str>>) -> Unknown {
        Unknown(reason.into())
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
    /// Whether it was kept from a step before.
    pub state: bool,
}

impl<S: Scalar> Buffer<S> {
    /// So many zeros.
    pub fn zeros(elements: usize) -> Self {
        Buffer { data: vec![S::ZERO; elements], unknown: None, state: false }
    }

    /// Known values.
    pub fn of(data: Vec<S>) -> Self {
        Buffer { data, unknown: None, state: false }
    }

    /// Nothing but the reason why.
    pub fn unknown(reason: Unknown) -> Self {
        Buffer { data: Vec::new(), unknown: Some(reason), state: false }
    }

    /// What a tensor at `place` shows of it; `None` where it reaches beyond.
    pub fn view(&self, place: &Place) -> Option<Strided<'_, S>> {
        let Place { offset, shape, strides, .. } = *place;
        (place.end()? <= self.data.len()).then_some(Strided { data: &self.data, offset, shape, strides })
    }

    /// Writes all elements of the tensor at `place`, in logical order; `false` where it reaches beyond.
    pub fn write(&mut self, place: &Place, values: &[S]) -> bool {
        if !place.end().is_some_and(|end| end <= self.data.len()) {
            return false;
        }
        if place.strides == contiguous(place.shape) {
            self.data[place.offset..place.offset + values.len()].copy_from_slice(values);
            return true;
        }
        let width = place.shape[3].max(1);
        for (row, values) in rows(place.shape).zip(values.chunks(width)) {
            self.write_row(place, row, values);
        }
        true
    }

    /// Writes one row of the tensor at `place`, which does not reach beyond.
    pub fn write_row(&mut self, place: &Place, row: [usize; 3], values: &[S]) {
        let (start, stride) = (place.row(row), place.strides[3]);
        for (i, &value) in values.iter().enumerate() {
            self.data[start + i * stride] = value;
        }
    }
}

/// Converts a value to what memory of a type holds of it: f16 and bf16 round to nearest, integers towards zero.
pub fn convert<S: Scalar>(dtype: DType, values: &mut [S]) {
    match dtype {
        DType::F16 => values.iter_mut().for_each(|value| *value = to_f16(*value)),
        DType::BF16 => values.iter_mut().for_each(|value| *value = to_bf16(*value)),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
            values.iter_mut().for_each(|value| *value = S::from_f64(value.to_f64().trunc()));
        }
        _ => {}
    }
}

/// Whether memory of this type holds one number after the other, so that one can be written.
pub fn is_plain(dtype: DType) -> bool {
    dtype.block_len() == 1
}
