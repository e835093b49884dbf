//! The main job: run the instrumented engine on a prompt, compare it with a recording, judge.

use std::path::{Path, PathBuf};

use indexmap::{IndexMap, IndexSet};

use crate::audit::{self, AuditRows, Audits};
use crate::checkpoint::Checkpoint;
use crate::compare::{Live, LiveOptions, LiveResult, Tolerances, argmax};
use crate::dump::{Kept, Recording};
use crate::engine::device::{self, Device};
use crate::engine::{Batch, Engine};
use crate::error::{Error, Result};
use crate::faults::diagnose::wanted_rows;
use crate::faults::inject;
use crate::faults::mistake::Mistake;
use crate::foreign;
use crate::gguf::Gguf;
use crate::model::file::ModelFile;
use crate::model::graph::Graph;
use crate::model::{self, Model};
use crate::numerics::Numerics;
use crate::record::import::is_partial;
use crate::references;
use crate::report::{Report, Verdict};
use crate::select::Selection;
use crate::verdict::{self, Gap, Parts};
use parity_dump::{Dump, Writer};

use super::graphs::ByGraph;
use super::limits::{self, Room};
use super::machine;
use super::plan::RunPlan;

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
    /// The reference's, whatever it declares.
    pub reference_numerics: Option<Numerics>,
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
    /// Whether every node is computed from the reference's inputs: each is judged on its own.
    pub isolated: bool,
    /// Token rows that both sides are audited at; no audit where absent.
    pub audit: Option<AuditRows>,
    /// Mistakes that are made on purpose.
    pub inject: Vec<Mistake>,
}

/// Tells how far a run is: checkpoints computed so far, of how many.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Runs a model and reports: its nodes on an engine, or, where it has none, a graph op by op.
///
/// # Errors
/// A model that cannot be run, a mistake that it has no place for, and everything that a run needs and does not find.
pub fn run(file: &ModelFile, options: &RunOptions, progress: Progress<'_>) -> Result<Report> {
    let ModelFile::Nodes(model) = file else {
        let by = ByGraph::to_be_executed(file, options.reference.as_deref())?;
        return machine::run(&by, options, progress);
    };
    let specs = options.inject.iter().map(Mistake::in_nodes).collect::<Result<Vec<_>>>()?;
    let mut graph = model.graph.clone();
    let injected = inject::inject(&mut graph, &specs, model)?;
    let mut report = on_nodes(model, &graph, options, progress)?;
    for fault in injected {
        report.notes.push(format!("{} was injected: {}", fault.fault, fault.sentence));
    }
    report.notes.extend(unseen_mistake(options, &report));
    Ok(report)
}

/// What a user should know whose injected mistake left no trace.
pub fn unseen_mistake(options: &RunOptions, report: &Report) -> Option<String> {
    let silent = !options.inject.is_empty() && report.verdict == Verdict::Parity;
    silent.then(|| {
        let one = "the injected mistake left no trace: on these tokens it moves no value that was looked at beyond \
                   what rounding explains";
        one.to_owned()
    })
}

/// Runs the engine for `graph`, the model's own or one with injected mistakes, and reports.
///
/// # Errors
/// As [`run`].
pub fn on_nodes(
    model: &Model,
    graph: &Graph,
    options: &RunOptions,
    progress: Progress<'_>,
) -> Result<Report> {
    let reference = reference(&model.gguf, Room::of(model), options)?;
    spare_the_reference(options, reference.as_ref())?;
    if options.isolated && auditable(reference.as_ref()).is_none() {
        return Err(Error::new("--isolate", "there are no inputs to feed")
            .expected("a reference")
            .found(if reference.is_some() { "printed values" } else { "none" })
            .hint(no_reference(model.gguf.path(), options)));
    }
    let mut plan = RunPlan::new(model, graph, options, reference.as_ref())?;
    limits::memory(model, options, &plan, reference.as_ref())?;
    let result = pass(model, options, &plan, reference.as_ref(), progress)?;
    let mut audits = audits(model, options, &plan, reference.as_ref(), &result.kept)?;
    let sampled = plan.sample.len();
    let silent = RunOptions { dump: None, pictures: false, ..options.clone() };
    if let Some(audits) = &mut audits {
        let outliers = verdict::outliers(&result.comparisons, &plan.sample);
        let second = audit_outliers(model, &silent, &plan, reference.as_ref(), outliers, progress)?;
        plan.sample.extend(second.iter().flat_map(Audits::rows_beyond));
        second.into_iter().for_each(|second| audits.merge(second));
    }
    // A diagnosis looks at more rows than an audit: those are computed once more.
    let mut again: Option<Kept> = None;
    if audits.as_ref().is_some_and(|audits| audits.sides[0].origins().next().is_some()) {
        plan.sample.extend(wanted_rows(&result.kept.manifest().steps));
        if plan.sample.len() > sampled {
            let fed = reference.as_ref().filter(|_| options.isolated);
            again = Some(pass(model, &silent, &plan, fed, progress)?.kept);
        }
    }
    report(model, options, reference.as_ref(), result, again, plan.notes, audits)
}

