//! The main job: run the instrumented engine on a prompt, hold it against a recording, judge.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::PathBuf;

use crate::audit::{self, AuditRows, Audits};
use crate::checkpoint::Checkpoint;
use crate::compare::{Live, LiveOptions, LiveResult, Tolerances, argmax};
use crate::dump::{self, Kept, Recording};
use crate::engine::device::{self, Device};
use crate::engine::{Batch, Engine};
use crate::error::{Error, Result};
use crate::evidence;
use crate::faults::diagnose::wanted_rows;
use crate::findings::{self, Parts};
use crate::model::Model;
use crate::model::graph::Graph;
use crate::numerics::Numerics;
use crate::record::import::is_partial;
use crate::references;
use crate::report::{Report, Verdict};
use crate::select::Selection;
use parity_dump::{Dump, Writer};

/// What to run and how to judge it.
#[derive(Clone, Default)]
pub struct RunOptions {
    /// (T,) tokens of the prompt; those of the reference where empty.
    pub tokens: Vec<u32>,
    /// The text that they come from, for the dump's manifest.
    pub prompt: Option<String>,
    /// Decode steps; as many as the reference has where neither this nor a prompt is given.
    pub n_predict: Option<usize>,
    /// Folder or file of the reference; looked for by model and tokens where absent.
    pub reference: Option<PathBuf>,
    /// Folder that the candidate's dump is written to.
    pub dump: Option<PathBuf>,
    /// Where the engine runs.
    pub device: Device,
    /// The engine's arithmetic.
    pub numerics: Numerics,
    /// Which checkpoints are looked at.
    pub selection: Selection,
    /// The user's tolerances.
    pub tolerances: Tolerances,
    /// Prefill in pieces of so many tokens; in the reference's steps where absent.
    pub chunk: Option<usize>,
    /// Whether checkpoints that a side lacks are no obstacle to parity.
    pub allow_missing: bool,
    /// Whether to draw the differences, for the HTML report.
    pub pictures: bool,
    /// Token rows that both sides are audited at; no audit where absent.
    pub audit: Option<AuditRows>,
}

/// Tells how far a run is: checkpoints computed so far, of how many.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Runs the engine for `graph`, the model's own or one with planted mistakes, and reports.
pub fn run(model: &Model, graph: &Graph, options: &RunOptions, progress: Progress<'_>) -> Result<Report> {
    let reference = reference(model, options)?;
    let mut plan = Plan::new(model, graph, options, reference.as_ref())?;
    let result = pass(model, options, &plan, reference.as_ref(), progress)?;
    let mut audits = audits(model, options, &plan, reference.as_ref(), &result.kept)?;
    let sampled = plan.sample.len();
    let silent = RunOptions { dump: None, pictures: false, ..options.clone() };
    if let Some(audits) = &mut audits {
        let outliers = evidence::outliers(&result.comparisons, &plan.sample);
        let second = audit_outliers(model, &silent, &plan, reference.as_ref(), outliers, progress)?;
        plan.sample.extend(second.iter().flat_map(Audits::rows_beyond));
        second.into_iter().for_each(|second| audits.merge(second));
    }
    // A diagnosis looks at more rows than an audit: those are computed once more.
    let mut again: Option<Kept> = None;
    if audits.as_ref().is_some_and(|audits| audits.sides[0].origins().next().is_some()) {
        plan.sample.extend(wanted_rows(&result.kept.manifest().steps));
        if plan.sample.len() > sampled {
            again = Some(pass(model, &silent, &plan, None, progress)?.kept);
        }
    }
    report(model, options, reference.as_ref(), result, again, plan.notes, audits)
}

