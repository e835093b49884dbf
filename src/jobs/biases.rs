//! Whether what a dump calls the product of queries, keys or values holds the bias too.
//!
//! Engines name both alike: `blk.0.attn_q` is the product of candle's loader and the sum of tinygrad's, and a hook on a
//! module of Hugging Face sees the sum. So the values say which it is.

use std::collections::BTreeSet;

use parity_graph::weights;

use crate::audit::{Graphs, exact};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::refuse_other;
use parity_dump::Dump;

/// A product, its sum with the bias, and whose weights they are.
const SUMS: [(Kind, Kind, &str); 3] = [
    (Kind::QProj, Kind::Q, weights::ATTN_Q),
    (Kind::KProj, Kind::K, weights::ATTN_K),
    (Kind::VProj, Kind::V, weights::ATTN_V),
];
/// Layers that are looked at, from the first to the last.
const LAYERS_MAX: usize = 4;
/// How many times nearer values must be to one reading than to the other: rounding of any type is a small part of a bias,
/// and what is wrong by as much as the bias itself is near neither.
const NEARER: f64 = 8.0;

/// Reads what a dump calls a product as the sum with its bias where it is that in most layers that are looked at and show it,
/// of queries, keys and values together: some may be wrong. The note that a report then has. Dumps that bring their graph are
/// llama.cpp's, and named by it.
///
/// # Errors
/// A weight that cannot be read.
pub fn settle(dump: &mut Dump, gguf: &Gguf) -> Result<Option<String>> {
    let is_own = !dump.manifest().graphs.is_empty();
    if is_own || refuse_other(gguf, dump.path(), &dump.manifest().model).is_err() {
        return Ok(None);
    }
    let recorded = Recording::checkpoints(dump);
    let has = |kind: Kind| recorded.iter().any(|id| id.kind() == kind);
    let concerned: Vec<_> =
        SUMS.into_iter().filter(|(product, sum, _)| has(*product) && !has(*sum)).collect();
    if concerned.is_empty() {
        return Ok(None);
    }
    let Ok(graphs) = Graphs::built(dump, gguf) else { return Ok(None) };
    let mut votes = Vec::new();
    for (product, _, weight) in &concerned {
        let layers = recorded.iter().filter(|id| id.kind() == *product).filter_map(|id| id.layer_index());
        let layers: Vec<u32> = layers.collect();
        let every = layers.len().div_ceil(LAYERS_MAX).max(1);
        for layer in layers.into_iter().step_by(every) {
            let bias = gguf.tensor(&weights::bias(&weights::in_layer(layer as usize, weight)));
            let Some(bias) = bias.map(|bias| bias.decode::<f64>()) else { continue };
            votes.extend(is_sum(dump, (&graphs, gguf), Checkpoint::layer(*product, layer), &bias)?);
        }
    }
    // One piece of code names queries, keys and values alike.
    if 2 * votes.iter().filter(|is_sum| **is_sum).count() <= votes.len() {
        return Ok(None);
    }
    let mut settled = Vec::new();
    for (product, sum, _) in concerned {
        dump.rename(|id| (id.kind() == product).then(|| id.sibling(sum)));
        settled.push(format!("{} as {}", product.name(), sum.name()));
    }
    let said = settled.join(", ");
    Ok(Some(format!("values with their bias are read as such, whatever they are called: {said}")))
}

/// Whether the last row of a product is far nearer to the exact one with a bias than without, or the other way round; `None`
/// where it is neither, or where that is not known.
fn is_sum(
    dump: &Dump,
    (graphs, gguf): (&Graphs, &Gguf),
    id: Checkpoint,
    bias: &[f64],
) -> Result<Option<bool>> {
    let Some(position) = Recording::positions(dump, id).last().copied() else { return Ok(None) };
    let steps = graphs.judged(dump, dump);
    let Some(rows) = exact(&steps, &graphs.steps(), gguf, id, &BTreeSet::from([position]))? else {
        return Ok(None);
    };
    if rows.exact.cols != bias.len() {
        return Ok(None);
    }
    let (mut with, mut without) = (0.0, 0.0);
    for ((recorded, exact), bias) in rows.recorded.data.iter().zip(&rows.exact.data).zip(bias) {
        without += (recorded - exact).powi(2);
        with += (recorded - exact - bias).powi(2);
    }
    let is_nearer = |a: f64, b: f64| NEARER * NEARER * a < b;
    Ok((is_nearer(with, without) || is_nearer(without, with)).then_some(with < without))
}
