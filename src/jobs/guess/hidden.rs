//! Hidden states: each is judged from the one before it, so that the layer is known and what is wrong in it is looked
//! for there alone. An audit says whether there is anything; the mistake is the one whose layer, computed from the state
//! before it, comes to the state behind it.

use std::path::Path;

use super::answer::{Answer, LIKELIER, Tried};
use super::evidence::Logits;
use super::hypotheses::{self, HEALTHY, Hypothesis, Rows};
use super::passes::Prompt;
use super::said::{Guess, Named, joined, of_audit, said};
use super::search::Search;
use super::{Known, Model, Progress, WORK_MAX};
use crate::audit::AuditRows;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::engine::fused::file::ModelFile;
use crate::engine::op_by_op::Multiplier;
use crate::error::Result;
use crate::foreign;
use crate::jobs::audit::{Options, audit};
use crate::model::builders;
use crate::report::{LocalError, Report, Verdict};
use crate::select::Selection;
use parity_dump::Dump;

/// How many times the bound of a stretch of which nothing was recorded a healthy state may be off: the bound is what some
/// simulated roundings come to, in an arithmetic that an audit knows.
const SIMULATED: f64 = 2.0;

/// Judges hidden states of `prompt`, whose tokens the file may say itself.
///
/// # Errors
/// What is no dump, or another model's.
pub fn hidden(
    (file, multiplier): (&ModelFile, Option<&dyn Multiplier>),
    path: &Path,
    prompt: &[u32],
    progress: Progress<'_>,
) -> Result<Guess> {
    let tokens = (!prompt.is_empty()).then(|| prompt.to_vec());
    let path_of_model = Some(file.gguf().path().to_owned());
    let own = foreign::is_native(path);
    let options = foreign::Options { names: None, tokens: tokens.filter(|_| !own), model: path_of_model };
    let mut dump = foreign::open(path, &options)?;
    let rows = Recording::tokens(&dump).len();
    let how = Options { selection: Selection::default(), rows: AuditRows::default(), allow_missing: true };
    let mut report = audit(&mut dump, file, &how)?;
    // Where layer outputs alone were recorded nothing says what a recorded graph begins with; one that is built of the file
    // begins with its tokens.
    let is_judged = report.checkpoints.iter().any(|entry| entry.local.candidate.is_some());
    let is_known = builders::knows(file.gguf().require_str("general.architecture")?);
    if !is_judged && is_known && !dump.manifest().is_numbered() && !dump.manifest().graphs.is_empty() {
        dump = foreign::open(path, &options)?;
        dump.without_graphs();
        report = audit(&mut dump, file, &how)?;
    }
    let first = report.first_divergence.as_ref();
    let errors = report.checkpoints.iter().filter_map(|entry| entry.local.candidate.as_ref());
    let is_near = |error: &LocalError| !error.bridged.is_empty() && error.over_bound <= SIMULATED;
    let all_near = errors.filter(|error| !(error.over_bound <= 1.0)).all(is_near);
    let first = first.filter(|first| !(first.diagnosis.is_empty() && all_near)).map(|first| first.checkpoint);
    let model = Model { gguf: file.gguf(), multiplier };
    let (mut behind, mut healthy, mut audited, mut first) = (None, Vec::new(), 0, first);
    for state in states(&dump).into_iter().filter(|_| is_known) {
        let stretch = (behind.replace(state), state);
        if first.is_some_and(|first| first != state) {
            audited += 1;
            continue;
        }
        let stretch = in_stretch(&dump, model, stretch, first.is_some(), progress)?;
        let Some((found, guess, in_blocks)) = stretch else { continue };
        match found {
            Answer::Mistake(_) | Answer::Several(_) => return Ok(guess),
            Answer::Healthy => {
                // An audit does not know what was cached in blocks, where only outputs of layers were recorded.
                first = first.filter(|_| !in_blocks);
                healthy.push(guess);
            }
            Answer::Nothing => {}
        }
    }
    // Across layers of which nothing was recorded an audit's bounds may be too wide, or too narrow, where hypotheses are not.
    if first.is_none()
        && report.verdict != Verdict::Parity
        && report.gaps.is_empty()
        && audited + healthy.len() == states(&dump).len()
        && let Some(all) = joined(healthy)
    {
        return Ok(all);
    }
    Ok(of_audit(named(&report), rows))
}

/// The outputs of layers that were recorded, and what follows them, in their order.
fn states(dump: &Dump) -> Vec<Checkpoint> {
    let kinds = [Kind::LayerOut, Kind::FinalNorm];
    let mut all: Vec<Checkpoint> =
        Recording::checkpoints(dump).into_iter().filter(|id| kinds.contains(&id.kind())).collect();
    all.sort_by_key(|id| id.layer_index().unwrap_or(u32::MAX));
    all
}

