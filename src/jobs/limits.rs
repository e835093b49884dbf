//! What a run may ask of a model and of this machine: told before it begins.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::run::{RunOptions, RunPlan};
use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::fused::Model;
use crate::engine::fused::TILE_ROWS;
use crate::engine::fused::graph::Op;
use crate::error::{Error, Result};
use crate::memory;
use crate::numerics::Products;

/// Bytes of a value that is written down: f32.
const KEPT_BYTES: u64 = 4;
/// Copies of attention's matrix that are alive at once: as computed, and rounded or in the order of its shape.
const COPIES: u64 = 2;

/// Bytes of a value that the engine computes.
fn engine_bytes(options: &RunOptions) -> u64 {
    if options.numerics.products == Products::F64 { 8 } else { 4 }
}

/// What bounds the positions of a run of a model.
#[derive(Clone, Copy)]
pub struct Room<'a> {
    /// The model file.
    pub file: &'a Path,
    /// Its context length.
    pub context: usize,
    /// Values that all caches together keep of one position.
    pub cached: u64,
}

impl<'a> Room<'a> {
    /// Of a model that has nodes of parity's own.
    pub fn of(model: &'a Model) -> Room<'a> {
        let dims = &model.config.dims;
        let cached = 2 * dims.layers as u64 * dims.width(Kind::V, 0) as u64;
        Room { file: model.gguf.path(), context: model.config.context, cached }
    }
}

/// Refuses more positions than the model was made for, or than the cache has memory for; `recorded` positions were
/// computed by somebody already.
///
/// # Errors
/// Names the limit.
pub fn positions(
    room: Room<'_>,
    options: &RunOptions,
    prompt: usize,
    total: Option<usize>,
    recorded: usize,
) -> Result<usize> {
    let Room { file, context, cached } = room;
    let asked = || match options.n_predict {
        Some(n) if n > 0 => format!("{prompt} tokens and {n} decode steps"),
        _ => format!("{prompt} tokens"),
    };
    let subject = if prompt > context { "prompt" } else { "-n" };
    let total = total.filter(|total| *total <= context.max(recorded)).ok_or_else(|| {
        Error::new(subject, "more positions than the model's context length")
            .expected(format!("at most {context} positions"))
            .found(asked())
            .hint(format!("parity inspect {} shows the context length", file.display()))
    })?;
    let row = cached * (engine_bytes(options) + KEPT_BYTES);
    let cache = (total as u64).saturating_mul(row);
    memory::require(subject, &[("keys and values of all positions", cache)], HINT)?;
    Ok(total)
}

const HINT: &str = "a shorter prompt or a smaller -n, --chunk N, fewer checkpoints, or PARITY_MEMORY=BYTES where this is wrong";

/// Refuses a run that needs more memory than there is.
///
/// # Errors
/// Names what most of the memory is for.
pub fn memory(model: &Model, options: &RunOptions, plan: &RunPlan) -> Result<()> {
    memory::require("parity run", &estimate(model, options, plan), HINT)
}

/// What a run needs memory for, in bytes: an upper bound of what the largest step holds at once.
fn estimate(model: &Model, options: &RunOptions, plan: &RunPlan) -> Vec<(&'static str, u64)> {
    let dims = &model.config.dims;
    let positions = plan.n_rows() as u64;
    let rows = plan.steps.iter().map(|step| step.len()).max().unwrap_or(0) as u64;
    let bytes = engine_bytes(options);
    let width = |checkpoint: &Checkpoint| match checkpoint.kind() {
        // Its rows are counted by themselves.
        Kind::Logits | Kind::AttnScores | Kind::AttnProbs => 0,
        kind => dims.width(kind, 0) as u64,
    };
    let inside = plan.wanted.iter().any(|checkpoint| checkpoint.kind().is_optional());
    let cache = 2 * dims.layers as u64 * dims.width(Kind::V, 0) as u64 * positions;
    let heads = dims.heads as u64;
    let matrix = match inside {
        // Whole, before and after the softmax.
        true => 2 * heads * rows * positions,
        false => heads.min(rayon::current_num_threads() as u64) * rows.min(TILE_ROWS as u64) * positions,
    };
    let logits = rows * dims.vocab as u64;
    let has_logits = plan.graph.nodes.iter().any(|node| node.checkpoint.kind() == Kind::Logits);
    vec![
        ("keys and values of all positions", cache.saturating_mul(bytes + KEPT_BYTES)),
        ("attention of a step", matrix.saturating_mul(COPIES * bytes)),
        ("activations of a step", live_widths(plan, width).saturating_mul(rows * bytes)),
        ("logits of a step", if has_logits { logits.saturating_mul(bytes) } else { 0 }),
    ]
}

/// The most columns of activations that are alive at once: outputs that a later node reads.
fn live_widths(plan: &RunPlan, width: impl Fn(&Checkpoint) -> u64) -> u64 {
    let graph = plan.graph.fused(|checkpoint| plan.wanted.contains(&checkpoint));
    let mut last: HashMap<Checkpoint, usize> = HashMap::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        last.extend(node.inputs.iter().map(|input| (*input, index)));
    }
    let (mut live, mut most) = (0u64, 0u64);
    for (index, node) in graph.nodes.iter().enumerate() {
        let own = width(&node.checkpoint);
        // What is decoded of a weight, or computed inside of attention, is small beside a long step.
        let within = if matches!(node.op, Op::Attention(_)) { own } else { 0 };
        live += own;
        most = most.max(live + within);
        let over = |checkpoint: &Checkpoint| last.get(checkpoint).is_none_or(|last| *last <= index);
        let ended: HashSet<&Checkpoint> =
            node.inputs.iter().chain([&node.checkpoint]).filter(|checkpoint| over(checkpoint)).collect();
        live -= ended.into_iter().map(&width).sum::<u64>().min(live);
    }
    most
}
