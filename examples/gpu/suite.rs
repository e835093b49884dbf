//! The measurements.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::cpu::CpuEngine;
use parity::engine::cuda::{CudaEngine, supported};
use parity::engine::{Batch, Engine, Probe, Values};
use parity::model::Model;
use parity::numerics::Numerics;
use serde_json::{Value, json};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// All arithmetics of the GPU engine.
const GPU_NUMERICS: [&str; 3] = ["f32", "f32 kv=f16", "f16"];

/// Collects values over all steps.
#[derive(Default)]
struct Collect {
    values: BTreeMap<Checkpoint, Vec<f64>>,
    optional: bool,
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
struct Count {
    wants: fn(Kind) -> bool,
    bytes: usize,
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

fn nothing() -> Count {
    Count { wants: |_| false, bytes: 0 }
}

/// Tokens that any vocabulary of 4096 and more has.
fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7919 % 3000 + 100).collect()
}

fn gpu<'m>(model: &'m Model, numerics: &str) -> Result<CudaEngine<'m>, Box<dyn std::error::Error>> {
    let numerics = supported(numerics.parse::<Numerics>()?)?;
    Ok(CudaEngine::new(&model.gguf, model.graph.clone(), 0, numerics)?)
}

/// ‖a - b‖ / ‖b‖
fn rel_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let error: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    let size: f64 = b.iter().map(|b| b * b).sum();
    (error / size).sqrt()
}

fn write(out: &str, model: &Model, engine: &CudaEngine<'_>, mut body: Value) -> Outcome {
    let (driver, capability) = engine.driver();
    body["model"] = json!(model.gguf.path().file_name().map(|name| name.to_string_lossy()));
    body["device"] = json!(engine.producer().device);
    body["driver_cuda"] = json!(format!("{}.{}", driver / 1000, driver % 1000 / 10));
    body["compute_capability"] = json!(format!("{}.{}", capability.0, capability.1));
    body["kernels"] = json!(engine.kernels());
    body["version"] = json!(env!("CARGO_PKG_VERSION"));
    std::fs::write(out, serde_json::to_string_pretty(&body)? + "\n")?;
    Ok(())
}

/// Distance of every checkpoint from an f64 run: CPU in f32, GPU in all its arithmetics.
pub fn accuracy(out: &str, path: &str, rows: usize) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let tokens = tokens(rows);
    let batch = Batch { tokens: &tokens, first: 0 };
    let run = |engine: &mut dyn Engine| -> Result<Collect, Box<dyn std::error::Error>> {
        let mut collect = Collect { optional: true, ..Collect::default() };
        engine.step(&batch, &mut collect)?;
        Ok(collect)
    };
    let exact = run(&mut CpuEngine::<f64>::new(&model.gguf, model.graph.clone(), "f64".parse()?))?;
    let cpu = run(&mut CpuEngine::<f32>::new(&model.gguf, model.graph.clone(), Numerics::default()))?;
    let mut checkpoints: BTreeMap<Checkpoint, Value> = exact
        .values
        .iter()
        .map(|(checkpoint, exact)| {
            (*checkpoint, json!({ "cpu f32": rel_l2(&cpu.values[checkpoint], exact) }))
        })
        .collect();
    let mut summary = json!({});
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, numerics)?;
        let found = run(&mut engine)?;
        let (mut worst_ratio, mut worst, mut largest) = (0f64, None, 0f64);
        for (checkpoint, exact) in &exact.values {
            let distance = rel_l2(&found.values[checkpoint], exact);
            let entry = checkpoints.get_mut(checkpoint).expect("all are there");
            entry[format!("cuda {numerics}")] = json!(distance);
            let of_cpu = entry["cpu f32"].as_f64().unwrap_or(0.0);
            largest = largest.max(distance);
            if !(distance <= worst_ratio * of_cpu) {
                (worst_ratio, worst) = (distance / of_cpu, Some(*checkpoint));
            }
        }
        summary[numerics] = json!({
            "largest_rel_l2": largest, "worst_ratio_to_cpu_f32": worst_ratio, "at": worst,
        });
        println!("{path} {numerics}: rel L2 up to {largest:.2e}, {worst_ratio:.2} x cpu f32 at {worst:?}");
    }
    let engine = gpu(&model, "f32")?;
    write(out, &model, &engine, json!({ "rows": rows, "summary": summary, "checkpoints": checkpoints }))
}

