//! Executes a graph op by op, whatever the architecture: one that is built of the file, or the one that the reference
//! brings, in the reference's own steps; and writes down what it computes, with the graph, as a recording of llama.cpp has it.

use std::collections::{BTreeMap, HashSet};
use std::marker::PhantomData;
use std::path::Path;

use parity_dump::Dump;
use parity_dump::manifest::Producer;
use parity_graph::Id;
use parity_record::map::Capture;

use super::mistakes::computed;
use super::steps::{self, Planned, Prepared};
use super::writer::{Rows, Sink};
use super::{Executed, Progress, RunOptions};
use crate::arithmetic::Arithmetic;
use crate::audit::{Arrangement, Tensor};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{argmax, common_positions};
use crate::engine::device::Device;
use crate::engine::op_by_op::{Conductor, Machine, Node, Number, Unknown, Value, own};
use crate::error::{Error, Result};
use crate::jobs::graph_limits::{Work, check as check_memory};
use crate::jobs::graphs::ByGraph;
use crate::jobs::limits::Room;
use crate::model;
use crate::numerics::{Products, Storage};
use crate::ops::{Args, Check};

/// What a run is and goes by.
#[derive(Clone, Copy)]
struct Run<'a> {
    by: &'a ByGraph<'a>,
    options: &'a RunOptions,
    reference: Option<&'a Dump>,
    planned: &'a Planned<'a>,
    progress: Progress<'a>,
}

/// Executes the steps of a run into a dump at `dir`.
///
/// # Errors
/// An architecture without a builder where no recording brings a graph, an arithmetic or a device that this does not have,
/// a mistake that no node has a place for, a dump that cannot be written.
pub(super) fn execute(
    by: &ByGraph<'_>,
    room: Room<'_>,
    options: &RunOptions,
    reference: Option<&Dump>,
    dir: &Path,
    progress: Progress<'_>,
) -> Result<Executed> {
    let arithmetic = arithmetic(options)?;
    let mistakes = &options.inject;
    let graphs = steps::graphs(by, room, options, reference)?;
    let planned = Planned::new(&graphs, mistakes, options)?;
    let recorded_graphs = reference.filter(|_| !planned.is_built()).map(Dump::path);
    check_memory(recorded_graphs.unwrap_or(by.gguf.path()), &planned.of_steps(), by.gguf, Work::Run)?;
    let run = Run { by, options, reference, planned: &planned, progress };
    let told = match options.numerics.products {
        Products::F64 => all_steps(&run, Machine::<f64>::new(by.gguf, arithmetic), dir)?,
        _ => all_steps(&run, Machine::<f32>::new(by.gguf, arithmetic), dir)?,
    };
    let (followed_notes, followed) = told;
    let notes = planned.notes.iter().cloned().chain(followed_notes).collect();
    let mut executed = Executed { notes, borrowed: !planned.is_built(), followed };
    if planned.is_built() && reference.is_none() {
        let built = format!("the graph is the one that parity builds of the file, for {}", by.architecture);
        executed.notes.push(built);
    }
    Ok(executed)
}

fn arithmetic(options: &RunOptions) -> Result<Arithmetic> {
    if let Device::Cuda(_) | Device::CudaAll = options.device {
        return Err(Error::new("--device", "this model is executed op by op, which is done on the CPU")
            .expected("auto or cpu")
            .found(&options.device));
    }
    match (options.numerics.products, options.numerics.storage) {
        (Products::F32 | Products::F64, Storage::F32) => Ok(Arithmetic::EXACT),
        (Products::LlamaCpu, Storage::F32) => Ok(Arithmetic::LLAMA_CPU),
        _ => Err(Error::new("--numerics", "is none that a graph is executed in")
            .expected("f32, f64 or llama-cpu, without storage=TYPE")
            .found(options.numerics)),
    }
}

