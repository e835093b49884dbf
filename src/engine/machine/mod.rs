//! Executes any graph, recorded or built, step by step, in f32 as an engine would or in f64 as the judge does.
//!
//! Memory is as ggml has it: one buffer for each tensor that is no view, and views into it through offset and
//! strides. What is computed in place, SET_ROWS and CPY write through the strides of their own view, so that caches
//! and recurrent states need no code of their own: a leaf that is written is kept from step to step under its name,
//! and is zero at the start. A [`Conductor`] sees every node that computes and says with which values the machine
//! goes on: its own, in a run, or recorded ones, in an audit.

mod memory;
mod program;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use parity_graph::{Id, Op};

use crate::arithmetic::Arithmetic;
use crate::error::Result;
use crate::gguf::{Gguf, TensorRef};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, rule};
use crate::scalar::Scalar;

pub use memory::Unknown;
pub use program::{Place, Program, dtype};

use memory::{Buffer, convert, is_plain};

/// A number that ops have a function for.
pub trait Number: Scalar {
    /// The function of a rule that computes in this type.
    fn function(rule: &Rule) -> fn(&Args<'_, Self>) -> Result<Vec<Self>>;
}

impl Number for f32 {
    fn function(rule: &Rule) -> fn(&Args<'_, f32>) -> Result<Vec<f32>> {
        rule.single
    }
}

impl Number for f64 {
    fn function(rule: &Rule) -> fn(&Args<'_, f64>) -> Result<Vec<f64>> {
        rule.double
    }
}

/// Values of a node, or why there are none.
pub type Value<S> = std::result::Result<Vec<S>, Unknown>;

/// Computes a node; what its rule refuses is not known, by the rule's own words.
pub fn compute<S: Number>(rule: &Rule, args: &Args<'_, S>) -> Value<S> {
    match S::function(rule)(args) {
        Ok(values) if values.len() == args.elements() => Ok(values),
        Ok(values) => {
            Err(Unknown::new(format!("{} elements of {}, not {}", args.elements(), args.name, values.len())))
        }
        Err(error) => Err(Unknown::new(error.to_string().replace('\n', ","))),
    }
}

/// A node that is about to be executed.
pub struct Node<'a> {
    /// Which of its graph.
    pub id: Id,
    /// The graph made ready.
    pub program: &'a Program,
    /// Its rule, if its op has one.
    pub rule: Option<&'static Rule>,
}

/// Sees every node that computes, and says with which values the machine goes on.
pub trait Conductor<S> {
    /// The values of a node: contiguous, in its shape. `args` is what it reads, under the machine's arithmetic, or
    /// why that is not known.
    ///
    /// # Errors
    /// Whatever ends the whole execution: what concerns one node is [`Unknown`].
    fn value(&mut self, node: &Node<'_>, args: std::result::Result<&Args<'_, S>, &Unknown>)
    -> Result<Value<S>>;
}

/// Goes on with the machine's own values.
pub struct Own;

impl<S: Number> Conductor<S> for Own {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, S>, &Unknown>,
    ) -> Result<Value<S>> {
        Ok(own(node, args))
    }
}

/// The machine's own values of a node.
pub fn own<S: Number>(node: &Node<'_>, args: std::result::Result<&Args<'_, S>, &Unknown>) -> Value<S> {
    match (args, node.rule) {
        (Err(unknown), _) => Err(unknown.clone()),
        (Ok(args), Some(rule)) => compute(rule, args),
        (Ok(args), None) => Err(Unknown::no_rule(args.name, &node.program.graph.get(node.id).op)),
    }
}

/// Values of the leaves of one step that are neither weights nor states, by name: contiguous, integers as numbers.
pub type Inputs<'a> = &'a dyn Fn(&str) -> Option<Vec<f64>>;

/// Executes graphs and keeps what they write into leaves.
pub struct Machine<'a, S> {
    gguf: &'a Gguf,
    arithmetic: Arithmetic,
    /// Leaves that were written, by name.
    states: BTreeMap<String, Buffer<S>>,
}

/// The memory of one step: by tensor that is no view.
type Memory<S> = Vec<Option<Buffer<S>>>;

impl<'a, S: Number> Machine<'a, S> {
    /// A machine for the weights of `gguf` whose caches and states are empty.
    pub fn new(gguf: &'a Gguf, arithmetic: Arithmetic) -> Self {
        Machine { gguf, arithmetic, states: BTreeMap::new() }
    }

