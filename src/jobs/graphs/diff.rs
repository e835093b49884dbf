//! Two recordings, at least one of which brings a graph: compared by name, each side audited.

use super::ByGraph;
use crate::audit::AuditRows;
use crate::audit::recorded::{self, Findings, How, Judged, Steps};
use crate::checkpoint::Checkpoint;
use crate::compare;
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::rewritten::diagnose;
use crate::jobs::diff::Options;
use crate::jobs::{notes_of, path_of};
use crate::model::diff::Whose;
use crate::report::{Report, Verdict};
use crate::verdict::recorded::{
    Known, assemble, entries, is_left_out, left_out, not_compared, not_looked_at, notes, refuse_gaps, tried,
};
use crate::verdict::{self, Gap};
use parity_dump::Dump;

/// The two sides.
pub struct Sides<'a> {
    /// The side that is judged.
    pub candidate: &'a Dump,
    /// The side that it is compared with; its graph, where the candidate brings none, is the candidate's too.
    pub reference: &'a Dump,
}

/// Compares, and judges at so many `rows`.
///
/// # Errors
/// A graph of the candidate that cannot be read.
pub fn diff(sides: &Sides<'_>, by: &ByGraph<'_>, rows: AuditRows, options: &Options) -> Result<Report> {
    let Sides { candidate, reference } = *sides;
    let Options { selection, allow_missing, .. } = options;
    let of_reference = by.graphs(reference).or_else(|_| by.graphs(candidate))?;
    let own = by.graphs(candidate).ok();
    // A dump without graphs of an architecture that nobody builds is judged by the other side's.
    let of_candidate = own.as_ref().unwrap_or(&of_reference);
    let (graphs, our_graphs) = (of_reference.steps(), of_candidate.steps());
    let their_values = of_reference.judged(reference, reference);
    let our_values = match &own {
        Some(own) => own.judged(candidate, candidate),
        None => of_reference.judged(candidate, reference),
    };
    let all = recorded::order(&our_graphs.iter().chain(&graphs).copied().collect::<Vec<_>>(), &|_| true);
    let selected = selection.of_graph(all.iter().copied());
    let how = How { rows, wants: &|_| true, diagnose: &diagnose };
    let theirs = recorded::audit(&their_values, &graphs, by.gguf, &how)?;
    let ours = match own.is_some() || are_of_the_same_steps(sides) {
        true => recorded::audit(&our_values, &our_graphs, by.gguf, &how)?,
        false => of_other_steps(candidate),
    };
    let comparisons = compare::dumps(candidate, reference, &all, &options.tolerances);
    let shown = all.iter().zip(&comparisons);
    let shown = shown.filter(|(id, _)| {
        !is_left_out(**id, &ours, &our_values, selection)
            && !is_left_out(**id, &theirs, &their_values, selection)
    });
    let known = shown.map(|(&id, comparison)| Known {
        id,
        comparison: Some(comparison),
        candidate: ours.nodes.get(&id),
        reference: theirs.nodes.get(&id),
        across: ours.is_bridged(id),
    });
    let ([ours_in_full, ours_screened], [in_full, screened]) = (ours.rows(), theirs.rows());
    let counted = [ours_in_full + in_full, ours_screened + screened];
    let mut report = assemble(
        entries(known, &|id| selected.contains(&id)),
        &graphs,
        &|id| tried(&ours, id),
        *allow_missing,
        counted,
    );
    report.tokens = compare::tokens(candidate, reference);
    report.candidate = verdict::side(candidate, path_of(candidate));
    report.reference = Some(verdict::side(reference, path_of(reference)));
    report.notes.extend(notes_of(candidate, "candidate"));
    report.notes.extend(notes_of(reference, "reference"));
    let unseen = |findings: &Findings, values: &Judged<'_>| -> Vec<Checkpoint> {
        let left_out =
            |id: &&Checkpoint| selected.contains(*id) && is_left_out(**id, findings, values, selection);
        all.iter().filter(left_out).copied().collect()
    };
    let unseen = [unseen(&ours, &our_values), unseen(&theirs, &their_values)];
    report.notes.extend(what_is_left_out(sides, &unseen, &all));
    report.notes.extend(not_compared(&comparisons, "such were judged by themselves"));
    report.notes.extend(notes("the candidate", &our_graphs, &ours, our_values.declared()));
    report.notes.extend(notes("the reference", &graphs, &theirs, their_values.declared()));
    let recorded = own.iter().map(|own| (Whose::Candidate, own)).chain([(Whose::Reference, &of_reference)]);
    by.weigh_wiring(&recorded.collect::<Vec<_>>(), &mut report);
    let mut gaps = verdict::gaps(candidate.tokens(), reference.tokens());
    gaps.extend(Gap::of_dump("candidate", candidate));
    gaps.extend(Gap::of_dump("reference", reference));
    refuse_gaps(&mut report, &gaps, *allow_missing);
    let compared = comparisons.iter().any(|comparison| comparison.numbers.is_some());
    refuse_nothing(&mut report, compared);
    Ok(report)
}

/// Nothing compared is no parity.
fn refuse_nothing(report: &mut Report, compared: bool) {
    if !compared && report.verdict == Verdict::Parity {
        report.verdict = Verdict::Undecided;
        report.reason = Some("nothing was compared".to_owned());
    }
}

/// What either side could have recorded, of the nodes that were judged by what comes after; and what it has recorded
/// beside the results of `nodes`.
fn what_is_left_out(sides: &Sides<'_>, unseen: &[Vec<Checkpoint>; 2], nodes: &[Checkpoint]) -> Vec<String> {
    let [ours, theirs] = [sides.candidate, sides.reference].map(Recording::checkpoints);
    let candidate = left_out("the candidate", &unseen[0], &ours, &theirs);
    let reference = left_out("the reference", &unseen[1], &theirs, &ours);
    let others = [("the candidate", &ours), ("the reference", &theirs)];
    let others = others.into_iter().filter_map(|(side, recorded)| not_looked_at(side, recorded, nodes));
    candidate.into_iter().chain(reference).chain(others).collect()
}

/// Whether both sides computed the same tokens in the same steps.
fn are_of_the_same_steps(sides: &Sides<'_>) -> bool {
    let positions = |dump: &Dump| -> Vec<Vec<u32>> {
        dump.manifest().steps.iter().map(|step| step.positions.clone()).collect()
    };
    positions(sides.candidate) == positions(sides.reference)
        && sides.candidate.tokens() == sides.reference.tokens()
}

/// Nothing can be said of nodes whose steps nobody has a graph of.
fn of_other_steps(candidate: &Dump) -> Findings {
    let mut findings = Findings::default();
    for id in Recording::checkpoints(candidate) {
        findings.at(id).cannot("the graph of its own steps: the sides were computed in different ones");
    }
    findings
}
