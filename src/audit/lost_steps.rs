//! Positions that a recording has no step of, before those that it has: what a node reads of them in a cache nobody knows.
//!
//! A cache is as the recorded steps left it. Where a step before is lost, or where the recording begins with a later one,
//! keys and values of its positions are not there, and an attention that sees them cannot be judged. One that does not see
//! them, as behind a sliding window, can: its mask shows how many positions a row sees, and these are the last ones.

use std::ops::Range;

use parity_graph::{Graph, Id, Op};

use super::{Labelled, Steps};
use crate::engine::op_by_op::Unknown;

/// The positions before the last one of a step that no step up to it computes, in runs.
pub fn before(steps: &dyn Steps, step: usize) -> Vec<Range<u32>> {
    if steps.knows_caches(step) {
        return Vec::new();
    }
    let mut known: Vec<u32> = (0..=step).flat_map(|step| steps.positions(step)).collect();
    known.sort_unstable();
    let last = steps.positions(step).into_iter().max().unwrap_or_default();
    let (mut next, mut lost) = (0, Vec::new());
    for position in known.into_iter().take_while(|position| *position <= last) {
        if next < position {
            lost.push(next..position);
        }
        next = position.saturating_add(1);
    }
    lost
}

/// Runs of positions in words.
fn spell(runs: &[Range<u32>]) -> String {
    let run = |run: &Range<u32>| match run.len() {
        1 => run.start.to_string(),
        _ => format!("{} to {}", run.start, run.end - 1),
    };
    let noun = if runs.len() == 1 && runs[0].len() == 1 { "position" } else { "positions" };
    format!("{noun} {}", runs.iter().map(run).collect::<Vec<_>>().join(", "))
}

/// Why what a node reads is not known, where it reads a cache in which positions are `lost` that it sees.
pub fn read_by(
    lost: &[Range<u32>],
    (steps, step): (&dyn Steps, usize),
    labelled: &Labelled,
    id: Id,
) -> Option<Unknown> {
    if lost.is_empty() || !reads_cache(labelled, id) {
        return None;
    }
    let graph = &labelled.program.graph;
    let attends = matches!(graph.get(id).op, Op::MulMat | Op::FlashAttn);
    let seen = if attends { first_seen(steps, step, labelled, id) } else { 0 };
    let of_seen = |run: &Range<u32>| run.start.max(seen)..run.end;
    let lost: Vec<Range<u32>> = lost.iter().map(of_seen).filter(|run| !run.is_empty()).collect();
    let what = if attends { "keys and values" } else { "states" };
    (!lost.is_empty()).then(|| Unknown::lost(format!("{what} of {}", spell(&lost))))
}

/// Whether a node reads memory that is kept from step to step, as it is or copied.
fn reads_cache(labelled: &Labelled, id: Id) -> bool {
    let (program, graph) = (&labelled.program, &labelled.program.graph);
    let is_kept = |source: Id| program.is_written(graph.root(source));
    graph.sources(id).filter(|source| *source != id).any(|s| is_kept(s) || is_kept(graph.origin(s)))
}

/// The first position that any token of a step sees in an attention; 0 where nothing shows it.
fn first_seen(steps: &dyn Steps, step: usize, labelled: &Labelled, id: Id) -> u32 {
    let graph = &labelled.program.graph;
    let of_mask = || {
        let leaf = graph.origin(mask(graph, id)?);
        let values = labelled.input(steps, step, leaf)?;
        let rows = values.chunks(graph.get(leaf).ne[0].max(1));
        let first = |(position, row): (u32, &[f64])| {
            let seen = row.iter().filter(|value| **value != f64::NEG_INFINITY).count();
            (position + 1).saturating_sub(u32::try_from(seen).unwrap_or(u32::MAX))
        };
        let positions = steps.positions(step);
        (rows.len() >= positions.len()).then(|| positions.into_iter().zip(rows).map(first).min())?
    };
    of_mask().unwrap_or_default()
}

/// The mask of the attention that a node is, or is a product of.
fn mask(graph: &Graph, id: Id) -> Option<Id> {
    let softmax = |id: &Id| graph.get(*id).op == Op::SoftMax;
    if graph.get(id).op == Op::FlashAttn {
        return graph.src(id, 3);
    }
    // Probabilities are what values are weighed with; scores lead to them through what is done element by element.
    if let Some(weights) = graph.sources(id).map(|source| graph.origin(source)).find(softmax) {
        return graph.src(weights, 1);
    }
    let mut reached = vec![id];
    for user in graph.computed().filter(|user| *user > id) {
        if !graph.sources(user).any(|source| reached.contains(&source)) {
            continue;
        }
        match &graph.get(user).op {
            Op::SoftMax => return graph.src(user, 1),
            op if op.is_view() || op.is_copy() => reached.push(user),
            Op::Scale | Op::Tanh | Op::Add | Op::Mul | Op::Clamp => reached.push(user),
            _ => {}
        }
    }
    None
}
