//! One engine against itself: traced and untraced, run after run, decode against prefill, comparisons on the
//! device against those on the host.

use std::path::Path;

use parity::audit::AuditRows;
use parity::checkpoint::Checkpoint;
use parity::compare::Accumulator;
use parity::engine::cuda::CudaEngine;
use parity::engine::device::Device;
use parity::engine::fused::file::ModelFile;
use parity::engine::{Asked, Batch, Engine, Probe, RowStats, Values};
use parity::jobs::diff;
use parity::jobs::run::{RunOptions, run};
use parity::report::{Report, Verdict};
use parity_dump::Dump;
use serde_json::{Value, json};

use crate::common::{Collect, Count, GPU_NUMERICS, Outcome, gpu, nothing, tokens, write};

/// Tokens of the prompt, and of everything.
const PROMPT: usize = 200;
const END: usize = 264;
/// Tokens of a short step, which other kernels compute.
const SHORT: usize = 5;

/// All of it, for every arithmetic; an error where something differs.
pub fn steps(out: &str, path: &str, runs: usize) -> Outcome {
    let file = ModelFile::open(Path::new(path))?;
    let model = file.nodes()?;
    let (mut body, mut failures) = (json!({}), Vec::new());
    for numerics in GPU_NUMERICS {
        let mut engine = gpu(model, &model.graph, numerics)?;
        let reruns = rerun(&mut engine, runs)?;
        if reruns["runs_with_other_logits_bits"] != json!(0) {
            failures.push(format!("{numerics}: logits bits differ"));
        }
        let tokens = tokens(END);
        engine.reset();
        let mut found = Collect::default();
        engine.step(&Batch { tokens: &tokens, first: 0 }, &mut found)?;
        let compared = on_device(&mut engine, &found, &tokens)?;

        let report = against(&file, numerics)?;
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
    write(out, model, body)?;
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

/// Decode compared with prefill, both sides audited: a prompt with greedy decode steps, and all of its tokens at once.
fn against(file: &ModelFile, numerics: &str) -> Result<Report, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let computed =
        |name: &str, tokens: Vec<u32>, n_predict: usize| -> Result<Dump, Box<dyn std::error::Error>> {
            let dump = folder.path().join(name);
            let options = RunOptions {
                tokens,
                n_predict: Some(n_predict),
                dump: Some(dump.clone()),
                device: Device::Cuda(vec![0]),
                numerics: numerics.parse()?,
                ..RunOptions::default()
            };
            run(file, &options, &|_, _| ())?;
            Ok(Dump::open(&dump)?)
        };
    let mut decode = computed("decode", tokens(PROMPT), END - PROMPT)?;
    let mut prefill = computed("prefill", decode.tokens().to_vec(), 0)?;
    let options = diff::Options { audit: Some(AuditRows::default()), ..diff::Options::default() };
    Ok(diff::diff(&mut decode, &mut prefill, Some(file), &options)?)
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

/// Hands over a changed copy of what the engine computed, and holds the engine's comparison against the host's.
struct OnDevice<'a> {
    found: &'a Collect,
    compared: usize,
    largest_rel_difference: f64,
    differences: usize,
}

impl OnDevice<'_> {
    fn reference(&self, checkpoint: Checkpoint) -> Vec<f32> {
        let values = self.found.values[&checkpoint].iter().enumerate();
        values.map(|(i, v)| *v as f32 * (1.0 + (i % 7) as f32 * 1e-3)).collect()
    }
}

impl Probe for OnDevice<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        !checkpoint.kind().is_optional()
    }

    fn record(
        &mut self,
        _: Checkpoint,
        _: &Batch<'_>,
        _: &[usize],
        _: Values<'_>,
    ) -> parity::error::Result<()> {
        self.differences += 1; // it was to be compared, not shown
        Ok(())
    }

    fn compares(&self, _: Checkpoint, _: &Batch<'_>) -> bool {
        true
    }

    fn asked(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>) -> Asked {
        Asked { reference: self.reference(checkpoint), rows: vec![batch.tokens.len() - 1] }
    }

    fn compared(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        rows: &[RowStats],
        values: &[(usize, Vec<f32>)],
    ) -> parity::error::Result<()> {
        let numbers = |accumulator: Accumulator| accumulator.numbers(&shape[1..]);
        let width: usize = shape[1..].iter().product();
        let ours: Vec<f32> = self.found.values[&checkpoint].iter().map(|v| *v as f32).collect();
        let theirs = self.reference(checkpoint);
        let (mut host, mut device) = (Accumulator::default(), Accumulator::default());
        for (t, (a, b)) in ours.chunks_exact(width).zip(theirs.chunks_exact(width)).enumerate() {
            host.row(t as u32, a, b);
            device.compared_row(t as u32, width, &rows[t]);
        }
        self.compared += 1;
        let shown = values.len() == 1 && values[0].1 == ours[(batch.tokens.len() - 1) * width..];
        let (Some(host), Some(device)) = (numbers(host), numbers(device)) else {
            self.differences += 1;
            return Ok(());
        };
        let exact = host.abs_err_max == device.abs_err_max
            && host.worst == device.worst
            && host.nonfinite == device.nonfinite
            && host.sign_positive == device.sign_positive
            && host.tolerance_needed == device.tolerance_needed;
        self.differences += usize::from(!(exact && shown));
        for (a, b) in [(host.rel_l2, device.rel_l2), (host.abs_err_mean, device.abs_err_mean)] {
            let difference = if a == b { 0.0 } else { (a - b).abs() / a };
            self.largest_rel_difference = self.largest_rel_difference.max(difference);
        }
        Ok(())
    }
}

/// Rounding of sums in f64 of up to 10^8 terms in another order.
const SUMS: f64 = 1e-11;

/// Computes `found` again, compared on the GPU, and compares on the host.
fn on_device(
    engine: &mut CudaEngine<'_>,
    found: &Collect,
    tokens: &[u32],
) -> Result<Value, Box<dyn std::error::Error>> {
    let mut probe = OnDevice { found, compared: 0, largest_rel_difference: 0.0, differences: 0 };
    engine.reset();
    engine.step(&Batch { tokens, first: 0 }, &mut probe)?;
    let body = json!({
        "checkpoints": probe.compared, "largest_rel_difference_of_sums": probe.largest_rel_difference,
        "checkpoints_with_other_maxima_or_counts": probe.differences,
    });
    if probe.differences > 0
        || probe.compared != found.values.len()
        || !(probe.largest_rel_difference <= SUMS)
    {
        return Err(format!("comparisons on the GPU give other numbers: {body}").into());
    }
    Ok(body)
}
