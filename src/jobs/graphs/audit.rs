//! One recording against exact arithmetic, on the graph that it brings or that is built for it.

use super::{ByGraph, nothing_selected};
use crate::audit::recorded::{self, How, Steps};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::rewritten::diagnose;
use crate::jobs::audit::Options;
use crate::jobs::{notes_of, path_of};
use crate::model::diff::Whose;
use crate::report::Report;
use crate::verdict::recorded::{
    Known, assemble, entries, is_left_out, left_out, not_looked_at, notes, refuse_gaps, tried,
};
use crate::verdict::{self, Gap};
use parity_dump::Dump;

/// Audits a recording.
///
/// # Errors
/// A selection that nothing of the recording fits.
pub fn audit(dump: &Dump, by: &ByGraph<'_>, options: &Options) -> Result<Report> {
    let Options { selection, rows, allow_missing } = options;
    let own = by.graphs(dump)?;
    let (graphs, judged) = (own.steps(), own.judged(dump, dump));
    let all = recorded::order(&graphs, &|_| true);
    let selected = selection.of_graph(all.iter().copied());
    if selected.is_empty() {
        return Err(nothing_selected(dump));
    }
    let how = How { rows: *rows, wants: &|_| true, diagnose: &diagnose };
    let findings = recorded::audit(&judged, &graphs, by.gguf, &how)?;
    let shown = |id: Checkpoint| selected.contains(&id);
    let (unseen, seen): (Vec<Checkpoint>, Vec<Checkpoint>) =
        all.iter().partition(|id| is_left_out(**id, &findings, &judged, selection));
    let known = seen.into_iter().map(|id| Known {
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
        *allow_missing,
        findings.rows(),
    );
    report.candidate = verdict::side(dump, path_of(dump));
    report.notes.extend(notes_of(dump, "dump"));
    let unseen: Vec<_> = unseen.into_iter().filter(|id| shown(*id)).collect();
    report.notes.extend(left_out("the dump", &unseen, &Recording::checkpoints(dump), &[]));
    report.notes.extend(not_looked_at("the dump", &Recording::checkpoints(dump), &all));
    report.notes.extend(notes("the recording", &graphs, &findings, judged.declared()));
    by.weigh_wiring(&[(Whose::Recorded, &own)], &mut report);
    // The rows that a graph brought along has are those that were computed.
    let built = all.iter().copied().filter(|id| own.are_built() && shown(*id));
    let gaps: Vec<Gap> =
        Gap::of_dump("dump", dump).into_iter().chain(Gap::of_rows("dump", dump, built)).collect();
    refuse_gaps(&mut report, &gaps, *allow_missing);
    Ok(report)
}
