//! Executes a model by parity's own kernels, on the CPU or on GPUs, and writes down what they compute.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use parity_dump::{Dump, Element, Writer};

use super::mistakes::Mistakes;
use super::plan::RunPlan;
use super::steps::{self, Form, Planned};
use super::{Executed, Progress, RunOptions};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{argmax, fed};
use crate::engine::fused::Model;
use crate::engine::{Batch, Engine, Probe, Values, device};
use crate::error::{Error, Result};
use crate::model::builders::Cache;

/// What a reader must know of isolation on a GPU.
const ATTENTION_ON_HOST: &str = "isolated: the attention kernel computes scores, probabilities and context in one launch \
     and cannot be fed between them, so where its inside is looked at the host computed all three";

/// Executes the steps of a run into a dump at `dir`.
///
/// # Errors
/// A device or an arithmetic that is not there, a mistake that the model has no place for, a dump that cannot be written.
pub(super) fn execute(
    model: &Model,
    options: &RunOptions,
    reference: Option<&Dump>,
    dir: &Path,
    progress: Progress<'_>,
) -> Result<Executed> {
    let plan = RunPlan::new(model, options, reference)?;
    super::limits::memory(model, options, &plan)?;
    let mistakes = &options.inject;
    // Attention in its parts where it is looked into; keys and values as they are.
    let flash = !plan.wanted.iter().any(|id| id.kind().is_optional());
    let form = Form { flash, cache: Cache::F32 };
    let source = match mistakes.is_empty() {
        true => None,
        false => Some(steps::built(&model.gguf, &plan.tokens, &plan.steps, &form)?),
    };
    let planned = source.as_ref().map(|source| Planned::new(source, mistakes, options)).transpose()?;
    let exposed = plan.graph.fused(|id| plan.wanted.contains(&id)).checkpoints().collect();
    let made = planned.as_ref().map(|planned| Mistakes::new(planned, &model.gguf, &exposed));
    let mut wanted = plan.wanted.clone();
    wanted.extend(made.iter().flat_map(Mistakes::read));
    let mut engine = device::open(&options.device, model, plan.graph.clone(), options.numerics)?;
    let mut writer = Writer::create(dir, engine.producer(), model.info())?;
    writer.manifest_mut().prompt.clone_from(&options.prompt);
    let mut recorder = Recorder {
        writer,
        wanted: &wanted,
        written: &plan.wanted,
        fed: reference.filter(|_| options.isolated),
        mistakes: made,
        mistaken: HashMap::new(),
        progress,
        n_expected: wanted.len() * plan.steps.len(),
        n_recorded: 0,
        first_logits: reference
            .filter(|_| options.dump.is_none() && mistakes.is_empty())
            .map_or(0, first_logits),
        rows: 0,
    };
    all_steps(engine.as_mut(), &plan, &mut recorder)?;
    recorder.writer.finish()?;
    let mut notes: Vec<String> = planned.iter().flat_map(|planned| planned.notes.clone()).collect();
    let looks_inside = !flash;
    if options.isolated && looks_inside && engine.producer().backend.as_deref() == Some("cuda") {
        notes.push(ATTENTION_ON_HOST.to_owned());
    }
    Ok(Executed { notes, ..Executed::default() })
}

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn all_steps(engine: &mut dyn Engine, plan: &RunPlan, recorder: &mut Recorder<'_>) -> Result<()> {
    let mut tokens = plan.tokens.clone();
    let mut logits: Option<Vec<f32>> = None;
    for (number, step) in plan.steps.iter().enumerate() {
        if step.end > tokens.len() {
            let next = logits.as_deref().and_then(argmax).ok_or_else(|| {
                Error::new("logits", "no token can be sampled").expected("finite logits").found("NaN only")
            })?;
            tokens.push(next);
        }
        let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
        recorder.rows = batch.tokens.len();
        recorder.mistaken.clear();
        recorder.mistakes.iter_mut().for_each(|mistakes| mistakes.begin(number, batch.tokens));
        recorder.writer.begin_step(batch.tokens, &batch.positions(), recorder.wanted.len())?;
        logits = engine.step(&batch, recorder)?;
        let mistaken = recorder.mistaken.get(&Checkpoint::global(Kind::Logits));
        let last = mistaken.and_then(|values| values.get(values.len() - values.len() / recorder.rows..));
        logits = last.map(<[f32]>::to_vec).or(logits);
        recorder.writer.end_step()?;
    }
    Ok(())
}

