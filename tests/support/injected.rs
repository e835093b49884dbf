//! Graphs that are built of a model file, executed in f32 with mistakes in them and judged, all in memory.

use std::collections::{BTreeMap, HashMap};

use parity::arithmetic::Arithmetic;
use parity::audit::{AuditRows, Findings, Graphs, How, Labelled, Steps, Tensor, audit};
use parity::checkpoint::Checkpoint;
use parity::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, own};
use parity::error::Result;
use parity::faults::diagnosis::diagnose;
use parity::faults::injected::{Injected, injected, parse};
use parity::faults::others::{Other, other};
use parity::faults::rewritten::rewrite;
use parity::gguf::Gguf;
use parity::model::builders::{self, Built, Cache, Shape};
use parity::numerics::Numerics;
use parity::ops::Args;
use parity_graph::fault::Wanted;
use parity_graph::rewrite::Change;
use parity_graph::{Graph, Id, Leaf, label};

/// What a node comes to instead, if it does.
pub type Strange<'a> = &'a dyn Fn(Checkpoint, &Args<'_, f32>, &[f32]) -> Option<Vec<f32>>;

/// What was computed in some steps.
pub struct Ran {
    gguf: Gguf,
    pub graphs: Graphs,
    steps: Vec<Step>,
    declared: Option<Numerics>,
}

#[derive(Default)]
struct Step {
    positions: Vec<u32>,
    tensors: HashMap<Checkpoint, Tensor>,
    leaves: BTreeMap<String, Vec<f64>>,
}

/// How a run is made.
pub struct Made<'a> {
    pub tokens: &'a [u32],
    /// Tokens of the first step; the others come one by one.
    pub prompt: usize,
    /// Whether attention is one node.
    pub flash: bool,
}

