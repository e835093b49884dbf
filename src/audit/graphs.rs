//! The graphs that a dump is judged by: those that it brings, or those that are built from the model file.

use std::collections::HashSet;

use super::adapters::name_apart;
use super::form::Form;
use super::{Labelled, Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::dump;
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::foreign::RANKS;
use crate::gguf::Gguf;
use crate::model::builders::{self, Shape, Values};
use crate::numerics::Numerics;
use parity_dump::Dump;
use parity_graph::Graph;

/// How llama.cpp's names of caches begin.
const CACHE: &str = "cache_";

/// The producer of dumps that recordings of llama.cpp are.
pub(super) const LLAMA_CPP: &str = "llama.cpp";

/// The graphs of a dump's steps, each once, with the names that their nodes have in it.
#[derive(Default)]
pub struct Graphs {
    graphs: Vec<Labelled>,
    /// By step.
    of_steps: Vec<usize>,
    /// By step, what the inputs of graphs hold that were built; nothing of graphs that a dump brings.
    inputs: Vec<Values>,
    /// Whether they are those of the backend of llama.cpp that computed the dump, as it declares.
    declared: bool,
    /// Sentences on ops that were taken for others.
    known_by_values: Vec<String>,
}

impl Graphs {
    /// The graphs that a dump brings, or those that are built for its steps.
    ///
    /// # Errors
    /// A graph that cannot be read, an architecture without a builder.
    pub fn of_dump(dump: &Dump, gguf: &Gguf) -> Result<Graphs> {
        match dump.manifest().graphs.is_empty() {
            true => Graphs::built_as_computed(dump, gguf),
            false => Graphs::read(dump, |graph| name_apart(graph, gguf))?.with_known_ops(dump, gguf),
        }
    }

    /// Reads the graphs that a dump lists.
    ///
    /// # Errors
    /// A file that cannot be read or is no graph, a step without one.
    pub fn open(dump: &Dump) -> Result<Graphs> {
        Graphs::read(dump, |_| ())
    }

    fn read(dump: &Dump, change: impl Fn(&mut Graph)) -> Result<Graphs> {
        let read = dump::Graphs::read(dump)?.with_factors(dump);
        let of_steps = (0..dump.manifest().steps.len()).map(|step| {
            read.index_of_step(step).ok_or_else(|| {
                Error::file(dump.path(), format!("step {step} has no graph"))
                    .expected("a graph of every step")
                    .hint("record it again")
            })
        });
        let of_steps = of_steps.collect::<Result<_>>()?;
        let graphs = read.all().iter().cloned().map(|mut graph| {
            change(&mut graph);
            Labelled::new(graph)
        });
        let graphs = graphs.collect::<Result<_>>()?;
        Ok(Graphs { graphs, of_steps, ..Graphs::default() })
    }

    /// Builds the graphs of a dump's steps from the model file, for an architecture that parity knows, in the form that the
    /// dump declares.
    ///
    /// # Errors
    /// An architecture without a builder, steps of positions that do not follow one another, tokens beyond the
    /// vocabulary.
    pub fn built(dump: &Dump, gguf: &Gguf) -> Result<Graphs> {
        Graphs::built_in(dump, gguf, Form::declared(dump))
    }

    /// The same in any form. Attention is one node only where the dump holds no scores or probabilities.
    pub(super) fn built_in(dump: &Dump, gguf: &Gguf, form: Form) -> Result<Graphs> {
        let manifest = dump.manifest();
        if manifest.is_numbered() {
            return Err(Error::file(
                dump.path(),
                "has rows of several sequences, or positions that were computed again",
            )
            .expected("the graphs that computed them")
            .found("none in the dump")
            .hint("record it again: parity record -o DIR -- CMD…"));
        }
        let inside = Recording::checkpoints(dump).iter().any(|id| id.kind().is_optional());
        let context = manifest.tokens.len();
        let Form { backend, flash, cache, .. } = form;
        let flash = flash && !inside;
        // Keys and values in blocks are read by llama.cpp's own kernels.
        let declared = backend.is_some() || cache.is_in_blocks() && manifest.producer.name == LLAMA_CPP;
        let mut out = Graphs { declared, ..Graphs::default() };
        let mut shapes: Vec<Shape> = Vec::new();
        for (number, step) in manifest.steps.iter().enumerate() {
            let first = step.positions.first().map_or(0, |first| *first as usize);
            let follow =
                step.positions.iter().enumerate().all(|(i, position)| *position as usize == first + i);
            let tokens = manifest.tokens.get(first..first + step.positions.len());
            let (true, Some(tokens)) = (follow && !step.positions.is_empty(), tokens) else {
                return Err(Error::file(dump.path(), format!("step {number} is no run of tokens"))
                    .expected("positions that follow one another, with a token for each")
                    .found(format!("{} positions from {first}, {context} tokens", step.positions.len()))
                    .hint("one step for each forward pass, in the order of their positions"));
            };
            let shape = Shape::step(first, tokens.len(), context, flash, cache);
            let mut built = builders::build(gguf, shape)?;
            out.inputs.push(builders::inputs(&built, tokens, first)?);
            let known = shapes.iter().position(|known| *known == shape);
            out.of_steps.push(known.unwrap_or(shapes.len()));
            if known.is_none() {
                shapes.push(shape);
                form.place(&mut built.graph, tokens.len());
                let labelled = Labelled::new(built.graph)?;
                // What recorded no graph took the product for the logits.
                out.graphs.push(match manifest.producer.name == LLAMA_CPP {
                    true => labelled.with_logits_before_bias(),
                    false => labelled,
                });
            }
        }
        Ok(out)
    }

    /// Graphs as such, and which of them each step computes.
    ///
    /// # Errors
    /// A graph that does not fit together.
    pub fn of(graphs: impl Iterator<Item = Graph>, of_steps: Vec<usize>) -> Result<Graphs> {
        let graphs = graphs.map(Labelled::new).collect::<Result<_>>()?;
        Ok(Graphs { graphs, of_steps, ..Graphs::default() })
    }

    /// Other graphs in place of each, of which `said` is to be said.
    pub(super) fn replaced(&self, graphs: Vec<Labelled>, said: String) -> Graphs {
        let mut known_by_values = self.known_by_values.clone();
        known_by_values.push(said);
        Graphs { graphs, of_steps: self.of_steps.clone(), known_by_values, ..Graphs::default() }
    }

    /// The same graphs, of which something is to be said.
    pub(super) fn saying(mut self, said: String) -> Graphs {
        self.known_by_values.push(said);
        self
    }

    /// Each graph once, with its names, for good.
    pub fn into_labelled(self) -> Vec<Labelled> {
        self.graphs
    }

    /// Each graph once, with its names.
    pub fn labelled(&self) -> &[Labelled] {
        &self.graphs
    }

    /// By step: which of them it computes.
    pub fn of_steps(&self) -> &[usize] {
        &self.of_steps
    }

    /// What `values` holds, with the inputs of these graphs: those that were built, or those that were recorded in
    /// `inputs`, which brought the graphs.
    pub fn judged<'a>(&'a self, values: &'a Dump, inputs: &'a Dump) -> Judged<'a> {
        let own = (self.inputs.is_empty() || self.declared) && std::ptr::eq(values, inputs);
        Judged { values, inputs, built: &self.inputs, own, fed: None }
    }

    /// The same, in memory that rounds to the types of these graphs.
    pub(super) fn in_own_memory<'a>(&'a self, values: &'a Dump) -> Judged<'a> {
        Judged { own: true, ..self.judged(values, values) }
    }

    /// Whether they were built of the model file.
    pub fn are_built(&self) -> bool {
        !self.inputs.is_empty()
    }

    /// Of ops that nobody knew and that were taken for others by their values: a sentence each.
    pub fn known_by_values(&self) -> &[String] {
        &self.known_by_values
    }

    /// Every graph once.
    pub fn each(&self) -> impl Iterator<Item = &Graph> {
        self.graphs.iter().map(|labelled| &labelled.program.graph)
    }

    /// The graph of each step, in order.
    pub fn steps(&self) -> Vec<(usize, &Labelled)> {
        self.of_steps.iter().enumerate().map(|(step, &graph)| (step, &self.graphs[graph])).collect()
    }
}

