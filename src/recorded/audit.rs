//! One recording against exact arithmetic, on the graph that it brings.

use super::computed;
use super::entry::{Known, assemble, entries};
use super::{Foreign, is_left_out, refuse_gaps, side, tried};
use crate::audit::recorded;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::faults::rewritten::diagnose;
use crate::foreign;
use crate::report::Report;
use crate::select::Selection;
use crate::verdict::Gap;
use parity_dump::Dump;

/// Audits a recording.
///
/// # Errors
/// A selection that nothing of the recording fits.
pub fn audit(dump: &Dump, foreign: &Foreign, selection: &Selection, allow_missing: bool) -> Result<Report> {
    let own = foreign.graphs(dump)?;
    let (graphs, judged) = (own.steps(), own.judged(dump, dump));
    let all = recorded::order(&graphs, &|_| true);
    let selected = foreign.selected(all.clone(), selection);
    if selected.is_empty() {
        return Err(Error::new("--layer, --checkpoint", "no node of this recording is selected")
            .expected("a layer of it, or a pattern such as 'blk.0.*'")
            .hint(format!("parity inspect {} lists its nodes", dump.path().display())));
    }
    let findings = recorded::audit(&judged, &graphs, &foreign.gguf, &|_| true, &diagnose)?;
    let shown = |id: Checkpoint| selected.contains(&id);
    let known = all.iter().filter(|id| !is_left_out(**id, &findings, &judged, selection)).map(|&id| Known {
        id,
        comparison: None,
        candidate: findings.nodes.get(&id),
        reference: None,
        across: findings.is_bridged(id),
    });
    let mut report =
        assemble(entries(known, &shown), &graphs, &|id| tried(&findings, id), allow_missing, findings.rows());
    report.candidate = side(dump, Some(dump.path().display().to_string()));
    report.notes.extend(interrupted(dump));
    report.notes.extend(foreign::names_not_understood(dump, "dump"));
    report.notes.extend(computed::notes("the recording", &graphs, &findings));
    foreign.weigh_wiring(&own, &mut report);
    let gaps: Vec<Gap> = Gap::of_steps("dump", dump).into_iter().collect();
    refuse_gaps(&mut report, &gaps, allow_missing);
    Ok(report)
}

/// That a recording is not whole.
pub fn interrupted(dump: &Dump) -> Option<String> {
    let whole = dump.manifest().complete;
    (!whole).then(|| "this is an interrupted recording; what is whole in it was looked at".to_owned())
}
