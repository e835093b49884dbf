//! What comparing every checkpoint of a prefill on the GPU, with a reference held there, costs beside a prefill that
//! nobody looks at.

use std::cell::RefCell;
use std::path::Path;
use std::time::Instant;

use indexmap::IndexMap;
use parity::checkpoint::Checkpoint;
use parity::compare::Accumulator;
use parity::engine::cuda::CudaEngine;
use parity::engine::fused::Model;
use parity::engine::{Asked, Batch, Engine, Probe, ReferenceId, RowStats, Values};
use parity::error::Error;
use serde_json::{Value, json};

use crate::common::{Outcome, gpu, in_f32, median, nothing, tokens, write};
use crate::speed::ALL_BUT_LOGITS;

/// Arithmetics that are measured, and the share of an untraced prefill's speed that a compared one must have.
const MEASURED: [(&str, Option<f64>); 2] = [("f16", Some(0.8)), ("f32", None)];
/// Tokens of the prefill.
const ROWS: usize = 512;
/// Untraced and compared prefills by turns, and how many of them warm up.
const TURNS: usize = 24;
const WARM_UP: usize = 4;
/// Rows whose values the probe asks to see, as an audit of a sample does.
const SHOWN: [usize; 4] = [0, 17, 300, ROWS - 1];
/// Rounding of sums in f64 of the columns of a row in another order.
const SUMS: f64 = 1e-12;

type Tensors = IndexMap<Checkpoint, Vec<f32>>;

/// The engine's own values of all checkpoints but attention matrices and logits.
#[derive(Default)]
struct Own(Tensors);

impl Probe for Own {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        ALL_BUT_LOGITS(checkpoint.kind())
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        _: &Batch<'_>,
        _: &[usize],
        values: Values<'_>,
    ) -> Result<(), Error> {
        self.0.insert(checkpoint, in_f32(values));
        Ok(())
    }
}

/// What is looked at of every comparison, beside counting it.
type Look<'a> = &'a dyn Fn(Checkpoint, &[RowStats], &[(usize, Vec<f32>)]);

/// Hands over `reference` and counts what is compared with it.
struct Compared<'a> {
    reference: &'a Tensors,
    id: ReferenceId,
    look: Look<'a>,
    asked: usize,
    checkpoints: usize,
    rows: usize,
    shown: usize,
    recorded: usize,
}

impl<'a> Compared<'a> {
    fn new(reference: &'a Tensors, look: Look<'a>) -> Self {
        let id = ReferenceId::unique();
        Compared { reference, id, look, asked: 0, checkpoints: 0, rows: 0, shown: 0, recorded: 0 }
    }

    /// One prefill in seconds. Every row of every checkpoint must have been compared, and the reference asked for only
    /// where it is not `held`.
    fn prefill(&mut self, engine: &mut dyn Engine, held: bool) -> Result<f64, Box<dyn std::error::Error>> {
        (self.asked, self.checkpoints, self.rows, self.shown, self.recorded) = (0, 0, 0, 0, 0);
        let seconds = prefill(engine, self)?;
        let n = self.reference.len();
        let found = [self.asked, self.checkpoints, self.rows, self.shown, self.recorded];
        let expected = [if held { 0 } else { n }, n, n * ROWS, n * SHOWN.len(), 0];
        if found != expected || n == 0 {
            return Err(format!(
                "references asked for, checkpoints compared, rows compared, rows shown, checkpoints not compared: \
                 {found:?} instead of {expected:?}"
            )
            .into());
        }
        Ok(seconds)
    }
}

impl Probe for Compared<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        ALL_BUT_LOGITS(checkpoint.kind())
    }

    fn record(&mut self, _: Checkpoint, _: &Batch<'_>, _: &[usize], _: Values<'_>) -> Result<(), Error> {
        self.recorded += 1;
        Ok(())
    }

    fn compares(&self, _: Checkpoint, _: &Batch<'_>) -> bool {
        true
    }

    fn reference(&self, _: &Batch<'_>) -> Option<ReferenceId> {
        Some(self.id)
    }

    fn asked(&mut self, checkpoint: Checkpoint, _: &Batch<'_>) -> Asked {
        self.asked += 1;
        let reference = self.reference.get(&checkpoint).cloned().unwrap_or_default();
        Asked { reference, rows: SHOWN.to_vec() }
    }

    fn compared(
        &mut self,
        checkpoint: Checkpoint,
        _: &Batch<'_>,
        _: &[usize],
        rows: &[RowStats],
        values: &[(usize, Vec<f32>)],
    ) -> Result<(), Error> {
        self.checkpoints += 1;
        self.rows += rows.len();
        self.shown += values.len();
        (self.look)(checkpoint, rows, values);
        Ok(())
    }
}

/// One prefill in seconds.
fn prefill(engine: &mut dyn Engine, probe: &mut dyn Probe) -> Result<f64, Error> {
    let tokens = tokens(ROWS);
    engine.reset();
    let start = Instant::now();
    engine.step(&Batch { tokens: &tokens, first: 0 }, probe)?;
    Ok(start.elapsed().as_secs_f64())
}

/// The row with this number of a checkpoint.
fn row(values: &[f32], t: usize) -> &[f32] {
    let width = values.len() / ROWS;
    &values[t * width..(t + 1) * width]
}

/// Whether the comparison of a row, and what it shows, is what the host finds; the sums but for their order.
fn is_right(own: &[f32], reference: &[f32], stats: &RowStats) -> bool {
    let (mut host, mut device) = (Accumulator::default(), Accumulator::default());
    host.row(0, own, reference);
    device.compared_row(0, own.len(), stats);
    let (Some(host), Some(device)) = (host.numbers(&[own.len()]), device.numbers(&[own.len()])) else {
        return false;
    };
    let near = |a: f64, b: f64| a == b || (a - b).abs() <= SUMS * b.abs();
    host.abs_err_max == device.abs_err_max
        && host.worst == device.worst
        && host.nonfinite == device.nonfinite
        && host.sign_positive == device.sign_positive
        && host.tolerance_needed == device.tolerance_needed
        && near(device.rel_l2, host.rel_l2)
        && near(device.abs_err_mean, host.abs_err_mean)
}

