//! Every fault of the catalogue, injected in the engine on the GPU: is it found, and at the right node?

use std::path::Path;

use parity::audit::{AuditRows, Context, Options, audit};
use parity::checkpoint::Checkpoint;
use parity::dump::{Kept, Recording};
use parity::faults::diagnose::diagnose;
use parity::faults::inject::{Injected, inject};
use parity::faults::{Fault, catalogue};
use parity::model::Model;
use serde_json::{Value, json};

use crate::common::{Outcome, gpu, keep, prompt_and_steps, tokens, write};

/// Tokens of the prompt, and with three decode steps. More than eight rows are computed by tiles.
const PROMPT: usize = 12;
const END: usize = 15;

/// Plants each fault in the first, a middle and the last layer.
pub fn faults(out: &str, path: &str) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let last = model.config.dims.layers as u32 - 1;
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for fault in catalogue::all() {
        let in_layers = fault.home.kinds().iter().any(|kind| kind.in_layer());
        let places = match in_layers {
            true => [0, last / 2 + 1, last].iter().map(|layer| format!("@{layer}")).collect(),
            false => vec![String::new()],
        };
        for place in places {
            let spec = format!("{}{place}", fault.name);
            let mut graph = model.graph.clone();
            let Ok(injected) = inject(&mut graph, &[spec.parse()?], &model) else {
                rows.push(json!({ "fault": spec, "outcome": "the model has no place for it" }));
                *counts.entry("no place").or_default() += 1;
                continue;
            };
            let mut engine = gpu(&model, &graph, "f32")?;
            let kept = keep(&mut engine, &model, &tokens(END), &prompt_and_steps(PROMPT, END))?;
            let (outcome, body) = judge(&model, fault, &injected[0], &kept)?;
            *counts.entry(outcome).or_default() += 1;
            if matches!(outcome, "missed" | "elsewhere") {
                println!("{spec}: {outcome} {body}");
                failures.push(spec.clone());
            }
            rows.push(json!({ "fault": spec, "outcome": outcome, "found": body }));
        }
    }
    println!("{path} faults: {counts:?}");
    let body = json!({ "counts": counts, "failures": failures, "faults": rows });
    write(out, &model, body)?;
    if failures.is_empty() { Ok(()) } else { Err(format!("not found: {}", failures.join(", ")).into()) }
}

/// Where the audit of all rows finds it, and what the diagnosis calls it.
fn judge(
    model: &Model,
    fault: &Fault,
    injected: &Injected,
    kept: &Kept,
) -> Result<(&'static str, Value), Box<dyn std::error::Error>> {
    let positions = AuditRows::All.positions(&kept.manifest().steps);
    let wants = |checkpoint: Checkpoint| !checkpoint.kind().is_optional();
    let options = Options { positions: &positions, wants: &wants, isolated: false };
    let audit = audit(&[kept], &model.gguf, &model.graph, &options)?.sides.remove(0);
    let origins: Vec<Checkpoint> = audit.origins().collect();
    let Some(first) = origins.first() else {
        let silent = fault.silent.is_some();
        return Ok((if silent { "within rounding on these data" } else { "missed" }, json!(fault.silent)));
    };
    if injected.nodes.first() != Some(first) {
        return Ok(("elsewhere", json!({ "origins": origins, "injected": injected.nodes })));
    }
    let recorded = kept.checkpoints();
    let graph = model.graph.fused(|checkpoint| recorded.contains(&checkpoint));
    let (numerics, recorded_unit) = (audit.numerics, audit.recorded_unit);
    let context =
        Context { gguf: &model.gguf, graph: &graph, recording: kept, numerics, recorded_unit, fed: None };
    let named: Vec<String> =
        diagnose(&context, model, *first, &[])?.diagnosis.into_iter().map(|found| found.fault).collect();
    let outcome = match named.iter().position(|name| name == fault.name) {
        Some(0) => "found and named first",
        Some(_) => "found and named among others",
        None => "found, not named",
    };
    Ok((outcome, json!({ "at": first, "named": named })))
}
