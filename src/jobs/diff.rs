//! Two dumps, compared; with their model both are audited.

use std::collections::{BTreeSet, HashSet};

use indexmap::IndexSet;

use super::graphs::{self, ByGraph, Sides};
use super::{head_rows, matrices_of_one, notes_of, path_of, tokens_of, with_matrices};
use crate::audit::{self, AuditRows};
use crate::checkpoint::{Checkpoint, usual_order};
use crate::compare::{self, Comparison, Tolerances};
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::faults::tokens::{self, Vocabulary};
use crate::model::file::ModelFile;
use crate::model::{Model, spelt};
use crate::record::import::is_partial;
use crate::report::Report;
use crate::report::detail::{GRID, detail};
use crate::select::Selection;
use crate::verdict::{self, Gap, Judgement, Parts, recorded};
use parity_dump::Dump;

/// What is compared, and how it is judged.
#[derive(Clone, Default)]
pub struct Options {
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// The user's tolerances.
    pub tolerances: Tolerances,
    /// Whether what a side lacks is no obstacle to parity.
    pub allow_missing: bool,
    /// Whether to draw the differences, for the HTML report.
    pub pictures: bool,
    /// Token rows that both sides are audited at; no audit where absent.
    pub audit: Option<AuditRows>,
}

/// Compares a candidate with a reference; queries and keys of both are read in the model file's order afterwards.
///
/// # Errors
/// A candidate of printed values, a dump of another model than the one given, a weight that cannot be read.
pub fn diff(
    candidate: &mut Dump,
    reference: &mut Dump,
    file: Option<&ModelFile>,
    options: &Options,
) -> Result<Report> {
    if is_partial(candidate) {
        let path = candidate.path().display();
        return Err(Error::file(candidate.path(), "holds printed values, which can be a reference only")
            .expected("a whole dump first, printed values second")
            .hint(format!("parity diff DUMP {path}, or parity run -m MODEL --reference {path}")));
    }
    let selection = with_matrices(&options.selection, [&*candidate, &*reference]);
    let options = &Options { selection, ..options.clone() };
    let Some(file) = file else {
        let mut report = on_nodes(candidate, reference, None, options)?;
        graphs::weigh_recorded(candidate, reference, &mut report)?;
        return Ok(report);
    };
    let mut orders: Vec<String> = Vec::new();
    for (side, dump) in [("candidate", &mut *candidate), ("reference", &mut *reference)] {
        orders.extend(head_rows::settle(dump, file)?.map(|order| format!("{side}: {order}")));
    }
    let (candidate, reference) = (&*candidate, &*reference);
    let sides = Sides { candidate, reference };
    let by = ByGraph::of_dumps(file, &[candidate, reference])?;
    let mut report = match options.audit {
        Some(rows) if !is_partial(reference) => graphs::diff(&sides, &by, rows, options)?,
        Some(_) => on_nodes(candidate, reference, Some(file.nodes()?), options)?,
        None => {
            let mut report = on_nodes(candidate, reference, None, options)?;
            by.weigh_wiring_of(candidate, reference, &mut report)?;
            report
        }
    };
    report.notes.extend(orders);
    verdict::weigh(&mut report, candidate, file)?;
    verdict::name_models(&mut report, file.gguf());
    Ok(report)
}

