//! What lies before the first node that is wrong, and that nothing accuses: rounding in a coarser arithmetic than that of the same
//! node in other layers explains it, or its rows were only screened, or nothing says what explains it.
//!
//! What reads it was computed from what it should be, is wrong beside it, and would be accused in its place. So it is judged once
//! more in full, in the rows in which its reader is wrong, by what explains other nodes of its kind: an engine computes them alike
//! in all layers. Where that does not explain it, and its reader is explained without it, it is the one that is wrong.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::super::{AuditRows, Finding, Findings, How, Labelled, Reads, Steps, passes};
use super::{Inputs, Instead, clear, wrong_inputs};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;

/// Names of arithmetics.
type Names = BTreeSet<&'static str>;

/// Accuses what the first wrong node reads where that is so, and clears the reader.
pub fn accuse(
    (steps, graphs, gguf): (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    how: &How<'_>,
    reads: &Reads,
    findings: &mut Findings,
) -> Result<()> {
    let is_wrong = |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(Finding::is_wrong);
    let Some(&first) = findings.order.iter().find(is_wrong) else { return Ok(()) };
    let Some(audit) = findings.nodes[&first].audit() else { return Ok(()) };
    let beyond: HashSet<u32> = audit.rows_beyond.into_iter().collect();
    let open = findings.nodes.iter().filter(|(_, finding)| !finding.is_wrong());
    let open: HashSet<Checkpoint> = open.map(|(id, _)| *id).collect();
    let read = wrong_inputs(first, reads, findings, &open, false).into_iter();
    let known: HashMap<Checkpoint, Names> =
        read.filter_map(|id| Some((id, of_others(id, findings)?))).collect();
    if known.is_empty() {
        return Ok(());
    }
    let wants = |id: Checkpoint| known.contains_key(&id);
    let only = |id: Checkpoint, name: &str| known.get(&id).is_none_or(|names| names.contains(name));
    let again = How { rows: AuditRows::All, wants: &wants, look: None, only: Some(&only), ..*how };
    let chosen = |row: Option<u32>| row.is_some_and(|row| beyond.contains(&row));
    let found = passes::alone(&Instead { steps, of: &|_, _| None, chosen: &chosen }, graphs, gguf, &again)?;
    let accused: HashMap<Checkpoint, Finding> =
        found.nodes.into_iter().filter(|(id, found)| wants(*id) && found.is_wrong()).collect();
    if accused.is_empty() {
        return Ok(());
    }
    let inputs = Inputs::from([(first, accused.keys().copied().collect())]);
    let mut tried = findings.clone();
    tried.nodes.extend(accused);
    clear(&inputs, (steps, graphs, gguf), how.rows, &mut tried)?;
    let is_contradicted = |id: &Checkpoint| tried.nodes[id].contradicted_by == Some(first);
    if inputs[&first].iter().all(is_contradicted) {
        *findings = tried;
    }
    Ok(())
}

/// What explains the healthy nodes of the same kind in other layers; `None` where none is known.
fn of_others(id: Checkpoint, findings: &Findings) -> Option<Names> {
    let others = findings.nodes.iter().filter(|(other, one)| {
        **other != id && other.kind() == id.kind() && one.is_certain() && one.is_healthy()
    });
    let names: Names = others.flat_map(|(_, one)| one.computed_in.iter().copied()).collect();
    (!names.is_empty()).then_some(names)
}