/// Traced against untraced, `runs` runs against each other, decode against prefill, statistics on the device.
pub fn steps(out: &str, path: &str, runs: usize) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let mut body = json!({});
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, numerics)?;
        let tokens = tokens(264);
        let whole = Batch { tokens: &tokens, first: 0 };
        let untraced = engine.step(&whole, &mut nothing())?.expect("logits");
        let mut bits_differ = 0;
        for run in 0..runs {
            engine.reset();
            let traced = run % 2 == 0;
            let mut all = Count { wants: |_| true, bytes: 0 };
            let logits =
                if traced { engine.step(&whole, &mut all)? } else { engine.step(&whole, &mut nothing())? };
            bits_differ += usize::from(bits(&logits.expect("logits")) != bits(&untraced));
        }
        engine.reset();
        let mut prefill = Collect::default();
        engine.step(&whole, &mut prefill)?;
        let compared = on_device(&mut engine, &prefill)?;

        engine.reset();
        let mut decode = Collect::default();
        engine.step(&Batch { tokens: &tokens[..200], first: 0 }, &mut decode)?;
        for position in 200..264 {
            let batch = Batch { tokens: &tokens[position..position + 1], first: position };
            engine.step(&batch, &mut decode)?;
        }
        let distances: BTreeMap<Checkpoint, f64> =
            prefill.values.iter().map(|(c, values)| (*c, rel_l2(&decode.values[c], values))).collect();
        let largest = distances.values().copied().fold(0.0, f64::max);
        println!(
            "{path} {numerics}: {runs} runs, {bits_differ} with other logits; decode against prefill rel L2 up to {largest:.2e}"
        );
        body[numerics] = json!({
            "runs": runs, "runs_with_other_logits_bits": bits_differ,
            "decode_against_prefill_largest_rel_l2": largest,
            "decode_against_prefill_rel_l2": distances,
            "statistics_on_device": compared,
        });
    }
    let engine = gpu(&model, "f32")?;
    write(out, &model, &engine, body)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Compares the last step with a changed copy of itself on the GPU and on the host.
fn on_device(engine: &mut CudaEngine<'_>, found: &Collect) -> Result<Value, Box<dyn std::error::Error>> {
    let mut largest = 0f64;
    for (checkpoint, values) in &found.values {
        let reference: Vec<f32> =
            values.iter().enumerate().map(|(i, v)| *v as f32 * (1.0 + (i % 7) as f32 * 1e-3)).collect();
        let stats = engine.compare_on_device(*checkpoint, &reference)?.ok_or("nothing to compare")?;
        let pairs = || values.iter().zip(&reference).map(|(a, b)| (*a, f64::from(*b)));
        let max = pairs().map(|(a, b)| (a - b).abs()).fold(-1.0, f64::max);
        let place = pairs().position(|(a, b)| (a - b).abs() == max);
        if stats.abs_err_max != max || Some(stats.worst as usize) != place {
            return Err(format!("{checkpoint}: the GPU found another maximum: {stats:?}, not {max}").into());
        }
        let error: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
        largest = largest.max((stats.squared_error - error).abs() / error);
    }
    Ok(json!({ "checkpoints": found.values.len(), "largest_rel_difference_of_sums": largest }))
}

/// Prefill of 512 tokens and decode, with and without every checkpoint read back to the host.
pub fn speed(out: &str, path: &str) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let mut body = json!({});
    let everything: fn(Kind) -> bool = |kind| !kind.is_optional();
    // llama.cpp computes the logits of the last position alone, and so shows no others.
    let all_but_logits: fn(Kind) -> bool = |kind| !kind.is_optional() && kind != Kind::Logits;
    let probes = [
        ("untraced", (|_| false) as fn(Kind) -> bool),
        ("traced", all_but_logits),
        ("traced, all logits", everything),
    ];
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, numerics)?;
        for (name, wants) in probes {
            let (mut entry, mut bytes) = (json!({}), 0);
            for n in [16, 128, 512] {
                let tokens = tokens(n);
                let times = (0..9).map(|_| {
                    engine.reset();
                    let mut probe = Count { wants, bytes: 0 };
                    let start = Instant::now();
                    engine.step(&Batch { tokens: &tokens, first: 0 }, &mut probe)?;
                    bytes = probe.bytes;
                    Ok(start.elapsed().as_secs_f64())
                });
                let seconds = median(times.collect::<Result<_, parity::error::Error>>()?);
                println!(
                    "{numerics} {name} pp{n}: {:.3} ms, {:.0} tok/s, {bytes} bytes",
                    1e3 * seconds,
                    n as f64 / seconds
                );
                entry[format!("pp{n}")] =
                    json!({ "ms": 1e3 * seconds, "tokens_per_second": n as f64 / seconds, "bytes": bytes });
            }
            let mut times = Vec::new();
            for _ in 0..3 {
                engine.reset();
                engine.step(&Batch { tokens: &tokens(8), first: 0 }, &mut nothing())?;
                let start = Instant::now();
                for i in 0..64 {
                    let token = tokens(i + 1)[i];
                    engine.step(&Batch { tokens: &[token], first: 8 + i }, &mut Count { wants, bytes: 0 })?;
                }
                times.push(start.elapsed().as_secs_f64() / 64.0);
            }
            let seconds = median(times);
            println!("{numerics} {name} tg64: {:.3} ms/tok, {:.1} tok/s", 1e3 * seconds, 1.0 / seconds);
            entry["tg64"] = json!({ "ms": 1e3 * seconds, "tokens_per_second": 1.0 / seconds });
            body[numerics][name] = entry;
        }
    }
    let engine = gpu(&model, "f32")?;
    write(out, &model, &engine, body)
}

/// Without the first two, which warm up.
fn median(mut times: Vec<f64>) -> f64 {
    if times.len() > 4 {
        times.drain(..2);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
