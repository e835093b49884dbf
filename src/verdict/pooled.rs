//! What a program gets of a pass beside logits: embeddings, pooled. How they are pooled is chosen for the run, by a last node that
//! reads an input of its own, the rows that it picks or their weights, which no node computes.

use std::collections::BTreeSet;

use crate::dump::{Graphs, inputs};
use crate::model::diff::Whose;
use crate::report::{Report, Verdict};
use parity_dump::{Dump, Step};
use parity_graph::{Graph, Id, Leaf, label};

/// A last node: what it does with which nodes' results, and the names of its inputs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Last {
    does: String,
    inputs: Vec<String>,
}

/// The last nodes of a graph that read an input.
fn last_nodes(graph: &Graph) -> BTreeSet<Last> {
    let (labels, names) = (label::labels(graph), label::leaf_names(graph));
    let read: BTreeSet<Id> =
        graph.computed().flat_map(|id| graph.sources(id).flat_map(|from| [from, graph.root(from)])).collect();
    let is_last = |id: &Id| {
        !graph.get(*id).op.is_view() && !read.contains(id) && graph.leaf(graph.root(*id)) != Some(Leaf::State)
    };
    let of = |id: Id| {
        let from = || graph.sources(id).map(|source| graph.origin(source));
        let inputs = from().filter(|source| graph.leaf(*source) == Some(Leaf::Input));
        let inputs: Vec<String> = inputs.filter_map(|leaf| names[leaf].clone()).collect();
        let nodes: Vec<String> = from().filter_map(|source| Some(labels[source]?.to_string())).collect();
        let does = format!("{} of {}", graph.get(id).op.name(), nodes.join(" and "));
        (!inputs.is_empty() && !nodes.is_empty()).then_some(Last { does, inputs })
    };
    graph.computed().filter(is_last).filter_map(of).collect()
}

/// What a last node is, with what it is given in a step.
fn said(dump: &Dump, step: usize, last: &Last) -> String {
    /// Values that are spelt out.
    const SHOWN_MAX: usize = 8;
    let of = |name: &String| {
        let values = dump.leaf(step, name).and_then(inputs::numbers).unwrap_or_default();
        let more = if values.len() > SHOWN_MAX { ", …" } else { "" };
        let shown: Vec<String> =
            values.iter().take(SHOWN_MAX).map(|value| (*value as f32).to_string()).collect();
        format!("{name} [{}{more}]", shown.join(", "))
    };
    format!("{} by {}", last.does, last.inputs.iter().map(of).collect::<Vec<_>>().join(", "))
}

/// The first step of both sides whose last nodes are not the same: its number, and what each side has there.
fn first_apart(sides: [(&Dump, &Graphs); 2]) -> Option<(usize, [String; 2])> {
    let last = sides.map(|(_, graphs)| graphs.all().iter().map(last_nodes).collect::<Vec<_>>());
    let of = |side: usize, number: usize| {
        let (dump, graphs) = sides[side];
        let last = graphs.index_of_step(number).map(|graph| &last[side][graph]);
        last.into_iter().flatten().map(|last| said(dump, number, last)).collect::<Vec<String>>()
    };
    let key = |step: &Step| (step.positions.clone(), step.life.sequences.clone());
    let [ours, theirs] = sides.map(|(dump, _)| &dump.manifest().steps);
    ours.iter().enumerate().find_map(|(number, step)| {
        let other = theirs.iter().position(|other| key(other) == key(step))?;
        let (ours, theirs) = (of(0, number), of(1, other));
        let whole = |side: Vec<String>| if side.is_empty() { "nothing".to_owned() } else { side.join("; ") };
        (ours != theirs).then(|| (number, [whole(ours), whole(theirs)]))
    })
}

/// Says where the programs of two recordings get other things of the same pass.
pub fn weigh_pooled(report: &mut Report, [candidate, reference]: [&Dump; 2]) {
    let (Ok(ours), Ok(theirs)) = (Graphs::read(candidate), Graphs::read(reference)) else { return };
    if ours.all().is_empty() || theirs.all().is_empty() {
        return;
    }
    let Some((step, [ours, theirs])) = first_apart([(candidate, &ours), (reference, &theirs)]) else {
        return;
    };
    let said = format!(
        "the programs do not get the same of step {step}: {} {ours}, {} {theirs}",
        Whose::Candidate,
        Whose::Reference
    );
    match report.verdict {
        Verdict::Divergence => report.notes.push(said),
        Verdict::Parity | Verdict::Undecided => report.diverge_by(said),
    }
}
