//! Whether what a dump calls a product holds the bias too, and embeddings their factor.
//!
//! Engines name both alike: `blk.0.attn_q` is the product of candle's loader and the sum of tinygrad's, and a hook on a
//! module of Hugging Face sees the sum, of the output projection of gpt-oss too; Gemma's table scales its rows as it is read in
//! new releases of transformers, and its model does in old ones. So the values say which it is.

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

/// How one reading of a name comes from the other.
enum Step {
    /// A vector of the file is added, by its name.
    Bias(String),
    /// All is multiplied.
    Factor(f64),
}

/// A node with the one that modules compute together with it.
struct Reading {
    /// What a dump calls it,
    named: Checkpoint,
    /// what it may be instead,
    meant: Checkpoint,
    /// and how that comes from what it is called.
    step: Step,
}

/// Those of a graph: products with a weight of the file that a bias is added to, and embeddings with a factor, either way.
fn readings(labelled: &Labelled, gguf: &Gguf) -> Vec<Reading> {
    let graph = &labelled.program.graph;
    let label = |id: usize| labelled.labels.get(id).copied().flatten();
    let reader = |id, op: Op| {
        graph.computed().find(|&next| graph.get(next).op == op && graph.src(next, 0) == Some(id))
    };
    let sum = |(id, named)| {
        let add = reader(id, Op::Add)?;
        let bias = graph.get(graph.src(add, 1)?).name.clone();
        let is_bias = gguf.tensor(&bias).is_some_and(|bias| bias.info.is_plain_vector());
        let meant = label(add)?;
        is_bias.then_some(Reading { named, meant, step: Step::Bias(bias) })
    };
    let embed = labelled.nodes().find(|(_, id)| id.kind() == Kind::Embed);
    let scaled = embed.and_then(|(id, rows)| {
        let scale = reader(id, Op::Scale)?;
        Some((rows, label(scale)?, f64::from(graph.get(scale).params.float(0))))
    });
    let both = scaled.into_iter().flat_map(|(rows, scaled, factor)| {
        let step = Step::Factor;
        [
            Reading { named: rows, meant: scaled, step: step(factor) },
            Reading { named: scaled, meant: rows, step: step(1.0 / factor) },
        ]
    });
    labelled.products().filter_map(sum).chain(both).collect()
}

/// Products that one piece of code names alike.
const TOGETHER: [Kind; 3] = [Kind::QProj, Kind::KProj, Kind::VProj];

/// The first of the kinds that one is named with.
fn named_with(kind: Kind) -> Kind {
    if TOGETHER.contains(&kind) { TOGETHER[0] } else { kind }
}

/// Reads what a dump calls a product as the sum with its bias where it is that in a layer that is looked at, of queries, keys and
/// values together: in others a mistake may have lost the bias, and no mistake makes a product its sum. And embeddings with or
/// without their factor. The note that a report then has. Dumps that bring their graph are llama.cpp's, and named by it.
///
/// # Errors
/// A weight that cannot be read.
pub fn settle(dump: &mut Dump, gguf: &Gguf) -> Result<Option<String>> {
    let is_own = !dump.manifest().graphs.is_empty();
    if is_own || refuse_other(gguf, dump.path(), &dump.manifest().model).is_err() {
        return Ok(None);
    }
    let Ok(graphs) = Graphs::built(dump, gguf) else { return Ok(None) };
    let recorded: HashSet<Checkpoint> = Recording::checkpoints(dump).into_iter().collect();
    let kinds: BTreeSet<&str> = recorded.iter().map(|id| id.kind().name()).collect();
    let steps = graphs.steps();
    let Some(&(_, labelled)) = steps.first() else { return Ok(None) };
    let mut concerned = readings(labelled, gguf);
    concerned.retain(|one| recorded.contains(&one.named) && !kinds.contains(one.meant.kind().name()));
    let groups: HashSet<Kind> = concerned.iter().map(|one| named_with(one.named.kind())).collect();
    let mut are_renamed = HashSet::new();
    for group in groups {
        let own: Vec<&Reading> =
            concerned.iter().filter(|one| named_with(one.named.kind()) == group).collect();
        if are_meant(dump, (&graphs, gguf), &own)? {
            are_renamed.insert(group);
        }
    }
    concerned.retain(|one| are_renamed.contains(&named_with(one.named.kind())));
    let place = |kind: Kind| TOGETHER.iter().position(|known| *known == kind);
    concerned.sort_by_key(|one| place(one.named.kind()).unwrap_or(usize::MAX));
    let mut settled: Vec<String> = Vec::new();
    for one in &concerned {
        let words = format!("{} as {}", one.named.kind().name(), one.meant.kind().name());
        if !settled.contains(&words) {
            settled.push(words);
        }
    }
    dump.rename(|id| concerned.iter().find(|one| one.named == id).map(|one| one.meant));
    let said = settled.join(", ");
    Ok((!said.is_empty()).then(|| {
        format!("values with their bias or factor are read as such, whatever they are called: {said}")
    }))
}

/// Whether one of some nodes that are looked at shows that it is what they may be instead.
fn are_meant(dump: &Dump, with: (&Graphs, &Gguf), own: &[&Reading]) -> Result<bool> {
    let layers: BTreeSet<Option<u32>> = own.iter().map(|one| one.named.layer_index()).collect();
    let every = layers.len().div_ceil(LAYERS_MAX).max(1);
    let some: Vec<Option<u32>> = layers.into_iter().step_by(every).collect();
    for one in own.iter().filter(|one| some.contains(&one.named.layer_index())) {
        if is_meant(dump, with, one)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the last row of a node is far nearer to what it may be than to what it is called.
fn is_meant(dump: &Dump, (graphs, gguf): (&Graphs, &Gguf), one: &Reading) -> Result<bool> {
    let Some(position) = Recording::positions(dump, one.named).last().copied() else { return Ok(false) };
    let steps = graphs.judged(dump, dump);
    let Some(rows) = exact(&steps, &graphs.steps(), gguf, one.named, &BTreeSet::from([position]))? else {
        return Ok(false);
    };
    let exact = &rows.exact.data;
    let meant: Vec<f64> = match &one.step {
        Step::Factor(factor) => exact.iter().map(|x| x * factor).collect(),
        Step::Bias(bias) => {
            let bias = gguf.tensor(bias).map(|bias| bias.decode::<f64>()).unwrap_or_default();
            exact.iter().zip(bias).map(|(x, bias)| x + bias).collect()
        }
    };
    if meant.len() != exact.len() {
        return Ok(false);
    }
    let from = |values: &[f64]| -> f64 {
        rows.recorded.data.iter().zip(values).map(|(recorded, x)| (recorded - x).powi(2)).sum()
    };
    Ok(NEARER * NEARER * from(&meant) < from(exact))
}