/// The mistakes that graphs of a model have a place for.
pub fn specs(texts: &[&str]) -> Vec<Wanted> {
    texts.iter().map(|text| parse(text).unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Executes with mistakes: what was computed, and where they are; nothing where the model has no place for one of them.
pub fn run(gguf: Gguf, how: &Made<'_>, specs: &[Wanted]) -> Option<(Ran, Vec<Checkpoint>)> {
    run_with(gguf, how, specs, &|_, _, _| None, &|_| true)
}

/// As [`run`], with what no catalogue has, and some nodes alone recorded.
pub fn run_with(
    gguf: Gguf,
    how: &Made<'_>,
    specs: &[Wanted],
    strange: Strange<'_>,
    shown: &dyn Fn(Checkpoint) -> bool,
) -> Option<(Ran, Vec<Checkpoint>)> {
    let mut spans: Vec<std::ops::Range<usize>> = std::iter::once(0..how.prompt).collect();
    spans.extend((how.prompt..how.tokens.len()).map(|start| start..start + 1));
    let context = how.tokens.len();
    let built = spans.iter().map(|span| {
        builders::build(&gguf, Shape::step(span.start, span.len(), context, how.flash, Cache::F32)).unwrap()
    });
    let built: Vec<Built> = built.collect();
    let graphs =
        Graphs::of(built.iter().map(|built| built.graph.clone()), (0..built.len()).collect()).unwrap();
    let mut nodes = Vec::new();
    let mut steps = Vec::new();
    {
        let mut machine = Machine::<f32>::new(&gguf, Arithmetic::EXACT);
        for ((span, built), labelled) in spans.into_iter().zip(&built).zip(graphs.labelled()) {
            let given = builders::inputs(built, &how.tokens[span.clone()], span.start).unwrap();
            let wrong = injected(labelled, specs);
            if (0..specs.len()).any(|spec| !wrong.iter().any(|one| one.spec == spec)) {
                return None;
            }
            nodes.extend(wrong.iter().map(|one| one.checkpoint));
            let leaves = leaves(&labelled.program.graph, &given);
            let positions = span.map(|position| position as u32).collect();
            let step = Step { positions, leaves, ..Step::default() };
            let mut recorder = Recorder {
                gguf: &gguf,
                labelled,
                given: &given,
                wrong,
                strange,
                shown,
                step,
                kept: BTreeMap::new(),
            };
            let input = |id| given.get(&labelled.program.graph.get(id).name).cloned();
            // Nothing reads what comes behind all that is recorded.
            let last = labelled.nodes().filter(|(_, node)| shown(*node)).map(|(id, _)| id).max().unwrap();
            machine.step_until(&labelled.program, last, &input, &mut recorder).unwrap();
            steps.push(recorder.step);
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    nodes.retain(|node| seen.insert(node.to_string()));
    Some((Ran { gguf, graphs, steps, declared: None }, nodes))
}

impl Ran {
    /// As an engine that says what it computes in.
    #[must_use]
    pub fn declaring(self, numerics: &str) -> Ran {
        Ran { declared: Some(numerics.parse().unwrap()), ..self }
    }

    /// Judges everything.
    pub fn audit(&self) -> Findings {
        let how =
            How { rows: AuditRows::All, wants: &|_| true, diagnose: Some(&diagnose), look: None, only: None };
        audit(self, &self.graphs.steps(), &self.gguf, &how).unwrap()
    }

    /// The nodes beyond rounding, in order.
    pub fn origins(findings: &Findings) -> Vec<Checkpoint> {
        let wrong = |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(|finding| finding.is_wrong());
        findings.order.iter().filter(wrong).copied().collect()
    }
}

impl Steps for Ran {
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        self.steps[step].tensors.get(&checkpoint).cloned()
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        self.steps[step].leaves.get(name).cloned()
    }

    fn positions(&self, step: usize) -> Vec<u32> {
        self.steps[step].positions.clone()
    }

    fn is_own_graph(&self) -> bool {
        true
    }

    fn declared(&self) -> Option<Numerics> {
        self.declared
    }
}

fn leaves(graph: &Graph, given: &BTreeMap<String, Vec<f64>>) -> BTreeMap<String, Vec<f64>> {
    let named = label::leaf_names(graph).into_iter().enumerate();
    let inputs = named.filter(|(id, _)| graph.leaf(*id) == Some(Leaf::Input));
    inputs.filter_map(|(id, name)| Some((name?, given.get(&graph.get(id).name)?.clone()))).collect()
}

struct Recorder<'a> {
    gguf: &'a Gguf,
    labelled: &'a Labelled,
    given: &'a BTreeMap<String, Vec<f64>>,
    wrong: Vec<Injected>,
    strange: Strange<'a>,
    shown: &'a dyn Fn(Checkpoint) -> bool,
    step: Step,
    kept: BTreeMap<Id, Vec<f32>>,
}

impl Recorder<'_> {
    fn of(&self, id: Id) -> Option<Vec<f32>> {
        let given = || self.given.get(&self.labelled.program.graph.get(id).name);
        self.kept.get(&id).cloned().or_else(|| Some(given()?.iter().map(|x| *x as f32).collect()))
    }
}

impl Conductor<f32> for Recorder<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f32>, &Unknown>,
    ) -> Result<Value<f32>> {
        let graph = &node.program.graph;
        let Some(id) = self.labelled.labels[node.id] else { return Ok(own(node, args)) };
        let args = args.unwrap_or_else(|unknown| panic!("{id}: {}", unknown.reason));
        let changes: Vec<Change> = self
            .wrong
            .iter()
            .filter(|one| one.checkpoint == id)
            .map(|one| one.fault.rewrite.change.clone())
            .collect();
        let of = |other: Id| self.of(other);
        let others = |with: Id| -> Option<Other<'_, f32>> { other(graph, self.gguf, with, &of) };
        let values = match changes.is_empty() {
            true => own(node, Ok(args)).map(|values| values.data),
            false => rewrite(&graph.get(node.id).op, args, &Change::All(changes), &others)
                .unwrap_or_else(|| {
                    panic!(
                        "{id} has no place for {:?}",
                        self.wrong.iter().map(|one| &one.fault.text).collect::<Vec<_>>()
                    )
                })
                .values(args),
        };
        let mut values = values.unwrap_or_else(|unknown| panic!("{id}: {}", unknown.reason));
        if let Some(strange) = (self.strange)(id, args, &values) {
            values = strange;
        }
        self.kept.insert(node.id, values.clone());
        if (self.shown)(id) {
            let shape = graph.get(node.id).shape();
            let tokens = self.labelled.axes[node.id];
            let axis = tokens.unwrap_or(0);
            let (outer, inner): (usize, usize) =
                (shape[..axis].iter().product(), shape[axis + 1..].iter().product());
            let rows = (0..shape[axis]).flat_map(|row| (0..outer).map(move |block| (row, block)));
            let laid = rows.flat_map(|(row, block)| {
                let from = (block * shape[axis] + row) * inner;
                values[from..from + inner].to_vec()
            });
            let laid: Vec<f32> = laid.collect();
            let whole = tokens.is_some() && shape[axis] == self.step.positions.len();
            let positions = if whole {
                self.step.positions.clone()
            } else {
                self.step.positions.last().copied().into_iter().collect()
            };
            // Matrices of attention are recorded as the graph has them: (H, T, S).
            let tensor = match id.kind().is_optional() {
                true => {
                    let positions = self.step.positions.clone();
                    Tensor { shape: shape[1..].to_vec(), positions, values: values.clone() }
                }
                false if tokens.is_some() => {
                    Tensor { shape: vec![shape[axis], outer * inner], positions, values: laid }
                }
                false => Tensor { shape: vec![1, values.len()], positions, values: laid },
            };
            self.step.tensors.insert(id, tensor);
        }
        Ok(Ok(values.into()))
    }
}
