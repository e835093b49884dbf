//! Every mistake of the catalogue, injected in the engine on the GPU: is it found, and at the right node?

use std::path::Path;

use parity::audit::AuditRows;
use parity::engine::device::Device;
use parity::engine::fused::file::ModelFile;
use parity::faults::injected::parse;
use parity::jobs::run::{RunOptions, run};
use parity::report::Report;
use parity_graph::fault::{Entry, entries};
use serde_json::{Value, json};

use crate::common::{Outcome, tokens, write};

/// Tokens of the prompt: more than eight rows are computed by tiles. Three decode steps follow.
const PROMPT: usize = 12;
const STEPS: usize = 3;

/// Where mistakes are injected that can happen to any value.
const ANY: &str = "ffn_out";

/// Injects each mistake in the first, a middle and the last layer, and where it sits outside of them.
pub fn faults(out: &str, path: &str) -> Outcome {
    let file = ModelFile::open(Path::new(path))?;
    let last = file.nodes()?.config.dims.layers - 1;
    let places = [Some(0), Some(last as u32 / 2 + 1), Some(last as u32), None];
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for entry in entries().filter(|entry| !entry.recognised) {
        let mut injected = 0;
        for layer in places {
            // What sits in a layer has been injected in three.
            if layer.is_none() && injected > 0 {
                break;
            }
            // What can happen to any value happens to one.
            let place = match layer {
                Some(layer) if entry.ops.is_empty() => format!("@blk.{layer}.{ANY}"),
                Some(layer) => format!("@{layer}"),
                None => String::new(),
            };
            let spec = format!("{}{place}", entry.name);
            let options = RunOptions {
                tokens: tokens(PROMPT),
                n_predict: Some(STEPS),
                device: Device::Cuda(vec![0]),
                numerics: "f32".parse()?,
                audit: Some(AuditRows::All),
                inject: vec![parse(&spec)?],
                ..RunOptions::default()
            };
            let Ok(report) = run(&file, &options, &|_, _| ()) else { continue };
            injected += 1;
            let (outcome, body) = outcome(entry, layer, &report);
            *counts.entry(outcome).or_default() += 1;
            if matches!(outcome, "missed" | "elsewhere") {
                println!("{spec}: {outcome} {body}");
                failures.push(spec.clone());
            }
            rows.push(json!({ "fault": spec, "outcome": outcome, "found": body }));
        }
        if injected == 0 {
            rows.push(json!({ "fault": entry.name, "outcome": "the model has no place for it" }));
            *counts.entry("no place").or_default() += 1;
        }
    }
    println!("{path} faults: {counts:?}");
    write(out, file.nodes()?, json!({ "counts": counts, "failures": failures, "faults": rows }))?;
    if failures.is_empty() { Ok(()) } else { Err(format!("not found: {}", failures.join(", ")).into()) }
}

/// Where the audit of all rows finds it, and what the diagnosis calls it.
fn outcome(entry: &Entry, layer: Option<u32>, report: &Report) -> (&'static str, Value) {
    let Some(first) = report.origins.first() else {
        let silent = entry.silent.is_some();
        return (if silent { "within rounding on these data" } else { "missed" }, json!(entry.silent));
    };
    if layer.is_some() && first.layer_index() != layer {
        return ("elsewhere", json!({ "origins": report.origins }));
    }
    let node = report.checkpoints.iter().find(|node| node.id == *first);
    let named: Vec<&str> =
        node.iter().flat_map(|node| &node.diagnosis).map(|found| found.fault.as_str()).collect();
    let alike = format!("indistinguishable here from {}", entry.name);
    let mut texts = node.iter().flat_map(|node| &node.diagnosis).map(|found| &found.text);
    let outcome = match named.iter().position(|name| *name == entry.name) {
        Some(0) => "found and named first",
        Some(_) => "found and named among others",
        None if texts.any(|text| text.contains(&alike)) => "found and named among others",
        None => "found, not named",
    };
    (outcome, json!({ "at": first, "named": named }))
}
