//! One recording against exact arithmetic, on the graph that it brings.

use super::entry::{Known, assemble, entries};
use super::{Foreign, is_left_out, side};
use crate::audit::recorded;
use crate::error::{Error, Result};
use crate::report::Report;
use crate::select::Selection;
use parity_dump::Dump;

/// Audits a recording.
///
/// # Errors
/// A selection that nothing of the recording fits.
pub fn audit(dump: &Dump, foreign: &Foreign, selection: &Selection, allow_missing: bool) -> Result<Report> {
    let selected = foreign.selected(selection);
    if selected.is_empty() {
        return Err(Error::new("--layer, --checkpoint", "no node of this recording is selected")
            .expected("a layer of it, or a pattern such as 'blk.0.*'")
            .hint(format!("parity inspect {} lists its nodes", dump.path().display())));
    }
    let graphs = foreign.graphs.steps();
    let findings = recorded::audit(dump, &graphs, &foreign.gguf, &|id| selected.contains(&id))?;
    let shown = selected.iter().filter(|id| !is_left_out(**id, &findings, selection));
    let known =
        shown.map(|&id| Known { id, comparison: None, candidate: findings.nodes.get(&id), reference: None });
    let mut report = assemble(entries(known), &graphs, allow_missing, findings.rows_audited());
    report.candidate = side(dump, Some(dump.path().display().to_string()));
    report.notes.extend(interrupted(dump));
    report.notes.push(foreign.note());
    Ok(report)
}

/// That a recording is not whole.
pub fn interrupted(dump: &Dump) -> Option<String> {
    let whole = dump.manifest().complete;
    (!whole).then(|| "this is an interrupted recording; what is whole in it was looked at".to_owned())
}