/// Computes rows once more that differ more than those that were audited, up to the checkpoints where they
/// first do, and audits them there.
fn audit_outliers(
    model: &Model,
    options: &RunOptions,
    plan: &Plan,
    reference: Option<&Dump>,
    outliers: BTreeMap<Checkpoint, u32>,
    progress: Progress<'_>,
) -> Result<Option<Audits>> {
    let Some((&last, _)) = outliers.last_key_value() else { return Ok(None) };
    let compared: BTreeSet<Checkpoint> = outliers.keys().copied().collect();
    let narrowed = Plan {
        graph: plan.graph.until(last),
        audited: healthy_inputs(model, &compared),
        compared,
        sample: outliers.into_values().collect(),
        tokens: plan.tokens.clone(),
        steps: plan.steps.clone(),
        notes: Vec::new(),
    };
    // Tokens that were sampled on the way are not known to a pass that ends before the logits.
    if narrowed.n_rows() > narrowed.tokens.len() {
        return Ok(None);
    }
    let kept = pass(model, options, &narrowed, None, progress)?.kept;
    audits(model, options, &narrowed, reference, &kept)
}

/// What the healthy nodes of some checkpoints read, and these checkpoints.
fn healthy_inputs(model: &Model, compared: &BTreeSet<Checkpoint>) -> BTreeSet<Checkpoint> {
    let healthy = model.graph.fused(|checkpoint| compared.contains(&checkpoint));
    let mut audited = compared.clone();
    for node in healthy.nodes.iter().filter(|node| compared.contains(&node.checkpoint)) {
        audited.extend(&node.inputs);
    }
    audited
}

/// Runs the engine once, held against the reference as it goes.
fn pass(
    model: &Model,
    options: &RunOptions,
    plan: &Plan,
    reference: Option<&Dump>,
    progress: Progress<'_>,
) -> Result<LiveResult> {
    let mut engine = device::open(options.device, model, plan.graph.clone(), options.numerics)?;
    let mut kept = Kept::new(engine.producer(), model.info());
    kept.manifest_mut().prompt.clone_from(&options.prompt);
    let writer = options.dump.as_ref().map(|dir| writer(dir, &kept)).transpose()?;
    let live = LiveOptions {
        compared: plan.compared.clone(),
        audited: plan.audited.clone(),
        sample: plan.sample.clone(),
        tolerances: &options.tolerances,
        writer,
        pictures: options.pictures,
        n_rows: plan.n_rows(),
        progress,
        n_expected: plan.n_outputs(),
    };
    let mut live = Live::new(live, reference.map(|dump| dump as &dyn Recording), kept);
    execute(engine.as_mut(), plan, &mut live)?;
    live.finish()
}

/// Audits both sides at the sampled rows.
fn audits(
    model: &Model,
    options: &RunOptions,
    plan: &Plan,
    reference: Option<&Dump>,
    kept: &Kept,
) -> Result<Option<Audits>> {
    if options.audit.is_none() {
        return Ok(None);
    }
    let positions: Vec<u32> = plan.sample.iter().copied().collect();
    let wants = |checkpoint: Checkpoint| plan.compared.contains(&checkpoint);
    let how = audit::Options { positions: &positions, wants: &wants };
    let sides: Vec<&dyn Recording> =
        std::iter::once(kept as &dyn Recording).chain(auditable(reference)).collect();
    audit::audit(&sides, &model.gguf, &model.graph, &how).map(Some)
}

/// The reference, unless only printed values of it are known, of which nothing can be computed again.
fn auditable(reference: Option<&Dump>) -> Option<&dyn Recording> {
    reference.filter(|dump| !is_partial(dump)).map(|dump| dump as &dyn Recording)
}

/// The steps of a run and what is looked at.
struct Plan {
    graph: Graph,
    /// Tokens that are known beforehand; later ones are sampled greedily.
    tokens: Vec<u32>,
    steps: Vec<Range<usize>>,
    compared: BTreeSet<Checkpoint>,
    audited: BTreeSet<Checkpoint>,
    sample: BTreeSet<u32>,
    notes: Vec<String>,
}

