//! One dump against exact arithmetic, on the graph that it brings or that is built for it.

use super::graphs::{ByGraph, nothing_selected};
use super::{notes_of, path_of, put_in_words, refuse_no_numbers, settle, with_matrices};
use crate::audit::AuditRows;
use crate::audit::{self, How, Steps};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::engine::fused::file::ModelFile;
use crate::error::Result;
use crate::faults::diagnosis::diagnose;
use crate::model::diff::Whose;
use crate::report::Report;
use crate::report::sensitivity::Sensitivity;
use crate::select::Selection;
use crate::sensitivity::{self, Recorded};
use crate::verdict::{self, Gap};
use crate::verdict::{
    Known, assemble, entries, is_left_out, left_out, not_looked_at, notes, refuse_gaps, tried, weigh_masks,
    weigh_precision,
};
use parity_dump::Dump;

/// What is audited.
#[derive(Clone, Default)]
pub struct Options {
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// Token rows that are computed again; the others are screened.
    pub rows: AuditRows,
    /// Whether what the dump lacks is no obstacle to parity.
    pub allow_missing: bool,
}

/// Audits a dump of a model; its queries and keys are read in the file's order afterwards.
///
/// # Errors
/// Another model's dump, a graph that cannot be read, a selection that nothing of the dump fits.
pub fn audit(dump: &mut Dump, file: &ModelFile, options: &Options) -> Result<Report> {
    let settled = settle(dump, file.gguf())?;
    let selection = with_matrices(&options.selection, [&*dump]);
    let options = &Options { selection, ..options.clone() };
    let by = ByGraph::of_dumps(file, &[&*dump])?;
    let mut report = judged(dump, &by, options)?;
    report.notes.extend(by.note_of(&[&*dump]));
    report.notes.extend(settled);
    put_in_words(&mut report, dump, file.gguf())?;
    Ok(report)
}

/// What an audit of the dump can see: mistakes made on purpose, one at a time.
///
/// # Errors
/// Another model's dump, a model that nothing can be said of.
pub fn self_test(
    dump: &mut Dump,
    file: &ModelFile,
    options: &Options,
    progress: &dyn Fn(usize, usize),
) -> Result<Sensitivity> {
    settle(dump, file.gguf())?;
    let by = ByGraph::of_dumps(file, &[&*dump])?;
    let graphs = by.graphs(dump)?;
    let (judged, steps) = (graphs.judged(dump, dump), graphs.steps());
    let wanted = options.selection.of_graph(audit::order(&steps, &|_| true).into_iter());
    let positions = options.rows.positions(&dump.manifest().steps);
    let of = Recorded { steps: &judged, graphs: &steps, gguf: file.gguf() };
    sensitivity::measure(of, &positions, &|checkpoint| wanted.contains(&checkpoint), progress)
}

/// The answer for a dump by itself.
///
/// # Errors
/// A selection that nothing of the dump fits.
pub fn judged(dump: &Dump, by: &ByGraph<'_>, options: &Options) -> Result<Report> {
    let Options { selection, rows, allow_missing } = options;
    let own = by.graphs(dump)?;
    let (graphs, judged) = (own.steps(), own.judged(dump, dump));
    let recorded = Recording::checkpoints(dump);
    let all = audit::order(&graphs, &|_| true);
    let all = audit::with_cut_out(all, &judged, &graphs, &|id| recorded.contains(&id));
    let selected = selection.of_graph(all.iter().copied());
    if selected.is_empty() {
        return Err(nothing_selected(dump));
    }
    let shown = |id: Checkpoint| selected.contains(&id);
    let how = How { rows: *rows, wants: &shown, diagnose: Some(&diagnose), look: None, only: None };
    let findings = audit::audit(&judged, &graphs, by.gguf, &how)?;
    let (unseen, seen): (Vec<Checkpoint>, Vec<Checkpoint>) =
        all.iter().partition(|id| is_left_out(**id, &findings, &judged, selection));
    let known = seen.into_iter().map(|id| Known {
        id,
        comparison: None,
        candidate: findings.nodes.get(&id),
        reference: None,
        across: findings.is_bridged(id),
        carried: None,
        unfinite: findings.unfinite(id, dump),
    });
    let reads = audit::reads(&graphs);
    let found = entries(known, &shown, &reads);
    let tried = |id: Checkpoint| tried(&findings, id);
    let mut report = assemble(found, &reads, &tried, *allow_missing, findings.rows());
    report.candidate = verdict::side(dump, path_of(dump));
    report.notes.extend(notes_of(dump, "dump"));
    let unseen: Vec<_> = unseen.into_iter().filter(|id| shown(*id)).collect();
    report.notes.extend(left_out("the dump", &unseen, &Recording::checkpoints(dump), &[]));
    report.notes.extend(not_looked_at("the dump", &Recording::checkpoints(dump), &all));
    report.notes.extend(notes("the recording", &graphs, &findings, judged.declared()));
    weigh_precision(&mut report, &graphs, &findings, dump);
    by.weigh_wiring(&[(Whose::Recorded, &own)], &mut report);
    // The rows that a graph brought along has are those that were computed.
    let built = all.iter().copied().filter(|id| own.are_built() && shown(*id));
    let gaps: Vec<Gap> =
        Gap::of_dump("dump", dump).into_iter().chain(Gap::of_rows("dump", dump, built)).collect();
    weigh_masks(&mut report, &[(Whose::Recorded, dump)], Some(by.gguf));
    refuse_gaps(&mut report, &gaps, *allow_missing);
    refuse_no_numbers(&mut report, &[dump]);
    Ok(report)
}
