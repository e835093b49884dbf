//! What the measurements share: probes, an engine on the first GPU, the file that a measurement becomes.

use indexmap::IndexMap;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::cuda::{CudaEngine, supported};
use parity::engine::fused::Model;
use parity::engine::fused::graph::Graph;
use parity::engine::{Batch, Engine, Probe, Values};
use parity::numerics::Numerics;
use serde_json::{Value, json};

pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// All arithmetics of the GPU engine: exact, exact with a cache in f16, fast.
pub const GPU_NUMERICS: [&str; 3] = ["f32", "f32 kv=f16", "f16"];

/// Collects values over all steps.
#[derive(Default)]
pub struct Collect {
    pub values: IndexMap<Checkpoint, Vec<f64>>,
    /// Whether the attention matrices too.
    pub optional: bool,
}

impl Probe for Collect {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.optional || !checkpoint.kind().is_optional()
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        _: &Batch<'_>,
        _: &[usize],
        values: Values<'_>,
    ) -> parity::error::Result<()> {
        let all = self.values.entry(checkpoint).or_default();
        match values {
            Values::F32(values) => all.extend(values.iter().map(|v| f64::from(*v))),
            Values::F16(values) => all.extend(values.iter().map(|v| v.to_f64())),
            Values::F64(values) => all.extend(values),
        }
        Ok(())
    }
}

/// Counts bytes that arrived on the host.
pub struct Count {
    pub wants: fn(Kind) -> bool,
    pub bytes: usize,
}

impl Probe for Count {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        (self.wants)(checkpoint.kind())
    }

    fn record(
        &mut self,
        _: Checkpoint,
        _: &Batch<'_>,
        _: &[usize],
        values: Values<'_>,
    ) -> parity::error::Result<()> {
        self.bytes += match values {
            Values::F32(values) => size_of_val(values),
            Values::F16(values) => size_of_val(values),
            Values::F64(values) => size_of_val(values),
        };
        Ok(())
    }
}

/// Sees nothing.
pub fn nothing() -> Count {
    Count { wants: |_| false, bytes: 0 }
}

/// The values as recordings have them.
pub fn in_f32(values: Values<'_>) -> Vec<f32> {
    match values {
        Values::F32(values) => values.to_vec(),
        Values::F16(values) => values.iter().map(|v| v.to_f32()).collect(),
        Values::F64(values) => values.iter().map(|v| *v as f32).collect(),
    }
}

/// The middle one; of an even number the later one of two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A prompt in one step, then one step for each later position.
pub fn prompt_and_steps(prompt: usize, end: usize) -> Vec<std::ops::Range<usize>> {
    std::iter::once(0..prompt).chain((prompt..end).map(|position| position..position + 1)).collect()
}

/// Tokens that any vocabulary of 4096 and more has.
pub fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7919 % 3000 + 100).collect()
}

/// An engine on the first GPU.
pub fn gpu<'m>(
    model: &'m Model,
    graph: &Graph,
    numerics: &str,
) -> Result<CudaEngine<'m>, Box<dyn std::error::Error>> {
    let numerics = supported(numerics.parse::<Numerics>()?)?;
    Ok(CudaEngine::new(&model.gguf, graph.clone(), 0, numerics)?)
}

/// ‖a - b‖ / ‖b‖; 0 where they are equal.
pub fn rel_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let error: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    let size: f64 = b.iter().map(|b| b * b).sum();
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

/// Writes a measurement with what it was made on. The commit is that of the sources, from `PARITY_COMMIT`.
pub fn write(out: &str, model: &Model, mut body: Value) -> Outcome {
    let engine = gpu(model, &model.graph, "f32")?;
    let (driver, capability) = engine.driver();
    body["model"] = json!(model.gguf.path().file_name().map(|name| name.to_string_lossy()));
    body["device"] = json!(engine.producer().device);
    body["driver_cuda"] = json!(format!("{}.{}", driver / 1000, driver % 1000 / 10));
    body["driver"] = json!(driver_version());
    body["compute_capability"] = json!(format!("{}.{}", capability.0, capability.1));
    body["kernels"] = json!(engine.kernels());
    body["version"] = json!(env!("CARGO_PKG_VERSION"));
    body["commit"] = json!(std::env::var("PARITY_COMMIT").ok().filter(|commit| !commit.is_empty()));
    std::fs::write(out, serde_json::to_string_pretty(&body)? + "\n")?;
    Ok(())
}

/// The version of the kernel driver, e.g. 580.159.04.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    text.split_whitespace()
        .find(|word| word.split('.').count() >= 2 && word.as_bytes()[0].is_ascii_digit())
        .map(str::to_owned)
}