impl Plan {
    fn new(model: &Model, graph: &Graph, options: &RunOptions, reference: Option<&Dump>) -> Result<Plan> {
        let n_layers = model.config.dims.layers;
        let wanted = |checkpoint: &Checkpoint| options.selection.wants(*checkpoint, n_layers);
        let compared: BTreeSet<Checkpoint> = graph.checkpoints().filter(wanted).collect();
        let last = *compared.last().ok_or_else(|| {
            Error::new("--layer, --checkpoint", "no checkpoint of this model is selected")
                .expected(format!("layers 0 to {}, or a pattern such as 'blk.*.q_rope'", n_layers - 1))
        })?;
        let audited =
            if options.audit.is_some() { healthy_inputs(model, &compared) } else { compared.clone() };
        let (tokens, steps, mut notes) = steps(options, reference)?;
        if let Some(reference) = reference {
            let ours = if options.tokens.is_empty() { &tokens } else { &options.tokens };
            let theirs = reference.tokens();
            if !theirs.starts_with(ours) {
                notes.extend(crate::faults::tokens::said(ours, theirs, &model.gguf));
            }
        }
        // Greedy decoding needs the logits even where they are not looked at.
        let sampled = steps.last().is_some_and(|step| step.end > tokens.len());
        let end = if sampled { *graph.nodes.last().map_or(&last, |node| &node.checkpoint) } else { last };
        let sample = options.audit.map_or(BTreeSet::new(), |rows| rows.sample(&steps));
        Ok(Plan { graph: graph.until(end), tokens, steps, compared, audited, sample, notes })
    }

    /// Token positions of the whole run.
    fn n_rows(&self) -> usize {
        self.steps.last().map_or(0, |step| step.end)
    }

    /// Outputs that the probe will see, for the progress bar.
    fn n_outputs(&self) -> usize {
        self.audited.union(&self.compared).count() * self.steps.len()
    }
}

/// The reference that was named, or a stored one that fits.
fn reference(model: &Model, options: &RunOptions) -> Result<Option<Dump>> {
    if let Some(path) = &options.reference {
        return dump::open(path, None).map(Some);
    }
    if options.tokens.is_empty() {
        return Err(Error::new("prompt", "there is nothing to run")
            .expected("a text or tokens")
            .found("no token")
            .hint("parity run -p \"def read_lines(path):\", or --tokens 1,2,3, or --reference DIR"));
    }
    let fingerprint = crate::model::fingerprint(&model.gguf);
    let n_decode = options.n_predict.unwrap_or(0);
    let stored = references::find(&fingerprint, &options.tokens, n_decode);
    match (&stored, &options.prompt) {
        (None, Some(prompt)) => {
            references::record(model.gguf.path(), &fingerprint, prompt, options.tokens.len(), n_decode)
        }
        _ => Ok(stored),
    }
}

/// Tokens, steps, and what a reader must know about them.
type Steps = (Vec<u32>, Vec<Range<usize>>, Vec<String>);

/// What is run: the prompt, and the reference's steps where there are any.
fn steps(options: &RunOptions, reference: Option<&Dump>) -> Result<Steps> {
    let mut notes = Vec::new();
    let mut tokens = options.tokens.clone();
    let mut steps: Vec<Range<usize>> = Vec::new();
    if let Some(reference) = reference {
        let known = reference.tokens();
        let prompt = if tokens.is_empty() { prompt_len(reference) } else { tokens.len() };
        let follows = known.starts_with(&tokens);
        let total = match (options.n_predict, options.tokens.is_empty()) {
            (Some(n), _) => prompt + n,
            (None, true) => known.len(),
            (None, false) => prompt,
        };
        if follows {
            tokens = known[..total.min(known.len())].to_vec();
            steps = contiguous(reference, tokens.len());
        } else {
            notes.push(
                "the reference was made with other tokens; only their common beginning is compared".into(),
            );
        }
        if !reference.manifest().complete {
            notes.push("the reference is an interrupted recording; what is whole in it is compared".into());
        }
        extend(&mut steps, prompt, total);
    } else {
        extend(&mut steps, tokens.len(), tokens.len() + options.n_predict.unwrap_or(0));
    }
    if let Some(chunk) = options.chunk {
        steps = steps.into_iter().flat_map(|step| pieces(step, chunk.max(1))).collect();
    }
    Ok((tokens, steps, notes))
}

