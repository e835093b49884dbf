//! Engines that keep weights in a narrower type than the file: a loader that converts whatever it reads, or the weights of norms
//! and biases alone. Every node that reads one is then off alike, which is one finding and no bug of a node.

use std::collections::BTreeSet;

use parity_graph::{Id, Op};

use super::{Exact, Labelled, Steps, exact};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::{Gguf, Loaded};
use crate::numerics::Storage;

/// Nodes that are looked at, from the first to the last.
const NODES_MAX: usize = 8;
/// Matmuls that are, which cost more.
const MATMULS_MAX: usize = 3;
/// Rows of each.
const ROWS_MAX: usize = 4;
/// How much of a node's error rounded weights must leave at most, in all that are looked at: half of its square where values
/// are kept in the same type, and next to nothing in f32.
const LEFT: f64 = 0.81;

/// What is looked at of a node: its recorded rows at some positions.
type Sampled = (Checkpoint, BTreeSet<u32>);

/// What a producer rounds as it loads it, where all nodes that are looked at show it, and the model file as it reads it.
///
/// # Errors
/// A file that cannot be read.
pub fn kept(steps: &dyn Steps, graphs: &[(usize, &Labelled)], gguf: &Gguf) -> Result<Option<(Loaded, Gguf)>> {
    if steps.is_own_graph() {
        return Ok(None);
    }
    let is_vector = |name: &str| gguf.tensor(name).is_some_and(|tensor| tensor.info.is_plain_vector());
    let is_matrix = |name: &str| gguf.tensor(name).is_some() && !is_vector(name);
    let reads = |labelled: &Labelled, id: Id, is: &dyn Fn(&str) -> bool| {
        let graph = &labelled.program.graph;
        graph.sources(id).any(|source| is(&graph.get(source).name))
    };
    let vectors = sampled(steps, graphs, NODES_MAX, |labelled, id, op| {
        matches!(op, Op::Mul | Op::Add) && reads(labelled, id, &is_vector)
    });
    let rows =
        sampled(steps, graphs, 1, |labelled, id, op| *op == Op::GetRows && reads(labelled, id, &is_matrix));
    let matmuls = sampled(steps, graphs, MATMULS_MAX, |labelled, id, op| {
        matches!(op, Op::MulMat | Op::MulMatId) && reads(labelled, id, &is_matrix)
    });
    let shows = |loaded: Loaded, nodes: &[Sampled]| shows(steps, graphs, gguf, loaded, nodes);
    let mut loaded = Loaded::default();
    for storage in [Storage::F16, Storage::Bf16] {
        let of_vectors = Loaded { vectors: Some(storage), matrices: None };
        if loaded.vectors.is_none() && vectors.len() > 1 && shows(of_vectors, &vectors)? {
            loaded.vectors = Some(storage);
        }
        // Rows of a table are exact: they alone tell whether the others are worth their cost, and none of them is a mistake of a
        // single node where matmuls read rounded weights too.
        let of_matrices = Loaded { vectors: None, matrices: Some(storage) };
        if loaded.matrices.is_none() && shows(of_matrices, &rows)? && shows(of_matrices, &matmuls)? {
            loaded.matrices = Some(storage);
        }
    }
    Ok(gguf.loaded(loaded)?.map(|gguf| (loaded, gguf)))
}

/// Whether all of some nodes that this changes are nearer to the file as it is loaded so than to the file, and these are more
/// than one or all.
fn shows(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    loaded: Loaded,
    nodes: &[Sampled],
) -> Result<bool> {
    let Some(loaded) = gguf.loaded(loaded)?.filter(|_| !nodes.is_empty()) else { return Ok(false) };
    let [filed, rounded] = [errors(steps, graphs, gguf, nodes)?, errors(steps, graphs, &loaded, nodes)?];
    let pairs: Vec<(f64, f64)> =
        filed.into_iter().zip(rounded).filter_map(|(a, b)| a.zip(b)).filter(|(a, b)| a != b).collect();
    Ok(pairs.len() >= nodes.len().min(2) && pairs.iter().all(|(filed, rounded)| *rounded <= LEFT * filed))
}

/// Some recorded nodes of a kind, each with positions that were recorded of it.
fn sampled(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    most: usize,
    is: impl Fn(&Labelled, Id, &Op) -> bool,
) -> Vec<Sampled> {
    let Some(&(step, labelled)) = graphs.first() else { return Vec::new() };
    let nodes = labelled.nodes().filter(|(id, _)| is(labelled, *id, &labelled.program.graph.get(*id).op));
    let with_rows = |(_, checkpoint): (Id, Checkpoint)| {
        let positions = steps.tensor(step, checkpoint)?.positions;
        let every = positions.len().div_ceil(ROWS_MAX).max(1);
        Some((checkpoint, positions.into_iter().step_by(every).collect()))
    };
    let all: Vec<Sampled> = nodes.filter_map(with_rows).collect();
    let every = all.len().div_ceil(most).max(1);
    all.into_iter().step_by(every).collect()
}

/// Of each node the squared error of what was recorded; `None` where that cannot be said.
fn errors(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    nodes: &[Sampled],
) -> Result<Vec<Option<f64>>> {
    let square = |rows: Exact| -> f64 {
        rows.recorded.data.iter().zip(&rows.exact.data).map(|(a, b)| (a - b).powi(2)).sum()
    };
    let error = |(id, positions): &Sampled| -> Result<Option<f64>> {
        Ok(exact(steps, graphs, gguf, *id, positions)?.map(square).filter(|square| square.is_finite()))
    };
    nodes.iter().map(error).collect()
}
