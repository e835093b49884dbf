//! What commands do with a recording that brings its graph: audit it, run it, compare with it.
//!
//! The graph is the producer's claim. Where parity has no graph of its own for an architecture, every node is judged
//! by what it says it computes, and the report says that the wiring is the producer's.

mod audit;
mod diff;
mod entry;
mod run;
mod wiring;

pub use audit::audit;
pub use diff::{Sides, diff};
pub use run::{RunOptions, run};
pub use wiring::wiring;

use std::path::Path;

use crate::audit::recorded::{Finding, Findings, Graphs};
use crate::checkpoint::Checkpoint;
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::{self, Model};
use crate::report::{Report, Side, Tried};
use crate::select::Selection;
use parity_dump::Dump;

/// A model file whose architecture parity has no graph for, and a recording that brings its own.
pub struct Foreign {
    /// The model.
    pub gguf: Gguf,
    /// The graphs of the recording.
    pub graphs: Graphs,
    /// `general.architecture`.
    pub architecture: String,
    /// Why parity has no graph of its own.
    pub refused: String,
}

/// Opens a model for a recording: with parity's own graph, or, where it has none and the recording brings one, with
/// that.
///
/// # Errors
/// Why there is no graph of parity's own, where the recording brings none either.
pub fn open(path: &Path, recording: &Dump) -> Result<std::result::Result<Model, Box<Foreign>>> {
    let refused = match Model::open(path) {
        Ok(model) => return Ok(Ok(model)),
        Err(refused) => refused,
    };
    if recording.manifest().graphs.is_empty() {
        return Err(refused);
    }
    let gguf = Gguf::open(path)?;
    model::refuse_other(&gguf, recording.path(), &recording.manifest().model)?;
    let architecture = gguf.str("general.architecture")?.unwrap_or("an unnamed architecture").to_owned();
    let refused = refused.to_string().lines().next().unwrap_or_default().to_owned();
    Ok(Err(Box::new(Foreign { gguf, graphs: Graphs::open(recording)?, architecture, refused })))
}

impl Foreign {
    /// Says of the graph whether it is the model file's, or that nobody knows.
    fn weigh_wiring(&self, report: &mut Report) {
        crate::verdict::describe_recorded(report, &self.graphs);
        match wiring(&self.gguf, &self.architecture, &self.graphs) {
            Some(wiring) => wiring.weigh(report),
            None => report.notes.push(format!(
                "the wiring is as the producer declares it: parity has no graph of its own for {} ({}), so that a \
                 parameter that was read from the wrong place looks right here",
                self.architecture, self.refused
            )),
        }
    }

    /// All ids of the graphs, in execution order.
    fn all(&self) -> Vec<Checkpoint> {
        crate::audit::recorded::order(&self.graphs.steps(), &|_| true)
    }

    /// Which of them are asked for. All are judged: what is wrong before them would show in them.
    fn selected(&self, selection: &Selection) -> Vec<Checkpoint> {
        let all = self.all();
        let n_layers = all.iter().filter_map(|id| id.layer_index()).max().map_or(0, |last| last as usize + 1);
        let whole = selection.is_all();
        all.into_iter().filter(|id| whole || selection.wants(*id, n_layers)).collect()
    }
}

/// What was tried on a node that no known mistake explains.
fn tried(findings: &Findings, id: Checkpoint) -> Vec<Tried> {
    findings.nodes.get(&id).map_or_else(Vec::new, |finding| finding.diagnosis().1.to_vec())
}

/// Whether an id is left out of a report: an attention matrix that was neither recorded nor asked for by name, where
/// nodes behind it were judged across it.
fn is_left_out(id: Checkpoint, findings: &Findings, selection: &Selection) -> bool {
    let unseen =
        findings.nodes.get(&id).is_none_or(|finding| finding.judged == 0 && finding.undecided.is_none());
    id.kind().is_optional() && !selection.names(id) && unseen && findings.is_bridged(id)
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
