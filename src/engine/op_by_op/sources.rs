//! What a node reads: weights, inputs, states, and windows into what was computed before.

use std::sync::Arc;

use parity_graph::Id;

use super::memory::{Buffer, Unknown, is_written};
use super::{Inputs, Machine, Memory, Number, Program, dtype};
use crate::gguf::TensorRef;
use crate::ops::Source;
use crate::ops::source::{Data, Strided};
use crate::scalar::Scalar;

impl<'a, S: Number> Machine<'a, S> {
    /// Brings a leaf into memory, where it is not there yet and is no weight that rules read themselves.
    pub(super) fn load(&mut self, program: &Program, id: Id, inputs: Inputs<'_>, memory: &mut Memory<S>) {
        let tensor = program.graph.get(id);
        if memory[id].is_some() || !program.graph.is_leaf(id) {
            return;
        }
        let buffer = if let Some(weight) = self.gguf.tensor(&tensor.name) {
            if !weight.info.dtype.is_decodable() {
                Buffer::unknown(undecodable(weight))
            } else if program.is_viewed(id) || self.weight(program, id).is_none() {
                Buffer::of(weight.decode())
            } else {
                return;
            }
        } else if let Some(values) = inputs(id) {
            Buffer::of(values.into_iter().map(S::from_f64).collect())
        } else if let Some(state) = self.states.remove(program.key(id)) {
            Buffer { state: true, ..Arc::unwrap_or_clone(state) }
        } else {
            empty(program, id)
        };
        let (expected, found) = (tensor.elements(), buffer.data.len());
        memory[id] = Some(Arc::new(match found == expected || buffer.unknown.is_some() {
            true => buffer,
            false => Buffer::unknown(Unknown::new(format!(
                "{}, of which {found} elements were found and {expected} are read",
                tensor.name
            ))),
        }));
    }

    /// A tensor that is a weight of the file in the file's own shape.
    pub(super) fn weight(&self, program: &Program, id: Id) -> Option<TensorRef<'a>> {
        let tensor = program.graph.get(id);
        if !program.graph.is_leaf(id) || tensor.view.is_some() || program.is_written(id) {
            return None;
        }
        let weight = self.gguf.tensor(&tensor.name).filter(|weight| weight.info.dtype.is_decodable())?;
        let mut shape = [1; 4];
        let given = &weight.info.shape;
        shape.get_mut(4usize.checked_sub(given.len())?..)?.copy_from_slice(given);
        (shape == tensor.shape()).then_some(weight)
    }

    /// What a node reads of a tensor.
    pub(super) fn source<'b>(
        &self,
        program: &Program,
        id: Id,
        memory: &'b Memory<S>,
    ) -> std::result::Result<Source<'b, S>, Unknown>
    where
        'a: 'b,
    {
        let (tensor, name) = (program.graph.get(id), &program.names[id]);
        if let Some(weight) = self.weight(program, id) {
            return Ok(Source { dtype: weight.info.dtype, data: Data::Weight(weight) });
        }
        let of_type = || Unknown::new(format!("the layout of {name}, of type {}", tensor.dtype));
        let place = program.place(id).ok_or_else(of_type)?;
        let dtype = dtype(tensor).ok_or_else(of_type)?;
        let values = match memory[place.root].as_deref() {
            // Nothing is read of what has no elements.
            None if tensor.elements() == 0 => None,
            None => return Err(Unknown::new(format!("{name}, which is not computed in this step"))),
            Some(Buffer { unknown: Some(unknown), .. }) => return Err(unknown.clone()),
            Some(buffer) => Some(buffer.view(&place).ok_or_else(of_type)?),
        };
        let strided =
            values.unwrap_or(Strided { data: &[], offset: 0, shape: place.shape, strides: place.strides });
        Ok(Source { dtype, data: Data::Values(strided) })
    }
}

/// A leaf that nothing is known of: a cache or a state is zero at the start, anything else is missing.
fn empty<S: Scalar>(program: &Program, id: Id) -> Buffer<S> {
    let tensor = program.graph.get(id);
    match (program.is_written(id), dtype(tensor).is_some_and(is_written)) {
        (true, true) => Buffer::zeros(tensor.elements()),
        (true, false) => {
            let kept = format!("the contents of {}, which is kept as {}", tensor.name, tensor.dtype);
            Buffer::unknown(Unknown::new(kept))
        }
        (false, _) => {
            Buffer::unknown(Unknown::new(format!("the input {}, which was not recorded", tensor.name)))
        }
    }
}

fn undecodable(weight: TensorRef<'_>) -> Unknown {
    Unknown::new(format!(
        "the values of {}, whose type {} is not decoded",
        weight.info.name, weight.info.dtype
    ))
}
