//! What each hypothesis would say: its logits, several hypotheses at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use parity_dump::Dump;
use parity_graph::Id;
use parity_graph::weights::{FFN_UP, TOKEN_EMBD, in_layer, weight};
use rayon::prelude::*;

use super::Model;
use super::hypotheses::{Hypothesis, Rows};
use super::steps::At;
use super::ways::{CACHES, Cached, EXACT};
use crate::audit::{Graphs, Labelled};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::engine::op_by_op::{Answer, Lane, Lanes, Multiplier, Node, Unknown, Value, own, step_lanes};
use crate::error::{Error, Result};
use crate::jobs::run::rewritten;
use crate::memory;
use crate::model::builders::{self, Cache, Shape, Values};
use crate::ops::Args;
use crate::report::words::number;

/// Token rows that are in memory at a time, of all hypotheses together: enough of them that decoding a weight takes no
/// longer than multiplying it.
const ROWS: usize = 512;
/// The largest number of f16.
const F16_MAX: f32 = 65504.0;
/// Rows in front of those that were seen that logits are computed of all the same.
const FRONT_MAX: usize = 64;
/// Logits that are in memory at a time.
const LOGITS: usize = 1 << 26;

/// A prompt with what was said behind it, ready for any number of hypotheses.
pub struct Prompt<'a> {
    model: Model<'a>,
    /// (T,)
    ids: Vec<u32>,
    /// What the graph was built for, if it was.
    shape: Option<Shape>,
    /// The graph of one step that computes all of it.
    pub labelled: Labelled,
    inputs: Values,
    /// The node that was seen: the logits, or what stands for them.
    seen: Id,
    /// A node whose values are known, and these.
    given: Option<(Id, Vec<f32>)>,
    /// Tokens in front of the first that was generated.
    prompt: usize,
    /// T
    pub tokens: usize,
    /// Rows that were seen, the last of the step.
    pub rows: usize,
    /// Rows in front of them that the graph computes too.
    before: usize,
    /// Their width: V of logits.
    pub width: usize,
    /// What feeds a cache, or meets one.
    cached: HashMap<Id, Cached>,
    /// The first node at which exact arithmetic comes to what f16 cannot hold, and the largest of its values.
    beyond_f16: Mutex<Option<(Checkpoint, f32)>>,
}

impl<'a> Prompt<'a> {
    /// `tokens` from position 0 of which the first `prompt` were given, with logits of the last `rows`.
    ///
    /// # Errors
    /// An architecture without a builder, a token beyond the vocabulary.
    pub fn new(model: Model<'a>, tokens: &[u32], prompt: usize, rows: usize) -> Result<Prompt<'a>> {
        Prompt::between(model, tokens, prompt, rows, (None, Checkpoint::global(Kind::Logits)))
    }

    /// The same with another node in place of the logits, and the values of one in front of it where they are known.
    ///
    /// # Errors
    /// As [`Prompt::new`].
    pub fn between(
        model: Model<'a>,
        tokens: &[u32],
        prompt: usize,
        rows: usize,
        (given, seen): (Option<(Checkpoint, Vec<f32>)>, Checkpoint),
    ) -> Result<Prompt<'a>> {
        let shape = Shape::step(0, tokens.len(), tokens.len(), true, Cache::F32);
        let shape = Shape { outputs: rows, ..shape };
        Prompt::of(model, tokens, (0, shape), prompt, (given, seen))
    }