/// Positions of the prompt: all before the trailing steps of one token.
fn prompt_len(reference: &Dump) -> usize {
    let steps = &reference.manifest().steps;
    let decoded = steps.iter().rev().take_while(|step| step.positions.len() == 1).count();
    reference.tokens().len() - decoded.min(reference.tokens().len().saturating_sub(1))
}

/// The reference's steps up to `end` where they follow one another; else none.
fn contiguous(reference: &Dump, end: usize) -> Vec<Range<usize>> {
    let mut steps = Vec::new();
    let mut next = 0;
    for step in &reference.manifest().steps {
        let first = step.positions.first().map_or(usize::MAX, |&p| p as usize);
        if first != next || next >= end {
            break;
        }
        let stop = (first + step.positions.len()).min(end);
        steps.push(first..stop);
        next = stop;
    }
    steps
}

/// Adds the prompt as one step where it is not there yet, and one step for each later token up to `total`.
fn extend(steps: &mut Vec<Range<usize>>, prompt: usize, total: usize) {
    let mut next = steps.last().map_or(0, |step| step.end);
    if next < prompt {
        steps.push(next..prompt);
        next = prompt;
    }
    steps.extend((next..total).map(|position| position..position + 1));
}

fn pieces(step: Range<usize>, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let end = step.end;
    step.step_by(chunk).map(move |start| start..(start + chunk).min(end))
}

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn execute(engine: &mut dyn Engine, plan: &Plan, live: &mut Live<'_>) -> Result<()> {
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
        live.begin_step(&batch)?;
        logits = engine.step(&batch, live)?;
        live.end_step()?;
    }
    Ok(())
}

fn writer(dir: &std::path::Path, kept: &Kept) -> Result<Writer> {
    let manifest = kept.manifest();
    let mut writer = Writer::create(dir, manifest.producer.clone(), manifest.model.clone())?;
    writer.manifest_mut().prompt.clone_from(&manifest.prompt);
    Ok(writer)
}

fn report(
    model: &Model,
    options: &RunOptions,
    reference: Option<&Dump>,
    result: LiveResult,
    again: Option<Kept>,
    notes: Vec<String>,
    audits: Option<Audits>,
) -> Result<Report> {
    let path = options.dump.as_ref().map(|dir| dir.display().to_string());
    let details = result.details;
    let kept: &dyn Recording = again.as_ref().unwrap_or(&result.kept);
    let sides: Vec<&dyn Recording> = std::iter::once(kept).chain(auditable(reference)).collect();
    let judgement = evidence::weigh(model, &sides, &result.comparisons, audits.as_ref())?;
    let mut report = findings::assemble(Parts {
        judgement,
        comparisons: result.comparisons,
        tokens: result.tokens,
        candidate: findings::side(&result.kept, path),
        reference: reference.map(|dump| findings::side(dump, Some(dump.path().display().to_string()))),
        notes,
        allow_missing: options.allow_missing,
    });
    report.details = details;
    if reference.is_none() && report.verdict != Verdict::Divergence {
        report.verdict = Verdict::Undecided;
        report.reason = Some(no_reference(model, options));
    }
    Ok(report)
}

/// What to type where there was no reference.
fn no_reference(model: &Model, options: &RunOptions) -> String {
    let n_decode = options.n_predict.unwrap_or(0);
    let prompt = options.prompt.as_deref().unwrap_or("…");
    let words = references::recording_command(
        "llama-completion".as_ref(),
        model.gguf.path(),
        prompt,
        options.tokens.len(),
        n_decode,
    );
    let words: Vec<String> = words.iter().map(|word| references::quoted(&word.to_string_lossy())).collect();
    format!(
        "no stored reference for these tokens; record one with a llama.cpp, and name it with --reference: \
         parity record -o ref -- {}",
        words.join(" ")
    )
}