/// Who computes.
fn producer(run: &Run<'_>) -> Producer {
    Producer {
        name: "parity".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        backend: Some("cpu".to_owned()),
        device: None,
        numerics: Some(run.planned.numerics(run.options).to_string()),
    }
}

/// What a reader must know of a run, and the choices of the reference's that were followed.
type Told = (Vec<String>, HashSet<Checkpoint>);

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn all_steps<S: Number>(run: &Run<'_>, mut machine: Machine<'_, S>, dir: &Path) -> Result<Told> {
    let mut sink = Sink::new(dir, producer(run), model::info(run.by.gguf), run.options)?;
    let mut tokens = run.planned.tokens.to_vec();
    let (mut logits, mut told, mut done): (Option<Vec<f32>>, Told, _) = (None, Told::default(), 0);
    for (number, step) in run.planned.steps.iter().enumerate() {
        let sampled = step.positions.last().is_some_and(|last| *last as usize == tokens.len());
        if sampled && run.planned.is_built() {
            let next = logits.as_deref().and_then(argmax).ok_or_else(|| {
                Error::new("logits", "no token can be sampled").expected("finite logits").found("none or NaN")
            })?;
            tokens.push(next);
        }
        let token = |position: &u32| tokens.get(*position as usize).copied();
        let of_step: Option<Vec<u32>> = step.positions.iter().map(token).collect();
        let of_step = of_step.ok_or_else(|| {
            Error::new(format!("step {number}"), "holds positions beyond the tokens")
                .expected(format!("up to {}", tokens.len().saturating_sub(1)))
        })?;
        let inputs = run.planned.inputs(number, &of_step, run.reference)?;
        let input = |id| inputs.of(id);
        let graph = &run.planned.graphs[step.graph];
        let positions = step.positions.clone();
        sink.begin(step.graph, graph, &of_step, &positions, &input)?;
        let common = run.reference.map_or(0, |dump| common_positions(&tokens, dump.tokens()));
        let mut runner = Runner::<S> {
            run,
            step: number,
            graph,
            positions,
            common,
            inputs: &input,
            sink: &mut sink,
            told: &mut told,
            done: &mut done,
            kept: BTreeMap::new(),
            logits: None,
            of: PhantomData,
        };
        machine.step_until(&graph.labelled.program, graph.last, &input, &mut runner)?;
        logits = runner.logits;
        sink.end()?;
    }
    sink.finish()?;
    Ok(told)
}

/// Executes one step: each node computed, with a mistake where one is injected, and written down.
struct Runner<'a, S> {
    run: &'a Run<'a>,
    step: usize,
    graph: &'a Prepared<'a>,
    /// Of the tokens of the step.
    positions: Vec<u32>,
    /// Positions from 0 at which the reference has the same tokens.
    common: u32,
    inputs: &'a dyn Fn(Id) -> Option<Vec<f64>>,
    sink: &'a mut Sink,
    told: &'a mut Told,
    /// Nodes that were computed so far.
    done: &'a mut usize,
    /// Values of nodes that a mistake elsewhere may read.
    kept: BTreeMap<Id, Vec<f64>>,
    logits: Option<Vec<f32>>,
    of: PhantomData<S>,
}

impl<'a, S: Number> Runner<'a, S> {
    /// Values of a tensor that a node does not read.
    fn other(&self, id: Id) -> Option<Vec<f64>> {
        self.kept.get(&id).cloned().or_else(|| (self.inputs)(id))
    }

    /// Positions of a node's rows.
    fn positions_of(&self, capture: &Capture) -> Option<Vec<u32>> {
        match capture.picked {
            _ if capture.whole => self.positions.last().map(|&last| vec![last]),
            None => Some(self.positions.clone()),
            Some(leaf) => {
                let rows = (self.inputs)(leaf)?;
                rows.into_iter().map(|row| self.positions.get(row as usize).copied()).collect()
            }
        }
    }

