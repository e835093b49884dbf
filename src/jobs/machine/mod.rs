//! `parity run` of models that the machine executes: on a graph that is built of the file, or on the one that the
//! reference brings, in the reference's own steps.

mod pairs;
mod runner;
mod steps;
mod writer;

use parity_dump::Dump;
use parity_dump::manifest::{ModelInfo, Producer};

use super::run::{Progress, RunOptions, gaps, no_reference, reference, spare_the_reference};
use crate::arithmetic::Arithmetic;
use crate::audit::recorded::{self, Findings, Graphs};
use crate::checkpoint::Checkpoint;
use crate::compare::argmax;
use crate::dump::Recording;
use crate::engine::device::Device;
use crate::engine::machine::{Machine, Number};
use crate::error::{Error, Result};
use crate::faults::planted::Spec;
use crate::faults::rewritten::diagnose;
use crate::model::{self, builders};
use crate::numerics::Products;
use crate::record::import::is_partial;
use crate::recorded::limits::{Work, check as check_memory};
use crate::recorded::{
    Foreign, Known, assemble, entries, interrupted, is_left_out, refuse_gaps, side, tried,
};
use crate::report::{Report, Side, Verdict};

use runner::{Executed, Run, Runner};
use steps::Planned;
use writer::Sink;

/// Executes a model step by step, compares node by node, and judges.
///
/// # Errors
/// An architecture without a builder where no recording brings a graph, an arithmetic or a device that the machine
/// does not have, a mistake that no node has a place for.
pub fn run(
    foreign: &Foreign,
    mistakes: &[Spec],
    options: &RunOptions,
    progress: Progress<'_>,
) -> Result<Report> {
    let arithmetic = arithmetic(options)?;
    let room = steps::room(foreign, options)?;
    let reference = reference(&foreign.gguf, room, options)?;
    spare_the_reference(options, reference.as_ref())?;
    refuse_reference(foreign, options, reference.as_ref())?;
    let graphs = steps::graphs(foreign, room, options, reference.as_ref())?;
    let planned = Planned::new(&graphs, mistakes, options)?;
    let recorded_graphs = reference.as_ref().filter(|_| !planned.is_built()).map(Dump::path);
    let subject = recorded_graphs.unwrap_or(foreign.gguf.path());
    check_memory(subject, &planned.of_steps(), &foreign.gguf, Work::Run)?;
    let of_reference = reference.as_ref().map(|dump| foreign.graphs(dump)).transpose()?;
    let theirs = match (&reference, &of_reference) {
        (Some(dump), Some(graphs)) => {
            let judged = graphs.judged(dump, dump);
            recorded::audit(&judged, &graphs.steps(), &foreign.gguf, &|_| true, &diagnose)?
        }
        _ => Findings::default(),
    };
    let run =
        Run { foreign, options, reference: reference.as_ref(), planned: &planned, arithmetic, progress };
    let ours = match options.numerics.products {
        Products::F64 => execute::<f64>(&run)?,
        _ => execute::<f32>(&run)?,
    };
    report(&run, of_reference.as_ref(), &theirs, ours)
}

fn arithmetic(options: &RunOptions) -> Result<Arithmetic> {
    if let Device::Cuda(_) = options.device {
        return Err(Error::new("--device", "this model is executed op by op, which is done on the CPU")
            .expected("auto or cpu")
            .found(options.device));
    }
    match options.numerics.products {
        Products::F32 | Products::F64 => Ok(Arithmetic::EXACT),
        Products::LlamaCpu => Ok(Arithmetic::LLAMA_CPU),
        _ => Err(Error::new("--numerics", "is none that a graph is executed in")
            .expected("f32, f64 or llama-cpu")
            .found(options.numerics)),
    }
}

/// Refuses a reference of which nothing can be computed again, and isolation without one.
fn refuse_reference(foreign: &Foreign, options: &RunOptions, reference: Option<&Dump>) -> Result<()> {
    if options.isolated && reference.is_none() {
        return Err(Error::new("--isolate", "there are no inputs to feed")
            .expected("a reference")
            .found("none")
            .hint(no_reference(foreign.gguf.path(), options)));
    }
    match reference.filter(|dump| is_partial(dump)) {
        Some(printed) => {
            Err(Error::file(printed.path(), "holds printed values, of which nothing can be fed or judged")
                .expected("a recording")
                .hint("parity record -o DIR -- CMD…"))
        }
        None => Ok(()),
    }
}

