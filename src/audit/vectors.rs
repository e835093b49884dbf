//! Engines that keep the vectors of a model, weights of norms and biases, in a narrower type than the file: a loader that
//! converts whatever it reads. Every node that reads one is then off alike, which is one finding and no bug of a node.

use std::collections::BTreeSet;

use parity_graph::Op;

use super::{Exact, Labelled, Steps, exact};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;

/// Nodes that are looked at, from the first to the last.
const NODES_MAX: usize = 8;
/// Rows of each.
const ROWS_MAX: usize = 4;
/// How much of a node's error rounded vectors must leave at most, in all that are looked at: half of its square where values
/// are kept in the same type as vectors, and next to nothing in f32.
const LEFT: f64 = 0.81;

/// The type that a producer keeps vectors in, where all nodes that are looked at show it, and the model file as it reads it.
///
/// # Errors
/// A file that cannot be read.
pub fn kept(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
) -> Result<Option<(Storage, Gguf)>> {
    if steps.is_own_graph() {
        return Ok(None);
    }
    let nodes = readers(steps, graphs, gguf);
    if nodes.len() < 2 {
        return Ok(None);
    }
    let as_filed = errors(steps, graphs, gguf, &nodes)?;
    for storage in [Storage::F16, Storage::Bf16] {
        let Some(rounded) = gguf.with_vectors_in(storage)? else { continue };
        let errors = errors(steps, graphs, &rounded, &nodes)?;
        let pairs: Vec<(f64, f64)> =
            as_filed.iter().zip(&errors).filter_map(|(a, b)| a.zip(*b)).filter(|(a, b)| a != b).collect();
        if pairs.len() >= 2 && pairs.iter().all(|(filed, rounded)| *rounded <= LEFT * filed) {
            return Ok(Some((storage, rounded)));
        }
    }
    Ok(None)
}

/// Some recorded nodes that read a vector of the file, each with positions that were recorded of it.
fn readers(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
) -> Vec<(Checkpoint, BTreeSet<u32>)> {
    let Some(&(step, labelled)) = graphs.first() else { return Vec::new() };
    let graph = &labelled.program.graph;
    let is_vector = |name: &str| gguf.tensor(name).is_some_and(|tensor| tensor.info.is_plain_vector());
    let all: Vec<(Checkpoint, BTreeSet<u32>)> = labelled
        .nodes()
        .filter(|(id, _)| {
            matches!(graph.get(*id).op, Op::Mul | Op::Add)
                && graph.sources(*id).any(|source| is_vector(&graph.get(source).name))
        })
        .filter_map(|(_, checkpoint)| {
            let positions = steps.tensor(step, checkpoint)?.positions;
            let every = positions.len().div_ceil(ROWS_MAX).max(1);
            Some((checkpoint, positions.into_iter().step_by(every).collect()))
        })
        .collect();
    let every = all.len().div_ceil(NODES_MAX).max(1);
    all.into_iter().step_by(every).collect()
}

/// Of each node the squared error of what was recorded; `None` where that cannot be said.
fn errors(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    nodes: &[(Checkpoint, BTreeSet<u32>)],
) -> Result<Vec<Option<f64>>> {
    let square = |rows: Exact| -> f64 {
        rows.recorded.data.iter().zip(&rows.exact.data).map(|(a, b)| (a - b).powi(2)).sum()
    };
    let error = |(id, positions): &(Checkpoint, BTreeSet<u32>)| -> Result<Option<f64>> {
        Ok(exact(steps, graphs, gguf, *id, positions)?.map(square).filter(|square| square.is_finite()))
    };
    nodes.iter().map(error).collect()
}
