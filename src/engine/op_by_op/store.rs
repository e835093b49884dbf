//! Where results go: through the strides of a view into the memory of its root, as its type holds them.

use std::sync::Arc;

use parity_graph::Id;

use super::memory::{Buffer, Unknown, hold};
use super::{Memory, Number, Program, Value, carried, dtype};
use crate::ops::source::{contiguous, rows};
use crate::scalar::Scalar;

/// Puts the values of a node where they lie, as its type holds them, if memory `rounds`.
pub(super) fn store<S: Scalar>(
    program: &Program,
    id: Id,
    value: Value<S>,
    memory: &mut Memory<S>,
    rounds: bool,
) {
    let tensor = program.graph.get(id);
    let place = program.place(id).zip(dtype(tensor));
    let root = program.graph.root(id);
    let value = value.and_then(|mut values| match place {
        Some((place, dtype))
            if values.data.len() == tensor.elements()
                && hold((dtype, rounds), tensor.ne[0], &mut values.data, &mut values.carried) =>
        {
            Ok((place, values))
        }
        _ => Err(Unknown::new(format!("{}, which is kept as {}", program.names[id], tensor.dtype))),
    });
    let (place, values) = match value {
        Ok(value) => value,
        Err(unknown) => {
            memory[root] = Some(Arc::new(Buffer::unknown(unknown)));
            return;
        }
    };
    if root == id && place.strides == contiguous(place.shape) {
        memory[root] = Some(Arc::new(Buffer { carried: values.carried, ..Buffer::of(values.data) }));
        return;
    }
    let elements = program.graph.get(root).elements();
    let whole = values.data.len() == elements;
    let buffer = Arc::make_mut(memory[root].get_or_insert_with(|| Arc::new(Buffer::zeros(elements))));
    if buffer.unknown.is_some() && whole {
        *buffer = Buffer::zeros(elements);
    }
    if buffer.unknown.is_none() && !buffer.write(&place, &values.data, values.carried.as_ref()) {
        *buffer = Buffer::unknown(Unknown::new(format!("the memory that {} lies in", program.names[id])));
    }
}

/// Writes rows by index: `dst[b3, b2, ids[b3 mod c2, b2 mod c1, i], :] = s0[b3, b2, i, :]`, in dst's type, if memory
/// `rounds`.
pub(super) fn set_rows<S: Number>(program: &Program, id: Id, memory: &mut Memory<S>, rounds: bool) {
    let root = program.graph.root(id);
    if let Err(unknown) = try_set_rows(program, id, memory, rounds) {
        memory[root] = Some(Arc::new(Buffer::unknown(unknown)));
    }
}

fn try_set_rows<S: Number>(
    program: &Program,
    id: Id,
    memory: &mut Memory<S>,
    rounds: bool,
) -> std::result::Result<(), Unknown> {
    let tensor = program.graph.get(id);
    let odd = || Unknown::new(format!("what {} wrote, whose sources do not fit", program.names[id]));
    let place = program.place(id).ok_or_else(odd)?;
    let dtype = dtype(tensor).ok_or_else(odd)?;
    // Rows are taken out of memory before they are written back to it.
    let read = |slot: usize| -> std::result::Result<(Vec<S>, [usize; 4]), Unknown> {
        let src = program.graph.src(id, slot).ok_or_else(odd)?;
        let from = program.place(src).ok_or_else(odd)?;
        let buffer = memory[from.root].as_ref().ok_or_else(odd)?;
        match &buffer.unknown {
            Some(unknown) => Err(unknown.clone()),
            None => Ok((buffer.view(&from).ok_or_else(odd)?.to_vec(), from.shape)),
        }
    };
    let ((mut new, shape), (ids, by)) = (read(0)?, read(1)?);
    let mut carried = program.graph.src(id, 0).and_then(|src| carried(program, src, memory));
    let [b3, b2, n, width] = shape;
    if !hold((dtype, rounds), width, &mut new, &mut carried) {
        return Err(odd());
    }
    let [c3, c2, c1, r] = by;
    let fits = [b3, b2, width] == [place.shape[0], place.shape[1], place.shape[3]] && r == n && c3 == 1;
    let buffer = Arc::make_mut(memory[place.root].as_mut().ok_or_else(odd)?);
    if !fits || c2 * c1 == 0 {
        return Err(odd());
    }
    if let Some(unknown) = &buffer.unknown {
        return Err(unknown.clone());
    }
    if !place.end().is_some_and(|end| end <= buffer.data.len()) {
        return Err(odd());
    }
    for (number, (row, values)) in rows(shape).zip(new.chunks(width.max(1))).enumerate() {
        let [i3, i2, i] = row;
        let index = ids[((i3 % c2) * c1 + i2 % c1) * r + i].to_f64();
        if !(index >= 0.0 && index < place.shape[2] as f64) {
            return Err(odd());
        }
        buffer.write_row(&place, [i3, i2, index as usize], values, carried.as_ref(), number * width);
    }
    Ok(())
}
