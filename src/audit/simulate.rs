//! What rounding explains at a checkpoint whose predecessors were not recorded: simulated.
//!
//! The healthy graph is executed from the tokens once in f64, and once for each side in f32 with every node's output
//! disturbed at random by as much as that side's arithmetic rounds it (stochastic arithmetic: D. S. Parker, "Monte
//! Carlo arithmetic", 1997; J. Vignes, "A stochastic arithmetic for reliable scientific computation", 1993). How far
//! the disturbed passes are from the exact one is what rounding carries up to there. The disturbances are seeded.

use std::collections::{BTreeSet, HashMap, HashSet};

use indexmap::IndexSet;

use super::bounds::{self, ANGLE_ROUNDINGS, CONFIDENCE, UNIT_F32, Units, storage_unit};
use super::judge::{PLAIN, half_steps_unfollowed};
use super::recorded::{Carried, OwnDistance};
use crate::arithmetic::round::{self, AttentionRounding};
use crate::checkpoint::Checkpoint;
use crate::dense::Rows;
use crate::dump::Recording;
use crate::engine::cpu::CpuEngine;
use crate::engine::{Batch, Engine, Probe, Values};
use crate::error::Result;
use crate::gguf::DType;
use crate::model::Model;
use crate::model::graph::{Graph, Op};
use crate::model::weights::Weight;
use crate::numerics::{Numerics, Storage};
use crate::random;
use crate::tensor::Matrix;

/// Tokens that are computed at a time.
const STEP: usize = 64;
/// Roundings of an elementwise operation.
const OWN_ROUNDINGS: f64 = 4.0;
/// Simulates the forward pass of the first recording's tokens up to the last of `checkpoints`, and looks at all rows that
/// it has of these. `sides` is the arithmetic of candidate and reference, or of the candidate alone.
///
/// # Errors
/// A weight that cannot be read, and tokens that the model does not have.
pub fn simulate(
    model: &Model,
    candidate: &dyn Recording,
    sides: &[Numerics],
    checkpoints: &HashSet<Checkpoint>,
) -> Result<HashMap<Checkpoint, Carried>> {
    let of = |c: &Checkpoint| (*c, candidate.positions(*c));
    let standard = checkpoints.iter().filter(|c| !c.kind().is_optional());
    let wanted: Wanted = standard.map(of).filter(|(_, rows)| !rows.is_empty()).collect();
    let Some(last) = model.graph.last_of(|id| wanted.contains_key(&id)) else { return Ok(HashMap::new()) };
    let end = wanted.values().flatten().max().map_or(0, |&position| position as usize + 1);
    let Some(tokens) = candidate.tokens().get(..end) else { return Ok(HashMap::new()) };
    let graph = model.graph.until(last).fused(|_| false);
    let different: IndexSet<Numerics> = sides.iter().copied().collect();
    let mut exact = Pass::new(model, &graph, &wanted, None);
    let disturb = |(index, numerics): (usize, &Numerics)| {
        let seed = index as u64 + 1;
        Pass::new(model, &graph, &wanted, Some(Disturb { model, graph: &graph, numerics: *numerics, seed }))
    };
    let mut disturbed: Vec<Pass<'_>> = different.iter().enumerate().map(disturb).collect();
    let mut rows: HashMap<Checkpoint, Vec<Row>> = HashMap::new();
    // All passes by turns, so that no more than the rows of a step are in memory.
    for (index, tokens) in tokens.chunks(STEP).enumerate() {
        let batch = Batch { tokens, first: index * STEP };
        let exact = exact.step(&batch)?;
        let passed = disturbed.iter_mut().map(|pass| pass.step(&batch)).collect::<Result<Vec<Passed>>>()?;
        let own = batch.positions();
        for (checkpoint, positions) in &wanted {
            for position in positions.iter().filter(|position| own.contains(position)) {
                let of = |passed: &Passed| passed.get(&(*checkpoint, *position)).cloned().unwrap_or_default();
                let exact = of(&exact);
                let passed: Vec<Vec<f64>> = passed.iter().map(of).collect();
                let spread =
                    |side: &Numerics| different.get_index_of(side).map(|at| apart(&passed[at], &exact));
                rows.entry(*checkpoint).or_default().push(Row {
                    distance: distance(candidate, *checkpoint, *position, &exact),
                    spreads: sides.iter().filter_map(spread).collect(),
                    square: exact.iter().map(|x| x * x).sum(),
                    width: exact.len(),
                });
            }
        }
    }
    Ok(rows.iter().map(|(checkpoint, rows)| (*checkpoint, carried(rows))).collect())
}

