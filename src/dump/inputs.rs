//! Tokens and positions twice: as a manifest names them, and as the inputs of the recorded graphs hold them.

use parity_dump::{Dump, Leaf};
use parity_graph::known::{self, Known};
use parity_graph::{Graph, Id, label};

use super::Graphs;
use crate::error::{Error, Result};

/// Names of the leaves that say what a graph computed: that with the tokens, (T,), and that with the positions, (T,) and maybe
/// further rows behind.
fn of_text(graph: &Graph) -> [Option<String>; 2] {
    let names = label::leaf_names(graph);
    let named = |leaf: Option<Id>| names.get(leaf?)?.clone();
    let Known { tokens, positions, .. } = known::find(graph);
    [named(tokens), named(positions)]
}

/// Refuses a dump whose steps computed other tokens, or at other positions, than its manifest names: by the graph, all its
/// values would be right, of another text. What the recording lacks of this, and a graph that cannot be read, is no matter
/// here.
///
/// # Errors
/// Names the first such step.
pub fn refuse_others(dump: &Dump) -> Result<()> {
    let Ok(graphs) = Graphs::read(dump) else { return Ok(()) };
    let leaves: Vec<_> = graphs.all().iter().map(of_text).collect();
    let manifest = dump.manifest();
    for (number, step) in manifest.steps.iter().enumerate() {
        let Some(graph) = graphs.index_of_step(number).filter(|graph| !graphs.all()[*graph].is_shift())
        else {
            continue;
        };
        let tokens = |position: &u32| manifest.tokens.get(*position as usize).map(|&token| f64::from(token));
        let wanted: [Vec<Option<f64>>; 2] = [
            step.positions.iter().map(tokens).collect(),
            step.at().iter().map(|&position| Some(f64::from(position))).collect(),
        ];
        for ((what, leaf), wanted) in ["tokens", "positions"].iter().zip(&leaves[graph]).zip(&wanted) {
            let Some(found) = leaf.as_deref().and_then(|leaf| numbers(dump.leaf(number, leaf)?)) else {
                continue;
            };
            let found: Vec<Option<f64>> = found.into_iter().map(Some).collect();
            if found.get(..wanted.len()) != Some(wanted) {
                return Err(other(dump, number, what, (wanted, &found)));
            }
        }
    }
    Ok(())
}

fn other(dump: &Dump, step: usize, what: &str, (wanted, found): (&[Option<f64>], &[Option<f64>])) -> Error {
    let at = (0..wanted.len()).find(|&row| found.get(row) != Some(&wanted[row])).unwrap_or(0);
    let said = |value: Option<&Option<f64>>| match value {
        Some(Some(value)) => value.to_string(),
        _ => "none".to_owned(),
    };
    Error::file(dump.path(), format!("step {step} computed other {what} than its manifest names"))
        .expected(format!("{} in row {at}, as the manifest has it", said(wanted.get(at))))
        .found(format!("{} in what the graph was given", said(found.get(at))))
        .hint("a manifest beside the steps of another run? record it again: parity record -o DIR -- CMD…")
}

/// The values of an input, integers as numbers; `None` of a type that inputs do not have.
pub fn numbers(leaf: Leaf<'_>) -> Option<Vec<f64>> {
    let numbers = |size: usize, read: fn(&[u8]) -> f64| leaf.bytes.chunks_exact(size).map(read).collect();
    Some(match leaf.dtype {
        "F32" => numbers(4, |b| f64::from(f32::from_le_bytes(b.try_into().unwrap_or_default()))),
        "F16" => numbers(2, |b| f64::from(half::f16::from_le_bytes(b.try_into().unwrap_or_default()))),
        "BF16" => numbers(2, |b| f64::from(half::bf16::from_le_bytes(b.try_into().unwrap_or_default()))),
        "I32" => numbers(4, |b| f64::from(i32::from_le_bytes(b.try_into().unwrap_or_default()))),
        "I64" => numbers(8, |b| i64::from_le_bytes(b.try_into().unwrap_or_default()) as f64),
        _ => return None,
    })
}
