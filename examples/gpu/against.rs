//! The engine against recordings of llama.cpp: verdicts, audits, distances from exact arithmetic, greedy text.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use parity::audit::AuditRows;
use parity::checkpoint::{Checkpoint, Kind};
use parity::compare::argmax;
use parity::dump::Recording;
use parity::engine::device::Device;
use parity::engine::fused::Model;
use parity::engine::fused::cpu::CpuEngine;
use parity::engine::fused::file::ModelFile;
use parity::engine::{Batch, Engine};
use parity::foreign;
use parity::jobs::run::{RunOptions, run};
use parity::numerics::Numerics;
use parity::report::{CheckpointVerdict, Report};
use parity_dump::Dump;
use serde_json::{Value, json};

use crate::common::{Collect, GPU_NUMERICS, Outcome, gpu, rel_l2, write};

/// Largest allowed distance of the exact GPU engine from exact arithmetic, as a multiple of the CPU's in f32.
const CPU_TIMES: f64 = 2.0;

/// Holds the GPU engine against recordings; an error where one of the criteria is missed.
pub fn against(out: &str, path: &str, references: &[&str]) -> Outcome {
    let file = ModelFile::open(Path::new(path))?;
    let model = file.nodes()?;
    let (mut body, mut failures) = (json!({}), Vec::new());
    for path in references {
        let reference = foreign::open(Path::new(path), &foreign::Options::default())?;
        let name = Path::new(path).file_name().map_or(path.to_string(), |n| n.to_string_lossy().into_owned());
        let mut entry = json!({
            "producer": reference.producer(), "tokens": reference.tokens().len(),
            "steps": reference.manifest().steps.iter().map(|step| step.positions.len()).collect::<Vec<_>>(),
        });
        let expected = model.graph.checkpoints().filter(|c| !c.kind().is_optional()).count();
        // A recording of a few checkpoints, such as the logits of a long text, says what the text is.
        let is_whole = reference.checkpoints().count() == expected;
        for numerics in GPU_NUMERICS.into_iter().filter(|_| is_whole) {
            let report = judged(&file, path, numerics)?;
            let sides = sides(&report);
            let clean = sides["origins"] == json!([]) && sides["exit"] == json!(0);
            println!("{name} {numerics}: {sides}");
            if !clean {
                failures.push(format!("{name} {numerics}: not clean"));
            }
            entry[numerics] = sides;
        }
        if is_whole {
            entry["distance"] = distances(model, &reference, &name, &mut failures)?;
        }
        entry["greedy"] = greedy(model, &reference)?;
        println!("{name} greedy: {}", entry["greedy"]);
        body[&name] = entry;
    }
    body["failures"] = json!(failures);
    write(out, model, body)?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

/// What `parity run --device cuda --audit-rows all` finds.
fn judged(file: &ModelFile, reference: &str, numerics: &str) -> Result<Report, Box<dyn std::error::Error>> {
    let options = RunOptions {
        reference: Some(reference.into()),
        device: Device::Cuda(vec![0]),
        numerics: numerics.parse()?,
        audit: Some(AuditRows::All),
        ..RunOptions::default()
    };
    Ok(run(file, &options, &|_, _| ())?)
}

/// The report in few numbers. The audit of the GPU's side is `over_bound`: 1 is what rounding explains.
fn sides(report: &Report) -> Value {
    let mut verdicts: BTreeMap<String, usize> = BTreeMap::new();
    let (mut over, mut at, mut audited) = (0f64, None, 0);
    for entry in &report.checkpoints {
        let verdict = serde_json::to_value(entry.verdict).unwrap_or_default();
        *verdicts.entry(verdict.as_str().unwrap_or("?").to_owned()).or_default() += 1;
        if let Some(local) = &entry.local.candidate {
            audited += 1;
            if !(local.over_bound <= over) {
                (over, at) = (local.over_bound, Some(entry.id));
            }
        }
    }
    let unexplained = |verdict| !matches!(verdict, CheckpointVerdict::Match | CheckpointVerdict::Inherited);
    let largest = |kind: fn(&parity::report::Numbers) -> f64| {
        report.checkpoints.iter().filter_map(|e| e.numbers.as_ref()).map(kind).fold(0.0, f64::max)
    };
    json!({
        "verdict": report.verdict,
        "exit": i32::from(report.checkpoints.iter().any(|entry| unexplained(entry.verdict))),
        "origins": report.origins,
        "checkpoints": verdicts,
        "missing": report.coverage.checkpoints_missing,
        "rows_compared": report.coverage.rows_compared, "rows_expected": report.coverage.rows_expected,
        "audited": audited, "rows_audited": report.coverage.rows_audited,
        "largest_over_bound": over, "largest_over_bound_at": at,
        "largest_rel_l2": largest(|numbers| numbers.rel_l2),
        "top1_agree": report.tokens.as_ref().map(|tokens| tokens.top1_agree),
        "kl_mean": report.tokens.as_ref().map(|tokens| tokens.kl_mean),
        "first_flip": report.tokens.as_ref().and_then(|tokens| tokens.first_flip.clone()),
    })
}

/// All values of a run in the reference's steps.
fn collect(engine: &mut dyn Engine, reference: &Dump) -> Result<Collect, Box<dyn std::error::Error>> {
    let (mut collect, mut first) = (Collect::default(), 0);
    for step in &reference.manifest().steps {
        let end = first + step.positions.len();
        engine.step(&Batch { tokens: &reference.tokens()[first..end], first }, &mut collect)?;
        first = end;
    }
    Ok(collect)
}

/// Distance of every checkpoint from an f64 run: the CPU in f32, llama.cpp, the GPU in all its arithmetics.
fn distances(
    model: &Model,
    reference: &Dump,
    name: &str,
    failures: &mut Vec<String>,
) -> Result<Value, Box<dyn std::error::Error>> {
    let graph = &model.graph;
    let exact = collect(&mut CpuEngine::<f64>::new(&model.gguf, graph.clone(), "f64".parse()?), reference)?;
    let cpu = CpuEngine::<f32>::new(&model.gguf, graph.clone(), Numerics::default());
    let mut witnesses = vec![("cpu f32".to_owned(), collect(&mut { cpu }, reference)?)];
    for numerics in GPU_NUMERICS {
        witnesses.push((format!("cuda {numerics}"), collect(&mut gpu(model, graph, numerics)?, reference)?));
    }
    let mut recorded = Collect::default();
    let positions: Vec<u32> = (0..reference.tokens().len() as u32).collect();
    for checkpoint in exact.values.keys() {
        if let Some(rows) = Recording::gather(reference, *checkpoint, &positions) {
            recorded.values.insert(*checkpoint, rows.data.iter().map(|v| f64::from(*v)).collect());
        }
    }
    witnesses.push(("llama.cpp".to_owned(), recorded));

    let mut checkpoints: HashMap<Checkpoint, BTreeMap<&str, f64>> = HashMap::new();
    for (witness, found) in &witnesses {
        for (checkpoint, exact) in &exact.values {
            let Some(found) = found.values.get(checkpoint).filter(|found| found.len() == exact.len()) else {
                continue;
            };
            checkpoints.entry(*checkpoint).or_default().insert(witness, rel_l2(found, exact));
        }
    }
    let mut summary = json!({});
    for (witness, _) in &witnesses {
        let all = || checkpoints.iter().filter_map(|(c, d)| Some((*c, *d.get(witness.as_str())?)));
        let largest = all().max_by(|a, b| a.1.total_cmp(&b.1));
        let ratio = |to: &'static str| {
            let ratios = checkpoints.iter().filter_map(|(c, d)| {
                let (own, other) = (*d.get(witness.as_str())?, *d.get(to)?);
                (own > 0.0).then_some((*c, own / other))
            });
            ratios.max_by(|a, b| a.1.total_cmp(&b.1))
        };
        let (to_cpu, to_llama) = (ratio("cpu f32"), ratio("llama.cpp"));
        summary[witness] = json!({
            "checkpoints": all().count(), "largest_rel_l2": largest,
            "largest_ratio_to_cpu_f32": to_cpu, "largest_ratio_to_llama_cpp": to_llama,
        });
        println!("{name} {witness}: {}", summary[witness]);
        let within = |ratio: Option<(Checkpoint, f64)>, limit| ratio.is_none_or(|(_, ratio)| ratio <= limit);
        if witness == "cuda f32" && !(within(to_cpu, CPU_TIMES) && within(to_llama, 1.0)) {
            failures.push(format!("{name} {witness}: farther from exact than allowed"));
        }
    }
    let table: BTreeMap<String, _> = checkpoints.iter().map(|(c, d)| (c.to_string(), d)).collect();
    Ok(json!({ "summary": summary, "rel_l2_by_checkpoint": table }))
}

