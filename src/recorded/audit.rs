//! One recording against exact arithmetic, on the graph that it brings.

use super::entry::{Known, assemble, entries};
use super::{Foreign, is_left_out, side, tried};
use crate::audit::recorded;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::faults::rewritten::diagnose;
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
    let findings = recorded::audit(dump, &graphs, &foreign.gguf, &|_| true, &diagnose)?;
    let all = foreign.all();
    let shown = |id: Checkpoint| selected.contains(&id);
    let known = all.iter().filter(|id| !is_left_out(**id, &findings, selection)).map(|&id| Known {
        id,
        comparison: None,
        candidate: findings.nodes.get(&id),
        reference: None,
        across: findings.is_bridged(id),
    });
    let mut report = assemble(
        entries(known, &shown),
        &graphs,
        &|id| tried(&findings, id),
        allow_missing,
        findings.rows(),
    );
    report.candidate = side(dump, Some(dump.path().display().to_string()));
    report.notes.extend(interrupted(dump));
    foreign.weigh_wiring(&mut report);
    Ok(report)
}

/// That a recording is not whole.
pub fn interrupted(dump: &Dump) -> Option<String> {
    let whole = dump.manifest().complete;
    (!whole).then(|| "this is an interrupted recording; what is whole in it was looked at".to_owned())
}
