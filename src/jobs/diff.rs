//! Two dumps, compared; with their model both are audited, each on the graph that it brings or that is built for it.

use std::collections::{HashMap, HashSet};

use super::bitwise;
use super::graphs::{self, ByGraph};
use super::hashed;
use super::{
    matrices_of_one, notes_of, path_of, put_in_words, refuse_no_numbers, settle, tokens_of, with_matrices,
};
use crate::audit::AuditRows;
use crate::audit::{self, Carried, Fed, Finding, Findings, Graphs, How, Judged, Reads, Steps, carried};
use crate::checkpoint::{Checkpoint, Kind, usual_order};
use crate::compare::{self, Comparison, Status, Tolerances};
use crate::dump::Recording;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::faults::diagnosis::diagnose;
use crate::faults::tokens::{self, Vocabulary};
use crate::gguf::Gguf;
use crate::model::diff::Whose;
use crate::model::spelt;
use crate::numerics::{Numerics, Products, Storage};
use crate::record::import::is_partial;
use crate::report::detail::{Detail, GRID, detail};
use crate::report::{Report, Verdict};
use crate::select::Selection;
use crate::verdict::numbers::{self, Parts};
use crate::verdict::{self, Gap};
use crate::verdict::{
    Known, assemble, entries, is_left_out, left_out, not_compared, not_looked_at, notes as arithmetic_notes,
    refuse_gaps, tried, weigh_masks, weigh_pooled, weigh_precision,
};
use crate::watch;
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
    /// Whether equal bits are asked for.
    pub bitwise: bool,
    /// Whether tokens' text is left out.
    pub no_text: bool,
    /// Token rows that both sides are audited at; no audit where absent.
    pub audit: Option<AuditRows>,
}

/// The two sides.
#[derive(Clone, Copy)]
pub struct Sides<'a> {
    /// The side that is judged.
    pub candidate: &'a Dump,
    /// The side that it is compared with.
    pub reference: &'a Dump,
    /// The nodes in place of whose values the candidate was given the reference's.
    pub fed: &'a Fed,
    /// Whether the candidate executed the reference's graph: then it claims nothing of its own.
    pub borrowed: bool,
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
    if candidate.is_hashed() || reference.is_hashed() {
        return hashed::diff(candidate, reference, options);
    }
    candidate.number_as(reference.manifest());
    let selection = with_matrices(&options.selection, [&*candidate, &*reference]);
    let options = &Options { selection, ..options.clone() };
    let mut settled: Vec<String> = Vec::new();
    if let Some(file) = file {
        for (side, dump) in [("candidate", &mut *candidate), ("reference", &mut *reference)] {
            settled.extend(settle(dump, file.gguf())?.into_iter().map(|said| format!("{side}: {said}")));
        }
    }
    let sides = Sides { candidate, reference, fed: &Fed::Nothing, borrowed: false };
    let mut gaps = verdict::gaps(tokens_of(sides.candidate), tokens_of(sides.reference));
    gaps.extend(Gap::of_dump("candidate", sides.candidate));
    gaps.extend(Gap::of_dump("reference", sides.reference));
    gaps.extend(Gap::of_contexts(sides.candidate, sides.reference));
    let Some(file) = file else {
        let mut report = by_numbers(&sides, None, gaps, options);
        graphs::weigh_recorded(sides.candidate, sides.reference, &mut report)?;
        if options.bitwise {
            bitwise::weigh(&mut report, sides.candidate, sides.reference)?;
        }
        return Ok(report);
    };
    let by = ByGraph::of_dumps(file, &[sides.candidate, sides.reference])?;
    let mut report = match options.audit {
        Some(rows) => judged(&sides, &by, rows, gaps, options)?,
        None => {
            let mut report = by_numbers(&sides, Some(file.gguf()), gaps, options);
            by.weigh_wiring_of(sides.candidate, sides.reference, &mut report)?;
            report
        }
    };
    report.notes.extend(by.note_of(&[sides.candidate, sides.reference]));
    report.notes.extend(settled);
    put_in_words(&mut report, sides.candidate, file.gguf())?;
    if options.bitwise {
        bitwise::weigh(&mut report, sides.candidate, sides.reference)?;
    }
    Ok(report)
}