/// By the nodes of parity's engines, or without a model.
fn on_nodes(candidate: &Dump, reference: &Dump, model: Option<&Model>, options: &Options) -> Result<Report> {
    let wanted = wanted(candidate, reference, model, &options.selection);
    if let Some(model) = model.filter(|_| wanted.is_empty()) {
        return Err(options.selection.refused(model.graph.checkpoints(), model.config.dims.layers));
    }
    let details = match options.pictures {
        true => wanted.iter().filter_map(|c| detail(*c, candidate, reference, GRID)).collect(),
        false => Vec::new(),
    };
    let comparisons = compare::dumps(candidate, reference, &wanted, &options.tolerances);
    let judgement = match model {
        Some(model) => judge(options, model, candidate, reference, &comparisons)?,
        None => Judgement::default(),
    };
    let mut notes = notes(candidate, reference, model);
    notes.extend(matrices_of_one(&options.selection, [("candidate", candidate), ("reference", reference)]));
    notes.extend(recorded::not_compared(
        &comparisons,
        "such were not compared; an audit (-m MODEL) judges them",
    ));
    let mut gaps = verdict::gaps(tokens_of(candidate), tokens_of(reference));
    gaps.extend(Gap::of_dump("candidate", candidate));
    gaps.extend(Gap::of_dump("reference", reference));
    let mut report = verdict::assemble(Parts {
        judgement,
        comparisons,
        tokens: compare::tokens(candidate, reference),
        notes,
        candidate: verdict::side(candidate, path_of(candidate)),
        reference: Some(verdict::side(reference, path_of(reference))),
        gaps,
        allow_missing: options.allow_missing,
    });
    report.details = details;
    if let Some(model) = model {
        verdict::describe(&mut report, &model.graph);
    }
    Ok(report)
}

/// The selected checkpoints of either dump, and of the model where it is given.
fn wanted(
    candidate: &Dump,
    reference: &Dump,
    model: Option<&Model>,
    selection: &Selection,
) -> Vec<Checkpoint> {
    // In the order of the model's graph; without one, in the usual order.
    let mut all: IndexSet<Checkpoint> = model.iter().flat_map(|model| model.graph.checkpoints()).collect();
    let recorded = candidate.checkpoints().chain(reference.checkpoints());
    all.extend(usual_order(recorded.chain(candidate.seen_checkpoints()).chain(reference.seen_checkpoints())));
    selection.among(all.into_iter()).into_iter().collect()
}

/// Audits both sides, unless told not to: at a sample of the common rows, and at rows that stand out.
fn judge(
    options: &Options,
    model: &Model,
    candidate: &Dump,
    reference: &Dump,
    comparisons: &[Comparison],
) -> Result<Judgement> {
    let Some(rows) = options.audit else { return Ok(Judgement::default()) };
    let mut positions: BTreeSet<u32> = rows.positions(&candidate.manifest().steps).into_iter().collect();
    let common = compare::common_positions(tokens_of(candidate), tokens_of(reference));
    positions.retain(|position| *position < common);
    positions.extend(verdict::outliers(comparisons, &positions).into_values());
    let positions: Vec<u32> = positions.into_iter().collect();
    let wanted: HashSet<Checkpoint> = comparisons.iter().map(|comparison| comparison.checkpoint).collect();
    let wants = |checkpoint: Checkpoint| wanted.contains(&checkpoint);
    let how = audit::Options { positions: &positions, wants: &wants, isolated: false };
    let sides: &[&dyn Recording] = if is_partial(reference) { &[candidate] } else { &[candidate, reference] };
    let audits = audit::audit(sides, &model.gguf, &model.graph, &how)?;
    verdict::judge(model, sides, comparisons, Some(&audits))
}

/// What a reader must know of the two dumps.
fn notes(candidate: &Dump, reference: &Dump, model: Option<&Model>) -> Vec<String> {
    let mut notes = notes_of(candidate, "candidate");
    notes.extend(notes_of(reference, "reference"));
    let [ours, theirs] = [candidate, reference].map(|dump| &dump.manifest().model);
    if ours.fingerprint.as_ref().zip(theirs.fingerprint.as_ref()).is_some_and(|(a, b)| a != b) {
        notes.push(format!(
            "the dumps are of two models, whose weights differ too: {} and {}",
            spelt(ours),
            spelt(theirs)
        ));
    }
    let (ours, theirs) = (tokens_of(candidate), tokens_of(reference));
    let common = compare::common_positions(ours, theirs) as usize;
    if common < ours.len().min(theirs.len()) {
        notes.push(format!("only the {common} tokens that both sides have in common are compared"));
        match model {
            Some(model) => notes.extend(tokens::said(ours, theirs, &model.gguf)),
            None => notes.extend(tokens::sentences(tokens::diagnose(ours, theirs, Vocabulary::default()))),
        }
    }
    notes
}
