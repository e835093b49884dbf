//! Several executions of one step at once, node by node: each has values of its own where it differs from the first.
//!
//! What a lane has as the first one has it is neither computed nor kept twice. A weight that several lanes multiply
//! their rows by is decoded once for all of them.

use parity_graph::{Id, Op};
use rayon::prelude::*;

use super::{Inputs, Machine, Memory, Node, Program, Unknown, Value, compute, free};
use crate::arithmetic::Arithmetic;
use crate::gguf::Gguf;
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided, rule};

/// What becomes of a node in a lane.
pub enum Answer {
    /// Its rule's values.
    Own,
    /// These.
    Given(Value<f32>),
}

/// Says what differs from lane to lane, and sees what is computed.
pub trait Lanes: Sync {
    /// Whether a node of a lane is another one than in the first, whatever it reads.
    fn differs(&self, lane: usize, id: Id) -> bool;

    /// What becomes of a node that differs, of which `args` is what it reads.
    fn answer(&self, lane: usize, node: &Node<'_>, args: &Args<'_, f32>) -> Answer;

    /// Takes note of the values of a node, which may be changed: they are what the lane goes on with.
    fn see(&self, lane: usize, id: Id, values: &mut Value<f32>);

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
    let answered: Vec<Option<Value<f32>>> = asked
        .par_iter()
        .enumerate()
        .map(|(lane, args)| match args.as_ref()? {
            Err(unknown) => Some(Err(unknown.clone())),
            Ok(args) if how.differs(lane, id) => match how.answer(lane, &node(lane), args) {
                Answer::Given(value) => Some(value),
                Answer::Own => None,
            },
            Ok(_) => None,
        })
        .collect();
    let open = || asked.iter().zip(&answered).enumerate();
    let open: Vec<(usize, &Args<'_, f32>)> = open()
        .filter(|(_, (_, answered))| answered.is_none())
        .filter_map(|(lane, (args, _))| Some((lane, args.as_ref()?.as_ref().ok()?)))
        .collect();
    let own = own(&open, rule, program, id);
    let mut out = answered;
    for ((lane, _), value) in open.iter().zip(own) {
        out[*lane] = Some(value);
    }
    out
}

/// The values of a rule, for several lanes.
fn own(
    open: &[(usize, &Args<'_, f32>)],
    rule: Option<&'static Rule>,
    program: &Program,
    id: Id,
) -> Vec<Value<f32>> {
    let op = &program.graph.get(id).op;
    let Some(rule) = rule else {
        return open.iter().map(|(_, args)| Err(Unknown::no_rule(args.name, op))).collect();
    };
    if let (Op::MulMat, Some(values)) = (op, stacked(open, rule)) {
        return values;
    }
    open.par_iter().map(|(_, args)| compute(rule, args).map(Into::into)).collect()
}

/// The products of a weight of the file with the rows of all lanes, where all multiply alike.
fn stacked(open: &[(usize, &Args<'_, f32>)], rule: &Rule) -> Option<Vec<Value<f32>>> {
    let mut order: Vec<usize> = (0..open.len()).collect();
    // Lanes of one arithmetic side by side.
    order.sort_by_key(|&i| open.iter().position(|(_, args)| args.arithmetic == open[i].1.arithmetic));
    let mut out: Vec<Option<Value<f32>>> = open.iter().map(|_| None).collect();
    for group in order.chunk_by(|&a, &b| open[a].1.arithmetic == open[b].1.arithmetic) {
        let args: Vec<&Args<'_, f32>> = group.iter().map(|&i| open[i].1).collect();
        for (&i, value) in group.iter().zip(of_group(&args, rule)?) {
            out[i] = Some(value);
        }
    }
    out.into_iter().collect()
}

fn of_group(all: &[&Args<'_, f32>], rule: &Rule) -> Option<Vec<Value<f32>>> {
    let first = all.first()?;
    let weight = first.get(0).filter(|weight| matches!(weight.data, Data::Weight(_)))?;
    let [a, b, _, k] = first.get(1)?.shape();
    let m = first.shape[3];
    if a * b != 1 {
        return None;
    }
    let mut rows: Vec<f32> = Vec::new();
    for args in all {
        rows.extend_from_slice(&args.get(1)?.values());
    }
    let n = rows.len() / k.max(1);
    let source =
        Source { dtype: first.get(1)?.dtype, data: Data::Values(Strided::whole(&rows, [1, 1, n, k])) };
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
