//! One engine against itself: traced and untraced, run after run, decode against prefill, comparisons on the
//! device against those on the host.

use std::path::Path;

use parity::audit::{self, audit};
use parity::checkpoint::Checkpoint;
use parity::compare::{self, Tolerances};
use parity::dump::{Kept, Recording};
use parity::engine::cuda::CudaEngine;
use parity::engine::{Batch, Engine};
use parity::evidence;
use parity::findings::{self, Parts};
use parity::model::Model;
use parity::report::{Report, Verdict};
use serde_json::{Value, json};

use crate::common::{
    Collect, Count, GPU_NUMERICS, Outcome, gpu, keep, nothing, prompt_and_steps, tokens, write,
};

/// Tokens of the prompt, and of everything.
const PROMPT: usize = 200;
const END: usize = 264;
/// Tokens of a short step, which other kernels compute.
const SHORT: usize = 5;

/// All of it, for every arithmetic; an error where something differs.
pub fn steps(out: &str, path: &str, runs: usize) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let (mut body, mut failures) = (json!({}), Vec::new());
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(&model, &model.graph, numerics)?;
        let reruns = rerun(&mut engine, runs)?;
        if reruns["runs_with_other_logits_bits"] != json!(0) {
            failures.push(format!("{numerics}: logits bits differ"));
        }
        let tokens = tokens(END);
        engine.reset();
        let mut found = Collect::default();
        engine.step(&Batch { tokens: &tokens, first: 0 }, &mut found)?;
        let compared = on_device(&mut engine, &found)?;

        engine.reset();
        let decode = keep(&mut engine, &model, &tokens, &prompt_and_steps(PROMPT, END))?;
        engine.reset();
        let prefill = keep(&mut engine, &model, &tokens, &prompt_and_steps(END, END))?;
        let report = against(&model, &decode, &prefill)?;
        if report.verdict != Verdict::Parity {
            failures.push(format!("{numerics}: decode and prefill are not within their bounds"));
        }
        let pair = summary(&report);
        println!("{path} {numerics}: {reruns} decode against prefill: {pair}");
        body[numerics] = json!({
            "reruns": reruns, "decode_against_prefill": pair, "statistics_on_device": compared,
        });
    }
    body["failures"] = json!(failures);
    write(out, &model, body)?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

/// Runs a prefill and decode steps again and again: every second time with every checkpoint read out, every
/// fourth with the attention matrices as well. All logits must have the bits of the first, untraced run.
fn rerun(engine: &mut CudaEngine<'_>, runs: usize) -> Result<Value, Box<dyn std::error::Error>> {
    let tokens = tokens(END);
    let mut first: Option<Vec<Vec<u32>>> = None;
    let mut differ = 0;
    for run in 0..=runs {
        engine.reset();
        let all = |optional: bool| Count {
            wants: if optional { |_| true } else { |kind| !kind.is_optional() },
            bytes: 0,
        };
        let mut probe = match run % 4 {
            1 => all(false),
            3 => all(true),
            _ => nothing(),
        };
        let mut logits = Vec::new();
        for step in [0..PROMPT, PROMPT..PROMPT + 1, PROMPT + 1..PROMPT + 2, PROMPT + 2..PROMPT + 2 + SHORT] {
            let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
            logits.push(bits(&engine.step(&batch, &mut probe)?.ok_or("no logits")?));
        }
        differ += usize::from(*first.get_or_insert_with(|| logits.clone()) != logits);
    }
    Ok(json!({ "runs": runs, "traced_every": 2, "runs_with_other_logits_bits": differ }))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Decode held against prefill: every row of the decoded positions, both sides audited there.
fn against(model: &Model, decode: &Kept, prefill: &Kept) -> Result<Report, Box<dyn std::error::Error>> {
    let positions: Vec<u32> = (PROMPT as u32..END as u32).collect();
    let wanted: Vec<Checkpoint> = decode.checkpoints();
    let comparisons = compare::recordings(decode, prefill, &wanted, &Tolerances::default());
    let options = audit::Options { positions: &positions, wants: &|_| true };
    let sides: [&dyn Recording; 2] = [decode, prefill];
    let audits = audit(&sides, &model.gguf, &model.graph, &options)?;
    Ok(findings::assemble(Parts {
        judgement: evidence::weigh(model, &sides, &comparisons, Some(&audits))?,
        comparisons,
        tokens: compare::tokens(decode, prefill),
        candidate: findings::side(decode, None),
        reference: Some(findings::side(prefill, None)),
        ..Parts::default()
    }))
}

/// The two sides' largest share of their bounds, and the largest difference of any row.
fn summary(report: &Report) -> Value {
    let (mut over, mut row) = ([0f64; 2], (0f64, None));
    for entry in &report.checkpoints {
        for (over, local) in over.iter_mut().zip([&entry.local.candidate, &entry.local.reference]) {
            *over = over.max(local.as_ref().map_or(f64::INFINITY, |local| local.over_bound));
        }
        for (position, distance) in entry.numbers.iter().flat_map(|numbers| &numbers.row_rel_l2) {
            if *position >= PROMPT as u32 && !(*distance <= row.0) {
                row = (*distance, Some((entry.id, *position)));
            }
        }
    }
    json!({
        "verdict": report.verdict, "origins": report.origins,
        "rows": END - PROMPT, "rows_audited": report.coverage.rows_audited,
        "largest_over_bound": { "decode": over[0], "prefill": over[1] },
        "largest_row_rel_l2": row.0, "at": row.1,
        "top1_agree": report.tokens.as_ref().map(|tokens| tokens.top1_agree),
    })
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