/// What numbers alone say.
pub fn by_numbers(sides: &Sides<'_>, gguf: Option<&Gguf>, gaps: Vec<Gap>, options: &Options) -> Report {
    let Sides { candidate, reference, .. } = *sides;
    let recorded = candidate.checkpoints().chain(reference.checkpoints());
    let all = recorded.chain(candidate.seen_checkpoints()).chain(reference.seen_checkpoints());
    let wanted = options.selection.among(usual_order(all).into_iter());
    let wanted: Vec<Checkpoint> = wanted.into_iter().collect();
    let comparisons = compare::dumps(candidate, reference, &wanted, &options.tolerances);
    let mut notes = notes(candidate, reference, gguf.filter(|_| !options.no_text));
    notes.extend(matrices_of_one(&options.selection, [("candidate", candidate), ("reference", reference)]));
    notes.extend(not_compared(&comparisons, "such were not compared; an audit (-m MODEL) judges them"));
    let mut report = numbers::assemble(Parts {
        comparisons,
        tokens: compare::tokens(candidate, reference),
        notes,
        candidate: verdict::side(candidate, path_of(candidate)),
        reference: Some(verdict::side(reference, path_of(reference))),
        gaps,
        allow_missing: options.allow_missing,
        ..Parts::default()
    });
    report.details = pictures(sides, &wanted, options);
    report
}

/// Pictures of the differences, where somebody wants them.
fn pictures(sides: &Sides<'_>, ids: &[Checkpoint], options: &Options) -> Vec<Detail> {
    let ids = ids.iter().filter(|_| options.pictures);
    ids.filter_map(|id| detail(*id, sides.candidate, sides.reference, GRID)).collect()
}

/// A side with the graphs that it is judged by and what was found.
struct Side<'a> {
    graphs: &'a Graphs,
    values: Judged<'a>,
    /// The kinds of nodes that its graphs have.
    kinds: HashSet<Kind>,
    findings: Findings,
}

