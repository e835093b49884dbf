//! What commands do with a recording that brings its graph: audit it, run it, compare with it.
//!
//! The graph is the producer's claim. Where parity has no graph of its own for an architecture, every node is judged
//! by what it says it computes, and the report says that the wiring is the producer's.

mod audit;
mod computed;
mod diff;
mod entry;
mod head_rows;
mod limits;
mod run;
mod weights;
mod wiring;

pub use audit::audit;
pub use diff::{Sides, diff};
pub use head_rows::settle;
pub use run::{RunOptions, run};
pub use weights::weigh;
pub use wiring::wiring;

use std::path::Path;

use crate::audit::recorded::{Finding, Findings, Graphs, Judged, Steps};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::{self, Model, builders};
use crate::report::{CheckpointVerdict, Report, Side, Tried, Verdict};
use crate::select::Selection;
use crate::verdict::{self, Gap};
use parity_dump::Dump;

/// A model file whose recordings are judged node by node, by graphs that they bring or that are built of the file.
pub struct Foreign {
    /// The model.
    pub gguf: Gguf,
    /// `general.architecture`.
    pub architecture: String,
    /// Why parity's engines do not run it, where they do not.
    pub refused: Option<String>,
}

/// Opens a model for dumps: with parity's own nodes where one of the dumps brings no graph, otherwise for the graphs.
///
/// # Errors
/// A dump of another model; why there are no nodes of parity's own, where there is no graph either.
pub fn open(path: &Path, dumps: &[&Dump]) -> Result<std::result::Result<Model, Foreign>> {
    let bring = dumps.iter().all(|dump| !dump.manifest().graphs.is_empty());
    let refused = match Model::open(path) {
        Ok(model) if !bring => return Ok(Ok(model)),
        Ok(_) => None,
        Err(refused) => Some(refused),
    };
    let gguf = Gguf::open(path)?;
    let architecture = gguf.str("general.architecture")?.unwrap_or("an unnamed architecture").to_owned();
    let some = dumps.iter().any(|dump| !dump.manifest().graphs.is_empty());
    match refused {
        Some(refused) if !some && !builders::knows(&architecture) => Err(refused),
        refused => {
            for dump in dumps {
                model::refuse_other(&gguf, dump.path(), &dump.manifest().model)?;
            }
            let first = |error: Error| error.to_string().lines().next().unwrap_or_default().to_owned();
            Ok(Err(Foreign { gguf, architecture, refused: refused.map(first) }))
        }
    }
}

impl Foreign {
    /// For a dump of an engine whose arithmetic is not known, of a model that parity has nodes of its own for.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of_file(path: &Path) -> Result<Foreign> {
        let gguf = Gguf::open(path)?;
        let architecture = gguf.require_str("general.architecture")?.to_owned();
        Ok(Foreign { gguf, architecture, refused: None })
    }

    /// The graphs that a dump brings, or those that are built for its steps.
    ///
    /// # Errors
    /// A graph that cannot be read, or that there is not enough memory for; an architecture without a builder.
    pub fn graphs(&self, dump: &Dump) -> Result<Graphs> {
        let graphs = match dump.manifest().graphs.is_empty() {
            true => Graphs::built(dump, &self.gguf),
            false => Graphs::open(dump),
        }?;
        limits::check(dump.path(), &graphs.steps(), &self.gguf, limits::Work::Audit)?;
        Ok(graphs)
    }

    /// Says of recorded graphs whether they are the model file's, or that nobody knows.
    fn weigh_wiring(&self, graphs: &Graphs, report: &mut Report) {
        crate::verdict::describe_recorded(report, graphs);
        if graphs.are_built() {
            report.notes.push(format!(
                "the dump brings no graph: it was judged by the one that parity builds of the file, for {}",
                self.architecture
            ));
            return;
        }
        match wiring(&self.gguf, &self.architecture, graphs) {
            Some(wiring) => wiring.weigh(report),
            None => report.notes.push(format!(
                "the wiring is as the producer declares it: parity has no graph of its own for {}{}, so that a \
                 parameter that was read from the wrong place looks right here",
                self.architecture,
                self.refused.as_ref().map_or_else(String::new, |why| format!(" ({why})"))
            )),
        }
    }

    /// Which of them are asked for. All are judged: what is wrong before them would show in them.
    fn selected(&self, all: Vec<Checkpoint>, selection: &Selection) -> Vec<Checkpoint> {
        let n_layers = all.iter().filter_map(|id| id.layer_index()).max().map_or(0, |last| last as usize + 1);
        let whole = selection.is_all();
        all.into_iter().filter(|id| whole || selection.wants(*id, n_layers)).collect()
    }
}