/// Who computes.
fn producer(run: &Run<'_>) -> Producer {
    Producer {
        name: "parity".to_owned(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        backend: Some("cpu".to_owned()),
        device: None,
        numerics: Some(run.planned.numerics(run.options).to_string()),
    }
}

/// What is computed with.
fn model_info(foreign: &Foreign) -> ModelInfo {
    let gguf = &foreign.gguf;
    ModelInfo {
        file: gguf.path().file_name().map(|name| name.to_string_lossy().into_owned()),
        fingerprint: Some(model::fingerprint(gguf)),
        architecture: Some(foreign.architecture.clone()),
        name: gguf.str("general.name").ok().flatten().map(str::to_owned),
    }
}

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn execute<S: Number>(run: &Run<'_>) -> Result<Executed> {
    let mut machine: Machine<'_, S> = Machine::new(&run.foreign.gguf, run.arithmetic);
    let mut sink = match &run.options.dump {
        Some(dir) => Some(Sink::new(dir, producer(run), model_info(run.foreign), run.options)?),
        None => None,
    };
    let mut executed = Executed { tokens: run.planned.tokens.to_vec(), ..Executed::default() };
    let mut logits: Option<Vec<f32>> = None;
    for (number, step) in run.planned.steps.iter().enumerate() {
        let sampled = step.positions.last().is_some_and(|last| *last as usize == executed.tokens.len());
        if sampled && run.planned.is_built() {
            let next = logits.as_deref().and_then(argmax).ok_or_else(|| {
                Error::new("logits", "no token can be sampled").expected("finite logits").found("none or NaN")
            })?;
            executed.tokens.push(next);
        }
        let token = |position: &u32| executed.tokens.get(*position as usize).copied();
        let tokens: Option<Vec<u32>> = step.positions.iter().map(token).collect();
        let tokens = tokens.ok_or_else(|| {
            Error::new(format!("step {number}"), "holds positions beyond the tokens")
                .expected(format!("up to {}", executed.tokens.len().saturating_sub(1)))
        })?;
        let inputs = run.planned.inputs(number, &tokens, run.reference)?;
        let input = |id| inputs.of(id);
        let mut runner = Runner::<S>::new(run, number, &tokens, &input, &mut executed, sink.as_mut())?;
        let program = &run.planned.graphs[step.graph].labelled.program;
        machine.step_until(program, run.planned.graphs[step.graph].last, &input, &mut runner)?;
        logits = runner.finish()?;
    }
    if let Some(sink) = sink {
        sink.finish()?;
    }
    Ok(executed)
}

fn report(run: &Run<'_>, of_reference: Option<&Graphs>, theirs: &Findings, ours: Executed) -> Result<Report> {
    let Run { foreign, options, reference, planned, .. } = *run;
    let graphs = planned.of_steps();
    let judged = reference.zip(of_reference).map(|(dump, graphs)| graphs.judged(dump, dump));
    let comparisons = ours.pairs.finish(reference);
    let all = recorded::order(&graphs, &|id| planned.is_computed(id));
    let left_out = |id: Checkpoint| {
        let there = reference.is_some_and(|dump| !Recording::positions(dump, id).is_empty());
        let inside = id.kind().is_optional() && !options.selection.names(id) && !there;
        let of_theirs =
            judged.as_ref().is_some_and(|judged| is_left_out(id, theirs, judged, &options.selection));
        let healthy = ours.findings.nodes.get(&id).is_none_or(|finding| finding.is_healthy());
        healthy && (inside || of_theirs)
    };
    let known = all.iter().filter(|id| !left_out(**id)).map(|&id| Known {
        id,
        comparison: comparisons.get(&id),
        candidate: ours.findings.nodes.get(&id),
        reference: theirs.nodes.get(&id),
        across: ours.findings.is_bridged(id) || theirs.is_bridged(id),
    });
    let ([ours_in_full, ours_screened], [in_full, screened]) = (ours.findings.rows(), theirs.rows());
    let rows = [ours_in_full + in_full, ours_screened + screened];
    let shown = |id: Checkpoint| planned.selected.contains(&id);
    let tried = |id| tried(&ours.findings, id);
    let mut report = assemble(entries(known, &shown), &graphs, &tried, options.allow_missing, rows);
    report.tokens = ours.token_sums.report();
    report.candidate = Side {
        path: options.dump.as_ref().map(|dir| dir.display().to_string()),
        producer: producer(run),
        model: model_info(foreign),
        tokens: ours.tokens.len(),
        steps: planned.steps.iter().map(|step| step.positions.len()).collect(),
        provenance: Default::default(),
    };
    report.notes.extend(planned.notes.iter().cloned());
    match (reference, of_reference) {
        (Some(dump), Some(graphs)) => {
            report.reference = Some(side(dump, Some(dump.path().display().to_string())));
            report.notes.extend(interrupted(dump));
            foreign.weigh_wiring(graphs, &mut report);
            refuse_gaps(&mut report, &gaps(options, &ours.tokens, dump), options.allow_missing);
        }
        _ => {
            crate::verdict::describe_recorded(&mut report, planned.source);
            report.notes.push(format!(
                "the graph is the one that parity builds of the file, for {}",
                foreign.architecture
            ));
            if report.verdict != Verdict::Divergence {
                report.verdict = Verdict::Undecided;
                let why = no_reference(foreign.gguf.path(), options);
                report.reason = Some(format!("nothing was compared: {why}"));
            }
        }
    }
    if options.isolated {
        report.notes.push(
            "isolated: every node read the reference's values, so that nothing is inherited".to_owned(),
        );
    }
    if options.audit.is_none() {
        report
            .notes
            .push("a graph is judged node by node while it is executed: --no-audit changes nothing".into());
    }
    report.notes.extend(ours.notes);
    Ok(report)
}

/// Whether there is a graph for new prompts of this architecture.
pub fn is_built(foreign: &Foreign) -> bool {
    builders::knows(&foreign.architecture)
}
