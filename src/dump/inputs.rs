//! Tokens and positions twice: as a manifest names them, and as the inputs of the recorded graphs hold them.

use parity_dump::Dump;
use parity_graph::known::{self, Known};
use parity_graph::{Id, label};

use super::Graphs;
use crate::error::{Error, Result};

/// The inputs of one graph that say what was computed.
struct Inputs {
    /// Name of the leaf with the tokens, (T,), and of that with the positions, (T,) and maybe further rows behind.
    leaves: [Option<String>; 2],
}

impl Inputs {
    fn of(graph: &parity_graph::Graph) -> Inputs {
        let names = label::leaf_names(graph);
        let named = |leaf: Option<Id>| names.get(leaf?)?.clone();
        let Known { tokens, positions, .. } = known::find(graph);
        Inputs { leaves: [named(tokens), named(positions)] }
    }
}

/// Refuses a dump whose steps computed other tokens, or at other positions, than its manifest names: by the graph, all its
/// values would be right, of another text. What the recording lacks of this, and a graph that cannot be read, is no matter
/// here.
///
/// # Errors
/// Names the first such step.
pub fn refuse_others(dump: &Dump) -> Result<()> {
    let Ok(graphs) = Graphs::read(dump) else { return Ok(()) };
    let inputs: Vec<Inputs> = graphs.all().iter().map(Inputs::of).collect();
    let manifest = dump.manifest();
    for (number, step) in manifest.steps.iter().enumerate() {
        let Some(graph) = graphs.index_of_step(number) else { continue };
        let tokens = |position: &u32| manifest.tokens.get(*position as usize).map(|&token| i64::from(token));
        let wanted: [Vec<Option<i64>>; 2] = [
            step.positions.iter().map(tokens).collect(),
            step.positions.iter().map(|&position| Some(i64::from(position))).collect(),
        ];
        for ((what, leaf), wanted) in ["tokens", "positions"].iter().zip(&inputs[graph].leaves).zip(&wanted) {
            let Some(found) = leaf.as_deref().and_then(|leaf| integers(dump, number, leaf)) else { continue };
            let found: Vec<Option<i64>> = found.into_iter().map(Some).collect();
            if found.get(..wanted.len()) != Some(wanted) {
                return Err(other(dump, number, what, (wanted, &found)));
            }
        }
    }
    Ok(())
}

fn other(dump: &Dump, step: usize, what: &str, (wanted, found): (&[Option<i64>], &[Option<i64>])) -> Error {
    let at = (0..wanted.len()).find(|&row| found.get(row) != Some(&wanted[row])).unwrap_or(0);
    let said = |value: Option<&Option<i64>>| match value {
        Some(Some(value)) => value.to_string(),
        _ => "none".to_owned(),
    };
    Error::file(dump.path(), format!("step {step} computed other {what} than its manifest names"))
        .expected(format!("{} in row {at}, as the manifest has it", said(wanted.get(at))))
        .found(format!("{} in what the graph was given", said(found.get(at))))
        .hint("a manifest beside the steps of another run? record it again: parity record -o DIR -- CMD…")
}

/// The values of an input of integers.
fn integers(dump: &Dump, step: usize, leaf: &str) -> Option<Vec<i64>> {
    let leaf = dump.leaf(step, leaf)?;
    match leaf.dtype {
        "I32" => Some(leaf.bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect()),
        "I64" => Some(leaf.bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        _ => None,
    }
}
