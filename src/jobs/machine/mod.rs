//! `parity run` of models that the machine executes: on a graph that is built of the file, or on the one that the
//! reference brings, in the reference's own steps.

mod pairs;
mod runner;
mod steps;
mod writer;

use std::collections::HashMap;

use parity_dump::Dump;
use parity_dump::manifest::Producer;

use super::graphs::ByGraph;
use super::graphs::limits::{Work, check as check_memory};
use super::run::{
    Progress, RunOptions, gaps, no_reference, reference, spare_the_reference, uncompared, unseen_mistake,
};
use super::{notes_of, path_of};
use crate::arithmetic::Arithmetic;
use crate::audit::recorded::{self, Findings, Graphs, How};
use crate::checkpoint::Checkpoint;
use crate::compare::{Comparison, argmax};
use crate::dump::Recording;
use crate::engine::device::Device;
use crate::engine::machine::{Machine, Number};
use crate::error::{Error, Result};
use crate::faults::mistake::Mistake;
use crate::faults::rewritten::diagnose;
use crate::model::{self, diff::Whose};
use crate::numerics::Products;
use crate::record::import::is_partial;
use crate::report::{Report, Side, Verdict};
use crate::verdict::recorded::{Known, assemble, entries, is_left_out, refuse_gaps, tried};
use crate::verdict::{self, Parts};

use runner::{Executed, Run, Runner};
use steps::Planned;
use writer::Sink;

/// Executes a model step by step, compares node by node, and judges.
///
/// # Errors
/// An architecture without a builder where no recording brings a graph, an arithmetic or a device that the machine
/// does not have, a mistake that no node has a place for.
pub fn run(by: &ByGraph<'_>, options: &RunOptions, progress: Progress<'_>) -> Result<Report> {
    let arithmetic = arithmetic(options)?;
    let mistakes = options.inject.iter().map(Mistake::in_graphs).collect::<Result<Vec<_>>>()?;
    let room = steps::room(by, options)?;
    let reference = reference(by.gguf, room, options)?;
    spare_the_reference(options, reference.as_ref())?;
    refuse_reference(by, options, reference.as_ref())?;
    let graphs = steps::graphs(by, room, options, reference.as_ref())?;
    let planned = Planned::new(&graphs, &mistakes, options)?;
    let recorded_graphs = reference.as_ref().filter(|_| !planned.is_built()).map(Dump::path);
    let subject = recorded_graphs.unwrap_or(by.gguf.path());
    check_memory(subject, &planned.of_steps(), by.gguf, Work::Run)?;
    let of_reference = reference.as_ref().map(|dump| by.graphs(dump)).transpose()?;
    let theirs = match (&reference, &of_reference, options.audit) {
        (Some(dump), Some(graphs), Some(rows)) => {
            let how = How { rows, wants: &|_| true, diagnose: &diagnose };
            recorded::audit(&graphs.judged(dump, dump), &graphs.steps(), by.gguf, &how)?
        }
        _ => Findings::default(),
    };
    let run = Run { by, options, reference: reference.as_ref(), planned: &planned, arithmetic, progress };
    let ours = match options.numerics.products {
        Products::F64 => execute::<f64>(&run)?,
        _ => execute::<f32>(&run)?,
    };
    report(&run, of_reference.as_ref(), &theirs, ours)
}

