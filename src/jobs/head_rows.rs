//! Whether queries and keys of a dump lie in Hugging Face's order, where the model file has pairs side by side.
//!
//! Conversion to GGUF reorders the rows of q and k of the `llama` architecture, because llama.cpp turns neighbours. An
//! engine that loads the Hugging Face weights and turns halves computes the same attention from other rows.

use crate::audit::Context;
use crate::audit::case::gather;
use crate::audit::judge::PLAIN;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::model::file::ModelFile;
use crate::model::graph::Pairing;
use crate::model::{Model, builders};
use crate::numerics::Numerics;
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
pub fn settle(dump: &mut Dump, file: &ModelFile) -> Result<Option<String>> {
    let ModelFile::Nodes(model) = file else { return Ok(None) };
    if !dump.manifest().graphs.is_empty() {
        return Ok(None);
    }
    let pairs = builders::pairing(model.config.architecture.name()) == Some(Pairing::Interleaved);
    if !pairs || model.refuse_other(dump.path(), &dump.manifest().model).is_err() {
        return Ok(None);
    }
    let (mut as_filed, mut reordered) = (0, 0);
    let layers = model.config.dims.layers;
    for layer in (0..layers).step_by(layers.div_ceil(LAYERS_MAX).max(1)) {
        for kinds in [[Kind::QProj, Kind::Q, Kind::QRope], [Kind::KProj, Kind::K, Kind::KRope]] {
            let found = kinds.into_iter().map(|kind| Checkpoint::layer(kind, layer as u32));
            for checkpoint in
                found.filter(|checkpoint| !Recording::positions(dump, *checkpoint).is_empty()).take(1)
            {
                match order(dump, model, checkpoint)? {
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
    dump.read_halves_as_pairs(model.config.dims.head_width, |checkpoint| {
        concerned.contains(&checkpoint.kind())
    });
    Ok(Some(NOTE.to_owned()))
}

/// In which order rows lie.
enum Order {
    AsFiled,
    Halves,
}

/// The order of one tensor; `None` where its values are near neither. What is turned shows it at position 0, where
/// nothing turns.
fn order(dump: &Dump, model: &Model, checkpoint: Checkpoint) -> Result<Option<Order>> {
    let turned = matches!(checkpoint.kind(), Kind::QRope | Kind::KRope);
    let recorded = Recording::positions(dump, checkpoint);
    let position = if turned { recorded.first().filter(|first| **first == 0) } else { recorded.last() };
    let context = Context {
        gguf: &model.gguf,
        graph: &model.graph,
        recording: dump,
        numerics: Numerics::default(),
        recorded_unit: 0.0,
        fed: None,
    };
    let Some((node, &position)) = model.graph.node(checkpoint).zip(position) else { return Ok(None) };
    let Ok(case) = gather(&context, node, &[position])? else { return Ok(None) };
    let exact = case.execute(&case.node, &model.gguf, &PLAIN)?;
    let width = model.config.dims.head_width;
    Ok(match (near(&case.recorded, &exact), near(&case.recorded, &in_halves(&exact, width))) {
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
