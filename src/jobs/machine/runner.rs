//! One step as it is executed: each node computed, with a mistake where one is injected, judged, compared and shown.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use parity_dump::Dump;
use parity_graph::Id;
use parity_graph::rewrite::Change;
use parity_record::map::Capture;

use super::pairs::{Pairs, Rows};
use super::steps::{Planned, Prepared};
use super::writer::Sink;
use crate::arithmetic::{Arithmetic, Hypothesis};
use crate::audit::recorded::{self, Arrangement, Findings, Suspect, Tensor};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{TokenSums, common_positions};
use crate::dump::Recording;
use crate::engine::machine::{Conductor, Node, Number, Unknown, Value, own};
use crate::error::Result;
use crate::faults::rewritten::{Scratch, diagnose, other, rewrite};
use crate::jobs::graphs::ByGraph;
use crate::jobs::run::{Progress, RunOptions};
use crate::ops::source::{Data, contiguous};
use crate::ops::{Args, Check, Source, Strided};

/// What a run is and goes by.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    pub by: &'a ByGraph<'a>,
    pub options: &'a RunOptions,
    pub reference: Option<&'a Dump>,
    pub planned: &'a Planned<'a>,
    pub arithmetic: Arithmetic,
    pub progress: Progress<'a>,
}

/// What an execution came to.
#[derive(Default)]
pub struct Executed {
    pub findings: Findings,
    pub pairs: Pairs,
    pub token_sums: TokenSums,
    /// Those that were known and those that were sampled.
    pub tokens: Vec<u32>,
    pub notes: Vec<String>,
    /// Nodes that were computed so far.
    pub done: usize,
}

/// Values of leaves.
type Inputs<'a> = &'a dyn Fn(Id) -> Option<Vec<f64>>;

/// Executes one step.
pub struct Runner<'a, S> {
    run: &'a Run<'a>,
    step: usize,
    graph: &'a Prepared<'a>,
    /// Of the tokens of the step.
    positions: Vec<u32>,
    /// Positions from 0 at which the reference has the same tokens.
    common: u32,
    inputs: Inputs<'a>,
    out: &'a mut Executed,
    sink: Option<&'a mut Sink>,
    /// Values of nodes that a mistake elsewhere may read.
    kept: BTreeMap<Id, Vec<f64>>,
    logits: Option<Vec<f32>>,
    of: PhantomData<S>,
}

impl<'a, S: Number> Runner<'a, S> {
    /// Begins a step.
    ///
    /// # Errors
    /// A dump that cannot be written.
    pub fn new(
        run: &'a Run<'a>,
        step: usize,
        tokens: &[u32],
        inputs: Inputs<'a>,
        out: &'a mut Executed,
        mut sink: Option<&'a mut Sink>,
    ) -> Result<Self> {
        let planned = &run.planned.steps[step];
        let graph = &run.planned.graphs[planned.graph];
        let positions = planned.positions.clone();
        if let Some(sink) = &mut sink {
            sink.begin(planned.graph, graph, tokens, &positions, inputs)?;
        }
        let common = run.reference.map_or(0, |dump| common_positions(&out.tokens, dump.tokens()));
        let (kept, logits) = (BTreeMap::new(), None);
        Ok(Runner { run, step, graph, positions, common, inputs, out, sink, kept, logits, of: PhantomData })
    }

    /// Ends the step: the logits of its last row, (V,), where it computed some.
    ///
    /// # Errors
    /// A dump that cannot be written.
    pub fn finish(self) -> Result<Option<Vec<f32>>> {
        if let Some(sink) = self.sink {
            sink.end()?;
        }
        Ok(self.logits)
    }