/// How far a recorded row is from the exact one; `None` where it was not recorded.
fn distance(recording: &dyn Recording, checkpoint: Checkpoint, position: u32, exact: &[f64]) -> Option<f64> {
    let mut buffer = Vec::new();
    let recorded = recording.row(checkpoint, position, &mut buffer)?;
    Some(apart(&recorded.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>(), exact))
}

/// (V,) or (D,) values of a healthy pass of `tokens` at each of `positions`: exact, or disturbed as `numerics` rounds.
///
/// # Errors
/// As [`simulate`].
pub fn rows(
    model: &Model,
    tokens: &[u32],
    checkpoint: Checkpoint,
    positions: &[u32],
    numerics: Option<Numerics>,
) -> Result<Vec<Vec<f64>>> {
    let ascending: BTreeSet<u32> = positions.iter().copied().collect();
    let wanted: Wanted = HashMap::from([(checkpoint, ascending.into_iter().collect())]);
    let graph = model.graph.until(checkpoint).fused(|_| false);
    let disturb = numerics.map(|numerics| Disturb { model, graph: &graph, numerics, seed: 1 });
    let mut pass = Pass::new(model, &graph, &wanted, disturb);
    let mut found = Passed::new();
    for (index, tokens) in tokens.chunks(STEP).enumerate() {
        found.extend(pass.step(&Batch { tokens, first: index * STEP })?);
    }
    Ok(positions.iter().map(|position| found.remove(&(checkpoint, *position)).unwrap_or_default()).collect())
}

/// Positions of rows, ascending.
type Wanted = HashMap<Checkpoint, Vec<u32>>;
type Passed = HashMap<(Checkpoint, u32), Vec<f64>>;

/// What the passes say of one row.
struct Row {
    /// How far the recorded row is from the exact one; `None` where it was not recorded.
    distance: Option<f64>,
    /// How far the disturbed one of each side is.
    spreads: Vec<f64>,
    /// Sum of the squares of the exact values.
    square: f64,
    width: usize,
}

/// What the passes say of one checkpoint.
fn carried(rows: &[Row]) -> Carried {
    let spread = |row: &Row| row.spreads.first().copied().unwrap_or(0.0);
    let mean = (rows.iter().map(|row| spread(row).powi(2)).sum::<f64>() / rows.len().max(1) as f64).sqrt();
    let sides = rows.iter().map(|row| row.spreads.len()).max().unwrap_or(0);
    let largest = |side: usize| rows.iter().fold(0.0f64, |max, row| max.max(row.spreads[side]));
    let apart_squared: f64 = (0..sides).map(|side| largest(side).powi(2)).sum();
    let mut own: Option<OwnDistance> = None;
    for (row, distance) in rows.iter().filter_map(|row| Some((row, row.distance?))) {
        let band = CONFIDENCE * spread(row).max(mean);
        let over = if distance == 0.0 { 0.0 } else { distance / band };
        // A NaN is the worst, and stays it.
        if own.is_none_or(|worst| !worst.over.is_nan() && !(over <= worst.over)) {
            own = Some(OwnDistance { distance, band, over });
        }
    }
    let values: usize = rows.iter().map(|row| row.width).sum();
    let size = (rows.iter().map(|row| row.square).sum::<f64>() / values.max(1) as f64).sqrt();
    Carried { candidate: own, apart: CONFIDENCE * apart_squared.sqrt(), size }
}

/// ‖a - b‖ / ‖b‖; NaN where the rows are not of one width.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() || a.is_empty() {
        return f64::NAN;
    }
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    if difference == 0.0 { 0.0 } else { difference / square(&mut b.iter().copied()) }
}

