//! Executes any graph, recorded or built, step by step, in f32 as an engine would or in f64 as the judge does.
//!
//! Memory is as ggml has it: one buffer for each tensor that is no view, and views into it through offset and
//! strides. What is computed in place, SET_ROWS and CPY write through the strides of their own view, so that caches
//! and recurrent states need no code of their own: a leaf that is written is kept from step to step under its name,
//! and is zero at the start. A [`Conductor`] sees every node that computes and says with which values the machine
//! goes on: its own, in a run, or recorded ones, in an audit.

mod lanes;
mod memory;
mod program;
mod sources;
mod store;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use parity_graph::{Id, Op};

use crate::arithmetic::Arithmetic;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::ops::{Args, Rule, Strided, rule};
use crate::scalar::Scalar;

pub use lanes::{Answer, Lane, Lanes, Multiplier, Product, step as step_lanes};
pub use memory::Unknown;
pub use program::{Place, Program, dtype};

use memory::Buffer;
use store::{set_rows, store};

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

/// Values of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Values<S> {
    /// Contiguous, in the node's shape.
    pub data: Vec<S>,
    /// How far each may be from what the producer had, where it is not what the producer had.
    pub carried: Option<Carried>,
}

/// What is known of values that were not recorded but computed again.
#[derive(Clone, Debug, PartialEq)]
pub struct Carried {
    /// Up to how far each may be from what the producer had: absolute, one for each value.
    pub error: Vec<f64>,
    /// The nodes that were computed again, each once.
    pub through: Vec<Id>,
}

impl<S> From<Vec<S>> for Values<S> {
    fn from(data: Vec<S>) -> Self {
        Values { data, carried: None }
    }
}

/// Values of a node, or why there are none.
pub type Value<S> = std::result::Result<Values<S>, Unknown>;

/// Computes a node; what its rule refuses is not known, by the rule's own words.
pub fn compute<S: Number>(rule: &Rule, args: &Args<'_, S>) -> std::result::Result<Vec<S>, Unknown> {
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
    /// By slot, what of its sources was computed again.
    pub carried: Vec<Option<Carried>>,
}

/// Sees every node that computes, and says with which values the machine goes on.
pub trait Conductor<S> {
    /// The values of a node: contiguous, in its shape. `args` is what it reads, under the machine's arithmetic, or
    /// why that is not known.
    ///
    /// # Errors
    /// Whatever ends the whole execution: what concerns one node is [`Unknown`].
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, S>, &Unknown>,
    ) -> Result<Value<S>>;
}

/// The machine's own values of a node.
pub fn own<S: Number>(node: &Node<'_>, args: std::result::Result<&Args<'_, S>, &Unknown>) -> Value<S> {
    match (args, node.rule) {
        (Err(unknown), _) => Err(unknown.clone()),
        (Ok(args), Some(rule)) => compute(rule, args).map(Values::from),
        (Ok(args), None) => Err(Unknown::no_rule(args.name, &node.program.graph.get(node.id).op)),
    }
}

/// Values of the leaves of one step that are neither weights nor states: contiguous, integers as numbers.
pub type Inputs<'a> = &'a dyn Fn(Id) -> Option<Vec<f64>>;

/// Leaves that were written, by their keys.
pub type States<S> = BTreeMap<String, Arc<Buffer<S>>>;

/// Executes graphs and keeps what they write into leaves.
pub struct Machine<'a, S> {
    gguf: &'a Gguf,
    arithmetic: Arithmetic,
    states: States<S>,
    /// Whether memory of a type holds numbers of that type.
    rounds: bool,
}

/// The memory of one step: by tensor that is no view. What several executions have alike they share.
pub type Memory<S> = Vec<Option<Arc<Buffer<S>>>>;

impl<'a, S: Number> Machine<'a, S> {
    /// A machine for the weights of `gguf` whose caches and states are empty.
    pub fn new(gguf: &'a Gguf, arithmetic: Arithmetic) -> Self {
        Machine { gguf, arithmetic, states: BTreeMap::new(), rounds: true }
    }

    /// Whose memory of a type, such as a cache, holds numbers of that type, or else values as they are: the types of a graph
    /// are not those of a producer that computed another one.
    #[must_use]
    pub fn rounding(self, rounds: bool) -> Self {
        Machine { rounds, ..self }
    }

    /// Which goes on with what other steps left.
    #[must_use]
    pub fn after(self, states: States<S>) -> Self {
        Machine { states, ..self }
    }

    /// What its steps left.
    pub fn into_states(self) -> States<S> {
        self.states
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
        self.step_until(program, program.graph.nodes, inputs, conductor)
    }

    /// [`Machine::step`] up to and including node `last`.
    ///
    /// # Errors
    /// Those of the conductor.
    pub fn step_until(
        &mut self,
        program: &Program,
        last: Id,
        inputs: Inputs<'_>,
        conductor: &mut dyn Conductor<S>,
    ) -> Result<()> {
        self.step_of(program, &|id| id <= last, inputs, conductor)
    }