    /// One step of these tokens.
    ///
    /// # Errors
    /// As [`Prompt::new`].
    pub fn step(model: Model<'a>, tokens: &[u32], at: At) -> Result<Prompt<'a>> {
        let shape = at.shape(tokens.len());
        Prompt::of(model, tokens, (at.first, shape), at.prompt, (None, Checkpoint::global(Kind::Logits)))
    }

    /// Goes on with the next token, if the graph of its step is this one.
    ///
    /// # Errors
    /// As [`Prompt::new`].
    pub fn moves(&mut self, tokens: &[u32], at: At) -> Result<bool> {
        let shape = at.shape(tokens.len());
        let is_alike = self.shape == Some(shape) && self.prompt == at.prompt;
        if is_alike {
            self.inputs = builders::inputs(&builders::build(self.model.gguf, shape)?, tokens, at.first)?;
        }
        Ok(is_alike)
    }

    fn of(
        model: Model<'a>,
        tokens: &[u32],
        (first, shape): (usize, Shape),
        prompt: usize,
        (given, seen): (Option<(Checkpoint, Vec<f32>)>, Checkpoint),
    ) -> Result<Prompt<'a>> {
        let (gguf, rows) = (model.gguf, shape.outputs);
        // Where the last layer computes some rows alone, what a mistake reads of other nodes lies at other places than where
        // all are computed.
        let before = tokens.len().checked_sub(rows).filter(|front| *front <= FRONT_MAX).unwrap_or(0);
        let shape = Shape { outputs: rows + before, ..shape };
        check_memory(model, tokens.len(), rows + before)?;
        let built = builders::build(gguf, shape)?;
        let inputs = builders::inputs(&built, tokens, first)?;
        let labelled = Labelled::new(built.graph)?;
        let node = |id: Checkpoint| {
            let found = match id.kind() {
                // Embeddings as the first layer reads them: some families scale them.
                Kind::Embed => labelled.nodes().find(|(_, label)| label.layer_index().is_some()),
                _ => labelled.nodes().filter(|(_, label)| *label == id).last(),
            };
            let found = found.map(|(node, label)| if label == id { node } else { node.saturating_sub(1) });
            found.ok_or_else(|| Error::file(gguf.path(), format!("has no {id} that could be compared")))
        };
        let seen = node(seen)?;
        let given = match given {
            Some((id, values)) => Some((node(id)?, values)),
            None => None,
        };
        let made = Prompt::made(model, (labelled, inputs, seen), tokens.to_vec(), tokens.len(), prompt);
        Ok(Prompt { shape: Some(shape), given, rows, before, ..made })
    }

