//! A model in the repository, an engine run kept in memory, and its audit.

use std::path::{Path, PathBuf};

use parity::audit::{self, Audit, AuditRows};
use parity::checkpoint::Checkpoint;
use parity::dump::{Kept, Recording};
use parity::engine::cpu::CpuEngine;
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::gguf::Gguf;
use parity::model::Model;
use parity::model::graph::Graph;
use parity::numerics::Numerics;
use parity::random;

/// Where a committed model is, or one of the folder `PARITY_MODELS`.
pub fn path(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models");
    let folders = [Some(own), std::env::var_os("PARITY_MODELS").map(PathBuf::from)];
    folders.into_iter().flatten().map(|dir| dir.join(name)).find(|path| path.exists())
}

/// Its file.
pub fn gguf(name: &str) -> Option<Gguf> {
    Some(Gguf::open(&path(name)?).unwrap())
}

/// The model.
pub fn model(name: &str) -> Option<Model> {
    Some(Model::open(&path(name)?).unwrap())
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
