//! Equal bits as what is asked for: the first node that is not equal, and what moved it.

use indexmap::IndexSet;
use parity_dump::{Dump, usual_order};
use parity_graph::{Graph, Op, Tensor, label};

use crate::checkpoint::Checkpoint;
use crate::compare::bits::{self, Differing};
use crate::dump::{Graphs, Recording};
use crate::error::Result;
use crate::model::builders::Shape;
use crate::report::{CheckpointVerdict, FirstDivergence, Report};

/// The checkpoints of a dump in the order in which its graphs compute them; those that no graph has come last.
///
/// # Errors
/// A graph that cannot be read.
pub fn execution_order(dump: &Dump) -> Result<Vec<Checkpoint>> {
    let recorded = Recording::checkpoints(dump);
    let mut order: IndexSet<Checkpoint> = IndexSet::new();
    for graph in Graphs::read(dump)?.all() {
        let labels = label::labels(graph);
        order.extend(graph.computed().filter_map(|id| labels[id]).filter(|id| recorded.contains(id)));
    }
    order.extend(usual_order(recorded.iter().copied()));
    Ok(order.into_iter().collect())
}

/// The first of some checkpoints, in order, whose bits differ: in the first step in which any does.
pub fn first_of<'a>(
    all: &'a [(Checkpoint, Differing)],
    reference: &Dump,
) -> Option<(Checkpoint, &'a Differing)> {
    let steps = &reference.manifest().steps;
    let step = |position: u32| steps.iter().position(|step| step.positions.contains(&position));
    let differing = all.iter().filter_map(|(id, found)| Some((*id, found, step(*found.rows.first()?))));
    // The first of equal ones stays.
    differing.min_by_key(|(_, _, step)| step.unwrap_or(usize::MAX)).map(|(id, found, _)| (id, found))
}

/// Asks two compared sides for equal bits: the first difference is a divergence.
///
/// # Errors
/// A graph that cannot be read.
pub fn weigh(report: &mut Report, candidate: &Dump, reference: &Dump) -> Result<()> {
    let ids: Vec<Checkpoint> = report.checkpoints.iter().map(|entry| entry.id).collect();
    let all = bits::all(candidate, reference, &ids);
    for (id, found) in &all {
        if let Some(entry) = report.checkpoints.iter_mut().find(|entry| entry.id == *id) {
            entry.bits = Some(found.bits());
        }
    }
    let Some((id, found)) = first_of(&all, reference) else {
        report.notes.push(format!("bits: all rows of {} are equal on both sides", all.len()));
        return Ok(());
    };
    let row = found.rows.first().copied().unwrap_or_default();
    let text = format!(
        "its bits differ at position {row} ({} of {} rows, {} elements), and nothing before it differs in a bit: {}",
        found.rows.len(),
        found.compared,
        found.elements,
        moved_by(candidate, reference, id, row)?
    );
    if report.first_divergence.is_some() {
        report.notes.push(format!("bits: {id}: {text}"));
        return Ok(());
    }
    let entry = report.checkpoints.iter_mut().find(|entry| entry.id == id);
    let inputs = entry.as_ref().map_or_else(Vec::new, |entry| entry.inputs.clone());
    if let Some(entry) = entry {
        (entry.verdict, entry.evidence) = (CheckpointVerdict::Bits, Some(text.clone()));
    }
    let first = FirstDivergence::at(id, CheckpointVerdict::Bits);
    report.diverge(FirstDivergence { inputs, residual: Some(text), ..first });
    Ok(())
}

/// How a row of a node was computed on one side.
struct Computed {
    /// Rows of its step.
    rows: usize,
    node: Option<(Graph, usize)>,
    /// The form of attention and the types of the cache in its step; without a graph, what its producer declares.
    choices: Option<String>,
}

impl Computed {
    fn of(dump: &Dump, id: Checkpoint, row: u32) -> Result<Computed> {
        let steps = &dump.manifest().steps;
        let Some(step) = steps.iter().position(|step| step.positions.contains(&row)) else {
            return Ok(Computed { rows: 0, node: None, choices: None });
        };
        let graphs = Graphs::read(dump)?;
        let node = graphs.of_step(step).and_then(|graph| {
            let labels = label::labels(graph);
            let node = graph.computed().find(|node| labels[*node] == Some(id))?;
            Some((graph.clone(), node))
        });
        let declared = dump.manifest().producer.numerics.clone();
        let choices = graphs.of_step(step).map(|graph| Shape::of(graph).choices()).or(declared);
        Ok(Computed { rows: steps[step].positions.len(), node, choices })
    }

    fn tensor(&self) -> Option<&Tensor> {
        self.node.as_ref().map(|(graph, node)| graph.get(*node))
    }

    /// Element types of what the node reads, by the storage that it lies in.
    fn sources(&self) -> Vec<(String, String)> {
        let Some((graph, node)) = &self.node else { return Vec::new() };
        let sources = graph.get(*node).srcs.iter().flatten();
        sources.map(|&src| graph.get(graph.origin(src))).map(|t| (t.name.clone(), t.dtype.clone())).collect()
    }
}

/// What of a row's computation is not the same on both sides.
fn moved_by(candidate: &Dump, reference: &Dump, id: Checkpoint, row: u32) -> Result<String> {
    let (ours, theirs) = (Computed::of(candidate, id, row)?, Computed::of(reference, id, row)?);
    let mut causes = Vec::new();
    if let (Some(a), Some(b)) = (ours.tensor(), theirs.tensor()) {
        if matches!(a.op, Op::Argsort | Op::TopK) {
            causes.push("the choice of experts".to_owned());
        }
        if a.op != b.op || a.params != b.params {
            causes.push(format!(
                "the kernel: {} in the candidate, {} in the reference",
                a.op.name(),
                b.op.name()
            ));
        }
        if a.backend != b.backend {
            let name =
                |tensor: &Tensor| tensor.backend.clone().unwrap_or_else(|| "an unknown device".to_owned());
            causes.push(format!("the device: {} in the candidate, {} in the reference", name(a), name(b)));
        }
        for ((name, a), (_, b)) in ours.sources().iter().zip(&theirs.sources()).filter(|(a, b)| a.1 != b.1) {
            let what =
                if name.starts_with("cache_") { "the type of the cache" } else { "the type of a source" };
            causes.push(format!("{what}: {name} is {a} in the candidate, {b} in the reference"));
        }
    }
    if ours.rows != theirs.rows {
        causes.push(format!(
            "the batch: the row was computed in a step of {} rows in the candidate, of {} in the reference",
            ours.rows, theirs.rows
        ));
    }
    let [a, b] = [candidate, reference].map(|dump| dump.producer().version.clone());
    if a != b {
        let told = |version: Option<String>| version.unwrap_or_else(|| "an unknown version".to_owned());
        causes.push(format!("the build: {} in the candidate, {} in the reference", told(a), told(b)));
    }
    // A node of another form is no node of both graphs.
    if let (true, Some(a), Some(b)) = (causes.is_empty(), &ours.choices, &theirs.choices)
        && a != b
    {
        causes
            .push(format!("the kernel or the type of the cache: {a} in the candidate, {b} in the reference"));
    }
    Ok(match causes.is_empty() {
        false => format!("what moved it is {}", causes.join("; ")),
        true => "the same op of the same build in a step of the same size: threads, a kernel that is chosen anew, or what was not \
                 recorded before it"
            .to_owned(),
    })
}
