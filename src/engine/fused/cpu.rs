//! The engine that runs anywhere: executes the graph node by node on all cores.

use std::collections::HashMap;
use std::ops::Range;

use crate::checkpoint::{Checkpoint, Kind};
use crate::engine::fused::graph::{Graph, Node};
use crate::engine::fused::linear::LOGIT_ROWS;
use crate::engine::fused::{self, Inputs, Rows};
use crate::engine::{Batch, Engine, Probe, Values};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::numerics::Numerics;
use crate::scalar::Scalar;
use crate::tensor::{Matrix, View};
use parity_dump::manifest::Producer;

/// Executes a graph in `S`, f32 unless a judge wants f64.
pub struct CpuEngine<'m, S> {
    gguf: &'m Gguf,
    graph: Graph,
    numerics: Numerics,
    /// (S, K·E) keys and values of all positions so far, by the checkpoint they are computed at.
    cache: HashMap<Checkpoint, Matrix<S>>,
    /// Positions computed so far.
    computed: usize,
}

impl<'m, S: Scalar> CpuEngine<'m, S> {
    /// An engine for `graph`, which may end before the logits.
    pub fn new(gguf: &'m Gguf, graph: Graph, numerics: Numerics) -> Self {
        CpuEngine { gguf, graph, numerics, cache: HashMap::new(), computed: 0 }
    }

    /// Computes one node from live values and the cache, without its first `skipped` rows.
    fn compute(
        &self,
        node: &Node,
        live: &HashMap<Checkpoint, Matrix<S>>,
        rows: Rows<'_>,
        skipped: usize,
    ) -> Result<Matrix<S>> {
        let mut values: Vec<View<'_, S>> = Vec::with_capacity(node.inputs.len());
        for (index, input) in node.inputs.iter().enumerate() {
            let cached = node.op.reads_cache(index);
            let source = if cached { &self.cache } else { live };
            let value = source.get(input).ok_or_else(|| {
                Error::new(node.checkpoint, format!("its input {input} has not been computed"))
            })?;
            values.push(value.view().after(if cached { 0 } else { skipped }));
        }
        let inputs = Inputs { rows: rows.after(skipped), values: &values };
        fused::execute(node, self.gguf, inputs, &self.numerics)
    }
}

/// For each checkpoint the index of the last node that reads it as a row value, and whether any reads it
/// from the cache.
fn readers(graph: &Graph) -> HashMap<Checkpoint, (usize, bool)> {
    let mut readers: HashMap<Checkpoint, (usize, bool)> = HashMap::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        for (input, checkpoint) in node.inputs.iter().enumerate() {
            let entry = readers.entry(*checkpoint).or_insert((index, false));
            entry.0 = index;
            entry.1 |= node.op.reads_cache(input);
        }
    }
    readers
}

impl<S: Scalar + AsValues> Engine for CpuEngine<'_, S> {
    fn producer(&self) -> Producer {
        Producer {
            name: "parity".to_owned(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            backend: Some("cpu".to_owned()),
            device: None,
            numerics: Some(self.numerics.to_string()),
        }
    }

    fn reset(&mut self) {
        self.cache.clear();
        self.computed = 0;
    }

    fn step(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>> {
        if batch.tokens.is_empty() || batch.first != self.computed {
            return Err(Error::new("engine", "a step must follow the steps before it")
                .expected(format!("tokens from position {}", self.computed))
                .found(format!("{} tokens from position {}", batch.tokens.len(), batch.first)));
        }
        let graph = self.graph.fused(|checkpoint| probe.wants(checkpoint));
        let readers = readers(&graph);
        let end = batch.first + batch.tokens.len();
        let positions = batch.positions();
        let steps: Vec<Range<u32>> = vec![batch.first as u32..end as u32; batch.tokens.len()];
        let rows = Rows { tokens: batch.tokens, positions: &positions, steps: &steps };

        let mut live: HashMap<Checkpoint, Matrix<S>> = HashMap::new();
        let mut logits = None;
        for (index, node) in graph.nodes.iter().enumerate() {
            let skipped = skipped_logits(node, batch, probe);
            let mut out = self.compute(node, &live, rows, skipped)?;
            let kept = self.numerics.storage_of(node.checkpoint.kind());
            kept.store(&mut out.data);
            let batch = &batch.after(skipped);
            if probe.wants(node.checkpoint) {
                show(&graph, node.checkpoint, batch, end, &out, probe)?;
            }
            if node.checkpoint.kind() == Kind::Logits {
                logits = Some(out.row(out.rows - 1).iter().map(|v| v.to_f32()).collect());
            }
            if let Some(fed) = probe.fed(node.checkpoint, batch, out.cols) {
                out = Matrix::new(out.rows, out.cols, fed.into_iter().map(S::from_f32).collect());
                kept.store(&mut out.data);
            }
            let (last_reader, cached) = readers.get(&node.checkpoint).copied().unwrap_or((0, false));
            if cached {
                let cache = self.cache.entry(node.checkpoint).or_default();
                cache.append(out.view());
            }
            if last_reader > index {
                live.insert(node.checkpoint, out);
            }
            live.retain(|checkpoint, _| readers.get(checkpoint).is_some_and(|reader| reader.0 > index));
        }
        self.computed = end;
        Ok(logits)
    }
}

/// Rows of logits that nobody asks for: whole blocks of those that are computed at once.
fn skipped_logits(node: &Node, batch: &Batch<'_>, probe: &dyn Probe) -> usize {
    if node.checkpoint.kind() != Kind::Logits {
        return 0;
    }
    let first = probe.first_logits(batch).min(batch.tokens.len() - 1);
    first / LOGIT_ROWS * LOGIT_ROWS
}

/// Hands a node's output to the probe in the checkpoint's shape.
fn show<S: AsValues>(
    graph: &Graph,
    checkpoint: Checkpoint,
    batch: &Batch<'_>,
    cached: usize,
    out: &Matrix<S>,
    probe: &mut dyn Probe,
) -> Result<()> {
    let shape = graph.dims.shape(checkpoint.kind(), out.rows, cached);
    if !checkpoint.kind().is_optional() {
        return probe.record(checkpoint, batch, &shape, S::values(&out.data));
    }
    // (T, H·S) in memory, (H, T, S) by contract.
    let mut heads_first = Vec::with_capacity(out.data.len());
    for head in 0..graph.dims.heads {
        for t in 0..out.rows {
            heads_first.extend_from_slice(&out.row(t)[head * cached..(head + 1) * cached]);
        }
    }
    probe.record(checkpoint, batch, &shape, S::values(&heads_first))
}

/// A scalar whose slices a probe can take.
pub trait AsValues: Scalar {
    /// The values, without a copy.
    fn values(values: &[Self]) -> Values<'_>;
}

impl AsValues for f32 {
    fn values(values: &[f32]) -> Values<'_> {
        Values::F32(values)
    }
}

impl AsValues for f64 {
    fn values(values: &[f64]) -> Values<'_> {
        Values::F64(values)
    }
}