/// What explains a state that follows from another, or from the tokens alone; nothing where these are not of all
/// positions, or where it would take too long. Whether a cache in blocks explains it better than anything else that is healthy
/// comes with it.
fn in_stretch(
    dump: &Dump,
    model: Model<'_>,
    (given, seen): (Option<Checkpoint>, Checkpoint),
    is_accused: bool,
    progress: Progress<'_>,
) -> Result<Option<(Answer, Guess, bool)>> {
    let tokens = Recording::tokens(dump).to_vec();
    let all: Vec<u32> = (0..tokens.len() as u32).collect();
    let positions = Recording::positions(dump, seen);
    let (Some(values), true) =
        (Recording::gather(dump, seen, &positions), !positions.is_empty() && all.ends_with(&positions))
    else {
        return Ok(None);
    };
    let before = given.and_then(|id| Some((id, Recording::gather(dump, id, &all)?.data)));
    let Model { gguf, multiplier } = model;
    let (prompt, text, forced, steps, recording) = (tokens, None, Vec::new(), None, None);
    let known = Known { gguf, multiplier, prompt, text, forced, steps, others: &[], recording };
    let rows = positions.len();
    let evidence = Logits {
        kind: "hidden states",
        first: all.len() - rows,
        width: values.data.len() / rows,
        values: values.data,
        normalised: false,
    };
    let layer = seen.layer_index().filter(|_| before.is_some());
    let tried_with = |prompt: usize| -> Result<Option<(Answer, Vec<Tried>)>> {
        let full = Prompt::between(model, &known.prompt, prompt, rows, (before.clone(), seen))?;
        let mut all = between(&full, layer);
        if prompt < known.prompt.len() {
            let in_decode = |one: &Hypothesis| hypotheses::part(one, one.layers, Rows::Decode, full.layers());
            all = all.iter().filter_map(in_decode).collect();
        }
        let is_other = full.width != evidence.width;
        let search = Search { known: &known, evidence: &evidence, progress, full, few: None };
        if is_other || search.work(all.len()) > WORK_MAX {
            return Ok(None);
        }
        search.stretch(all, is_accused).map(Some)
    };
    let Some((mut found, mut tried)) = tried_with(known.prompt.len())? else { return Ok(None) };
    // Where a healthy engine explains the first rows, steps that begin behind them may alone be wrong.
    let healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY);
    let until = healthy.filter_map(|one| one.score.first_miss).max().map(|row| evidence.first + row);
    if found == Answer::Nothing
        && let Some(until) = until.filter(|until| *until > 0)
        && let Some(decode) = tried_with(until)?
    {
        (found, tried) = decode;
    }
    let best = |blocks: bool| {
        let healthy = tried.iter().filter(|one| one.hypothesis.name == HEALTHY && one.explains());
        let own = healthy.filter(|one| one.hypothesis.way.is_in_blocks() == blocks);
        own.map(|one| one.score.log_likelihood).fold(f64::NEG_INFINITY, f64::max)
    };
    let in_blocks = best(true) > best(false) + LIKELIER.ln();
    Ok(Some((found.clone(), said(&known, &evidence, &found, &tried), in_blocks)))
}

/// The mistakes that can be made between two states: each wherever it has a place there, then each in one node alone.
fn between(prompt: &Prompt<'_>, layer: Option<u32>) -> Vec<Hypothesis> {
    let whole = hypotheses::everywhere(&prompt.labelled);
    let here = |one: &Hypothesis| hypotheses::kept(one, &|id| prompt.is_between(id), layer);
    let all: Vec<Hypothesis> = whole.iter().filter_map(here).collect();
    let single = all.iter().flat_map(|one| {
        let nodes: Vec<_> = one.nodes().into_iter().flatten().map(|(id, _)| *id).collect();
        let nodes = if nodes.len() > 1 { nodes } else { Vec::new() };
        nodes.into_iter().filter_map(|node| hypotheses::kept(one, &|id| id == node, layer))
    });
    let single: Vec<Hypothesis> = single.collect();
    hypotheses::merged(all.into_iter().chain(single).collect())
}

fn named(report: &Report) -> Named {
    let first = report.first_divergence.as_ref();
    let diagnosis = first.map(|first| first.diagnosis.clone()).unwrap_or_default();
    let at = first.map(|first| first.checkpoint.to_string());
    let answer = match report.verdict {
        Verdict::Parity => Some(HEALTHY.to_owned()),
        Verdict::Divergence => diagnosis.first().map(|one| one.fault.clone()),
        Verdict::Undecided => None,
    };
    let text = match (report.verdict, &at, diagnosis.first()) {
        (Verdict::Parity, ..) => "HEALTHY: every hidden state follows from the one before it".to_owned(),
        (_, Some(at), Some(one)) => format!("{}: {} (at {at})", one.fault, one.text),
        (_, Some(at), None) => format!(
            "UNDECIDED: {at} does not follow from the state before it, and no known mistake explains it"
        ),
        (_, None, _) => format!(
            "UNDECIDED: {}",
            report.reason.clone().unwrap_or_else(|| "the states do not say it".to_owned())
        ),
    };
    let next =
        at.map(|at| format!("the one tensor to dump next: those between {at} and the layer before it"));
    Named {
        answer,
        text,
        layer: first.and_then(|first| first.layer),
        diagnosis,
        next: next.into_iter().collect(),
    }
}
