//! What is executed: steps, the graph of each, the inputs of its leaves, and which nodes are looked at.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use indexmap::IndexSet;
use parity_dump::Dump;
use parity_graph::fault::Wanted;
use parity_graph::{Graph, Id};
use parity_record::map::{Capture, LeafCapture, map};

use super::RunOptions;
use super::plan;
use crate::audit::{Graphs, Labelled};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::{Error, Result};
use crate::faults::injected::{Injected, injected, refuse_uninjected};
use crate::gguf::Gguf;
use crate::jobs::graphs::ByGraph;
use crate::jobs::limits::Room;
use crate::model::builders::{self, Built, Cache, Shape, Values};
use crate::numerics::{Numerics, Storage};
use crate::watch;

/// Where graphs and inputs come from.
pub struct Source {
    /// The graphs of the steps.
    pub graphs: Graphs,
    /// By graph, where they were built for a prompt: the inputs follow from it.
    built: Vec<Built>,
    tokens: Vec<u32>,
    /// Positions of each step.
    steps: Vec<Vec<u32>>,
}

/// Refuses to go on where nobody waits any longer: so many of `all` values are `done`, and of a run that is not whole nothing
/// can be judged.
///
/// # Errors
/// The time is over.
pub fn in_time(done: usize, all: usize) -> Result<()> {
    match watch::over().filter(|_| done < all) {
        None => Ok(()),
        Some(why) => Err(Error::new("the engine", format!("did not finish: {why}"))
            .expected(format!("{all} values"))
            .found(format!("{done} of them"))
            .hint("a longer --time-limit, a shorter prompt, or --layer, behind which the engine stops")),
    }
}

/// What bounds the positions: nothing but what was recorded, where a recording's own graph is executed.
///
/// # Errors
/// An architecture without a builder, where a prompt is to be run.
pub fn room<'a>(by: &'a ByGraph<'_>, options: &RunOptions) -> Result<Room<'a>> {
    let file = by.gguf.path();
    if is_of_the_reference(options) {
        return Ok(Room { file, context: usize::MAX, cached: 0 });
    }
    if !by.is_built() {
        let names: Vec<&str> = builders::architectures().collect();
        let hint = match &options.reference {
            Some(_) => {
                "record that prompt with llama.cpp, and name the recording with --reference alone".to_owned()
            }
            None => super::no_reference(by.gguf, options),
        };
        return Err(Error::file(file, "is of an architecture that is run by a recorded graph, in its steps")
            .expected(format!(
                "--reference RECORDING without a prompt, -n or --chunk; or {}",
                names.join(", ")
            ))
            .found(by.architecture)
            .hint(hint));
    }
    let built = builders::build(by.gguf, Shape::step(0, 1, 1, true, Cache::F32))?;
    let cached = 2 * built.facts.layers * built.facts.kv_heads * built.facts.head_width;
    Ok(Room { file, context: built.facts.context, cached: cached as u64 })
}

/// Whether the reference's steps are executed as they are.
fn is_of_the_reference(options: &RunOptions) -> bool {
    options.reference.is_some()
        && options.tokens.is_empty()
        && options.n_predict.is_none()
        && options.chunk.is_none()
}

/// The graphs of what is run.
///
/// # Errors
/// Graphs that cannot be read or built, more positions than there are.
pub fn graphs(
    by: &ByGraph<'_>,
    room: Room<'_>,
    options: &RunOptions,
    reference: Option<&Dump>,
) -> Result<Source> {
    if let Some(dump) = reference.filter(|_| is_of_the_reference(options)) {
        let graphs = by.graphs(dump)?;
        let positions = dump.manifest().steps.iter().map(|step| step.positions.clone());
        let (tokens, steps) = (dump.tokens().to_vec(), positions.collect());
        return Ok(Source { graphs, built: Vec::new(), tokens, steps });
    }
    if let Some(dump) = reference.filter(|dump| dump.manifest().is_numbered()) {
        return Err(Error::file(
            dump.path(),
            "holds rows of several sequences, or positions that were computed again",
        )
        .expected("the tokens and steps that it was recorded in")
        .found("others (--prompt, --tokens, -n, --chunk)")
        .hint("parity run --reference DIR without them"));
    }
    let (tokens, steps) = plan::steps(room, options, reference)?;
    let form = Form::of(options, reference)?;
    built(by.gguf, &tokens, &steps, &form)
}