impl<'a> Side<'a> {
    /// `dump` judged by the graphs of `owner`, which is itself where it brings some or some are built for it.
    fn new(dump: &'a Dump, owner: (&'a Dump, &'a Graphs), fed: Option<(&'a Dump, &'a Fed)>) -> Side<'a> {
        let (inputs, graphs) = owner;
        let values = graphs.judged(dump, inputs);
        let values = match fed {
            Some((source, fed)) => values.fed(source, fed),
            None => values,
        };
        let nodes = audit::order(&graphs.steps(), &|_| true);
        let kinds = nodes.iter().map(|id| id.kind()).collect();
        Side { graphs, values, kinds, findings: Findings::default() }
    }

    fn audit(&mut self, gguf: &Gguf, how: &How<'_>) -> Result<()> {
        self.findings = audit::audit(&self.values, &self.graphs.steps(), gguf, how)?;
        Ok(())
    }
}

/// Compares, and judges both sides at so many `rows`. A dump without graphs of an architecture that nobody builds is judged
/// by the other side's, where it was computed in the same steps.
///
/// # Errors
/// A graph of the candidate that cannot be read.
pub fn judged(
    sides: &Sides<'_>,
    by: &ByGraph<'_>,
    rows: AuditRows,
    gaps: Vec<Gap>,
    options: &Options,
) -> Result<Report> {
    let Sides { candidate, reference, fed, .. } = *sides;
    let isolated = matches!(fed, Fed::Everything);
    let Options { selection, allow_missing, .. } = options;
    let (own, other) = (by.graphs(candidate), by.graphs(reference));
    let ours = own.as_ref().map(|own| (candidate, own));
    let theirs = other.as_ref().map(|other| (reference, other));
    let of_candidate = ours.or(theirs).map_err(Clone::clone)?;
    let of_reference = theirs.or(ours).map_err(Clone::clone)?;
    let mut ours_side = Side::new(candidate, of_candidate, Some((reference, fed)));
    let mut theirs_side = Side::new(reference, of_reference, None);
    let all_graphs: Vec<_> = [&ours_side, &theirs_side].iter().flat_map(|side| side.graphs.steps()).collect();
    let all = with_cut_out(audit::order(&all_graphs, &|_| true), [&ours_side, &theirs_side], sides);
    let selected = selection.of_graph(all.iter().copied());
    let wants = |id: Checkpoint| selected.contains(&id);
    let how = How { rows, wants: &wants, diagnose: Some(&diagnose), look: None, only: None };
    let owners = [(&mut ours_side, candidate, own.is_ok()), (&mut theirs_side, reference, other.is_ok())];
    audit_all(owners, are_of_the_same_steps(sides), by.gguf, &how)?;
    let (ours, theirs) = (&ours_side.findings, &theirs_side.findings);
    let comparisons = compare::dumps(candidate, reference, &all, &options.tolerances);
    let both = [&ours_side, &theirs_side];
    let is_left_out = |comparison: &Comparison| {
        let id = comparison.checkpoint;
        both.iter().any(|side| is_left_out(id, &side.findings, &side.values, selection))
            || is_within_another(comparison, both, selection)
    };
    let reads = audit::reads(&all_graphs);
    // In isolation nothing comes from another node.
    let before = if isolated { &Reads::new() } else { &reads };
    let of = |carried: &HashMap<Checkpoint, Carried>| {
        let shown = all.iter().zip(&comparisons).filter(|(_, comparison)| !is_left_out(comparison));
        entries(
            shown.map(|(id, comparison)| {
                known(id, comparison, [&ours_side, &theirs_side], (candidate, carried))
            }),
            &wants,
            before,
        )
    };
    let mut found = of(&HashMap::new());
    if !found.open.is_empty() && !isolated {
        let arithmetics = [candidate, reference].map(numerics_of);
        let steps = ours_side.graphs.steps();
        let carried = carried(&ours_side.values, &steps, by.gguf, &arithmetics, &found.open)?;
        // Of a simulation that was ended early nothing can be said.
        if !watch::is_over() {
            found = of(&carried);
        }
    }
    let ([ours_in_full, ours_screened], [in_full, screened]) = (ours.rows(), theirs.rows());
    let counted = [ours_in_full + in_full, ours_screened + screened];
    let tried = |id: Checkpoint| tried(ours, id);
    let mut report = assemble(found, &reads, &tried, *allow_missing, counted);
    let asked: Vec<Checkpoint> = all.iter().copied().filter(|id| wants(*id)).collect();
    tell(&mut report, sides, [&ours_side, &theirs_side], (&all, &asked), selection);
    report.notes.extend(notes(candidate, reference, Some(by.gguf).filter(|_| !options.no_text)));
    report.notes.extend(not_compared(&comparisons, "such were judged by themselves"));
    report.details = pictures(sides, &asked, options);
    weigh_precision(&mut report, &ours_side.graphs.steps(), ours, candidate);
    weigh_claims(&mut report, sides, by, [own.as_ref().ok(), other.as_ref().ok()]);
    refuse_gaps(&mut report, &gaps, *allow_missing);
    refuse_incomparable(&mut report, &gaps, [ours, theirs], &comparisons);
    Ok(report)
}

/// Whether a value that one side lacks is of a kind of nodes that its graphs have nowhere, and healthy on the other side: it
/// is computed within another node there, as in a fused activation. Not where it was asked for by name.
fn is_within_another(comparison: &Comparison, [ours, theirs]: [&Side<'_>; 2], selection: &Selection) -> bool {
    let id = comparison.checkpoint;
    let (lacking, owner) = match comparison.status {
        Status::MissingCandidate => (ours, theirs),
        Status::MissingReference => (theirs, ours),
        _ => return false,
    };
    let is_healthy = |finding: &Finding| {
        finding.judged > 0 && finding.undecided.is_none() && finding.lost.is_none() && finding.is_healthy()
    };
    !lacking.kinds.contains(&id.kind())
        && owner.findings.nodes.get(&id).is_some_and(is_healthy)
        && !selection.names(id)
}

/// Audits each side by its own graphs, or by the other's where both computed the same steps.
fn audit_all(
    sides: [(&mut Side<'_>, &Dump, bool); 2],
    same_steps: bool,
    gguf: &Gguf,
    how: &How<'_>,
) -> Result<()> {
    for (side, dump, is_own) in sides {
        match is_own || same_steps {
            // Of values that were only printed nothing can be computed again.
            _ if is_partial(dump) => {}
            true => side.audit(gguf, how)?,
            false => side.findings = of_other_steps(dump),
        }
    }
    Ok(())
}

/// Weighs what the sides' own graphs say of how they are wired, and their masks; who borrowed a graph claims nothing by it.
fn weigh_claims(
    report: &mut Report,
    sides: &Sides<'_>,
    by: &ByGraph<'_>,
    [own, other]: [Option<&Graphs>; 2],
) {
    let Sides { candidate, reference, borrowed, .. } = *sides;
    let own = own.filter(|_| !borrowed).map(|own| (Whose::Candidate, own));
    let other = other.filter(|_| !is_partial(reference)).map(|other| (Whose::Reference, other));
    let claims: Vec<_> = own.into_iter().chain(other).collect();
    by.weigh_wiring(&claims, report);
    let masked = [(Whose::Candidate, candidate), (Whose::Reference, reference)];
    weigh_masks(report, &masked[usize::from(borrowed)..], Some(by.gguf));
    weigh_pooled(report, [candidate, reference]);
    refuse_no_numbers(report, &[candidate, reference]);
}

/// Everything that is known of one node.
fn known<'a>(
    id: &Checkpoint,
    comparison: &'a Comparison,
    [ours, theirs]: [&'a Side<'_>; 2],
    (candidate, carried): (&Dump, &'a HashMap<Checkpoint, Carried>),
) -> Known<'a> {
    Known {
        id: *id,
        comparison: Some(comparison),
        candidate: ours.findings.nodes.get(id),
        reference: theirs.findings.nodes.get(id),
        across: ours.findings.is_bridged(*id),
        carried: carried.get(id),
        unfinite: ours.findings.unfinite(*id, candidate),
    }
}

/// Says who the sides are, what their tokens come to, what of the nodes `asked` for was left out, and in which arithmetic
/// each side computes.
fn tell(
    report: &mut Report,
    sides: &Sides<'_>,
    judged: [&Side<'_>; 2],
    (all, asked): (&[Checkpoint], &[Checkpoint]),
    selection: &Selection,
) {
    let Sides { candidate, reference, .. } = *sides;
    report.tokens = compare::tokens(candidate, reference);
    report.candidate = verdict::side(candidate, path_of(candidate));
    report.reference = Some(verdict::side(reference, path_of(reference)));
    let unseen = judged.map(|side| -> Vec<Checkpoint> {
        let left_out = |id: &&Checkpoint| is_left_out(**id, &side.findings, &side.values, selection);
        asked.iter().filter(left_out).copied().collect()
    });
    report.notes.extend(what_is_left_out(sides, &unseen, all));
    for (name, side) in ["the candidate", "the reference"].into_iter().zip(judged) {
        let declared = side.values.declared();
        report.notes.extend(arithmetic_notes(name, &side.graphs.steps(), &side.findings, declared));
    }
}

/// What a producer computes in: what it declares; of llama.cpp's recordings, and of what they print, what is usual there.
pub(super) fn numerics_of(dump: &Dump) -> Numerics {
    let products = match dump.producer().backend.as_deref() {
        Some("cuda") => Products::LlamaCuda,
        Some("vulkan") => Products::LlamaVulkan,
        _ => Products::LlamaCpu,
    };
    let usual = Numerics { products, kv: Storage::F16, ..Numerics::default() };
    let declared = dump.manifest().producer.numerics.as_deref().and_then(|words| words.parse().ok());
    let is_llama = is_partial(dump) || !dump.manifest().graphs.is_empty();
    declared.unwrap_or(if is_llama { usual } else { Numerics::default() })
}

/// Nothing compared is no parity, and behind other tokens each side can be judged by itself alone.
fn refuse_incomparable(report: &mut Report, gaps: &[Gap], sides: [&Findings; 2], comparisons: &[Comparison]) {
    if gaps.iter().any(|gap| matches!(gap, Gap::OtherTokens(..))) {
        let said = format!("; {}; {}", sides[0].by_itself("candidate"), sides[1].by_itself("reference"));
        report
            .reason
            .iter_mut()
            .filter(|_| report.verdict == Verdict::Undecided)
            .for_each(|reason| *reason += &said);
    } else if comparisons.iter().all(|comparison| comparison.numbers.is_none()) {
        report.cannot_be_judged("nothing was compared".to_owned());
    }
}

/// An order of nodes with what both sides cut out of one, where both computed the graphs that they bring.
fn with_cut_out(order: Vec<Checkpoint>, both: [&Side<'_>; 2], sides: &Sides<'_>) -> Vec<Checkpoint> {
    let [ours, theirs] = [sides.candidate, sides.reference].map(Recording::checkpoints);
    if !both.iter().all(|side| side.values.is_own_graph()) {
        return order;
    }
    let is_recorded = |id: Checkpoint| ours.contains(&id) && theirs.contains(&id);
    both.into_iter().fold(order, |order, side| {
        audit::with_cut_out(order, &side.values, &side.graphs.steps(), &is_recorded)
    })
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

/// What a reader must know of the two dumps.
fn notes(candidate: &Dump, reference: &Dump, gguf: Option<&Gguf>) -> Vec<String> {
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
        notes
            .push(format!("rows behind the first {common} tokens stand behind other ones: none is compared"));
        match gguf {
            Some(gguf) => notes.extend(tokens::said(ours, theirs, gguf)),
            None => notes.extend(tokens::sentences(tokens::diagnose(ours, theirs, Vocabulary::default()))),
        }
    }
    notes
}
