//! Whether queries and keys of a dump lie in Hugging Face's order, where the model file has pairs side by side.
//!
//! Conversion to GGUF reorders the rows of q and k of the `llama` architecture, because llama.cpp turns neighbours. An
//! engine that loads the Hugging Face weights and turns halves computes the same attention from other rows.

use std::collections::BTreeSet;

use crate::audit::{Graphs, exact};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::engine::fused::graph::Pairing;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::{builders, refuse_other};
use crate::tensor::Matrix;
use parity_dump::Dump;

/// Layers that are looked at, from the first to the last.
const LAYERS_MAX: usize = 8;
/// ‖recorded - exact‖ / ‖exact‖ up to which rows are in an order: engines in any arithmetic are nearer, and rows in
/// another order are as far as rows of anything, sqrt(2).
const NEAR: f64 = 0.25;

/// What a report says of it.
const NOTE: &str = "rows of q and k are in Hugging Face order: compared after reordering";

/// Reads the queries and keys of a dump as the model file has them, where they lie in Hugging Face's order; the note
/// that a report then has. Dumps that bring their graph are llama.cpp's, and in the file's order.
///
/// # Errors
/// A weight that cannot be read.
pub fn settle(dump: &mut Dump, gguf: &Gguf) -> Result<Option<String>> {
    let architecture = gguf.str("general.architecture")?.unwrap_or_default();
    if !dump.manifest().graphs.is_empty() || builders::pairing(architecture) != Some(Pairing::Interleaved) {
        return Ok(None);
    }
    let Ok(graphs) = Graphs::built(dump, gguf) else { return Ok(None) };
    if refuse_other(gguf, dump.path(), &dump.manifest().model).is_err() {
        return Ok(None);
    }
    let nodes: Vec<_> =
        graphs.labelled().iter().flat_map(|graph| graph.nodes().map(move |node| (graph, node))).collect();
    let layers =
        nodes.iter().filter_map(|(_, (_, id))| id.layer_index()).max().map_or(0, |last| last as usize + 1);
    let keys = nodes.iter().find(|(_, (_, id))| id.kind() == Kind::KRope);
    let width = keys.map_or(0, |(graph, (node, _))| graph.program.graph.get(*node).shape()[3]);
    let (mut as_filed, mut reordered) = (0, 0);
    for layer in (0..layers).step_by(layers.div_ceil(LAYERS_MAX).max(1)) {
        for kinds in [[Kind::QProj, Kind::Q, Kind::QRope], [Kind::KProj, Kind::K, Kind::KRope]] {
            let found = kinds.into_iter().map(|kind| Checkpoint::layer(kind, layer as u32));
            for checkpoint in
                found.filter(|checkpoint| !Recording::positions(dump, *checkpoint).is_empty()).take(1)
            {
                match order(dump, (&graphs, gguf), checkpoint, width)? {
                    Some(Order::AsFiled) => as_filed += 1,
                    Some(Order::Halves) => reordered += 1,
                    None => {}
                }
            }
        }
    }
    if reordered <= as_filed {
        return Ok(None);
    }
    let concerned = [Kind::QProj, Kind::Q, Kind::QRope, Kind::KProj, Kind::K, Kind::KRope];
    dump.read_halves_as_pairs(width, |checkpoint| concerned.contains(&checkpoint.kind()));
    Ok(Some(NOTE.to_owned()))
}

/// In which order rows lie.
enum Order {
    AsFiled,
    Halves,
}

/// The order of one tensor; `None` where its values are near neither. What is rotated shows it at position 0, where
/// nothing is.
fn order(
    dump: &Dump,
    (graphs, gguf): (&Graphs, &Gguf),
    checkpoint: Checkpoint,
    width: usize,
) -> Result<Option<Order>> {
    let rotated = matches!(checkpoint.kind(), Kind::QRope | Kind::KRope);
    let recorded = Recording::positions(dump, checkpoint);
    let position = if rotated { recorded.first().filter(|first| **first == 0) } else { recorded.last() };
    let Some(&position) = position else { return Ok(None) };
    let (steps, positions) = (graphs.judged(dump, dump), BTreeSet::from([position]));
    let Some(rows) = exact(&steps, &graphs.steps(), gguf, checkpoint, &positions)? else { return Ok(None) };
    let halves = in_halves(&rows.exact, width);
    Ok(match (near(&rows.recorded, &rows.exact), near(&rows.recorded, &halves)) {
        (true, false) => Some(Order::AsFiled),
        (false, true) => Some(Order::Halves),
        _ => None,
    })
}

fn near(recorded: &Matrix<f64>, exact: &Matrix<f64>) -> bool {
    let (mut far, mut size) = (0.0, 0.0);
    for (a, b) in recorded.data.iter().zip(&exact.data) {
        far += (a - b).powi(2);
        size += b * b;
    }
    far.sqrt() <= NEAR * size.sqrt()
}

/// Heads (E/2, 2) as (2, E/2).
fn in_halves(rows: &Matrix<f64>, width: usize) -> Matrix<f64> {
    let half = width / 2;
    let from = |at: usize| at / width * width + at % width % half.max(1) * 2 + at % width / half.max(1);
    let whole = rows.data.len() / width.max(1) * width;
    let mut out = rows.clone();
    if width.is_multiple_of(2) && width > 0 {
        (0..whole).for_each(|at| out.data[at] = rows.data[from(at)]);
    }
    out
}