/// The graphs that are built for given steps of a run.
///
/// # Errors
/// An architecture without a builder, a token beyond the vocabulary.
pub fn built(gguf: &Gguf, tokens: &[u32], steps: &[Range<usize>], form: &Form) -> Result<Source> {
    let context = steps.last().map_or(0, |step| step.end);
    let (mut built, mut of_steps): (Vec<Built>, Vec<usize>) = (Vec::new(), Vec::new());
    for step in steps {
        let shape = Shape::step(step.start, step.len(), context, form.flash, form.cache);
        of_steps.push(built.iter().position(|known| known.shape == shape).unwrap_or(built.len()));
        if of_steps.last() == Some(&built.len()) {
            built.push(builders::build(gguf, shape)?);
        }
    }
    // Before anything is written.
    built.first().map_or(Ok(()), |built| builders::known(built, tokens))?;
    let graphs = Graphs::of(built.iter().map(|built| built.graph.clone()), of_steps)?;
    let positions = |step: &Range<usize>| step.clone().map(|position| position as u32).collect();
    let steps = steps.iter().map(positions).collect();
    Ok(Source { graphs, built, tokens: tokens.to_vec(), steps })
}

/// In which form attention is computed and cached.
pub struct Form {
    pub flash: bool,
    pub cache: Cache,
}

impl Form {
    /// As in the reference; attention in one node where neither it nor the user looks inside.
    fn of(options: &RunOptions, reference: Option<&Dump>) -> Result<Form> {
        let asked = match options.numerics.kv {
            Storage::F32 => Cache::F32,
            Storage::F16 => Cache::F16,
            Storage::Bf16 => {
                return Err(Error::new("--numerics", "a graph has no cache of this type")
                    .expected("kv=f32 or kv=f16")
                    .found(options.numerics));
            }
        };
        let probe = [Kind::AttnScores, Kind::AttnProbs].map(|kind| Checkpoint::layer(kind, 0));
        let inside = probe.iter().any(|id| options.selection.names(*id));
        let recorded = reference.map(crate::dump::Graphs::read).transpose()?;
        let shape = recorded.as_ref().and_then(|graphs| graphs.all().first()).map(Shape::of);
        let there = |dump: &Dump| Recording::checkpoints(dump).iter().any(|id| id.kind().is_optional());
        Ok(match shape {
            Some(shape) => Form { flash: shape.flash && !inside, cache: shape.cache },
            None => Form { flash: !inside && !reference.is_some_and(there), cache: asked },
        })
    }
}

/// One step.
pub struct Step {
    /// Its graph among [`Planned::graphs`].
    pub graph: usize,
    /// Token positions.
    pub positions: Vec<u32>,
}

/// A graph and what is done with it.
pub struct Prepared<'a> {
    /// The graph with its names.
    pub labelled: &'a Labelled,
    /// How each checkpoint is shown.
    pub captures: HashMap<Checkpoint, Capture>,
    /// The inputs that are shown.
    pub leaves: Vec<LeafCapture>,
    /// The mistakes in it.
    pub injected: Vec<Injected>,
    /// Nodes whose values a mistake elsewhere may read.
    pub read_elsewhere: BTreeSet<Id>,
    /// The last node that is computed.
    pub last: Id,
}

/// Everything that is executed.
pub struct Planned<'a> {
    /// The graphs as such.
    pub source: &'a Graphs,
    built: &'a [Built],
    /// Each graph once.
    pub graphs: Vec<Prepared<'a>>,
    /// In order.
    pub steps: Vec<Step>,
    /// Tokens that are known beforehand.
    pub tokens: &'a [u32],
    /// What is written down: what is judged, and what that reads.
    pub written: IndexSet<Checkpoint>,
    /// Nodes that are computed in all steps together.
    pub n_nodes: usize,
    /// What a reader must know.
    pub notes: Vec<String>,
}