    /// Of a graph with its inputs, which computes so many rows, and what of it was seen.
    fn made(
        model: Model<'a>,
        (labelled, inputs, seen): (Labelled, Values, Id),
        ids: Vec<u32>,
        tokens: usize,
        prompt: usize,
    ) -> Prompt<'a> {
        let graph = &labelled.program.graph;
        let cached = Cached::of(graph);
        let width = graph.get(seen).ne[0];
        let (shape, given, rows, before, beyond_f16) = (None, None, 0, 0, Mutex::default());
        Prompt {
            model,
            ids,
            shape,
            labelled,
            inputs,
            seen,
            given,
            prompt,
            tokens,
            rows,
            before,
            width,
            cached,
            beyond_f16,
        }
    }

    /// The same with the graph of a recording, whose tokens begin with these, in place of one that is built.
    ///
    /// # Errors
    /// A recording of other tokens, of several steps, without a graph or without these rows.
    pub fn recorded(
        model: Model<'a>,
        dump: &Dump,
        ids: &[u32],
        prompt: usize,
        rows: usize,
    ) -> Result<Prompt<'a>> {
        let gguf = model.gguf;
        let refused = |why: &str| Error::file(dump.path(), why.to_owned());
        let all = Recording::tokens(dump);
        let [step] = &dump.manifest().steps[..] else {
            return Err(refused("has several steps").expected("one step that computes prompt and output"));
        };
        if !all.starts_with(ids) || dump.manifest().graphs.is_empty() || dump.manifest().is_numbered() {
            return Err(refused("is none of the prompt with what was said behind it")
                .expected(format!("a graph, and tokens that begin with {ids:?}"))
                .found(format!("{all:?}"))
                .hint("parity record -o DIR -- PROGRAM with both as its prompt"));
        }
        let graphs = Graphs::of_dump(dump, gguf)?;
        let judged = graphs.judged(dump, dump);
        let (_, labelled) = graphs.steps()[0];
        let graph = &labelled.program.graph;
        let leaves = (0..graph.tensors.len()).filter(|&id| graph.is_leaf(id));
        let input = |id: Id| Some((graph.get(id).name.clone(), labelled.input(&judged, 0, id)?));
        let inputs: Values =
            leaves.filter(|&id| gguf.tensor(&graph.get(id).name).is_none()).filter_map(input).collect();
        let seen = labelled.nodes().filter(|(_, id)| *id == Checkpoint::global(Kind::Logits)).last();
        let (seen, _) = seen.ok_or_else(|| refused("has a graph without logits"))?;
        // Logits of the last rows of a step.
        let n = graph.get(seen).ne[1];
        let before = (ids.len() + n).checked_sub(step.positions.len() + rows);
        let before = before.ok_or_else(|| {
            refused("has logits of too few rows").expected(format!("the last {rows}")).found(n)
        })?;
        let of_graph = (graphs.into_labelled().swap_remove(0), inputs, seen);
        let made = Prompt::made(model, of_graph, ids.to_vec(), step.positions.len(), prompt);
        Ok(Prompt { rows, before, ..made })
    }

    /// How many hypotheses are computed at a time.
    pub fn at_once(&self) -> usize {
        (ROWS / self.tokens).min(LOGITS / ((self.before + self.rows) * self.width)).max(2)
    }

    /// L
    pub fn layers(&self) -> u32 {
        let layers = self.labelled.nodes().filter_map(|(_, id)| id.layer_index());
        layers.max().map_or(0, |last| last + 1)
    }

    /// (rows, V) logits of each hypothesis behind those of exact arithmetic; `None` where a hypothesis has none.
    pub fn logits(&self, hypotheses: &[&Hypothesis]) -> Vec<Option<Vec<f32>>> {
        let exact = Hypothesis::healthy(EXACT);
        let all: Vec<&Hypothesis> = std::iter::once(&exact).chain(hypotheses.iter().copied()).collect();
        self.logits_in(&mut self.lanes(&all), &all)
    }

    /// Those of one.
    pub fn alone(&self, one: &Hypothesis) -> Option<Vec<f32>> {
        self.logits_in(&mut self.lanes(&[one]), &[one]).pop().flatten()
    }

    /// Lanes in which nothing was computed yet.
    pub fn lanes(&self, hypotheses: &[&Hypothesis]) -> Vec<Lane<'a>> {
        hypotheses.iter().map(|one| Lane::new(self.model.gguf, one.way.arithmetic)).collect()
    }

    /// Logits of each, going on with what a step before left in its lane; the others are told by where they differ from the
    /// first.
    pub fn logits_in(&self, lanes: &mut [Lane<'_>], all: &[&Hypothesis]) -> Vec<Option<Vec<f32>>> {
        let run = Run {
            prompt: self,
            elsewhere: all.iter().map(|one| self.read_elsewhere(one)).collect(),
            kept: all.iter().map(|_| Mutex::new(HashMap::new())).collect(),
            logits: all.iter().map(|_| Mutex::new(None)).collect(),
            all,
        };
        let input = |id: Id| self.input(id);
        step_lanes(lanes, &self.labelled.program, self.seen, &input, &run);
        let [from, to] = [self.before * self.width, (self.before + self.rows) * self.width];
        let rows = |mut all: Vec<f32>| {
            (all.len() >= to).then(|| {
                all.truncate(to);
                all.drain(..from);
                all
            })
        };
        run.logits
            .into_par_iter()
            .map(|found| found.into_inner().unwrap_or_default().and_then(rows))
            .collect()
    }

    /// Where a pass in exact arithmetic came to what f16 cannot hold, in words.
    pub fn beyond_f16(&self) -> Option<String> {
        let (at, peak) = (*self.beyond_f16.lock().ok()?)?;
        Some(format!("an exact pass reaches {} at {at}, and f16 holds {F16_MAX}", number(peak.into())))
    }

    /// What a layer makes of its own output, in exact arithmetic; `None` where it has none.
    fn repeated(&self, layer: u32, output: &[f32]) -> Option<Vec<f32>> {
        // A thread of a pass computes it: who multiplies may be waiting for that pass.
        let model = Model { multiplier: None, ..self.model };
        let pass = |rows: usize, what| Prompt::between(model, &self.ids, self.prompt, rows, what).ok();
        let out = |layer| Checkpoint::layer(Kind::LayerOut, layer);
        let (own, before) = (out(layer), layer.checked_sub(1).map_or(Checkpoint::global(Kind::Embed), out));
        // Of the last layer only the rows are computed that something is said of.
        let computed = self.before + self.rows;
        let output = match layer + 1 == self.layers() && computed < self.tokens {
            true => pass(self.tokens, (None, own))?.alone(&Hypothesis::healthy(EXACT))?,
            false => output.to_vec(),
        };
        let rows = if layer + 1 == self.layers() { computed } else { self.tokens };
        pass(rows, (Some((before, output)), own))?.alone(&Hypothesis::healthy(EXACT))
    }

    fn given(&self, id: Id) -> Option<&[f32]> {
        self.given.as_ref().filter(|(node, _)| *node == id).map(|(_, values)| &values[..])
    }

    /// Whether a mistake in a node may show in what was seen, and not in what is given.
    pub fn is_between(&self, id: Id) -> bool {
        id <= self.seen && self.given.as_ref().is_none_or(|(given, _)| id > *given)
    }

    fn input(&self, leaf: Id) -> Option<Vec<f64>> {
        self.inputs.get(&self.labelled.program.graph.get(leaf).name).cloned()
    }

    /// Nodes that mistakes read besides the sources of their own.
    fn read_elsewhere(&self, one: &Hypothesis) -> HashSet<Id> {
        let graph = &self.labelled.program.graph;
        let mistakes = one.nodes().into_iter().flat_map(|nodes| nodes.values().flatten());
        let others = mistakes.flat_map(|one| one.fault.rewrite.change.others());
        others.map(|id| graph.origin(id)).filter(|&id| !graph.is_leaf(id)).collect()
    }
}

