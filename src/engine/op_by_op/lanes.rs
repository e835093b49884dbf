//! Several executions of one step at once, node by node: each has values of its own where it differs from the first.
//!
//! What a lane has as the first one has it is neither computed nor kept twice. A weight that several lanes multiply
//! their rows by is decoded once for all of them.

use std::borrow::Cow;

use parity_graph::{Id, Op};
use rayon::prelude::*;

use super::{Inputs, Machine, Memory, Node, Program, Unknown, Value, compute, free};
use crate::arithmetic::Arithmetic;
use crate::gguf::{Gguf, TensorRef};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided, rule};

/// What becomes of a node in a lane.
pub enum Answer<'a> {
    /// Its rule's values.
    Own,
    /// These.
    Given(Value<f32>),
    /// The product of a weight of the file with rows, of which it makes something.
    Product(Box<dyn Product + 'a>),
}

/// A product of a weight of the file with rows in place of a node's, and what is made of it.
pub trait Product: Send + Sync {
    /// What it reads, where the node reads `like`.
    fn args<'b>(&'b self, like: &Args<'b, f32>) -> Args<'b, f32>;

    /// What becomes of its values.
    fn finished(&self, values: Vec<f32>, like: &Args<'_, f32>) -> Value<f32>;
}

/// Who multiplies rows by weights in place of the CPU, in f32.
pub trait Multiplier: Sync {
    /// By lane, (n, O) products of rows (n, I) with a weight, which may be another one than the file has under its name; `None`
    /// where that is left to the CPU.
    fn products(&self, weight: &TensorRef<'_>, lanes: &[Cow<'_, [f32]>]) -> Option<Vec<Vec<f32>>>;

    /// Why it left everything to the CPU from some product on, if it did.
    fn failed(&self) -> Option<String>;
}

/// Says what differs from lane to lane, and sees what is computed.
pub trait Lanes: Sync {
    /// Whether a node of a lane is another one than in the first, whatever it reads.
    fn differs(&self, lane: usize, id: Id) -> bool;

    /// What becomes of a node that differs, of which `args` is what it reads.
    fn answer<'a>(&'a self, lane: usize, node: &Node<'_>, args: &'a Args<'a, f32>) -> Answer<'a>;

    /// Takes note of the values of a node, which may be changed: they are what the lane goes on with.
    fn see(&self, lane: usize, id: Id, values: &mut Value<f32>);

    /// Who multiplies by weights, where it is not the CPU.
    fn multiplier(&self) -> Option<&dyn Multiplier>;

    /// Whether a lane wants to [`Lanes::see`] a node that it has as the first lane has it.
    fn wants(&self, lane: usize, id: Id) -> bool;
}

/// One execution.
pub struct Lane<'a> {
    machine: Machine<'a, f32>,
    memory: Memory<f32>,
    /// By tensor that is no view: whether its values are not the first lane's.
    own: Vec<bool>,
}

