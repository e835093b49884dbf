//! Dumps that are judged node by node on a graph: the one that they bring, or the one that is built of the model file.

use std::path::Path;

use super::graph_limits;
use crate::audit::Graphs;
use crate::dump;
use crate::engine::fused::config::Architecture;
use crate::engine::fused::file::ModelFile;
use crate::error::{Error, Result};
use crate::foreign;
use crate::gguf::Gguf;
use crate::model::builders::{Cache, Shape};
use crate::model::diff::Whose;
use crate::model::{self, builders};
use crate::report::Report;
use crate::verdict::{Claim, File, describe_recorded, weigh_masks, weigh_pooled, weigh_wiring};
use parity_dump::Dump;

/// A model file whose dumps are judged by graphs.
pub struct ByGraph<'a> {
    /// The model.
    pub gguf: &'a Gguf,
    /// `general.architecture`.
    pub architecture: &'a str,
    /// Why parity's engines do not run it, where they do not.
    refused: Option<String>,
}

impl<'a> ByGraph<'a> {
    /// Of a file, whether or not it has nodes of parity's own.
    ///
    /// # Errors
    /// An architecture that is no text.
    pub fn of(file: &'a ModelFile) -> Result<ByGraph<'a>> {
        let gguf = file.gguf();
        let architecture = gguf.str("general.architecture")?.unwrap_or("an unnamed architecture");
        Ok(ByGraph { gguf, architecture, refused: file.refused() })
    }

    /// Of a file, to judge dumps of it.
    ///
    /// # Errors
    /// A dump of another model; an architecture that nobody builds, where no dump brings a graph.
    pub fn of_dumps(file: &'a ModelFile, dumps: &[&Dump]) -> Result<ByGraph<'a>> {
        for dump in dumps {
            model::refuse_other(file.gguf(), dump.path(), &dump.manifest().model)?;
            refuse_adapter(file.gguf(), dump)?;
        }
        let by = ByGraph::of(file)?;
        let brings = dumps.iter().any(|dump| !dump.manifest().graphs.is_empty());
        match file {
            ModelFile::Refused(_, refused) if !brings && !by.is_built() => Err(refused.clone()),
            _ => Ok(by),
        }
    }

    /// For a model that parity's engines refuse, to be executed op by op.
    ///
    /// # Errors
    /// What was refused, where that is no reason to execute it op by op.
    pub fn to_be_executed(file: &'a ModelFile, reference: Option<&Path>) -> Result<ByGraph<'a>> {
        let by_graph = ByGraph::of(file)?;
        let brings = |dump: Dump| !dump.manifest().graphs.is_empty();
        let opened = |path| foreign::open(path, &foreign::Options::default());
        let recorded = || reference.is_some_and(|reference| opened(reference).is_ok_and(brings));
        let built = || builders::build(by_graph.gguf, Shape::step(0, 1, 1, true, Cache::F32)).is_ok();
        let engines = Architecture::of(by_graph.architecture).is_some();
        let named = by_graph.gguf.str("general.architecture")?.is_some();
        match file {
            ModelFile::Refused(_, refused) if !named || engines && !recorded() && !built() => {
                Err(refused.clone())
            }
            _ => Ok(by_graph),
        }
    }

    /// The graphs that a dump brings, or those that are built for its steps.
    ///
    /// # Errors
    /// A graph that cannot be read, or that there is not enough memory for; an architecture without a builder.
    pub fn graphs(&self, dump: &Dump) -> Result<Graphs> {
        let graphs = Graphs::of_dump(dump, self.gguf)?;
        graph_limits::check(dump.path(), &graphs.steps(), self.gguf, graph_limits::Work::Audit)?;
        Ok(graphs)
    }

    /// Says of the graphs that the sides' nodes are judged by what they compute, and of those that were recorded whether
    /// they are the model file's and each other's.
    pub fn weigh_wiring<'b>(&self, sides: &[(Whose, &'b Graphs)], report: &mut Report) {
        sides.iter().rev().take(1).for_each(|(_, graphs)| describe_recorded(report, graphs));
        for said in sides.iter().flat_map(|(_, graphs)| graphs.known_by_values()) {
            if !report.notes.contains(said) {
                report.notes.push(said.clone());
            }
        }
        let claim = |&(side, graphs): &(Whose, &'b Graphs)| Claim {
            side,
            graphs: graphs.each().filter(|graph| !graph.is_shift()).collect(),
        };
        let claims: Vec<Claim<'_>> =
            sides.iter().filter(|(_, graphs)| !graphs.are_built()).map(claim).collect();
        let (gguf, architecture, refused) = (self.gguf, self.architecture, self.refused.as_deref());
        weigh_wiring(report, &claims, Some(&File { gguf, architecture, refused }));
    }