/// Refuses what would not fit into memory: logits of several hypotheses, and the widest values of as many.
fn check_memory(model: Model<'_>, tokens: usize, rows: usize) -> Result<()> {
    let gguf = model.gguf;
    let extent =
        |name: &str| gguf.tensor(&weight(name)).and_then(|t| t.info.shape.first().copied()).unwrap_or(0);
    let at_once = (model.side_by_side() * ROWS / tokens.max(1)).max(CACHES.len() + 1);
    let floats = |numbers: usize| (at_once.saturating_mul(numbers).saturating_mul(size_of::<f32>())) as u64;
    let (vocabulary, wide) = (extent(TOKEN_EMBD), extent(&in_layer(0, FFN_UP)));
    // Each twice: while they are copied.
    let parts =
        [("logits", 2 * floats(rows * vocabulary)), ("values between nodes", 2 * floats(tokens * wide))];
    memory::require(
        &gguf.path().display().to_string(),
        &parts,
        "a shorter prompt or output; --rows A..B of --logits",
    )
}

/// One run of several hypotheses.
struct Run<'a> {
    prompt: &'a Prompt<'a>,
    all: &'a [&'a Hypothesis],
    /// By lane.
    elsewhere: Vec<HashSet<Id>>,
    kept: Vec<Mutex<HashMap<Id, Vec<f64>>>>,
    logits: Vec<Mutex<Option<Vec<f32>>>>,
}

impl Run<'_> {
    /// Values with a mistake in some rows alone: in the others they are the node's own.
    fn in_rows(&self, rows: Rows, node: &Node<'_>, args: &Args<'_, f32>, wrong: Value<f32>) -> Value<f32> {
        let axis = self.prompt.labelled.axes.get(node.id).copied().flatten();
        let (Some(axis), false) = (axis, rows == Rows::All) else { return wrong };
        let (mut values, right) = (wrong?, own(node, Ok(args))?);
        let shape = args.shape;
        let inner: usize = shape[axis + 1..].iter().product();
        // The rows of a node are those of the whole step, or its last.
        let first = self.prompt.tokens.saturating_sub(shape[axis]);
        for (i, (value, right)) in values.data.iter_mut().zip(&right.data).enumerate() {
            let position = first + i / inner.max(1) % shape[axis].max(1);
            let is_behind = position >= self.prompt.prompt;
            if is_behind != (rows == Rows::Decode) {
                *value = *right;
            }
        }
        Ok(values)
    }
}

