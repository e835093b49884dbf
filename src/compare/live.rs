//! Compares while the engine runs, so that a long prompt's activations need not be kept.

use std::collections::{BTreeSet, HashMap};

use indexmap::IndexSet;
use rayon::prelude::*;

use super::{
    Accumulator, Comparison, Partial, Status, TokenSums, Tolerances, common_positions, fed, finish,
    finish_seen, rows::Rows, shape_of,
};
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::{Kept, Recording, Unfinite};
use crate::engine::{Asked, Batch, Probe, RowStats, Values};
use crate::error::Result;
use crate::report::TokenReport;
use crate::report::detail::{Detail, GRID, Sketch};
use parity_dump::Writer;

/// Rows of a step from which on a GPU engine compares: fewer are compared on the host while they arrive.
const ROWS_MIN_ON_DEVICE: usize = 64;

/// What a live comparison looks at.
pub struct LiveOptions<'a> {
    /// Checkpoints to compare.
    pub compared: IndexSet<Checkpoint>,
    /// Checkpoints whose sampled rows an audit will read: the compared ones and their inputs.
    pub audited: IndexSet<Checkpoint>,
    /// Positions of the sampled rows.
    pub sample: BTreeSet<u32>,
    /// The user's tolerances.
    pub tolerances: &'a Tolerances,
    /// Where the whole candidate is written to, if it is.
    pub writer: Option<Writer>,
    /// Whether to draw the differences.
    pub pictures: bool,
    /// Whether every node reads the reference's values instead of the engine's own.
    pub isolated: bool,
    /// Token positions of the whole run.
    pub n_rows: usize,
    /// Told after each output: how many so far, of how many.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
    /// Outputs that will come.
    pub n_expected: usize,
}

/// A probe that compares each row with the reference's as it is computed, and keeps what an audit reads.
pub struct Live<'a> {
    options: LiveOptions<'a>,
    reference: Option<&'a dyn Recording>,
    kept: Kept,
    sums: HashMap<Checkpoint, Accumulator>,
    /// Checkpoints of which the reference has only printed values; `None` where the rows do not fit.
    partial: HashMap<Checkpoint, Option<Partial<'a>>>,
    row_shapes: HashMap<Checkpoint, Vec<usize>>,
    tokens: TokenSums,
    sketches: HashMap<Checkpoint, Sketch>,
    n_recorded: usize,
}

/// What a live comparison ends with.
pub struct LiveResult {
    /// The numbers of every compared checkpoint, in execution order; without numbers without a reference.
    pub comparisons: Vec<Comparison>,
    /// What the logits say, where they were compared.
    pub tokens: Option<TokenReport>,
    /// Pictures of the differences, in execution order.
    pub details: Vec<Detail>,
    /// The rows that an audit reads.
    pub kept: Kept,
}

impl<'a> Live<'a> {
    /// A comparison with `reference`, or only a recording where there is none.
    pub fn new(options: LiveOptions<'a>, reference: Option<&'a dyn Recording>, kept: Kept) -> Self {
        Live {
            options,
            reference,
            kept,
            sums: HashMap::new(),
            partial: HashMap::new(),
            row_shapes: HashMap::new(),
            tokens: TokenSums::default(),
            sketches: HashMap::new(),
            n_recorded: 0,
        }
    }

    /// Starts a step.
    pub fn begin_step(&mut self, batch: &Batch<'_>) -> Result<()> {
        self.kept.add_step(batch.tokens, batch.first);
        let tensors = self.options.compared.len() + self.options.audited.len();
        if let Some(writer) = &mut self.options.writer {
            let positions = batch.positions();
            writer.begin_step(batch.tokens, &positions, tensors)?;
        }
        Ok(())
    }

    /// Ends a step.
    pub fn end_step(&mut self) -> Result<()> {
        if let Some(writer) = &mut self.options.writer {
            writer.end_step()?;
        }
        Ok(())
    }