    /// The node's values, with the mistake that is injected into it, if any.
    fn computed(
        &self,
        node: &Node<'_>,
        id: Checkpoint,
        args: std::result::Result<&Args<'_, S>, &Unknown>,
    ) -> Value<S> {
        let Some(injected) = self.graph.injected.iter().find(|injected| injected.checkpoint == id) else {
            return own(node, args);
        };
        let args = args.map_err(Clone::clone)?;
        let (graph, change) = (&node.program.graph, &injected.fault.rewrite.change);
        let of_node =
            |id: Id| -> Option<Vec<S>> { Some(self.other(id)?.into_iter().map(S::from_f64).collect()) };
        let no_place = || Unknown::new(format!("a place for {} in {id}", injected.fault.name));
        let other = match change {
            Change::Source { with: Some(with), .. } => {
                Some(other(graph, self.run.by.gguf, *with, &of_node).ok_or_else(no_place)?)
            }
            _ => None,
        };
        let mut scratch = Scratch::default();
        let rewritten = rewrite(&graph.get(node.id).op, args, change, other, &mut scratch);
        rewritten.ok_or_else(no_place)?.values().map(Into::into)
    }

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
            shape: capture.shape.clone(),
            positions: self.positions_of(capture)?,
            values: vec![0.0; capture.shape.iter().product()],
        };
        Some((self.graph.labelled.arrange(node.id, id, &tensor)?, capture))
    }

    /// Judges the node's own values by exact arithmetic from what it read.
    fn judge(&mut self, node: &Node<'_>, id: Checkpoint, args: &Args<'_, S>, values: &[S], at: &Arrangement) {
        let (Some(rule), Some(rows)) = (node.rule, self.run.options.audit) else { return };
        let doubles = doubles(args);
        let args = in_f64(args, &doubles);
        let values: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
        let tried = [Hypothesis { name: "its own", arithmetic: *args.arithmetic }];
        let sight = recorded::Sight { looked_at: &|_| true, carried: &[], row: None };
        let held = match recorded::judge_sampled(rule, &args, &values, &sight, &tried, rows) {
            Ok(held) => held,
            Err(unknown) => return self.out.findings.at(id).cannot(&unknown.reason),
        };
        if !held.is_healthy() || held.nonfinite > 0 {
            let others = |id: Id| self.other(id);
            let (recorded, gguf) = (&values[..], self.run.by.gguf);
            let names = diagnose(&Suspect {
                node,
                args: &args,
                recorded,
                sight: &sight,
                held: &held,
                tried: &tried,
                gguf,
                others: &others,
                replay: None,
            });
            self.out.findings.at(id).diagnosed(names);
        }
        self.out.findings.at(id).add(held, at, at.positions().len());
    }

    /// Compares the rows with the reference's.
    fn compare(&mut self, id: Checkpoint, rows: &Rows<'_>) {
        let Some(dump) = self.run.reference else { return };
        let there = self.out.pairs.compare(dump, self.common, &self.run.options.tolerances, rows);
        // Of a graph that was built rows are compared wherever the reference has some.
        let known = |position: &u32| *position < self.common;
        let anywhere = || Recording::positions(dump, id).iter().any(known);
        let expected = rows.positions.iter().any(known);
        if !there && expected && (!self.run.planned.is_built() || !anywhere()) {
            self.out.findings.at(id).unrecorded += 1;
        }
        if id == Checkpoint::global(Kind::Logits) {
            let sums = &mut self.out.token_sums;
            rows.each_beside(dump, self.common, |position, a, b| {
                if a.len() == b.len() {
                    sums.row(position, a, b);
                }
            });
        }
    }

    /// The reference's values in place of the node's own, for the rows that it has.
    fn fed(&self, rows: &Rows<'_>, at: &Arrangement, values: &mut [S]) -> usize {
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

    /// Goes on with the choice that was recorded: where scores differ by rounding alone, both are right, and values of
    /// another choice could not be compared.
    fn follow(&mut self, id: Checkpoint, changed: usize, of: usize) {
        if changed > 0 {
            self.out.notes.push(format!(
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
        self.out.done += 1;
        (self.run.progress)(self.out.done, self.run.planned.n_nodes);
        let mut values = match self.computed(node, id, args) {
            Ok(values) => values.data,
            Err(unknown) => {
                self.out.findings.at(id).cannot(&unknown.reason);
                return Ok(Err(unknown));
            }
        };
        let Some((at, capture)) = self.arranged(node, id) else {
            self.out.findings.at(id).cannot("token rows that can be told apart");
            return Ok(Ok(values.into()));
        };
        self.out.findings.at(id).row_shape = capture.shape.get(1..).unwrap_or_default().to_vec();
        if let Ok(args) = args {
            self.judge(node, id, args, &values, &at);
        }
        let single: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        let laid = at.of_rows(&single);
        let rows = Rows::new(id, capture, at.positions(), &laid);
        let selected = self.run.planned.selected.contains(&id);
        if selected {
            self.compare(id, &rows);
        }
        if let Some(sink) = self.sink.as_mut().filter(|_| selected) {
            sink.tensor(&rows)?;
        }
        if id == Checkpoint::global(Kind::Logits) {
            self.logits = rows.last().map(<[f32]>::to_vec);
        }
        let choice = node.rule.is_some_and(|rule| matches!(rule.check, Check::Choice(_)));
        // A choice that a mistake was injected into is not mended.
        let mistaken = self.graph.injected.iter().any(|injected| injected.checkpoint == id);
        if self.run.options.isolated || choice && !mistaken {
            let (changed, of) = (self.fed(&rows, &at, &mut values), values.len());
            if choice && !mistaken {
                self.follow(id, changed, of);
            }
        }
        if self.graph.read_elsewhere.contains(&node.id) {
            self.kept.insert(node.id, values.iter().map(|value| value.to_f64()).collect());
        }
        Ok(Ok(values.into()))
    }
}

/// The values of all sources in f64.
fn doubles<S: Number>(args: &Args<'_, S>) -> Vec<Option<Vec<f64>>> {
    let double = |source: &Option<Source<'_, S>>| match &source.as_ref()?.data {
        Data::Values(values) => Some(values.to_vec().into_iter().map(|x| x.to_f64()).collect()),
        Data::Weight(_) => None,
    };
    args.sources.iter().map(double).collect()
}

/// What a node reads, with the values of its sources in f64.
fn in_f64<'b, S: Number>(args: &Args<'b, S>, doubles: &'b [Option<Vec<f64>>]) -> Args<'b, f64> {
    let sources = args.sources.iter().zip(doubles).map(|(source, doubles)| {
        source.as_ref().map(|source| {
            let data = match (&source.data, doubles) {
                (Data::Weight(weight), _) => Data::Weight(*weight),
                (Data::Values(values), doubles) => Data::Values(Strided {
                    data: doubles.as_deref().unwrap_or_default(),
                    offset: 0,
                    shape: values.shape,
                    strides: contiguous(values.shape),
                }),
            };
            Source { dtype: source.dtype, data }
        })
    });
    let Args { name, params, shape, dtype, arithmetic, .. } = *args;
    Args { name, params, sources: sources.collect(), shape, dtype, arithmetic }
}
