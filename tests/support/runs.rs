//! A model in the repository, an engine run kept in memory, and its audit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parity::audit::{self, Audit, AuditRows, Context};
use parity::checkpoint::Checkpoint;
use parity::dump::{Kept, Recording};
use parity::engine::fused::Model;
use parity::engine::fused::cpu::CpuEngine;
use parity::engine::fused::graph::Graph;
use parity::engine::fused::{self, Inputs, Rows};
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::faults::diagnose::{Diagnosed, diagnose};
use parity::numerics::Numerics;
use parity::random;
use parity::tensor::{Matrix, View};
use parity_dump::manifest::Producer;

/// A committed model, or one of the folder `PARITY_MODELS`.
pub fn model(name: &str) -> Option<Model> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models");
    let folders = [Some(own), std::env::var_os("PARITY_MODELS").map(PathBuf::from)];
    let path = folders.into_iter().flatten().map(|dir| dir.join(name)).find(|path| path.exists())?;
    Some(Model::open(&path).unwrap())
}

/// Keeps every row of every checkpoint that is wanted.
struct KeepAll<'a> {
    kept: Kept,
    attention: bool,
    layers: &'a dyn Fn(Checkpoint) -> bool,
}

impl Probe for KeepAll<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        (self.attention || !checkpoint.kind().is_optional()) && (self.layers)(checkpoint)
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let Values::F32(values) = values else { panic!("the engine computes in f32") };
        let rows = batch.tokens.len();
        if checkpoint.kind().is_optional() {
            let [heads, _, cached] = shape[..] else { panic!("(H, T, S)") };
            for t in 0..rows {
                let position = batch.first + t;
                let row: Vec<f32> = (0..heads)
                    .flat_map(|h| values[(h * rows + t) * cached..][..=position].iter().copied())
                    .collect();
                self.kept.keep(checkpoint, &[heads, position + 1], position as u32, &row);
            }
            return Ok(());
        }
        let width = values.len() / rows;
        for (t, row) in values.chunks_exact(width).enumerate() {
            self.kept.keep(checkpoint, &shape[1..], (batch.first + t) as u32, row);
        }
        Ok(())
    }
}

/// Runs `graph` on `tokens`: a prompt of `prompt` tokens in one step, then one step per token.
pub fn run(model: &Model, graph: &Graph, tokens: &[u32], prompt: usize, attention: bool) -> Kept {
    run_some(model, graph, tokens, prompt, attention, &|_| true)
}

/// As [`run`], keeping some checkpoints only.
pub fn run_some(
    model: &Model,
    graph: &Graph,
    tokens: &[u32],
    prompt: usize,
    attention: bool,
    layers: &dyn Fn(Checkpoint) -> bool,
) -> Kept {
    run_as(Numerics::default(), model, graph, tokens, prompt, attention, layers)
}

/// As [`run_some`], in some arithmetic.
pub fn run_as(
    numerics: Numerics,
    model: &Model,
    graph: &Graph,
    tokens: &[u32],
    prompt: usize,
    attention: bool,
    layers: &dyn Fn(Checkpoint) -> bool,
) -> Kept {
    let mut engine = CpuEngine::<f32>::new(&model.gguf, graph.clone(), numerics);
    let mut probe = KeepAll { kept: Kept::new(engine.producer(), model.info()), attention, layers };
    let mut first = 0;
    while first < tokens.len() {
        let end = if first < prompt { prompt } else { first + 1 };
        let batch = Batch { tokens: &tokens[first..end], first };
        engine.step(&batch, &mut probe).unwrap();
        probe.kept.add_step(batch.tokens, first);
        first = end;
    }
    probe.kept
}

/// Audits all rows of the checkpoints that were kept.
pub fn audit_all(model: &Model, kept: &Kept) -> Audit {
    let positions = AuditRows::All.positions(&kept.manifest().steps);
    let recorded = kept.checkpoints();
    // A node whose inputs were left out cannot be judged.
    let graph = model.graph.fused(|checkpoint| recorded.contains(&checkpoint));
    let whole = |checkpoint: Checkpoint| {
        graph.node(checkpoint).is_some_and(|node| node.inputs.iter().all(|input| recorded.contains(input)))
    };
    let options = audit::Options { positions: &positions, wants: &whole, isolated: false };
    audit::audit(&[kept], &model.gguf, &model.graph, &options).unwrap().sides.remove(0)
}

/// Diagnoses one node.
pub fn diagnose_at(model: &Model, kept: &Kept, checkpoint: Checkpoint) -> Diagnosed {
    let recorded = kept.checkpoints();
    let graph = model.graph.fused(|checkpoint| recorded.contains(&checkpoint));
    let numerics = Numerics::default();
    let context = Context {
        gguf: &model.gguf,
        graph: &graph,
        recording: kept,
        numerics,
        recorded_unit: 0.0,
        fed: None,
    };
    assert!(graph.node(checkpoint).is_some());
    diagnose(&context, model, checkpoint, &[]).unwrap()
}

/// A small generator.
pub struct Random(pub u64);

impl Random {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(random::GAMMA);
        (random::mixed(self.0) % n as u64) as usize
    }

    /// Tokens below `n`.
    pub fn tokens(&mut self, count: usize, n: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(n) as u32).collect()
    }
}

/// What a strange mistake does to a node's output (T, width), given its inputs.
pub type Strange<'a> = &'a dyn Fn(&mut Matrix<f32>, &[View<'_, f32>], &Model);

/// Runs the healthy graph node by node, with a mistake at one of them that no catalogue knows.
pub fn run_strange(
    model: &Model,
    tokens: &[u32],
    prompt: usize,
    at: Checkpoint,
    strange: Strange<'_>,
) -> Kept {
    let graph = model.graph.fused(|_| false);
    let mut probe = KeepAll { kept: kept_by_test(model), attention: false, layers: &|_| true };
    let mut cache: HashMap<Checkpoint, Matrix<f32>> = HashMap::new();
    let mut first = 0;
    while first < tokens.len() {
        let end = if first < prompt { prompt } else { first + 1 };
        let batch = Batch { tokens: &tokens[first..end], first };
        let positions: Vec<u32> = (first as u32..end as u32).collect();
        let steps = vec![first as u32..end as u32; end - first];
        let rows = Rows { tokens: batch.tokens, positions: &positions, steps: &steps };
        let mut live: HashMap<Checkpoint, Matrix<f32>> = HashMap::new();
        for node in &graph.nodes {
            let source = |(index, input): (usize, &Checkpoint)| match node.op.reads_cache(index) {
                true => cache[input].view(),
                false => live[input].view(),
            };
            let values: Vec<View<'_, f32>> = node.inputs.iter().enumerate().map(source).collect();
            let inputs = Inputs { rows, values: &values };
            let mut out = dense::execute(node, &model.gguf, inputs, &Numerics::default()).unwrap();
            if node.checkpoint == at {
                strange(&mut out, &values, model);
            }
            let shape = graph.dims.shape(node.checkpoint.kind(), out.rows, end);
            probe.record(node.checkpoint, &batch, &shape, Values::F32(&out.data)).unwrap();
            cache.entry(node.checkpoint).or_default().append(out.view());
            live.insert(node.checkpoint, out);
        }
        probe.kept.add_step(batch.tokens, first);
        first = end;
    }
    probe.kept
}

fn kept_by_test(model: &Model) -> Kept {
    let producer = Producer { name: "test".into(), numerics: Some("f32".into()), ..Producer::default() };
    Kept::new(producer, model.info())
}
