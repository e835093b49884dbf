//! Two recordings, at least one of which brings a graph: compared by name, each side audited.

use std::collections::BTreeSet;

use super::audit::interrupted;
use super::entry::{Known, assemble, entries};
use super::{Foreign, is_left_out, side, tried};
use crate::audit::recorded::{self, Findings, Graphs, Labelled, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::compare::{self, Comparison, Tolerances};
use crate::dump::Recording;
use crate::error::Result;
use crate::faults::rewritten::diagnose;
use crate::model::diff as wiring;
use crate::report::{Report, Verdict};
use crate::select::Selection;
use parity_dump::Dump;

/// The two sides.
pub struct Sides<'a> {
    /// The side that is judged.
    pub candidate: &'a Dump,
    /// The side that it is compared with; its graph, where the candidate brings none, is the candidate's too.
    pub reference: &'a Dump,
}

/// A candidate's values with the inputs of the recording whose graph it is judged by.
struct Judged<'a> {
    values: &'a Dump,
    inputs: &'a Dump,
}

impl Steps for Judged<'_> {
    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        Steps::tensor(self.values, step, checkpoint)
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        Steps::leaf(self.inputs, step, name)
    }
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
    let selected = foreign.selected(selection);
    let all = foreign.all();
    let wants = |_: Checkpoint| true;
    let graphs = foreign.graphs.steps();
    let theirs = recorded::audit(reference, &graphs, &foreign.gguf, &wants, &diagnose)?;
    let brings_graphs = !candidate.manifest().graphs.is_empty();
    let own = brings_graphs.then(|| Graphs::open(candidate)).transpose()?;
    let ours = audit_candidate(sides, own.as_ref(), foreign, &graphs, &wants)?;
    let comparisons = compare::recordings(candidate, reference, &all, tolerances);
    let shown = all.iter().zip(&comparisons);
    let shown = shown.filter(|(id, _)| !is_left_out(**id, &theirs, selection));
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
    foreign.weigh_wiring(&mut report);
    refuse_other_tokens(&mut report, sides, &comparisons);
    if let Some(own) = &own {
        refuse_other_graph(&mut report, own, &foreign.graphs);
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

/// Audits the candidate on its own graph, or on the reference's where both were computed in the same steps.
fn audit_candidate(
    sides: &Sides<'_>,
    own: Option<&Graphs>,
    foreign: &Foreign,
    graphs: &[(usize, &Labelled)],
    wants: &dyn Fn(Checkpoint) -> bool,
) -> Result<Findings> {
    let Sides { candidate, reference } = *sides;
    if let Some(own) = own {
        return recorded::audit(candidate, &own.steps(), &foreign.gguf, wants, &diagnose);
    }
    let positions = |dump: &Dump| -> Vec<Vec<u32>> {
        dump.manifest().steps.iter().map(|step| step.positions.clone()).collect()
    };
    if positions(candidate) == positions(reference) && candidate.tokens() == reference.tokens() {
        return recorded::audit(
            &Judged { values: candidate, inputs: reference },
            graphs,
            &foreign.gguf,
            wants,
            &diagnose,
        );
    }
    let mut findings = Findings::default();
    let ids: BTreeSet<Checkpoint> =
        Recording::checkpoints(candidate).into_iter().filter(|id| wants(*id)).collect();
    for id in ids {
        findings.at(id).cannot("the graph of its own steps: the sides were computed in different ones");
    }
    Ok(findings)
}

/// Other tokens are no parity, however well their common beginning agrees.
fn refuse_other_tokens(report: &mut Report, sides: &Sides<'_>, comparisons: &[Comparison]) {
    let (ours, theirs) = (sides.candidate.tokens(), sides.reference.tokens());
    let common = compare::common_positions(ours, theirs) as usize;
    let compared = comparisons.iter().any(|comparison| comparison.numbers.is_some());
    if common < ours.len().max(theirs.len()) && report.verdict == Verdict::Parity {
        report.verdict = Verdict::Undecided;
        report.reason =
            Some(format!("only the {common} tokens that both sides have in common were compared"));
    } else if !compared && report.verdict == Verdict::Parity {
        report.verdict = Verdict::Undecided;
        report.reason = Some("nothing was compared".to_owned());
    }
}
