//! Nodes that mistakes are made in, computed op by op from what the engine gave to them, on whatever device it runs.
//!
//! A mistake is a rewrite of the graph, which no fast kernel knows. So the engine computes the healthy model, and at the
//! nodes that a mistake reaches first it is given the mistaken values to go on with.

use std::collections::{BTreeMap, HashMap, HashSet};

use parity_graph::Id;
use parity_graph::rewrite::Change;

use super::steps::{Planned, Prepared};
use crate::audit::{Labelled, Steps, Tensor, needed};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Machine, Node, Number, Unknown, Value, own};
use crate::error::{Error, Result};
use crate::faults::injected::Injected;
use crate::faults::others::{Other, other};
use crate::faults::rewritten::{Rewritten, rewrite};
use crate::gguf::Gguf;
use crate::ops::Args;

/// A node's values, with the mistake that is injected into it, if any; `others` has the values of tensors that it does not
/// read.
pub fn computed<S: Number>(
    injected: &[Injected],
    gguf: &Gguf,
    node: &Node<'_>,
    args: std::result::Result<&Args<'_, S>, &Unknown>,
    others: &dyn Fn(Id) -> Option<Vec<f64>>,
) -> Value<S> {
    if injected.iter().all(|injected| injected.fault.rewrite.node != node.id) {
        return own(node, args);
    }
    let args = args.map_err(Clone::clone)?;
    rewritten(injected, gguf, node, args, others)?.values(args).map(Into::into)
}

/// A node with the mistakes that are injected into it.
///
/// # Errors
/// A mistake that has no place in it.
pub fn rewritten<'a, S: Number>(
    injected: &[Injected],
    gguf: &'a Gguf,
    node: &Node<'_>,
    args: &Args<'a, S>,
    others: &dyn Fn(Id) -> Option<Vec<f64>>,
) -> std::result::Result<Rewritten<'a, S>, Unknown> {
    let here = || injected.iter().filter(|injected| injected.fault.rewrite.node == node.id);
    let graph = &node.program.graph;
    let change = Change::All(here().map(|one| one.fault.rewrite.change.clone()).collect());
    let of_node = |id: Id| -> Option<Vec<S>> { Some(others(id)?.into_iter().map(S::from_f64).collect()) };
    let others = |id: Id| -> Option<Other<'a, S>> { other(graph, gguf, id, &of_node) };
    let names = || here().map(|one| one.fault.name).collect::<Vec<_>>().join(" + ");
    rewrite(&graph.get(node.id).op, args, &change, &others)
        .ok_or_else(|| Unknown::new(format!("a place for {} in {}", names(), args.name)))
}

/// What an engine that knows nothing of mistakes gives, and what becomes of it.
pub struct Mistakes<'a> {
    planned: &'a Planned<'a>,
    gguf: &'a Gguf,
    /// Keeps what nodes with mistakes read of earlier steps.
    machine: Machine<'a, f32>,
    /// By graph: the nodes of an engine that a mistake reaches first.
    reached: Vec<HashSet<Checkpoint>>,
    step: usize,
    tokens: Vec<u32>,
    /// What the engine gave in this step so far.
    given: Given,
}