impl<'a> Lane<'a> {
    /// With empty caches, in an arithmetic.
    pub fn new(gguf: &'a Gguf, arithmetic: Arithmetic) -> Lane<'a> {
        Lane { machine: Machine::new(gguf, arithmetic), memory: Vec::new(), own: Vec::new() }
    }

    /// Whether it computes a node by itself.
    fn computes(&self, program: &Program, id: Id) -> bool {
        let graph = &program.graph;
        graph.sources(id).chain([id]).any(|used| self.own[graph.root(used)])
    }
}

/// Executes one step in all lanes, up to and including node `last`. The first lane is the one that others differ from.
///
/// A lane in another arithmetic than the first one's must differ in every node.
pub fn step(
    lanes: &mut [Lane<'_>],
    program: &Program,
    last: Id,
    inputs: &(dyn Fn(Id) -> Option<Vec<f64>> + Sync),
    how: &dyn Lanes,
) {
    let n = program.graph.tensors.len();
    for lane in lanes.iter_mut() {
        lane.memory = program.memory();
        // A state of a lane that has one is its own.
        lane.own = (0..n).map(|id| lane.machine.states.contains_key(program.key(id))).collect();
    }
    for id in program.executed().filter(|&id| id <= last) {
        one(lanes, program, id, inputs, how);
    }
    for lane in lanes.iter_mut() {
        let memory = std::mem::take(&mut lane.memory);
        lane.machine.keep(program, memory);
    }
}

/// Executes one node in all lanes.
fn one(lanes: &mut [Lane<'_>], program: &Program, id: Id, inputs: Inputs<'_>, how: &dyn Lanes) {
    let graph = &program.graph;
    let root = graph.root(id);
    let mut computing = vec![true];
    computing.extend((1..lanes.len()).map(|lane| how.differs(lane, id) || lanes[lane].computes(program, id)));
    for (lane, _) in lanes.iter_mut().zip(&computing).filter(|(_, computes)| **computes) {
        lane.machine.load_all(program, id, inputs, &mut lane.memory);
    }
    let moves = matches!(graph.get(id).op, Op::SetRows | Op::Cpy | Op::Cont | Op::Dup);
    let values: Vec<Option<Value<f32>>> = match moves {
        true => lanes.iter().map(|_| None).collect(),
        false => values(lanes, program, id, &computing, how),
    };
    lanes.par_iter_mut().zip(values).zip(&computing).enumerate().for_each(
        |(number, ((lane, value), computes))| {
            if *computes {
                lane.own[root] = true;
                let value = value.map(|mut value| {
                    how.see(number, id, &mut value);
                    value
                });
                lane.machine.put(program, id, value, &mut lane.memory);
            }
        },
    );
    let Some((first, others)) = lanes.split_first_mut() else { return };
    for (number, (lane, computes)) in others.iter_mut().zip(&computing[1..]).enumerate() {
        if !computes {
            if how.wants(number + 1, id)
                && let Some(buffer) = &first.memory[root]
            {
                let mut shown = buffer.unknown.clone().map_or_else(|| Ok(buffer.data.clone().into()), Err);
                how.see(number + 1, id, &mut shown);
            }
            share(first, lane, program, id);
        }
    }
    lanes.iter_mut().for_each(|lane| free(program, id, &mut lane.memory));
}

/// Gives a lane what the first one has of everything that a node uses.
fn share(first: &Lane<'_>, lane: &mut Lane<'_>, program: &Program, id: Id) {
    let root = program.graph.root(id);
    lane.memory[root] = first.memory[root].clone();
}

/// The values of a node in the lanes that compute it.
fn values(
    lanes: &[Lane<'_>],
    program: &Program,
    id: Id,
    computing: &[bool],
    how: &dyn Lanes,
) -> Vec<Option<Value<f32>>> {
    let rule = rule(&program.graph.get(id).op);
    let node = |_: usize| Node { id, program, rule, carried: Vec::new() };
    let asked: Vec<Option<Result<Args<'_, f32>, Unknown>>> = lanes
        .iter()
        .zip(computing)
        .map(|(lane, computes)| computes.then(|| lane.machine.args(program, id, &lane.memory)))
        .collect();
    let answers: Vec<Answer<'_>> = asked
        .par_iter()
        .enumerate()
        .map(|(lane, args)| match args {
            Some(Ok(args)) if how.differs(lane, id) => how.answer(lane, &node(lane), args),
            _ => Answer::Own,
        })
        .collect();
    let args_of = |lane: usize| asked[lane].as_ref()?.as_ref().ok();
    let others: Vec<Option<Args<'_, f32>>> = (0..lanes.len())
        .map(|lane| match &answers[lane] {
            Answer::Product(product) => Some(product.args(args_of(lane)?)),
            _ => None,
        })
        .collect();
    let open = answers.iter().enumerate().filter_map(|(lane, answer)| match answer {
        Answer::Given(_) => None,
        Answer::Own => Some((lane, args_of(lane)?)),
        Answer::Product(_) => Some((lane, others[lane].as_ref()?)),
    });
    let open: Vec<(usize, &Args<'_, f32>)> = open.collect();
    let mut own: Vec<Option<Value<f32>>> = lanes.iter().map(|_| None).collect();
    for ((lane, _), value) in open.iter().zip(self::own(&open, rule, (program, id), how)) {
        own[*lane] = Some(value);
    }
    let all = answers.into_par_iter().zip(own).enumerate();
    all.map(|(lane, (answer, own))| {
        let args = match asked[lane].as_ref()? {
            Ok(args) => args,
            Err(unknown) => return Some(Err(unknown.clone())),
        };
        match answer {
            Answer::Given(value) => Some(value),
            Answer::Own => own,
            Answer::Product(product) => Some(own?.and_then(|values| product.finished(values.data, args))),
        }
    })
    .collect()
}

/// The values of a rule, for several lanes.
fn own(
    open: &[(usize, &Args<'_, f32>)],
    rule: Option<&'static Rule>,
    (program, id): (&Program, Id),
    how: &dyn Lanes,
) -> Vec<Value<f32>> {
    let op = &program.graph.get(id).op;
    let Some(rule) = rule else {
        return open.iter().map(|(_, args)| Err(Unknown::no_rule(args.name, op))).collect();
    };
    if let (Op::MulMat, Some(values)) = (op, stacked(open, rule, how)) {
        return values;
    }
    open.par_iter().map(|(_, args)| compute(rule, args).map(Into::into)).collect()
}

/// The products of a weight of the file with the rows of all lanes, where all multiply alike.
fn stacked(open: &[(usize, &Args<'_, f32>)], rule: &Rule, how: &dyn Lanes) -> Option<Vec<Value<f32>>> {
    // Lanes of one arithmetic and one weight side by side.
    let is_alike = |a: usize, b: usize| {
        let [(_, a), (_, b)] = [open[a], open[b]];
        a.arithmetic == b.arithmetic
            && stored(a).map(|w| w.bytes.as_ptr()) == stored(b).map(|w| w.bytes.as_ptr())
    };
    let mut order: Vec<usize> = (0..open.len()).collect();
    order.sort_by_key(|&i| (0..open.len()).find(|&first| is_alike(first, i)));
    let mut out: Vec<Option<Value<f32>>> = open.iter().map(|_| None).collect();
    for group in order.chunk_by(|&a, &b| is_alike(a, b)) {
        let args: Vec<&Args<'_, f32>> = group.iter().map(|&i| open[i].1).collect();
        for (&i, value) in group.iter().zip(of_group(&args, rule, how)?) {
            out[i] = Some(value);
        }
    }
    out.into_iter().collect()
}

/// The weight of the file that rows are multiplied by.
fn stored<'b>(args: &'b Args<'_, f32>) -> Option<&'b TensorRef<'b>> {
    match &args.get(0)?.data {
        Data::Weight(stored) => Some(stored),
        Data::Values(_) => None,
    }
}

fn of_group(all: &[&Args<'_, f32>], rule: &Rule, how: &dyn Lanes) -> Option<Vec<Value<f32>>> {
    let first = all.first()?;
    let (weight, other) = (first.get(0)?, first.get(1)?);
    let stored = stored(first)?;
    let [a, b, _, k] = other.shape();
    let m = first.shape[3];
    if a * b != 1 {
        return None;
    }
    let rows = all.iter().map(|args| Some(args.get(1)?.values()));
    let rows: Vec<Cow<'_, [f32]>> = rows.collect::<Option<_>>()?;
    let is_plain = *first.arithmetic == Arithmetic::EXACT;
    if let Some(elsewhere) = how.multiplier().filter(|_| is_plain)
        && let Some(products) = elsewhere.products(stored, &rows)
    {
        return Some(products.into_iter().map(|products| Ok(products.into())).collect());
    }
    let rows = rows.concat();
    let n = rows.len() / k.max(1);
    let source = Source { dtype: other.dtype, data: Data::Values(Strided::whole(&rows, [1, 1, n, k])) };
    let stacked = Args {
        sources: vec![Some(weight.clone()), Some(source)],
        shape: [1, 1, n, m],
        name: first.name,
        params: first.params,
        dtype: first.dtype,
        arithmetic: first.arithmetic,
        tokens: None,
    };
    let products = match compute::<f32>(rule, &stacked) {
        Ok(products) => products,
        Err(unknown) => return Some(all.iter().map(|_| Err(unknown.clone())).collect()),
    };
    let mut rest = &products[..];
    let cut = all.iter().map(|args| {
        let (own, behind) = rest.split_at(args.elements());
        rest = behind;
        Ok(own.to_vec().into())
    });
    Some(cut.collect())
}