    /// Where the values of a node stand in a dump; `None` where it has no token rows that could be told apart.
    fn arranged(&self, node: &Node<'_>, id: Checkpoint) -> Option<(Arrangement, &'a Capture)> {
        let capture = self.graph.captures.get(&id)?;
        let tensor = Tensor {
            shape: capture.shape.to_vec(),
            positions: self.positions_of(capture)?,
            values: vec![0.0; capture.shape.iter().product()],
        };
        Some((self.graph.labelled.arrange(node.id, id, &tensor)?, capture))
    }

    /// The reference's values in place of the node's own, for the rows that it has: how many they change.
    fn feed(&self, rows: &Rows<'_>, at: &Arrangement, values: &mut [S]) -> usize {
        let Some(dump) = self.run.reference else { return 0 };
        let mut theirs = vec![0.0; rows.values.len()];
        let mut known = vec![0.0; rows.values.len()];
        rows.take(dump, self.common, &mut theirs, &mut known);
        let (theirs, known) = (at.of_node(&theirs, |_| 0.0), at.of_node(&known, |_| 0.0));
        let mut changed = 0;
        for ((value, theirs), known) in values.iter_mut().zip(theirs).zip(known) {
            if known > 0.0 && value.to_f64() != theirs {
                changed += 1;
                *value = S::from_f64(theirs);
            }
        }
        changed
    }

    /// Goes on with the choice that was recorded: where scores differ by rounding alone both are right, and values of
    /// another choice could not be compared. What is written down is the node's own choice, and is judged.
    fn follow(&mut self, id: Checkpoint, changed: usize, of: usize) {
        if changed > 0 {
            let (notes, followed) = &mut *self.told;
            followed.insert(id);
            notes.push(format!(
                "{id} chose otherwise than the reference in {changed} of {of} places (step {}); what follows goes by \
                 the reference's choice, which its audit judges",
                self.step
            ));
        }
    }
}

impl<S: Number> Conductor<S> for Runner<'_, S> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, S>, &Unknown>,
    ) -> Result<Value<S>> {
        let Some(id) = self.graph.labelled.labels.get(node.id).copied().flatten() else {
            return Ok(own(node, args));
        };
        *self.done += 1;
        (self.run.progress)(*self.done, self.run.planned.n_nodes);
        steps::in_time(*self.done, self.run.planned.n_nodes)?;
        let others = |id: Id| self.other(id);
        let mut values = match computed(&self.graph.injected, self.run.by.gguf, node, args, &others) {
            Ok(values) => values.data,
            Err(unknown) => return Ok(Err(unknown)),
        };
        let Some((at, capture)) = self.arranged(node, id) else { return Ok(Ok(values.into())) };
        let laid = |values: &[S]| -> Vec<f32> {
            at.of_rows(&values.iter().map(|value| value.to_f32()).collect::<Vec<f32>>())
        };
        let shown = laid(&values);
        // A choice that a mistake was injected into is not mended.
        let is_choice = node.rule.is_some_and(|rule| matches!(rule.check, Check::Choice(_)))
            && !self.graph.injected.iter().any(|injected| injected.checkpoint == id);
        if self.run.options.isolated || is_choice {
            let own = Rows::new(id, capture, at.positions(), &shown);
            let (changed, of) = (self.feed(&own, &at, &mut values), values.len());
            if is_choice {
                self.follow(id, changed, of);
            }
        }
        let rows = Rows::new(id, capture, at.positions(), &shown);
        if self.run.planned.written.contains(&id) {
            self.sink.tensor(&rows)?;
        }
        if id == Checkpoint::global(Kind::Logits) {
            self.logits = rows.last().map(<[f32]>::to_vec);
        }
        if self.graph.read_elsewhere.contains(&node.id) {
            self.kept.insert(node.id, values.iter().map(|value| value.to_f64()).collect());
        }
        Ok(Ok(values.into()))
    }
}