/// One forward pass.
struct Pass<'a> {
    engine: Box<dyn Engine + 'a>,
    watch: Watch<'a>,
}

impl<'a> Pass<'a> {
    /// Exact in f64, or disturbed in f32.
    fn new(model: &'a Model, graph: &Graph, wanted: &'a Wanted, disturb: Option<Disturb<'a>>) -> Self {
        let engine: Box<dyn Engine + 'a> = match disturb {
            None => Box::new(CpuEngine::<f64>::new(&model.gguf, graph.clone(), PLAIN)),
            Some(_) => Box::new(CpuEngine::<f32>::new(&model.gguf, graph.clone(), Numerics::default())),
        };
        Pass { engine, watch: Watch { wanted, disturb, shown: Matrix::default(), rows: Passed::new() } }
    }

    /// The wanted rows of a step.
    fn step(&mut self, batch: &Batch<'_>) -> Result<Passed> {
        self.engine.step(batch, &mut self.watch)?;
        Ok(std::mem::take(&mut self.watch.rows))
    }
}

/// Keeps the wanted rows and, where it is to, disturbs every output.
struct Watch<'a> {
    wanted: &'a Wanted,
    disturb: Option<Disturb<'a>>,
    /// The output that was shown last.
    shown: Matrix<f64>,
    rows: Passed,
}

impl Watch<'_> {
    fn keep(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>) {
        for (t, position) in batch.positions().into_iter().enumerate() {
            if self.wanted.get(&checkpoint).is_some_and(|rows| rows.binary_search(&position).is_ok()) {
                self.rows.insert((checkpoint, position), self.shown.row(t).to_vec());
            }
        }
    }
}

impl Probe for Watch<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        !checkpoint.kind().is_optional() && (self.disturb.is_some() || self.wanted.contains_key(&checkpoint))
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let values: Vec<f64> = match values {
            Values::F32(values) => values.iter().map(|&x| f64::from(x)).collect(),
            Values::F16(values) => values.iter().map(|x| x.to_f64()).collect(),
            Values::F64(values) => values.to_vec(),
        };
        self.shown = Matrix::new(shape[0], shape[1..].iter().product(), values);
        if let Some(disturb) = &self.disturb {
            disturb.output(checkpoint, batch, &mut self.shown)?;
        }
        self.keep(checkpoint, batch);
        Ok(())
    }

    fn first_logits(&self, batch: &Batch<'_>) -> usize {
        let logits = self.wanted.iter().filter(|(c, _)| c.layer_index().is_none()).flat_map(|(_, rows)| rows);
        let first = logits.filter(|position| **position as usize >= batch.first).min();
        first.map_or(batch.tokens.len(), |position| *position as usize - batch.first)
    }

    fn fed(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>, width: usize) -> Option<Vec<f32>> {
        let disturb = self.disturb.as_ref().filter(|_| !checkpoint.kind().is_optional())?;
        let mut values = std::mem::take(&mut self.shown);
        disturb.input(checkpoint, batch, &mut values).ok()?;
        (values.cols == width).then(|| values.data.iter().map(|&x| x as f32).collect())
    }
}

/// The roundings of one side.
struct Disturb<'a> {
    model: &'a Model,
    graph: &'a Graph,
    numerics: Numerics,
    seed: u64,
}