/// Greedy text after the prompt of the recording, in every arithmetic, up to the first token that differs.
fn greedy(model: &Model, reference: &Dump) -> Result<Value, Box<dyn std::error::Error>> {
    let steps = &reference.manifest().steps;
    let prompt = steps.first().map_or(0, |step| step.positions.len());
    let known = reference.tokens();
    let logits = Checkpoint::global(Kind::Logits);
    let mut body = json!({ "prompt": prompt, "decoded": known.len() - prompt });
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(model, &model.graph, numerics)?;
        let (mut first, mut equal, mut parting) = (0, 0, Value::Null);
        for end in prompt..known.len() {
            let batch = Batch { tokens: &known[first..end], first };
            let own = engine.step(&batch, &mut crate::common::nothing())?.ok_or("no logits")?;
            first = end;
            let token = argmax(&own).ok_or("no token")?;
            if token == known[end] {
                equal += 1;
                continue;
            }
            let mut buffer = Vec::new();
            if let Some(theirs) = Recording::row(reference, logits, end as u32 - 1, &mut buffer) {
                let (a, b) = (token as usize, known[end] as usize);
                let error = own.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                let margin = theirs[b] - theirs[a];
                parting = json!({
                    "position": end, "own": token, "llama.cpp": known[end],
                    "own_logits": [own[a], own[b]], "llama.cpp_logits": [theirs[a], theirs[b]],
                    "margin_of_llama.cpp": margin, "largest_logit_difference": error,
                    "near_tie": margin <= 2.0 * error,
                });
            } else {
                parting = json!({ "position": end, "own": token, "llama.cpp": known[end] });
            }
            break;
        }
        body[numerics] = json!({ "equal_tokens": equal, "parting": parting });
    }
    Ok(body)
}