impl<'a> Planned<'a> {
    /// Prepares the graphs of a run.
    ///
    /// # Errors
    /// A selection that nothing fits, a mistake that no node has a place for.
    pub fn new(source: &'a Source, mistakes: &[Wanted], options: &RunOptions) -> Result<Planned<'a>> {
        let ids = source.graphs.labelled().iter().flat_map(Labelled::nodes).map(|(_, id)| id);
        let ids: IndexSet<Checkpoint> = ids.collect();
        let layers = ids.iter().filter_map(|id| id.layer_index()).max().map_or(0, |last| last as usize + 1);
        let selected = options.selection.of_graph(ids.into_iter());
        if selected.is_empty() {
            let ids = source.graphs.labelled().iter().flat_map(Labelled::nodes).map(|(_, id)| id);
            return Err(options.selection.refused(ids, layers));
        }
        // Greedy decoding needs the logits even where they are not looked at.
        let known = |position: &u32| (*position as usize) < source.tokens.len();
        let sampled = source.steps.last().is_some_and(|step| !step.iter().all(known));
        let wanted = |id: Checkpoint| sampled || selected.contains(&id);
        let graphs = source.graphs.labelled().iter().map(|labelled| {
            let last = labelled.nodes().filter(|(_, id)| wanted(*id)).map(|(node, _)| node).last();
            let graph = &labelled.program.graph;
            let mapping = map(graph);
            let captures = mapping.captures.into_iter().map(|capture| (capture.checkpoint, capture));
            let injected = injected(labelled, mistakes);
            Prepared {
                labelled,
                captures: captures.collect(),
                leaves: mapping.leaves,
                read_elsewhere: read_elsewhere(graph, &injected),
                injected,
                // Where nothing is looked at, as in a piece of a prompt without logits, caches are still filled.
                last: last.unwrap_or(graph.nodes),
            }
        });
        let graphs: Vec<Prepared<'_>> = graphs.collect();
        let all: Vec<&Injected> = graphs.iter().flat_map(|graph| &graph.injected).collect();
        refuse_uninjected(mistakes, source.graphs.labelled().iter(), &all)?;
        let mut notes = Vec::new();
        for (number, _) in mistakes.iter().enumerate() {
            let first = all.iter().find(|one| one.spec == number);
            notes.extend(first.map(|one| format!("{} was injected: {}", one.fault.name, one.fault.text)));
        }
        let of_steps = source.graphs.of_steps().iter().zip(&source.steps);
        let steps: Vec<Step> =
            of_steps.map(|(&graph, positions)| Step { graph, positions: positions.clone() }).collect();
        let computed =
            |graph: &Prepared<'_>| graph.labelled.nodes().filter(|(id, _)| *id <= graph.last).count();
        let n_nodes = steps.iter().map(|step| computed(&graphs[step.graph])).sum();
        let (built, tokens) = (&source.built, &source.tokens);
        let mut written = selected.clone();
        for labelled in source.graphs.labelled().iter().filter(|_| options.audit.is_some()) {
            written.extend(selected.iter().flat_map(|id| labelled.inputs(*id)));
        }
        Ok(Planned { source: &source.graphs, built, graphs, steps, tokens, written, n_nodes, notes })
    }

    /// The graph of each step.
    pub fn of_steps(&self) -> Vec<(usize, &Labelled)> {
        self.steps
            .iter()
            .enumerate()
            .map(|(number, step)| (number, self.graphs[step.graph].labelled))
            .collect()
    }

    /// The arithmetic of the run: keys and values are kept as its graphs say.
    pub fn numerics(&self, options: &RunOptions) -> Numerics {
        let tensors = self.graphs.iter().flat_map(|graph| &graph.labelled.program.graph.tensors);
        let mut kept =
            tensors.filter(|tensor| tensor.name.starts_with("cache_k_l")).map(|tensor| &tensor.dtype[..]);
        let kv = kept.next_back().map_or(options.numerics.kv, |dtype| match dtype {
            "f16" => Storage::F16,
            "bf16" => Storage::Bf16,
            _ => Storage::F32,
        });
        Numerics { kv, ..options.numerics }
    }

    /// Whether the graphs were built for a prompt.
    pub fn is_built(&self) -> bool {
        !self.built.is_empty()
    }

    /// What the leaves of a step hold.
    ///
    /// # Errors
    /// A token beyond the vocabulary.
    pub fn inputs<'b>(
        &'b self,
        step: usize,
        tokens: &[u32],
        reference: Option<&'b Dump>,
    ) -> Result<Inputs<'b>> {
        let Step { graph, positions } = &self.steps[step];
        let labelled = self.graphs[*graph].labelled;
        let built = self.built.get(*graph);
        let first = positions.first().map_or(0, |first| *first as usize);
        let built = built.map(|built| builders::inputs(built, tokens, first)).transpose()?;
        Ok(Inputs { labelled, built, source: self.source, reference, step })
    }
}

/// Nodes that a mistake reads besides the sources of its own.
fn read_elsewhere(graph: &Graph, injected: &[Injected]) -> BTreeSet<Id> {
    let others = injected.iter().flat_map(|one| one.fault.rewrite.change.others());
    others.map(|id| graph.origin(id)).filter(|&id| !graph.is_leaf(id)).collect()
}

/// What the leaves of one step hold.
pub struct Inputs<'a> {
    labelled: &'a Labelled,
    built: Option<Values>,
    source: &'a Graphs,
    reference: Option<&'a Dump>,
    step: usize,
}

impl Inputs<'_> {
    /// The values of a leaf, if they are known.
    pub fn of(&self, leaf: Id) -> Option<Vec<f64>> {
        match (&self.built, self.reference) {
            (Some(values), _) => values.get(&self.labelled.program.graph.get(leaf).name).cloned(),
            (None, Some(dump)) => self.labelled.input(&self.source.judged(dump, dump), self.step, leaf),
            (None, None) => None,
        }
    }
}