impl Disturb<'_> {
    /// Rounds what a node puts out: its sums, and the type that it is stored in.
    fn output(&self, checkpoint: Checkpoint, batch: &Batch<'_>, y: &mut Matrix<f64>) -> Result<()> {
        let Some(node) = self.graph.node(checkpoint) else { return Ok(()) };
        let units = Units::of(&self.numerics);
        let stored = storage_unit(self.numerics.storage_of(checkpoint.kind()));
        let attention = AttentionRounding::of(&self.numerics);
        let rms = |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / row.len().max(1) as f64).sqrt();
        let of_rms = match &node.op {
            Op::Linear { weight, .. } => {
                let weight = Weight::find(&self.model.gguf, weight)?;
                let narrow = narrow_weights(&self.numerics, weight.dtype());
                units.accumulator * (weight.cols() as f64).sqrt() + narrow
            }
            Op::Attention(op) => {
                let terms = (batch.first + batch.tokens.len()).max(op.head_width);
                let narrow = [attention.sums, attention.probs].into_iter().filter(|to| *to != Storage::F32);
                let narrow: f64 = narrow.map(|to| storage_unit(to) * OWN_ROUNDINGS).sum();
                units.accumulator * ((terms as f64).sqrt() + ANGLE_ROUNDINGS) + narrow
            }
            _ => 0.0,
        };
        let turned = match &node.op {
            Op::Rope(rope) => {
                let freqs = match &rope.freqs {
                    Some(freqs) => Weight::find(&self.model.gguf, freqs)?.decode(),
                    None => Vec::new(),
                };
                let (positions, steps) = (batch.positions(), Vec::new());
                let rows = Rows { tokens: batch.tokens, positions: &positions, steps: &steps };
                Some(bounds::rope(&units, rope, &freqs, rows, y.view()))
            }
            _ => None,
        };
        let relative = OWN_ROUNDINGS * units.accumulator + stored;
        let mut random = Random::new(self.seed, checkpoint, batch.first);
        for t in 0..y.rows {
            let size = of_rms * rms(y.row(t));
            for (column, x) in y.row_mut(t).iter_mut().enumerate() {
                let angle = turned.as_ref().map_or(0.0, |bound| bound.row(t)[column]);
                *x += random.next() * (size + relative * x.abs() + angle);
            }
        }
        Ok(())
    }

    /// Rounds what its readers round of it: activations of matmuls, and what attention reads.
    fn input(&self, checkpoint: Checkpoint, batch: &Batch<'_>, y: &mut Matrix<f64>) -> Result<()> {
        let mut steps: Matrix<f64> = Matrix::zeros(y.rows, y.cols);
        let mut widen = |other: Matrix<f64>| {
            steps.data.iter_mut().zip(other.data).for_each(|(step, other)| *step = step.max(other));
        };
        for node in self.graph.nodes.iter().filter(|node| node.inputs.contains(&checkpoint)) {
            match &node.op {
                Op::Linear { weight, .. } => {
                    let dtype = Weight::find(&self.model.gguf, weight)?.dtype();
                    half_steps_unfollowed(self.numerics.products, dtype, y).into_iter().for_each(&mut widen);
                }
                Op::Attention(_) => {
                    let rounding = AttentionRounding::of(&self.numerics);
                    let to = if node.inputs.first() == Some(&checkpoint) { rounding.q } else { rounding.kv };
                    let unit = if to == Storage::F32 { 0.0 } else { storage_unit(to) };
                    widen(bounds::map(y, |x| unit * x.abs()));
                }
                _ => {}
            }
        }
        let mut random = Random::new(!self.seed, checkpoint, batch.first);
        y.data.iter_mut().zip(steps.data).filter(|(_, step)| *step > 0.0).for_each(|(x, step)| {
            *x += random.next() * step;
        });
        Ok(())
    }
}

/// What rounding its weights adds to an output, relative to the output's root mean square.
fn narrow_weights(numerics: &Numerics, dtype: DType) -> f64 {
    match (round::weight_storage(numerics.products), dtype) {
        (Storage::F32, _) | (Storage::F16, DType::F16) | (Storage::Bf16, DType::BF16) => 0.0,
        (to, _) => storage_unit(to).max(UNIT_F32),
    }
}

/// Uniform numbers from -1 to 1: SplitMix64 (Steele and others, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn new(seed: u64, checkpoint: Checkpoint, first: usize) -> Random {
        let mut random = Random(seed ^ (first as u64) << 32);
        for byte in checkpoint.to_string().bytes() {
            random.0 = random.bits() ^ u64::from(byte);
        }
        random
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(random::GAMMA);
        random::mixed(self.0)
    }

    fn next(&mut self) -> f64 {
        random::unit(self.bits())
    }
}