/// Whether a reference is held already, step by step: the second is recorded as a graph, and the third launches it again.
const HELD: [bool; 3] = [false, true, true];

/// How many rows, and rows shown, are not what the host finds.
fn wrong_rows(
    engine: &mut dyn Engine,
    own: &Tensors,
    reference: &Tensors,
) -> Result<usize, Box<dyn std::error::Error>> {
    let wrong = RefCell::new(0);
    let look = |checkpoint: Checkpoint, stats: &[RowStats], shown: &[(usize, Vec<f32>)]| {
        let (own, reference) = (&own[&checkpoint], &reference[&checkpoint]);
        let right = |(t, stats): (usize, &RowStats)| is_right(row(own, t), row(reference, t), stats);
        let others = stats.iter().enumerate().filter(|row| !right(*row)).count();
        let unlike = shown.iter().filter(|(t, values)| row(own, *t) != values).count();
        *wrong.borrow_mut() += others + unlike;
    };
    let mut probe = Compared::new(reference, &look);
    for held in HELD {
        probe.prefill(engine, held)?;
    }
    Ok(wrong.into_inner())
}

/// Plants one difference in one value of the engine's own: whether that row of that checkpoint alone differs, and where
/// it was planted, in each of the ways.
fn finds_planted(engine: &mut dyn Engine, own: &Tensors) -> Result<bool, Box<dyn std::error::Error>> {
    let Some((&planted, values)) = own.get_index(2 * own.len() / 3) else { return Ok(false) };
    let (t, column, width) = (211, values.len() / ROWS / 2, values.len() / ROWS);
    let mut reference = own.clone();
    let value = reference.get_mut(&planted).map_or(&mut [][..], |values| &mut values[..]);
    value[t * width + column] += 1.0;
    let found = RefCell::new(Vec::new());
    let look = |checkpoint: Checkpoint, stats: &[RowStats], _: &[(usize, Vec<f32>)]| {
        let differing = stats.iter().enumerate().filter(|(_, row)| row.differing > 0 || row.max > 0.0);
        found.borrow_mut().extend(differing.map(|(t, row)| (checkpoint, t, row.column, row.differing)));
    };
    let mut probe = Compared::new(&reference, &look);
    for held in HELD {
        probe.prefill(engine, held)?;
    }
    Ok(found.into_inner() == [(planted, t, column as i64, 1); HELD.len()])
}

/// Untraced and compared prefills by turns, each on an engine of its own, whose plans stay; and whether what was
/// compared is right. What is wrong goes to `missed`.
pub fn measure(
    model: &Model,
    numerics: &str,
    missed: &mut Vec<String>,
) -> Result<Value, Box<dyn std::error::Error>> {
    let Some((_, at_least)) = MEASURED.iter().find(|(name, _)| *name == numerics) else {
        return Ok(Value::Null);
    };
    let mut untraced = gpu(model, &model.graph, numerics)?;
    let mut engine: CudaEngine<'_> = gpu(model, &model.graph, numerics)?;
    let mut own = Own::default();
    prefill(&mut engine, &mut own)?;
    let own = own.0;
    let change = |values: &Vec<f32>| -> Vec<f32> {
        values.iter().enumerate().map(|(i, v)| v * (1.0 + (i % 7) as f32 * 1e-3)).collect()
    };
    let reference: Tensors = own.iter().map(|(id, values)| (*id, change(values))).collect();
    let mut probe = Compared::new(&reference, &|_, _, _| ());
    probe.prefill(&mut engine, false)?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for turn in 0..WARM_UP + TURNS {
        let times = (prefill(&mut untraced, &mut nothing())?, probe.prefill(&mut engine, true)?);
        if turn >= WARM_UP {
            alone.push(times.0);
            beside.push(times.1);
        }
    }
    let (alone, beside) = (median(alone), median(beside));
    let share = alone / beside;
    let wrong = wrong_rows(&mut engine, &own, &reference)?;
    let planted = finds_planted(&mut engine, &own)?;
    if wrong > 0 || !planted {
        missed
            .push(format!("{numerics}: {wrong} rows compared wrongly, planted difference found: {planted}"));
    }
    if at_least.is_some_and(|limit| !(share >= limit)) {
        missed.push(format!("{numerics}: compared pp{ROWS} has {share:.3} of the untraced speed"));
    }
    let values: usize = own.values().map(Vec::len).sum();
    let body = json!({ format!("pp{ROWS}"): {
        "untraced_ms": 1e3 * alone, "ms": 1e3 * beside, "tokens_per_second": ROWS as f64 / beside,
        "share_of_untraced": share, "share_at_least": at_least, "turns": TURNS,
        "checkpoints": own.len(), "values": values, "reference_bytes": 4 * values,
        "rows_compared_wrongly": wrong, "planted_difference_found": planted,
    }});
    println!("{numerics} compared pp{ROWS}: {}", body[format!("pp{ROWS}")]);
    Ok(body)
}

/// [`measure`] alone.
pub fn compared(out: &str, path: &str) -> Outcome {
    let model = Model::open(Path::new(path))?;
    let (mut body, mut missed) = (json!({}), Vec::new());
    for (numerics, _) in MEASURED {
        body[numerics]["compared"] = measure(&model, numerics, &mut missed)?;
    }
    write(out, &model, body)?;
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}