fn arithmetic(options: &RunOptions) -> Result<Arithmetic> {
    if let Device::Cuda(_) | Device::CudaAll = options.device {
        return Err(Error::new("--device", "this model is executed op by op, which is done on the CPU")
            .expected("auto or cpu")
            .found(&options.device));
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
fn refuse_reference(by: &ByGraph<'_>, options: &RunOptions, reference: Option<&Dump>) -> Result<()> {
    if options.isolated && reference.is_none() {
        return Err(Error::new("--isolate", "there are no inputs to feed")
            .expected("a reference")
            .found("none")
            .hint(no_reference(by.gguf.path(), options)));
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

/// Runs the steps; a token that is not known beforehand is the most likely one.
fn execute<S: Number>(run: &Run<'_>) -> Result<Executed> {
    let mut machine: Machine<'_, S> = Machine::new(run.by.gguf, run.arithmetic);
    let mut sink = match &run.options.dump {
        Some(dir) => Some(Sink::new(dir, producer(run), model::info(run.by.gguf), run.options)?),
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
    let Run { by, options, reference, planned, .. } = *run;
    let Executed { findings, pairs, token_sums, tokens, notes, .. } = ours;
    let comparisons = pairs.finish(reference);
    let mut report = match options.audit {
        Some(_) => judged(run, of_reference, &comparisons, [&findings, theirs]),
        None => compared(run, comparisons),
    };
    report.tokens = token_sums.report();
    report.candidate = Side {
        path: options.dump.as_ref().map(|dir| dir.display().to_string()),
        producer: producer(run),
        model: model::info(by.gguf),
        tokens: tokens.len(),
        steps: planned.steps.iter().map(|step| step.positions.len()).collect(),
        provenance: Default::default(),
    };
    report.notes.extend(planned.notes.iter().cloned());
    report.notes.extend(unseen_mistake(options, &report));
    match (reference, of_reference) {
        (Some(dump), Some(graphs)) => {
            report.reference = Some(verdict::side(dump, path_of(dump)));
            if !planned.is_built() {
                report.notes.extend(notes_of(dump, "reference"));
            }
            by.weigh_wiring(&[(Whose::Reference, graphs)], &mut report);
            refuse_gaps(&mut report, &gaps(options, &tokens, dump), options.allow_missing);
        }
        _ => {
            verdict::describe_recorded(&mut report, planned.source);
            report.notes.push(format!(
                "the graph is the one that parity builds of the file, for {}",
                by.architecture
            ));
            if report.verdict != Verdict::Divergence {
                report.verdict = Verdict::Undecided;
                uncompared(&mut report, by.gguf.path(), options);
            }
        }
    }
    if options.isolated {
        report.notes.push(
            "isolated: every node read the reference's values, so that nothing is inherited".to_owned(),
        );
    }
    report.notes.extend(notes);
    Ok(report)
}

/// Whether an id is of the inside of attention that nobody recorded or asked for.
fn is_inside(run: &Run<'_>, id: Checkpoint) -> bool {
    let there = run.reference.is_some_and(|dump| !Recording::positions(dump, id).is_empty());
    id.kind().is_optional() && !run.options.selection.names(id) && !there
}

/// The answers of the audits of both sides, the candidate's first.
fn judged(
    run: &Run<'_>,
    of_reference: Option<&Graphs>,
    comparisons: &HashMap<Checkpoint, Comparison>,
    [ours, theirs]: [&Findings; 2],
) -> Report {
    let Run { options, reference, planned, .. } = *run;
    let graphs = planned.of_steps();
    let judged = reference.zip(of_reference).map(|(dump, graphs)| graphs.judged(dump, dump));
    let all = recorded::order(&graphs, &|id| planned.is_computed(id));
    let left_out = |id: Checkpoint| {
        let of_theirs =
            judged.as_ref().is_some_and(|judged| is_left_out(id, theirs, judged, &options.selection));
        let healthy = ours.nodes.get(&id).is_none_or(|finding| finding.is_healthy());
        healthy && (is_inside(run, id) || of_theirs)
    };
    let known = all.iter().filter(|id| !left_out(**id)).map(|&id| Known {
        id,
        comparison: comparisons.get(&id),
        candidate: ours.nodes.get(&id),
        reference: theirs.nodes.get(&id),
        across: ours.is_bridged(id) || theirs.is_bridged(id),
    });
    let ([ours_in_full, ours_screened], [in_full, screened]) = (ours.rows(), theirs.rows());
    let rows = [ours_in_full + in_full, ours_screened + screened];
    let shown = |id: Checkpoint| planned.selected.contains(&id);
    assemble(entries(known, &shown), &graphs, &|id| tried(ours, id), options.allow_missing, rows)
}

/// What numbers alone say: nothing was audited.
fn compared(run: &Run<'_>, mut comparisons: HashMap<Checkpoint, Comparison>) -> Report {
    let Run { options, reference, planned, .. } = *run;
    let all = recorded::order(&planned.of_steps(), &|id| planned.is_computed(id));
    let shown = all.into_iter().filter(|id| planned.selected.contains(id) && !is_inside(run, *id));
    verdict::assemble(Parts {
        comparisons: shown.filter_map(|id| comparisons.remove(&id)).collect(),
        reference: reference.map(|dump| verdict::side(dump, path_of(dump))),
        allow_missing: options.allow_missing,
        ..Parts::default()
    })
}