impl Lanes for Run<'_> {
    fn differs(&self, lane: usize, id: Id) -> bool {
        if self.prompt.given(id).is_some() && lane == 0 {
            return true;
        }
        // A lane in another arithmetic than the first one's differs in every node.
        let one = self.all[lane];
        let label = self.prompt.labelled.labels[id];
        let is_repeated =
            one.repeats().is_some_and(|layer| label == Some(Checkpoint::layer(Kind::LayerOut, layer)));
        !one.way.is_exact() || is_repeated || one.nodes().is_some_and(|nodes| nodes.contains_key(&id))
    }

    fn answer<'a>(&'a self, lane: usize, node: &Node<'_>, args: &'a Args<'a, f32>) -> Answer<'a> {
        if let Some(values) = self.prompt.given(node.id) {
            return Answer::Given(Ok(values.to_vec().into()));
        }
        let one = self.all[lane];
        if let Some(layer) = one.repeats() {
            let values = own(node, Ok(args));
            let again = |values: &[f32]| self.prompt.repeated(layer, values);
            return Answer::Given(values.and_then(|values| {
                again(&values.data).map(Into::into).ok_or_else(|| Unknown::new(args.name))
            }));
        }
        let Some(here) = one.nodes().and_then(|nodes| nodes.get(&node.id)) else { return Answer::Own };
        let kept = |id: Id| self.kept[lane].lock().ok()?.get(&id).cloned();
        let others = |id: Id| kept(id).or_else(|| self.prompt.input(id));
        match rewritten(here, self.prompt.model.gguf, node, args, &others) {
            Ok(product) if one.rows == Rows::All && product.is_product(args) => {
                Answer::Product(Box::new(product))
            }
            Ok(other) => {
                let wrong = other.values(args).map(Into::into);
                Answer::Given(self.in_rows(one.rows, node, args, wrong))
            }
            Err(unknown) => Answer::Given(Err(unknown)),
        }
    }

    fn multiplier(&self) -> Option<&dyn Multiplier> {
        self.prompt.model.multiplier
    }

    fn wants(&self, lane: usize, id: Id) -> bool {
        id == self.prompt.seen || self.elsewhere[lane].contains(&id)
    }

    fn see(&self, lane: usize, id: Id, value: &mut Value<f32>) {
        let Ok(values) = value else { return };
        // What is given is as it is.
        let way = self.all[lane].way;
        if !way.is_exact() && self.prompt.given(id).is_none() {
            way.keep(id, self.prompt.cached.get(&id).copied(), &mut values.data);
        }
        if lane == 0
            && way.is_exact()
            && let Some(label) = self.prompt.labelled.labels[id]
            && let Ok(beyond @ None) = self.prompt.beyond_f16.lock().as_deref_mut()
        {
            // Magnitudes are ordered as their bits are, and bits are compared several at a time.
            let bits = values.data.iter().map(|x| x.abs().to_bits());
            let finite = bits.map(|x| if x < f32::INFINITY.to_bits() { x } else { 0 });
            let peak = f32::from_bits(finite.fold(0, u32::max));
            *beyond = (peak > F16_MAX).then_some((label, peak));
        }
        if self.elsewhere[lane].contains(&id)
            && let Ok(mut kept) = self.kept[lane].lock()
        {
            kept.insert(id, values.data.iter().map(|value| f64::from(*value)).collect());
        }
        if id == self.prompt.seen
            && let Ok(mut logits) = self.logits[lane].lock()
        {
            // The first lane's are those of lanes that do not differ; of another nobody reads them again.
            *logits = Some(if lane == 0 { values.data.clone() } else { std::mem::take(&mut values.data) });
        }
    }
}