/// The first position whose logits a reference has: those before it are compared with nothing.
fn first_logits(reference: &Dump) -> usize {
    let logits = Checkpoint::global(Kind::Logits);
    if !reference.seen(logits).is_empty() {
        return 0;
    }
    let recorded = reference.get(logits).and_then(|recorded| recorded.positions().next());
    recorded.map_or(0, |first| first as usize)
}

/// A probe that writes down what an engine shows it.
struct Recorder<'a> {
    writer: Writer,
    /// What the engine shows: what is written down, and what nodes with mistakes read.
    wanted: &'a HashSet<Checkpoint>,
    written: &'a HashSet<Checkpoint>,
    /// Whose values the engine goes on with, where its nodes are looked at in isolation.
    fed: Option<&'a Dump>,
    /// What is computed wrongly on purpose.
    mistakes: Option<Mistakes<'a>>,
    /// What that came to in this step, by the nodes that it reaches first.
    mistaken: HashMap<Checkpoint, Vec<f32>>,
    progress: Progress<'a>,
    n_expected: usize,
    n_recorded: usize,
    /// The first position whose logits the reference has, where nobody keeps the others.
    first_logits: usize,
    /// Rows of the step.
    rows: usize,
}

impl Probe for Recorder<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.wanted.contains(&checkpoint)
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let mut values: Cow<'_, [f32]> = match values {
            Values::F32(values) => values.into(),
            Values::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Values::F64(values) => values.iter().map(|&value| value as f32).collect(),
        };
        if let Some(mistakes) = &mut self.mistakes {
            mistakes.take(checkpoint, shape, &values);
            if let Some(mistaken) = mistakes.values(checkpoint)? {
                mistakes.take(checkpoint, shape, &mistaken);
                self.mistaken.insert(checkpoint, mistaken.clone());
                values = mistaken.into();
            }
        }
        if self.written.contains(&checkpoint) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let positions = batch.positions();
            let some = Some(&positions[..]).filter(|_| batch.tokens.len() < self.rows);
            self.writer.tensor(checkpoint, Element::F32, shape, &bytes, some)?;
        }
        self.n_recorded += 1;
        (self.progress)(self.n_recorded, self.n_expected);
        steps::in_time(self.n_recorded, self.n_expected)
    }

    fn first_logits(&self, batch: &Batch<'_>) -> usize {
        self.first_logits.saturating_sub(batch.first).min(batch.tokens.len())
    }

    fn feeds(&self) -> bool {
        self.fed.is_some() || self.mistakes.is_some()
    }

    fn fed(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>, width: usize) -> Option<Vec<f32>> {
        let Some(reference) = self.fed else {
            let mistaken = self.mistaken.get(&checkpoint)?;
            // What a dump has heads first an engine has rows first.
            return match checkpoint.kind().is_optional() {
                true => Some(rows_first(mistaken, batch, width)),
                false => Some(mistaken.clone()),
            };
        };
        let rows = fed::rows(reference, checkpoint, batch, width)?;
        if let Some(mistakes) = self.mistakes.as_mut().filter(|_| !checkpoint.kind().is_optional()) {
            mistakes.feed(checkpoint, &rows);
        }
        Some(rows)
    }
}

/// (H, T, S) values as (T, H·S).
fn rows_first(values: &[f32], batch: &Batch<'_>, width: usize) -> Vec<f32> {
    let (rows, cached) = (batch.tokens.len(), batch.first + batch.tokens.len());
    let row = |t: usize| {
        (0..width / cached.max(1)).flat_map(move |head| &values[(head * rows + t) * cached..][..cached])
    };
    (0..rows).flat_map(row).copied().collect()
}