/// Refuses to write the candidate's dump over the reference that it is compared with, and to write one of which no node
/// was computed from the others: an audit would call all of them wrong.
pub fn spare_the_reference(options: &RunOptions, reference: Option<&Dump>) -> Result<()> {
    if options.isolated && options.dump.is_some() {
        let why = "nodes of an isolated run read the reference's values, not one another's";
        return Err(Error::new("--dump", why).expected("--dump without --isolate").found("both"));
    }
    let (Some(dir), Some(reference)) = (&options.dump, reference) else { return Ok(()) };
    let same = std::fs::canonicalize(dir).ok().zip(std::fs::canonicalize(reference.path()).ok());
    match same {
        Some((ours, theirs)) if ours == theirs => {
            Err(Error::new("--dump", "would replace the reference itself")
                .expected("another folder")
                .found(dir.display()))
        }
        _ => Ok(()),
    }
}

/// Computes rows once more that differ more than those that were audited, up to the checkpoints where they
/// first do, and audits them there.
fn audit_outliers(
    model: &Model,
    options: &RunOptions,
    plan: &RunPlan,
    reference: Option<&Dump>,
    outliers: IndexMap<Checkpoint, u32>,
    progress: Progress<'_>,
) -> Result<Option<Audits>> {
    let Some(last) = plan.graph.last_of(|id| outliers.contains_key(&id)) else { return Ok(None) };
    let compared: IndexSet<Checkpoint> = outliers.keys().copied().collect();
    let narrowed = RunPlan {
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
    let fed = reference.filter(|_| options.isolated);
    let kept = pass(model, options, &narrowed, fed, progress)?.kept;
    audits(model, options, &narrowed, reference, &kept)
}

/// What the healthy nodes of some checkpoints read, and these checkpoints.
pub fn healthy_inputs(model: &Model, compared: &IndexSet<Checkpoint>) -> IndexSet<Checkpoint> {
    let healthy = model.graph.fused(|checkpoint| compared.contains(&checkpoint));
    let mut audited = compared.clone();
    for node in healthy.nodes.iter().filter(|node| compared.contains(&node.checkpoint)) {
        audited.extend(&node.inputs);
    }
    audited
}

/// Runs the engine once, compared with the reference as it goes.
fn pass(
    model: &Model,
    options: &RunOptions,
    plan: &RunPlan,
    reference: Option<&Dump>,
    progress: Progress<'_>,
) -> Result<LiveResult> {
    let mut engine = device::open(&options.device, model, plan.graph.clone(), options.numerics)?;
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
        isolated: options.isolated,
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
    plan: &RunPlan,
    reference: Option<&Dump>,
    kept: &Kept,
) -> Result<Option<Audits>> {
    if options.audit.is_none() {
        return Ok(None);
    }
    let positions: Vec<u32> = plan.sample.iter().copied().collect();
    let wants = |checkpoint: Checkpoint| plan.compared.contains(&checkpoint);
    let how = audit::Options { positions: &positions, wants: &wants, isolated: options.isolated };
    let sides: Vec<&dyn Recording> =
        std::iter::once(kept as &dyn Recording).chain(auditable(reference)).collect();
    audit::audit(&sides, &model.gguf, &model.graph, &how).map(Some)
}

/// The reference, unless only printed values of it are known, of which nothing can be computed again.
fn auditable(reference: Option<&Dump>) -> Option<&dyn Recording> {
    reference.filter(|dump| !is_partial(dump)).map(|dump| dump as &dyn Recording)
}

/// The reference that was named, or a stored one that fits.
///
/// # Errors
/// A recording of another model, nothing to run, a recording that could not be made.
pub fn reference(gguf: &Gguf, room: Room<'_>, options: &RunOptions) -> Result<Option<Dump>> {
    if let Some(path) = &options.reference {
        let dump = foreign::open(path, &foreign::Options::default())?;
        model::refuse_other(gguf, path, &dump.manifest().model)?;
        return Ok(Some(foreign::declared(dump, options.reference_numerics)));
    }
    if options.tokens.is_empty() {
        return Err(Error::new("prompt", "there is nothing to run")
            .expected("a text or tokens")
            .found("no token")
            .hint("parity run -p \"def read_lines(path):\", or --tokens 1,2,3, or --reference DIR"));
    }
    let asked = options.tokens.len().checked_add(options.n_predict.unwrap_or(0));
    limits::positions(room, options, options.tokens.len(), asked, 0)?;
    let fingerprint = model::fingerprint(gguf);
    let n_decode = options.n_predict.unwrap_or(0);
    let stored = references::find(&fingerprint, &options.tokens, n_decode);
    let found = match (&stored, &options.prompt) {
        (None, Some(prompt)) => {
            references::record(gguf.path(), &fingerprint, prompt, options.tokens.len(), n_decode)?
        }
        _ => stored,
    };
    Ok(found.map(|dump| foreign::declared(dump, options.reference_numerics)))
}

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn execute(engine: &mut dyn Engine, plan: &RunPlan, live: &mut Live<'_>) -> Result<()> {
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

fn writer(dir: &Path, kept: &Kept) -> Result<Writer> {
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
    let looks_inside = result.comparisons.iter().any(|entry| entry.checkpoint.kind().is_optional());
    let kept: &dyn Recording = again.as_ref().unwrap_or(&result.kept);
    let sides: Vec<&dyn Recording> = std::iter::once(kept).chain(auditable(reference)).collect();
    let judgement = verdict::judge(model, &sides, &result.comparisons, audits.as_ref())?;
    let mut report = verdict::assemble(Parts {
        judgement,
        comparisons: result.comparisons,
        tokens: result.tokens,
        candidate: verdict::side(&result.kept, path),
        reference: reference.map(|dump| verdict::side(dump, super::path_of(dump))),
        notes,
        gaps: reference.map_or(Vec::new(), |dump| gaps(options, super::tokens_of(&result.kept), dump)),
        allow_missing: options.allow_missing,
    });
    report.details = details;
    verdict::describe(&mut report, &model.graph);
    if options.isolated {
        report.notes.push(
            "isolated: every node read the reference's values, so that nothing is inherited".to_owned(),
        );
        if looks_inside && result.kept.manifest().producer.backend.as_deref() == Some("cuda") {
            report.notes.push(
                "isolated: the attention kernel computes scores, probabilities and context in one launch and cannot \
                 be fed between them, so where its inside is looked at the host computed all three"
                    .to_owned(),
            );
        }
    }
    if reference.is_none() && report.verdict != Verdict::Divergence {
        report.verdict = Verdict::Undecided;
        uncompared(&mut report, model.gguf.path(), options);
    }
    Ok(report)
}

/// Tokens of the two sides that are not compared. That a prompt is only the beginning of the reference's text is
/// what was asked for.
pub fn gaps(options: &RunOptions, ours: &[u32], reference: &Dump) -> Vec<Gap> {
    let theirs = super::tokens_of(reference);
    let whole = options.tokens.is_empty() && options.n_predict.is_none();
    let asked_for = !whole && theirs.starts_with(ours);
    let mut gaps = if asked_for { Vec::new() } else { verdict::gaps(ours, theirs) };
    gaps.extend(Gap::of_end("reference", reference));
    gaps.extend(Gap::of_steps("reference", reference).filter(|_| whole));
    gaps
}

/// Says that there was no reference, and what to type.
pub fn uncompared(report: &mut Report, model: &Path, options: &RunOptions) {
    report.reason = Some(format!("nothing was compared: {NO_REFERENCE}"));
    report.next.insert(0, to_record(model, options));
}

const NO_REFERENCE: &str =
    "no stored reference for these tokens; record one with a llama.cpp, and name it with --reference";

/// The same for an error's hint.
pub fn no_reference(model: &Path, options: &RunOptions) -> String {
    format!("{NO_REFERENCE}: {}", to_record(model, options))
}

/// The command that records a reference.
fn to_record(model: &Path, options: &RunOptions) -> String {
    let n_decode = options.n_predict.unwrap_or(0);
    let prompt = options.prompt.as_deref().unwrap_or("…");
    let words = references::recording_command(
        "llama-completion".as_ref(),
        model,
        prompt,
        options.tokens.len(),
        n_decode,
    );
    let words: Vec<String> = words.iter().map(|word| references::quoted(&word.to_string_lossy())).collect();
    format!("parity record -o ref -- {}", words.join(" "))
}
