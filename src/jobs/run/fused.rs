//! Executes a model by parity's own kernels, on the CPU or on GPUs, and writes down what they compute.

use std::collections::HashSet;
use std::path::Path;

use parity_dump::{Dump, Element, Writer};

use super::plan::RunPlan;
use super::{Executed, Progress, RunOptions};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{argmax, fed};
use crate::engine::{Batch, Engine, Probe, Values, device};
use crate::error::{Error, Result};
use crate::faults::inject;
use crate::faults::mistake::Mistake;
use crate::jobs::limits;
use crate::model::Model;

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
    let specs = options.inject.iter().map(Mistake::in_nodes).collect::<Result<Vec<_>>>()?;
    let mut graph = model.graph.clone();
    let injected = inject::inject(&mut graph, &specs, model)?;
    let plan = RunPlan::new(model, &graph, options, reference)?;
    limits::memory(model, options, &plan)?;
    let mut engine = device::open(&options.device, model, plan.graph.clone(), options.numerics)?;
    let mut writer = Writer::create(dir, engine.producer(), model.info())?;
    writer.manifest_mut().prompt.clone_from(&options.prompt);
    let fed = reference.filter(|_| options.isolated);
    let n_expected = plan.n_outputs();
    let first_logits = reference.filter(|_| options.dump.is_none()).map_or(0, first_logits);
    let (wanted, n_recorded, rows) = (&plan.wanted, 0, 0);
    let mut recorder = Recorder { writer, wanted, fed, progress, n_expected, n_recorded, first_logits, rows };
    steps(engine.as_mut(), &plan, &mut recorder)?;
    recorder.writer.finish()?;
    let mut notes = plan.notes;
    notes.extend(
        injected.into_iter().map(|fault| format!("{} was injected: {}", fault.fault, fault.sentence)),
    );
    let looks_inside = plan.wanted.iter().any(|id| id.kind().is_optional());
    if options.isolated && looks_inside && engine.producer().backend.as_deref() == Some("cuda") {
        notes.push(ATTENTION_ON_HOST.to_owned());
    }
    Ok(Executed { notes })
}

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn steps(engine: &mut dyn Engine, plan: &RunPlan, recorder: &mut Recorder<'_>) -> Result<()> {
    let mut tokens = plan.tokens.clone();
    let mut logits: Option<Vec<f32>> = None;
    for step in &plan.steps {
        if step.end > tokens.len() {
            let next = logits.as_deref().and_then(argmax).ok_or_else(|| {
                Error::new("logits", "no token can be sampled").expected("finite logits").found("NaN only")
            })?;
            tokens.push(next);
        }
        let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
        recorder.rows = batch.tokens.len();
        recorder.writer.begin_step(batch.tokens, &batch.positions(), plan.wanted.len())?;
        logits = engine.step(&batch, recorder)?;
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
    wanted: &'a HashSet<Checkpoint>,
    /// Whose values the engine goes on with, where its nodes are looked at in isolation.
    fed: Option<&'a Dump>,
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
        let bytes: Vec<u8> = match values {
            Values::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Values::F16(values) => values.iter().flat_map(|value| value.to_f32().to_le_bytes()).collect(),
            Values::F64(values) => values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect(),
        };
        let positions = batch.positions();
        let some = Some(&positions[..]).filter(|_| batch.tokens.len() < self.rows);
        self.writer.tensor(checkpoint, Element::F32, shape, &bytes, some)?;
        self.n_recorded += 1;
        (self.progress)(self.n_recorded, self.n_expected);
        Ok(())
    }

    fn first_logits(&self, batch: &Batch<'_>) -> usize {
        self.first_logits.saturating_sub(batch.first).min(batch.tokens.len())
    }

    fn feeds(&self) -> bool {
        self.fed.is_some()
    }

    fn fed(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>, width: usize) -> Option<Vec<f32>> {
        fed::rows(self.fed?, checkpoint, batch, width)
    }
}