impl<'a> Mistakes<'a> {
    /// For an engine that shows the nodes of `exposed`.
    pub fn new(planned: &'a Planned<'a>, gguf: &'a Gguf, exposed: &HashSet<Checkpoint>) -> Mistakes<'a> {
        let reached = planned.graphs.iter().map(|graph| reached(graph, exposed)).collect();
        let machine = Machine::new(gguf, crate::arithmetic::Arithmetic::EXACT).rounding(false);
        Mistakes { planned, gguf, machine, reached, step: 0, tokens: Vec::new(), given: Given::default() }
    }

    /// What the nodes with mistakes read, which an engine has to show.
    pub fn read(&self) -> HashSet<Checkpoint> {
        let all = self.planned.graphs.iter().zip(&self.reached);
        all.flat_map(|(graph, ids)| {
            let inputs = ids.iter().flat_map(|id| graph.labelled.inputs(*id));
            let elsewhere = graph.read_elsewhere.iter().filter_map(|&id| graph.labelled.labels[id]);
            ids.iter().copied().chain(inputs).chain(elsewhere)
        })
        .collect()
    }

    /// Begins a step.
    pub fn begin(&mut self, step: usize, tokens: &[u32]) {
        (self.step, self.tokens) = (step, tokens.to_vec());
        self.given = Given { positions: self.planned.steps[step].positions.clone(), tensors: HashMap::new() };
    }

    /// Takes what the engine goes on with at a node; `shape` has the slowest axis first.
    pub fn take(&mut self, id: Checkpoint, shape: &[usize], values: &[f32]) {
        let positions = self.given.positions.clone();
        self.given.tensors.insert(id, Tensor { shape: shape.to_vec(), positions, values: values.to_vec() });
    }

    /// Takes the rows (T, width) that somebody feeds to the engine in place of what it gave at a node.
    pub fn feed(&mut self, id: Checkpoint, rows: &[f32]) {
        if let Some(tensor) =
            self.given.tensors.get_mut(&id).filter(|tensor| tensor.values.len() == rows.len())
        {
            tensor.values.copy_from_slice(rows);
        }
    }

    /// The mistaken values of a node of the engine, where a mistake reaches it first.
    ///
    /// # Errors
    /// A mistake that cannot be computed from what the engine gives.
    pub fn values(&mut self, id: Checkpoint) -> Result<Option<Vec<f32>>> {
        let number = self.planned.steps[self.step].graph;
        if !self.reached[number].contains(&id) {
            return Ok(None);
        }
        let graph = &self.planned.graphs[number];
        let labelled = graph.labelled;
        let needed = needed(&self.given, &[(self.step, labelled)], &|known| known == id).remove(0);
        let inputs = self.planned.inputs(self.step, &self.tokens, None)?;
        let input = |leaf| inputs.of(leaf);
        let mut host = Host {
            gguf: self.gguf,
            graph,
            given: &self.given,
            id,
            input: &input,
            kept: BTreeMap::new(),
            found: None,
        };
        self.machine.step_of(&labelled.program, &|id| needed[id], &input, &mut host)?;
        match host.found {
            Some(Ok(values)) => Ok(Some(values)),
            Some(Err(unknown)) => Err(Error::new(id, format!("the mistake needs {}", unknown.reason))),
            None => Err(Error::new(id, "the mistake is not computed in this step")),
        }
    }
}

/// The nodes of `exposed` that the mistakes of a graph reach first.
fn reached(graph: &Prepared<'_>, exposed: &HashSet<Checkpoint>) -> HashSet<Checkpoint> {
    let tensors = &graph.labelled.program.graph;
    let mut mistaken = vec![false; tensors.tensors.len()];
    let mut out = HashSet::new();
    for id in tensors.computed() {
        let own = graph.injected.iter().any(|injected| injected.fault.rewrite.node == id);
        if !own && !tensors.sources(id).any(|source| source != id && mistaken[source]) {
            continue;
        }
        match graph.labelled.labels[id].filter(|label| exposed.contains(label)) {
            Some(label) => {
                out.insert(label);
            }
            None => mistaken[id] = true,
        }
    }
    out
}

/// What an engine gave in one step.
#[derive(Default)]
struct Given {
    positions: Vec<u32>,
    tensors: HashMap<Checkpoint, Tensor>,
}

impl Steps for Given {
    fn tensor(&self, _: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        self.tensors.get(&checkpoint).cloned()
    }

    fn rows(&self, _: usize, checkpoint: Checkpoint) -> Option<usize> {
        Some(self.tensors.get(&checkpoint)?.positions.len())
    }

    fn leaf(&self, _: usize, _: &str) -> Option<Vec<f64>> {
        None
    }

    fn positions(&self, _: usize) -> Vec<u32> {
        self.positions.clone()
    }

    fn is_own_graph(&self) -> bool {
        true
    }
}

/// Computes one node of an engine op by op, from what the engine gave.
struct Host<'a> {
    gguf: &'a Gguf,
    graph: &'a Prepared<'a>,
    given: &'a Given,
    id: Checkpoint,
    input: &'a dyn Fn(Id) -> Option<Vec<f64>>,
    kept: BTreeMap<Id, Vec<f64>>,
    found: Option<std::result::Result<Vec<f32>, Unknown>>,
}

impl Host<'_> {
    /// What the engine gave of a node, in the node's shape.
    fn given(&self, labelled: &Labelled, node: Id, label: Checkpoint) -> Option<Vec<f32>> {
        let tensor = self.given.tensors.get(&label)?;
        let arranged = labelled.arrange(node, label, tensor)?;
        Some(arranged.of_node(&tensor.values, |_| 0.0).into_iter().map(|value| value as f32).collect())
    }
}

impl Conductor<f32> for Host<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f32>, &Unknown>,
    ) -> Result<Value<f32>> {
        let labelled = self.graph.labelled;
        let label = labelled.labels.get(node.id).copied().flatten();
        let is_asked = label == Some(self.id);
        if let Some(given) =
            label.filter(|_| !is_asked).and_then(|label| self.given(labelled, node.id, label))
        {
            return Ok(Ok(given.into()));
        }
        // What the engine gave is there, whether this node needs it or not.
        let elsewhere = |id: Id| -> Option<Vec<f64>> {
            let values = self.given(labelled, id, labelled.labels.get(id).copied().flatten()?)?;
            Some(values.into_iter().map(f64::from).collect())
        };
        let kept = |id: Id| self.kept.get(&id).cloned().or_else(|| elsewhere(id));
        let others = |id: Id| kept(id).or_else(|| (self.input)(id));
        let value = computed(&self.graph.injected, self.gguf, node, args, &others);
        if let (true, Some(tensor)) = (is_asked, self.given.tensors.get(&self.id)) {
            let laid = |values: &[f32]| Some(labelled.arrange(node.id, self.id, tensor)?.of_rows(values));
            let found = value.as_ref().map_err(Clone::clone);
            let no_rows = || Unknown::new("token rows that can be told apart");
            self.found = Some(found.and_then(|values| laid(&values.data).ok_or_else(no_rows)));
        }
        if let (true, Ok(values)) = (self.graph.read_elsewhere.contains(&node.id), &value) {
            self.kept.insert(node.id, values.data.iter().map(|&value| f64::from(value)).collect());
        }
        Ok(value)
    }
}
