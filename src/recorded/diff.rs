//! Two recordings, at least one of which brings a graph: compared by name, each side audited.

use super::audit::interrupted;
use super::computed;
use super::entry::{Known, assemble, entries};
use super::{Foreign, is_left_out, refuse_gaps, side, tried};
use crate::audit::recorded::{self, Findings, Graphs};
use crate::checkpoint::Checkpoint;
use crate::compare::{self, Tolerances};
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::rewritten::diagnose;
use crate::foreign;
use crate::model::diff as wiring;
use crate::report::{Report, Verdict};
use crate::select::Selection;
use crate::verdict::{self, Gap};
use parity_dump::Dump;

/// The two sides.
pub struct Sides<'a> {
    /// The side that is judged.
    pub candidate: &'a Dump,
    /// The side that it is compared with; its graph, where the candidate brings none, is the candidate's too.
    pub reference: &'a Dump,
}

/// Compares and judges; `foreign` has the graphs of the reference.
///
/// # Errors
/// A graph of the candidate that cannot be read.
pub fn diff(
    sides: &Sides<'_>,
    foreign: &Foreign,
    selection: &Selection,
    tolerances: &Tolerances,
    allow_missing: bool,
) -> Result<Report> {
    let Sides { candidate, reference } = *sides;
    let wants = |_: Checkpoint| true;
    let of_reference = foreign.graphs(reference).or_else(|_| foreign.graphs(candidate))?;
    let own = foreign.graphs(candidate).ok();
    // A dump without graphs of an architecture that nobody builds is judged by the other side's.
    let of_candidate = own.as_ref().unwrap_or(&of_reference);
    let (graphs, our_graphs) = (of_reference.steps(), of_candidate.steps());
    let their_values = of_reference.judged(reference, reference);
    let our_values = match &own {
        Some(own) => own.judged(candidate, candidate),
        None => of_reference.judged(candidate, reference),
    };
    let all = recorded::order(&our_graphs.iter().chain(&graphs).copied().collect::<Vec<_>>(), &wants);
    let selected = foreign.selected(all.clone(), selection);
    let theirs = recorded::audit(&their_values, &graphs, &foreign.gguf, &wants, &diagnose)?;
    let ours = match own.is_some() || are_of_the_same_steps(sides) {
        true => recorded::audit(&our_values, &our_graphs, &foreign.gguf, &wants, &diagnose)?,
        false => of_other_steps(candidate),
    };
    let comparisons = compare::recordings(candidate, reference, &all, tolerances);
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
    let rows = [ours_in_full + in_full, ours_screened + screened];
    let mut report = assemble(
        entries(known, &|id| selected.contains(&id)),
        &graphs,
        &|id| tried(&ours, id),
        allow_missing,
        rows,
    );
    report.tokens = compare::tokens(candidate, reference);
    report.candidate = side(candidate, Some(candidate.path().display().to_string()));
    report.reference = Some(side(reference, Some(reference.path().display().to_string())));
    report.notes.extend(interrupted(candidate).or(interrupted(reference)));
    report.notes.extend(foreign::names_of_both(candidate, reference));
    report.notes.extend(computed::notes("the candidate", &of_candidate.steps(), &ours));
    report.notes.extend(computed::notes("the reference", &of_reference.steps(), &theirs));
    foreign.weigh_wiring(&of_reference, &mut report);
    let mut gaps = verdict::gaps(candidate.tokens(), reference.tokens());
    gaps.extend(Gap::of_steps("candidate", candidate));
    gaps.extend(Gap::of_steps("reference", reference));
    refuse_gaps(&mut report, &gaps, allow_missing);
    let compared = comparisons.iter().any(|comparison| comparison.numbers.is_some());
    if !compared && report.verdict == Verdict::Parity {
        report.verdict = Verdict::Undecided;
        report.reason = Some("nothing was compared".to_owned());
    }
    if let Some(own) = own.as_ref().filter(|own| !own.are_built() && !of_reference.are_built()) {
        refuse_other_graph(&mut report, own, &of_reference);
    }
    Ok(report)
}

/// A candidate that is healthy by a graph of its own is no parity where that graph is not the reference's: a parameter
/// that was read from the wrong place is in the graph and in the values alike.
fn refuse_other_graph(report: &mut Report, own: &Graphs, reference: &Graphs) {
    let differences = own.each().zip(reference.each()).flat_map(|(ours, theirs)| {
        let found = wiring::diff(ours, theirs);
        let sentences = if found.is_equal() { Vec::new() } else { found.sentences() };
        sentences.into_iter().map(|text| {
            text.replace(" in the graph", " in the candidate's graph")
                .replace(" in the file", " in the reference's")
        })
    });
    let Some(first) = differences.into_iter().next() else { return };
    let text = format!("the graphs of the two sides are not the same: {first}");
    match report.verdict {
        Verdict::Parity => {
            report.verdict = Verdict::Undecided;
            report.reason = Some(text);
        }
        Verdict::Divergence | Verdict::Undecided => report.notes.push(text),
    }
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