/// A dump with the inputs of the graphs that it is judged by.
pub struct Judged<'a> {
    values: &'a Dump,
    inputs: &'a Dump,
    built: &'a [Values],
    own: bool,
    fed: Option<(&'a Dump, &'a Fed)>,
}

/// The nodes in place of whose values others were given those of somebody else's recording.
#[derive(Clone, Debug, Default)]
pub enum Fed {
    /// None.
    #[default]
    Nothing,
    /// These: choices of experts that were followed.
    Some(HashSet<Checkpoint>),
    /// All: nodes are looked at in isolation.
    Everything,
}

impl<'a> Judged<'a> {
    /// Whose nodes were given what `source` holds of some, in place of what these were recorded to give.
    #[must_use]
    pub fn fed(self, source: &'a Dump, fed: &'a Fed) -> Judged<'a> {
        Judged { fed: Some((source, fed)), ..self }
    }
}

impl Steps for Judged<'_> {
    fn positions(&self, step: usize) -> Vec<u32> {
        self.values.manifest().steps.get(step).map_or_else(Vec::new, |step| step.positions.clone())
    }

    fn is_chosen(&self, row: Option<u32>) -> bool {
        self.values.is_chosen(row)
    }

    fn knows_caches(&self, step: usize) -> bool {
        let recorded = |step| self.inputs.leaves(step).any(|(name, _)| name.starts_with(CACHE));
        self.values.manifest().is_numbered() || (0..=step).any(recorded)
    }

    fn is_own_graph(&self) -> bool {
        self.own
    }

    fn declared(&self) -> Option<Numerics> {
        self.values.manifest().producer.numerics.as_deref()?.parse().ok()
    }

    fn ranks(&self) -> Option<usize> {
        self.values.manifest().provenance.get(RANKS)?.parse().ok()
    }

    fn tensor(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        let (shape, positions, values) = self.values.in_step(step, checkpoint)?;
        Some(Tensor { shape, positions, values })
    }

    fn rows(&self, step: usize, checkpoint: Checkpoint) -> Option<usize> {
        self.values.rows_in_step(step, checkpoint)
    }

    fn fed(&self, step: usize, checkpoint: Checkpoint) -> Option<Tensor> {
        let (fed, which) = self.fed?;
        let is_fed = match which {
            Fed::Nothing => false,
            Fed::Some(ids) => ids.contains(&checkpoint),
            Fed::Everything => true,
        };
        if !is_fed {
            return None;
        }
        let mut tensor = self.tensor(step, checkpoint)?;
        let (mut buffer, rows) = (Vec::new(), tensor.positions.len());
        for (row, position) in tensor.positions.iter().enumerate() {
            let Some(theirs) = Recording::row(fed, checkpoint, *position, &mut buffer) else { continue };
            // Heads of an attention matrix stand before its rows, each with what its token can see.
            let (heads, width) = match (checkpoint.kind().is_optional(), &tensor.shape[..]) {
                (true, &[heads, _, cached]) => (heads, cached),
                _ => (1, tensor.values.len() / rows),
            };
            let seen = theirs.len() / heads.max(1);
            if seen <= width && (heads > 1 || seen == width || checkpoint.kind().is_optional()) {
                for (head, theirs) in theirs.chunks(seen.max(1)).enumerate() {
                    tensor.values[(head * rows + row) * width..][..seen].copy_from_slice(theirs);
                }
            }
        }
        // An engine keeps what it is given as it keeps its own values.
        let storage = self.declared().map(|numerics| numerics.storage_of(checkpoint.kind()));
        storage.into_iter().for_each(|storage| storage.store(&mut tensor.values));
        Some(tensor)
    }

    fn leaf(&self, step: usize, name: &str) -> Option<Vec<f64>> {
        if let Some(built) = self.built.get(step) {
            return built.get(name.split('#').next()?).cloned();
        }
        dump::inputs::numbers(self.inputs.leaf(step, name)?)
    }
}