    /// What a reader must know of dumps of which none brings a graph.
    pub fn note_of(&self, dumps: &[&Dump]) -> Option<String> {
        let none = dumps.iter().all(|dump| dump.manifest().graphs.is_empty());
        none.then(|| {
            let built = "no dump brings a graph: judged by the one that parity builds of the file, for";
            format!("{built} {}", self.architecture)
        })
    }

    /// The same of two dumps of which no node is judged.
    ///
    /// # Errors
    /// Neither has a graph that can be read or built.
    pub fn weigh_wiring_of(&self, candidate: &Dump, reference: &Dump, report: &mut Report) -> Result<()> {
        match (self.graphs(candidate), self.graphs(reference)) {
            (Ok(ours), Ok(theirs)) => {
                self.weigh_wiring(&[(Whose::Candidate, &ours), (Whose::Reference, &theirs)], report);
            }
            (Ok(ours), Err(_)) => self.weigh_wiring(&[(Whose::Candidate, &ours)], report),
            (Err(_), theirs) => self.weigh_wiring(&[(Whose::Reference, &theirs?)], report),
        }
        let both = [(Whose::Candidate, candidate), (Whose::Reference, reference)];
        weigh_masks(report, &both, Some(self.gguf));
        weigh_pooled(report, [candidate, reference]);
        Ok(())
    }

    /// Whether there is a graph for new prompts of its architecture.
    pub fn is_built(&self) -> bool {
        builders::knows(self.architecture)
    }
}

/// Refuses a recording with an adapter that was not given: its products cannot be judged, and the model's file has none.
///
/// # Errors
/// Such a recording; a graph that cannot be read.
pub fn refuse_adapter(gguf: &Gguf, dump: &Dump) -> Result<()> {
    let graphs = dump::Graphs::read(dump)?;
    match graphs.adapter_matrix().filter(|_| gguf.adapters().next().is_none()) {
        Some(matrix) => {
            Err(Error::file(dump.path(), "was recorded with an adapter (LoRA) that parity was not given")
                .expected("--lora FILE[:SCALE], as the program had it")
                .found(format!("{matrix} in its graph")))
        }
        None => Ok(()),
    }
}

/// Says of two dumps without their model file whether the graphs that they bring are the same.
///
/// # Errors
/// A graph that cannot be read.
pub fn weigh_recorded(candidate: &Dump, reference: &Dump, report: &mut Report) -> Result<()> {
    let read = |dump: &Dump| Ok::<_, Error>(dump::Graphs::read(dump)?.with_factors(dump));
    let [ours, theirs] = [read(candidate)?, read(reference)?];
    if !ours.all().is_empty() && !theirs.all().is_empty() {
        let sides = [(Whose::Candidate, &ours), (Whose::Reference, &theirs)];
        let claims = sides.map(|(side, graphs)| Claim { side, graphs: graphs.all().iter().collect() });
        weigh_wiring(report, &claims, None);
        weigh_masks(report, &[(Whose::Candidate, candidate), (Whose::Reference, reference)], None);
        weigh_pooled(report, [candidate, reference]);
    }
    Ok(())
}

/// What is refused of a selection that nothing of a recording fits.
pub fn nothing_selected(dump: &Dump) -> Error {
    Error::new("--layer, --checkpoint", "no node of this recording is selected")
        .expected("a layer of it, or a pattern such as 'blk.0.*'")
        .hint(format!("parity inspect {} lists its nodes", dump.path().display()))
}
