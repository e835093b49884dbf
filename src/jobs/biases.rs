//! Whether what a dump calls a product holds the bias too.
//!
//! Engines name both alike: `blk.0.attn_q` is the product of candle's loader and the sum of tinygrad's, and a hook on a
//! module of Hugging Face sees the sum, of the output projection of gpt-oss too. So the values say which it is.

use std::collections::{BTreeSet, HashSet};

use parity_graph::Op;

use crate::audit::{Graphs, Labelled, exact};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::refuse_other;
use parity_dump::Dump;

/// Layers that are looked at, from the first to the last.
const LAYERS_MAX: usize = 4;
/// How many times nearer values must be to one reading than to the other: rounding of any type is a small part of a bias,
/// and what is wrong by as much as the bias itself is near neither.
const NEARER: f64 = 8.0;

/// A product with a weight of the file that a bias is added to.
struct Sum {
    product: Checkpoint,
    /// What it is called with the bias.
    sum: Checkpoint,
    /// The name of the bias.
    bias: String,
}

/// Those of a graph.
fn sums(labelled: &Labelled, gguf: &Gguf) -> Vec<Sum> {
    let graph = &labelled.program.graph;
    let sum = |(id, product)| {
        let reads = |add: &usize| graph.get(*add).op == Op::Add && graph.src(*add, 0) == Some(id);
        let add = graph.computed().find(reads)?;
        let bias = graph.get(graph.src(add, 1)?).name.clone();
        let is_bias = gguf.tensor(&bias).is_some_and(|bias| bias.info.is_plain_vector());
        let sum = labelled.labels.get(add).copied().flatten()?;
        is_bias.then_some(Sum { product, sum, bias })
    };
    labelled.products().filter_map(sum).collect()
}

/// Products that one piece of code names alike.
const TOGETHER: [Kind; 3] = [Kind::QProj, Kind::KProj, Kind::VProj];

/// The first of the kinds that one is named with.
fn named_with(kind: Kind) -> Kind {
    if TOGETHER.contains(&kind) { TOGETHER[0] } else { kind }
}

/// Reads what a dump calls a product as the sum with its bias where it is that in most layers that are looked at and show it,
/// of queries, keys and values together: some may be wrong. The note that a report then has. Dumps that bring their graph are
/// llama.cpp's, and named by it.
///
/// # Errors
/// A weight that cannot be read.
pub fn settle(dump: &mut Dump, gguf: &Gguf) -> Result<Option<String>> {
    let is_own = !dump.manifest().graphs.is_empty();
    let has_biases = || gguf.tensors().any(|info| info.name.ends_with(".bias"));
    if is_own || !has_biases() || refuse_other(gguf, dump.path(), &dump.manifest().model).is_err() {
        return Ok(None);
    }
    let Ok(graphs) = Graphs::built(dump, gguf) else { return Ok(None) };
    let recorded: HashSet<Checkpoint> = Recording::checkpoints(dump).into_iter().collect();
    let kinds: BTreeSet<&str> = recorded.iter().map(|id| id.kind().name()).collect();
    let steps = graphs.steps();
    let Some(&(_, labelled)) = steps.first() else { return Ok(None) };
    let mut concerned = sums(labelled, gguf);
    concerned.retain(|one| recorded.contains(&one.product) && !kinds.contains(one.sum.kind().name()));
    let groups: HashSet<Kind> = concerned.iter().map(|one| named_with(one.product.kind())).collect();
    let mut are_renamed = HashSet::new();
    for group in groups {
        let own: Vec<&Sum> = concerned.iter().filter(|one| named_with(one.product.kind()) == group).collect();
        if are_sums(dump, (&graphs, gguf), &own)? {
            are_renamed.insert(group);
        }
    }
    concerned.retain(|one| are_renamed.contains(&named_with(one.product.kind())));
    let place = |kind: Kind| TOGETHER.iter().position(|known| *known == kind);
    concerned.sort_by_key(|one| place(one.product.kind()).unwrap_or(usize::MAX));
    let mut settled: Vec<String> = Vec::new();
    for one in &concerned {
        let words = format!("{} as {}", one.product.kind().name(), one.sum.kind().name());
        if !settled.contains(&words) {
            settled.push(words);
        }
    }
    dump.rename(|id| concerned.iter().find(|one| one.product == id).map(|one| one.sum));
    let said = settled.join(", ");
    Ok((!said.is_empty())
        .then(|| format!("values with their bias are read as such, whatever they are called: {said}")))
}

/// Whether most of some products that are looked at, of those that show it, are sums.
fn are_sums(dump: &Dump, with: (&Graphs, &Gguf), own: &[&Sum]) -> Result<bool> {
    let layers: BTreeSet<Option<u32>> = own.iter().map(|one| one.product.layer_index()).collect();
    let every = layers.len().div_ceil(LAYERS_MAX).max(1);
    let some: Vec<Option<u32>> = layers.into_iter().step_by(every).collect();
    let mut votes = Vec::new();
    for one in own.iter().filter(|one| some.contains(&one.product.layer_index())) {
        let Some(bias) = with.1.tensor(&one.bias).map(|bias| bias.decode::<f64>()) else { continue };
        votes.extend(is_sum(dump, with, one.product, &bias)?);
    }
    Ok(2 * votes.iter().filter(|is_sum| **is_sum).count() > votes.len())
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