    /// Executes one step.
    ///
    /// # Errors
    /// Those of the conductor.
    pub fn step(
        &mut self,
        program: &Program,
        inputs: Inputs<'_>,
        conductor: &mut dyn Conductor<S>,
    ) -> Result<()> {
        let graph = &program.graph;
        let mut memory: Memory<S> = graph.tensors.iter().map(|_| None).collect();
        for id in program.executed() {
            for used in graph.sources(id).chain([id]) {
                self.load(program, graph.root(used), inputs, &mut memory);
            }
            let value = match graph.get(id).op {
                Op::SetRows => {
                    set_rows(program, id, &mut memory);
                    None
                }
                Op::Cpy | Op::Cont | Op::Dup => Some(self.copy(program, id, &memory)),
                _ => Some(self.node(program, id, &memory, conductor)?),
            };
            if let Some(value) = value {
                store(program, id, value, &mut memory);
            }
            for used in graph.sources(id).chain([id]) {
                let root = graph.root(used);
                let state = memory[root].as_ref().is_some_and(|buffer| buffer.state);
                if !program.is_used_after(root, id) && !program.is_written(root) && !state {
                    memory[root] = None;
                }
            }
        }
        for (id, buffer) in memory.into_iter().enumerate() {
            if let Some(buffer) = buffer.filter(|buffer| program.is_written(id) || buffer.state) {
                self.states.insert(graph.get(id).name.clone(), buffer);
            }
        }
        Ok(())
    }

    /// Brings a leaf into memory, where it is not there yet and is no weight that rules read themselves.
    fn load(&mut self, program: &Program, id: Id, inputs: Inputs<'_>, memory: &mut Memory<S>) {
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
        } else if let Some(values) = inputs(&tensor.name) {
            Buffer::of(values.into_iter().map(S::from_f64).collect())
        } else if let Some(state) = self.states.remove(&tensor.name) {
            Buffer { state: true, ..state }
        } else {
            empty(program, id)
        };
        let (expected, found) = (tensor.elements(), buffer.data.len());
        memory[id] = Some(match found == expected || buffer.unknown.is_some() {
            true => buffer,
            false => Buffer::unknown(Unknown::new(format!(
                "{}, of which {found} elements were found and {expected} are read",
                tensor.name
            ))),
        });
    }

    /// A tensor that is a weight of the file in the file's own shape.
    fn weight(&self, program: &Program, id: Id) -> Option<TensorRef<'a>> {
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
    fn source<'b>(
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
        let values = match &memory[place.root] {
            // Nothing is read of what has no elements.
            None if tensor.elements() == 0 => None,
            None => return Err(Unknown::new(format!("{name}, which is not computed in this step"))),
            Some(Buffer { unknown: Some(unknown), .. }) => return Err(unknown.clone()),
            Some(buffer) => Some(buffer.view(&place).ok_or_else(of_type)?),
        };
        let strided = values.unwrap_or(crate::ops::Strided {
            data: &[],
            offset: 0,
            shape: place.shape,
            strides: place.strides,
        });
        Ok(Source { dtype, data: Data::Values(strided) })
    }

    /// A copy in logical order: the values of its source.
    fn copy(&self, program: &Program, id: Id, memory: &Memory<S>) -> Value<S> {
        let missing = || Unknown::new(format!("a source of {}", program.names[id]));
        let source = self.source(program, program.graph.src(id, 0).ok_or_else(missing)?, memory)?;
        Ok(source.values().into_owned())
    }

    /// A node that computes, by the conductor.
    fn node(
        &self,
        program: &Program,
        id: Id,
        memory: &Memory<S>,
        conductor: &mut dyn Conductor<S>,
    ) -> Result<Value<S>> {
        let tensor = program.graph.get(id);
        let sources: std::result::Result<Vec<_>, Unknown> = tensor
            .srcs
            .iter()
            .map(|slot| slot.filter(|&src| src != id).map(|src| self.source(program, src, memory)).transpose())
            .collect();
        let args = sources.and_then(|sources| {
            let name = &program.names[id];
            let dtype = dtype(tensor).ok_or_else(|| Unknown::new(format!("the type {} of {name}", tensor.dtype)))?;
            let (params, shape) = (&tensor.params, tensor.shape());
            Ok(Args { name, params, sources, shape, dtype, arithmetic: &self.arithmetic })
        });
        let node = Node { id, program, rule: rule(&tensor.op) };
        conductor.value(&node, args.as_ref())
    }
}