    /// [`Machine::step`] of the nodes in `some` alone: these must have among them what they read.
    ///
    /// # Errors
    /// Those of the conductor.
    pub fn step_of(
        &mut self,
        program: &Program,
        some: &dyn Fn(Id) -> bool,
        inputs: Inputs<'_>,
        conductor: &mut dyn Conductor<S>,
    ) -> Result<()> {
        let mut memory: Memory<S> = program.memory();
        self.go_on(program, some, inputs, conductor, &mut memory)?;
        self.keep(program, memory);
        Ok(())
    }

    /// [`Machine::step_of`] that goes on with what nodes before left in a memory, and keeps nothing for the next step.
    ///
    /// # Errors
    /// Those of the conductor.
    pub fn go_on(
        &mut self,
        program: &Program,
        some: &dyn Fn(Id) -> bool,
        inputs: Inputs<'_>,
        conductor: &mut dyn Conductor<S>,
        memory: &mut Memory<S>,
    ) -> Result<()> {
        for id in program.executed().filter(|id| some(*id)) {
            self.load_all(program, id, inputs, memory);
            let value = match program.graph.get(id).op {
                Op::SetRows | Op::Cpy | Op::Cont | Op::Dup => None,
                _ => Some(self.node(program, id, memory, conductor)?),
            };
            self.put(program, id, value, memory);
            free(program, id, memory);
        }
        Ok(())
    }

    /// Brings what a node reads and writes into memory.
    fn load_all(&mut self, program: &Program, id: Id, inputs: Inputs<'_>, memory: &mut Memory<S>) {
        for used in program.graph.sources(id).chain([id]) {
            self.load(program, program.graph.root(used), inputs, memory);
        }
    }

    /// Puts the values of a node where they lie; those of a node that only moves values are found here.
    fn put(&self, program: &Program, id: Id, value: Option<Value<S>>, memory: &mut Memory<S>) {
        let value = match (value, &program.graph.get(id).op) {
            (Some(value), _) => value,
            (None, Op::SetRows) => return set_rows(program, id, memory, self.rounds),
            (None, _) => self.copy(program, id, memory),
        };
        store(program, id, value, memory, self.rounds);
    }

    /// Keeps the states of a step for the next.
    fn keep(&mut self, program: &Program, memory: Memory<S>) {
        for (id, buffer) in memory.into_iter().enumerate() {
            if let Some(buffer) = buffer.filter(|buffer| program.is_written(id) || buffer.state) {
                self.states.insert(program.key(id).to_owned(), buffer);
            }
        }
    }

    /// A copy in logical order: the values of its source.
    fn copy(&self, program: &Program, id: Id, memory: &Memory<S>) -> Value<S> {
        let missing = || Unknown::new(format!("a source of {}", program.names[id]));
        let src = program.graph.src(id, 0).ok_or_else(missing)?;
        let data = self.source(program, src, memory)?.values().into_owned();
        Ok(Values { data, carried: carried(program, src, memory) })
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
        let args = self.args(program, id, memory);
        let slots = || tensor.srcs.iter().map(|slot| slot.filter(|&src| src != id));
        let carried = slots().map(|slot| carried(program, slot?, memory)).collect();
        let node = Node { id, program, rule: rule(&tensor.op), carried };
        conductor.value(&node, args.as_ref())
    }

    /// What a node reads.
    fn args<'b>(
        &'b self,
        program: &'b Program,
        id: Id,
        memory: &'b Memory<S>,
    ) -> std::result::Result<Args<'b, S>, Unknown>
    where
        'a: 'b,
    {
        let tensor = program.graph.get(id);
        // A cast is its own second source.
        let slots = tensor.srcs.iter().map(|slot| slot.filter(|&src| src != id));
        let sources: std::result::Result<Vec<_>, Unknown> =
            slots.map(|slot| slot.map(|src| self.source(program, src, memory)).transpose()).collect();
        let name = &program.names[id];
        let of_type = || Unknown::new(format!("the type {} of {name}", tensor.dtype));
        let (sources, dtype) = (sources?, dtype(tensor).ok_or_else(of_type)?);
        let (params, shape) = (&tensor.params, tensor.shape());
        Ok(Args { name, params, sources, shape, dtype, arithmetic: &self.arithmetic, tokens: None })
    }
}

/// Forgets what no node reads any more.
fn free<S>(program: &Program, id: Id, memory: &mut Memory<S>) {
    let graph = &program.graph;
    for used in graph.sources(id).chain([id]) {
        let root = graph.root(used);
        let state = memory[root].as_ref().is_some_and(|buffer| buffer.state);
        if !program.is_used_after(root, id) && !program.is_written(root) && !state {
            memory[root] = None;
        }
    }
}

/// What of a tensor was computed again, in its logical order.
fn carried<S: Scalar>(program: &Program, id: Id, memory: &Memory<S>) -> Option<Carried> {
    let place = program.place(id)?;
    let carried = memory[place.root].as_ref()?.carried.as_ref()?;
    let Place { offset, shape, strides, .. } = place;
    let within = place.end()? <= carried.error.len();
    let error = within.then(|| Strided { data: &carried.error, offset, shape, strides }.to_vec())?;
    Some(Carried { error, through: carried.through.clone() })
}