    /// The numbers, the kept rows, and the dump finished.
    pub fn finish(self) -> Result<LiveResult> {
        let Live {
            options, reference, kept, mut sums, mut partial, row_shapes, tokens, mut sketches, ..
        } = self;
        if let Some(writer) = options.writer {
            writer.finish()?;
        }
        let shape = |id: &Checkpoint| row_shapes.get(id).cloned().unwrap_or_default();
        let Some(reference) = reference else {
            let alone = options.compared.iter().map(|id| Comparison::alone(*id, shape(id)));
            return Ok(LiveResult { comparisons: alone.collect(), tokens: None, details: Vec::new(), kept });
        };
        let common = common_positions(kept.tokens(), reference.tokens());
        let compare = |checkpoint: Checkpoint| {
            let ours = shape(&checkpoint);
            let tolerance = options.tolerances.of(checkpoint);
            if let Some(seen) = partial.remove(&checkpoint) {
                let theirs = shape_of(reference, checkpoint);
                let fits = seen.is_some();
                let empty = || Partial::new(checkpoint, &[], tolerance);
                let seen = seen.unwrap_or_else(empty);
                return finish_seen(checkpoint, fits, [ours, theirs], seen, &tolerance, u64::from(common));
            }
            let theirs = reference.row_shape(checkpoint);
            let status = Status::of(checkpoint, [ours.is_empty(), theirs.is_empty()], [&ours, &theirs]);
            let sums = sums.remove(&checkpoint).unwrap_or_default();
            let theirs = reference.positions(checkpoint).into_iter().filter(|position| *position < common);
            let lacking = theirs.count().saturating_sub(sums.n_rows());
            let status = match status {
                Status::Compared if lacking > 0 => Status::MissingRows(lacking as u64),
                other => other,
            };
            finish(checkpoint, status, ours, sums, &tolerance, u64::from(common))
        };
        let comparisons = options.compared.iter().copied().map(compare).collect();
        let details =
            options.compared.iter().filter_map(|id| sketches.remove(id)).map(Sketch::finish).collect();
        Ok(LiveResult { comparisons, tokens: tokens.report(), details, kept })
    }

    fn tell_progress(&mut self) {
        self.n_recorded += 1;
        (self.options.progress)(self.n_recorded, self.options.n_expected);
    }

    /// Counts NaN and Inf in all rows, looked at or not.
    fn note_unfinite(&mut self, checkpoint: Checkpoint, rows: &Rows<'_>) {
        let mut buffer = Vec::new();
        for t in 0..rows.len {
            let found = Unfinite::of(rows.row(t, &mut buffer));
            self.kept.note_unfinite(checkpoint, rows.first + t as u32, found);
        }
    }

    /// Adds the rows to the picture, in order of position.
    fn draw_rows(&mut self, checkpoint: Checkpoint, rows: &Rows<'_>) {
        let Some(reference) = self.reference.filter(|_| self.options.pictures) else { return };
        let sketch = || Sketch::new(checkpoint, self.options.n_rows, &rows.shape, GRID);
        let Some(mut sketch) = self.sketches.remove(&checkpoint).or_else(sketch) else { return };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for t in 0..rows.len {
            let position = rows.first + t as u32;
            let ours = rows.row(t, &mut ours);
            let theirs = reference.row(checkpoint, position, &mut theirs);
            if let Some(theirs) = theirs.filter(|theirs| ours.len() == theirs.len()) {
                sketch.row(position, ours, theirs);
            }
        }
        self.sketches.insert(checkpoint, sketch);
    }

    /// Holds the rows against printed values.
    fn compare_seen(&mut self, checkpoint: Checkpoint, reference: &'a dyn Recording, rows: &Rows<'_>) {
        let tolerance = self.options.tolerances.of(checkpoint);
        let common = common_positions(self.kept.tokens(), reference.tokens());
        let new = || Some(Partial::new(checkpoint, reference.seen(checkpoint), tolerance));
        let partial = self.partial.entry(checkpoint).or_insert_with(new);
        let mut buffer = Vec::new();
        for t in 0..rows.len {
            let position = rows.first + t as u32;
            let row = rows.row(t, &mut buffer);
            if position < common && !partial.as_mut().is_some_and(|partial| partial.row(position, row)) {
                *partial = None;
            }
        }
    }

    /// Adds the rows to the sums, in parallel.
    fn compare_rows(&mut self, checkpoint: Checkpoint, rows: &Rows<'_>) {
        let Some(reference) = self.reference else { return };
        if !reference.seen(checkpoint).is_empty() {
            return self.compare_seen(checkpoint, reference, rows);
        }
        let width: usize = reference.row_shape(checkpoint).iter().product();
        if !checkpoint.kind().is_optional() && width != rows.width() {
            return;
        }
        let tolerance = self.options.tolerances.of(checkpoint);
        let tokens = (self.kept.tokens(), reference.tokens());
        let common = common_positions(tokens.0, tokens.1);
        let rows_per_task = rows.len.div_ceil(2 * rayon::current_num_threads()).max(1);
        let starts: Vec<usize> = (0..rows.len).step_by(rows_per_task).collect();
        let is_logits = checkpoint.kind() == Kind::Logits;
        let parts: Vec<(Accumulator, TokenSums)> = starts
            .into_par_iter()
            .map(|start| {
                let mut sums = Accumulator::new(tolerance);
                let mut tokens = TokenSums::default();
                let (mut ours, mut theirs) = (Vec::new(), Vec::new());
                for t in start..(start + rows_per_task).min(rows.len) {
                    let position = rows.first + t as u32;
                    let ours = rows.row(t, &mut ours);
                    let theirs = reference.row(checkpoint, position, &mut theirs);
                    let fits = |theirs: &&[f32]| position < common && ours.len() == theirs.len();
                    if let Some(theirs) = theirs.filter(fits) {
                        sums.row(position, ours, theirs);
                        if is_logits {
                            tokens.row(position, ours, theirs);
                        }
                    }
                }
                (sums, tokens)
            })
            .collect();
        let total = self.sums.entry(checkpoint).or_insert_with(|| Accumulator::new(tolerance));
        for (part, tokens) in parts {
            total.merge(part);
            self.tokens.merge(tokens);
        }
    }
}

