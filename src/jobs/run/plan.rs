//! What a run computes: its tokens, its steps, and the checkpoints and rows that are looked at.

use std::collections::HashSet;
use std::ops::Range;

use super::RunOptions;
use crate::checkpoint::Checkpoint;
use crate::engine::fused::Model;
use crate::engine::fused::graph::Graph;
use crate::error::Result;
use crate::jobs::limits::{self, Room};
use parity_dump::Dump;

/// The steps of a run by parity's own kernels, and what of them is written down.
pub struct RunPlan {
    pub graph: Graph,
    /// Tokens that are known beforehand; later ones are sampled greedily.
    pub tokens: Vec<u32>,
    pub steps: Vec<Range<usize>>,
    /// What is judged, and what that reads.
    pub wanted: HashSet<Checkpoint>,
}

impl RunPlan {
    pub fn new(model: &Model, options: &RunOptions, reference: Option<&Dump>) -> Result<RunPlan> {
        let graph = &model.graph;
        let n_layers = model.config.dims.layers;
        let selected = |checkpoint: &Checkpoint| options.selection.wants(*checkpoint, n_layers);
        let mut wanted: HashSet<Checkpoint> = graph.checkpoints().filter(selected).collect();
        let last = graph
            .last_of(|id| wanted.contains(&id))
            .ok_or_else(|| options.selection.refused(graph.checkpoints(), n_layers))?;
        let healthy = graph.fused(|checkpoint| wanted.contains(&checkpoint));
        // Without an audit nobody reads what they are computed from.
        let is_judged = |id: Checkpoint| options.audit.is_some() && wanted.contains(&id);
        let judged = healthy.nodes.iter().filter(|node| is_judged(node.checkpoint));
        let read: Vec<Checkpoint> = judged.flat_map(|node| node.inputs.iter().copied()).collect();
        wanted.extend(read);
        let (tokens, steps) = steps(Room::of(model), options, reference)?;
        // Greedy decoding needs the logits even where they are not looked at.
        let sampled = steps.last().is_some_and(|step| step.end > tokens.len());
        let end = if sampled { graph.last_of(|_| true).unwrap_or(last) } else { last };
        Ok(RunPlan { graph: graph.until(end), tokens, steps, wanted })
    }

    /// Token positions of the whole run.
    pub fn n_rows(&self) -> usize {
        self.steps.last().map_or(0, |step| step.end)
    }
}

/// Tokens and steps of a run: the prompt, and the reference's steps where there are any.
///
/// # Errors
/// More positions than the model or the memory has.
pub fn steps(
    room: Room<'_>,
    options: &RunOptions,
    reference: Option<&Dump>,
) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
    let mut tokens = options.tokens.clone();
    let mut steps: Vec<Range<usize>> = Vec::new();
    if let Some(reference) = reference {
        let known = reference.tokens();
        let prompt = if tokens.is_empty() { prompt_len(reference) } else { tokens.len() };
        let follows = known.starts_with(&tokens);
        let total = match (options.n_predict, options.tokens.is_empty()) {
            (Some(n), _) => prompt.checked_add(n),
            (None, true) => Some(known.len()),
            (None, false) => Some(prompt),
        };
        let total = limits::positions(room, options, prompt, total, known.len())?;
        if follows {
            tokens = known[..total.min(known.len())].to_vec();
            steps = contiguous(reference, tokens.len());
        }
        extend(&mut steps, prompt, total);
    } else {
        let total = tokens.len().checked_add(options.n_predict.unwrap_or(0));
        let total = limits::positions(room, options, tokens.len(), total, 0)?;
        extend(&mut steps, tokens.len(), total);
    }
    if let Some(chunk) = options.chunk {
        steps = steps.into_iter().flat_map(|step| pieces(step, chunk.max(1))).collect();
    }
    Ok((tokens, steps))
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
    step.step_by(chunk).map(move |start| start..start.saturating_add(chunk).min(end))
}