/// A leaf that nothing is known of: a cache or a state is zero at the start, anything else is missing.
fn empty<S: Scalar>(program: &Program, id: Id) -> Buffer<S> {
    let tensor = program.graph.get(id);
    match (program.is_written(id), dtype(tensor).is_some_and(is_plain)) {
        (true, true) => Buffer::zeros(tensor.elements()),
        (true, false) => {
            let kept = format!("the contents of {}, which is kept as {}", tensor.name, tensor.dtype);
            Buffer::unknown(Unknown::new(kept))
        }
        (false, _) => Buffer::unknown(Unknown::new(format!("the input {}, which was not recorded", tensor.name))),
    }
}

fn undecodable(weight: TensorRef<'_>) -> Unknown {
    Unknown::new(format!("the values of {}, whose type {} is not decoded", weight.info.name, weight.info.dtype))
}

/// Puts the values of a node where they lie, as its type holds them.
fn store<S: Scalar>(program: &Program, id: Id, value: Value<S>, memory: &mut Memory<S>) {
    let tensor = program.graph.get(id);
    let place = program.place(id).zip(dtype(tensor)).filter(|(_, dtype)| is_plain(*dtype));
    let root = program.graph.root(id);
    let value = value.and_then(|mut values| match place {
        Some((place, dtype)) if values.len() == tensor.elements() => {
            convert(dtype, &mut values);
            Ok((place, values))
        }
        _ => Err(Unknown::new(format!("{}, which is kept as {}", program.names[id], tensor.dtype))),
    });
    let (place, values) = match value {
        Ok(value) => value,
        Err(unknown) => {
            memory[root] = Some(Buffer::unknown(unknown));
            return;
        }
    };
    if root == id && place.strides == crate::ops::source::contiguous(place.shape) {
        memory[root] = Some(Buffer::of(values));
        return;
    }
    let elements = program.graph.get(root).elements();
    let whole = values.len() == elements;
    let buffer = memory[root].get_or_insert_with(|| Buffer::zeros(elements));
    if buffer.unknown.is_some() && whole {
        *buffer = Buffer::zeros(elements);
    }
    if buffer.unknown.is_none() && !buffer.write(&place, &values) {
        *buffer = Buffer::unknown(Unknown::new(format!("the memory that {} lies in", program.names[id])));
    }
}

/// Writes rows by index: `dst[b3, b2, ids[b3 mod c2, b2 mod c1, i], :] = s0[b3, b2, i, :]`, in dst's type.
fn set_rows<S: Number>(program: &Program, id: Id, memory: &mut Memory<S>) {
    let root = program.graph.root(id);
    if let Err(unknown) = try_set_rows(program, id, memory) {
        memory[root] = Some(Buffer::unknown(unknown));
    }
}

fn try_set_rows<S: Number>(
    program: &Program,
    id: Id,
    memory: &mut Memory<S>,
) -> std::result::Result<(), Unknown> {
    let tensor = program.graph.get(id);
    let odd = || Unknown::new(format!("what {} wrote, whose sources do not fit", program.names[id]));
    let place = program.place(id).ok_or_else(odd)?;
    let dtype = dtype(tensor).filter(|dtype| is_plain(*dtype)).ok_or_else(odd)?;
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
    convert(dtype, &mut new);
    let [b3, b2, n, width] = shape;
    let [c3, c2, c1, r] = by;
    let fits = [b3, b2, width] == [place.shape[0], place.shape[1], place.shape[3]] && r == n && c3 == 1;
    let buffer = memory[place.root].as_mut().ok_or_else(odd)?;
    if !fits || c2 * c1 == 0 {
        return Err(odd());
    }
    if let Some(unknown) = &buffer.unknown {
        return Err(unknown.clone());
    }
    if !place.end().is_some_and(|end| end <= buffer.data.len()) {
        return Err(odd());
    }
    for (row, values) in crate::ops::source::rows(shape).zip(new.chunks(width.max(1))) {
        let [i3, i2, i] = row;
        let index = ids[((i3 % c2) * c1 + i2 % c1) * r + i].to_f64();
        if !(index >= 0.0 && index < place.shape[2] as f64) {
            return Err(odd());
        }
        buffer.write_row(&place, [i3, i2, index as usize], values);
    }
    Ok(())
}