impl Probe for Live<'_> {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.options.compared.contains(&checkpoint) || self.options.audited.contains(&checkpoint)
    }

    fn record(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()> {
        let converted: Vec<f32>;
        let values = match values {
            Values::F32(values) => values,
            Values::F16(values) => {
                converted = values.iter().map(|value| value.to_f32()).collect();
                &converted
            }
            Values::F64(values) => {
                converted = values.iter().map(|&value| value as f32).collect();
                &converted
            }
        };
        let rows = Rows::new(checkpoint, batch.first as u32, shape, values);
        self.note_unfinite(checkpoint, &rows);
        if self.options.compared.contains(&checkpoint) {
            self.compare_rows(checkpoint, &rows);
            self.draw_rows(checkpoint, &rows);
            self.row_shapes.entry(checkpoint).or_insert_with(|| rows.shape.clone());
        }
        if self.options.audited.contains(&checkpoint) {
            let mut buffer = Vec::new();
            for t in 0..rows.len {
                let position = rows.first + t as u32;
                if self.options.sample.contains(&position) || Kept::keeps_all(checkpoint.kind()) {
                    self.kept.keep(checkpoint, &rows.shape, position, rows.row(t, &mut buffer));
                }
            }
        }
        if let Some(writer) = &mut self.options.writer {
            writer.tensor_f32(checkpoint, shape, values)?;
        }
        self.tell_progress();
        Ok(())
    }

    /// The first that the reference has, where nothing else is to be done with the logits.
    fn first_logits(&self, batch: &Batch<'_>) -> usize {
        let Some(reference) = self.reference.filter(|_| self.options.writer.is_none()) else { return 0 };
        let logits = Checkpoint::global(Kind::Logits);
        if !reference.seen(logits).is_empty() {
            return 0;
        }
        let recorded = reference.positions(logits);
        let first = recorded.into_iter().find(|position| *position as usize >= batch.first);
        first.map_or(batch.tokens.len(), |position| position as usize - batch.first)
    }

    /// Where nothing but the numbers and the sampled rows is needed of many rows that the reference has too.
    fn compares(&self, checkpoint: Checkpoint, batch: &Batch<'_>) -> bool {
        let Some(reference) = self.reference else { return false };
        let (kind, options) = (checkpoint.kind(), &self.options);
        let end = batch.first + batch.tokens.len();
        let whole = kind == Kind::Logits || kind.is_optional() || Kept::keeps_all(kind);
        let numbers_only = options.writer.is_none() && !options.pictures && !options.isolated;
        if batch.tokens.len() < ROWS_MIN_ON_DEVICE
            || whole
            || !numbers_only
            || !options.compared.contains(&checkpoint)
            || !options.tolerances.of(checkpoint).is_empty()
            || (common_positions(self.kept.tokens(), reference.tokens()) as usize) < end
        {
            return false;
        }
        let recorded = reference.positions(checkpoint);
        (batch.first..end).all(|position| recorded.binary_search(&(position as u32)).is_ok())
    }

    fn asked(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>) -> Asked {
        let positions = batch.positions();
        let reference = self.reference.and_then(|reference| reference.gather(checkpoint, &positions));
        let sampled = |t: &usize| self.options.sample.contains(&positions[*t]);
        let audited = self.options.audited.contains(&checkpoint);
        let rows = (0..positions.len()).filter(|_| audited).filter(sampled).collect();
        Asked { reference: reference.map(|rows| rows.data).unwrap_or_default(), rows }
    }

    fn compared(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        rows: &[RowStats],
        values: &[(usize, Vec<f32>)],
    ) -> Result<()> {
        let width = shape[1..].iter().product();
        self.row_shapes.entry(checkpoint).or_insert_with(|| shape[1..].to_vec());
        let sums = self.sums.entry(checkpoint).or_default();
        for (t, row) in rows.iter().enumerate() {
            let position = (batch.first + t) as u32;
            sums.compared_row(position, width, row);
            self.kept.note_unfinite(checkpoint, position, Unfinite::unknown(row.nonfinite_a.into()));
        }
        for (t, row) in values {
            self.kept.keep(checkpoint, &shape[1..], (batch.first + t) as u32, row);
        }
        self.tell_progress();
        Ok(())
    }

    fn feeds(&self) -> bool {
        self.options.isolated && self.reference.is_some()
    }

    fn fed(&mut self, checkpoint: Checkpoint, batch: &Batch<'_>, width: usize) -> Option<Vec<f32>> {
        fed::rows(self.reference.filter(|_| self.options.isolated)?, checkpoint, batch, width)
    }
}