/// Tokens that there is nothing to say about are no parity.
fn refuse_gaps(report: &mut Report, gaps: &[Gap], allow_missing: bool) {
    let (obstacles, accepted) = verdict::spoken(gaps, allow_missing);
    if let Some(first) = obstacles.first().filter(|_| report.verdict == Verdict::Parity) {
        report.verdict = Verdict::Undecided;
        report.reason = Some(first.clone());
    }
    report.notes.extend(accepted);
    report.gaps = obstacles;
}

/// What is not at parity in the arithmetic that a dump declares, or that all its values show, may be so tensor by
/// tensor: then that is the answer, and where it is not, it tells better where the first mistake is.
pub fn explained(report: Report, by_tensor: impl FnOnce() -> Result<Report>) -> Report {
    // A reference that is wrong stays wrong in any arithmetic of the candidate.
    let refuted = report.checkpoints.iter().any(|entry| entry.verdict == CheckpointVerdict::Reference);
    if report.verdict == Verdict::Parity || refuted {
        return report;
    }
    match by_tensor() {
        Ok(other) if other.verdict == Verdict::Parity || report.verdict == Verdict::Undecided => other,
        Ok(other) => both(report, other),
        Err(_) => report,
    }
}

/// One answer of two that found no parity: the names that either knows, at the node that was found tensor by tensor.
fn both(mut whole: Report, mut by_tensor: Report) -> Report {
    let (Some(of_whole), Some(first)) = (&mut whole.first_divergence, &mut by_tensor.first_divergence) else {
        return whole;
    };
    if of_whole.checkpoint == first.checkpoint {
        if of_whole.diagnosis.is_empty() {
            of_whole.diagnosis = std::mem::take(&mut first.diagnosis);
        }
        return whole;
    }
    let named = whole.checkpoints.iter().find(|entry| entry.id == first.checkpoint);
    if let Some(named) = named.filter(|_| first.diagnosis.is_empty()) {
        first.diagnosis.clone_from(&named.diagnosis);
    }
    by_tensor
}

/// What was tried on a node that no known mistake explains.
fn tried(findings: &Findings, id: Checkpoint) -> Vec<Tried> {
    findings.nodes.get(&id).map_or_else(Vec::new, |finding| finding.diagnosis().1.to_vec())
}

/// Whether an id is left out of a report: an attention matrix, or any node of an engine that computed another graph,
/// that was neither recorded nor asked for by name, where nodes behind it were judged across it.
fn is_left_out(id: Checkpoint, findings: &Findings, graphs: &Judged<'_>, selection: &Selection) -> bool {
    let unseen =
        findings.nodes.get(&id).is_none_or(|finding| finding.judged == 0 && finding.undecided.is_none());
    let exposed = graphs.is_own_graph() && !id.kind().is_optional();
    !exposed && !selection.names(id) && unseen && findings.is_bridged(id)
}

/// Where a recording comes from.
fn side(recording: &dyn Recording, path: Option<String>) -> Side {
    let manifest = recording.manifest();
    Side {
        path,
        producer: manifest.producer.clone(),
        model: manifest.model.clone(),
        tokens: manifest.tokens.len(),
        steps: manifest.steps.iter().map(|step| step.positions.len()).collect(),
        provenance: manifest.provenance.clone(),
    }
}

/// Sentences about discrete nodes in which rounding decided, and about other arithmetic than the usual.
fn remarks(finding: &Finding) -> String {
    let mut out = String::new();
    if !finding.arithmetic.is_empty() {
        let names: Vec<&str> = finding.arithmetic.iter().copied().collect();
        out += &format!("; in another arithmetic than llama.cpp's usual: {}", names.join(", "));
    }
    if let Some(tie) = finding.near_ties.iter().max_by(|a, b| a.margin.total_cmp(&b.margin)) {
        let rows = crate::report::words::count(finding.near_ties.len(), "row");
        out += &format!(
            "; a near-tie in {rows}: at position {} another choice is {} better, and rounding of the scores \
             explains {}",
            tie.position,
            crate::report::words::number(tie.margin),
            crate::report::words::number(tie.near)
        );
    }
    if !finding.bridged.is_empty() {
        let names: Vec<String> = finding.bridged.iter().map(ToString::to_string).collect();
        out += &format!("; across {}, which the recording lacks", names.join(", "));
    }
    if finding.explained_nonfinite > 0 {
        out += &format!("; {} NaN or Inf, as in exact arithmetic", finding.explained_nonfinite);
    }
    out
}
