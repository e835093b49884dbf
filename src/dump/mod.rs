//! Recorded rows by token position, wherever they are kept: the only place where engine and comparison meet.

use std::collections::BTreeSet;
use std::fmt;

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::scalar::{in_lanes, vectorized};
use crate::tensor::Matrix;
use parity_dump::manifest::{Manifest, Producer};
use parity_dump::seen::SeenPart;
use parity_dump::{Dump, DumpError};

mod graphs;
pub mod inputs;

pub use graphs::Graphs;

/// Values that are no finite numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfinite {
    /// NaN.
    pub nan: u64,
    /// Inf of either sign.
    pub inf: u64,
    /// One or the other, where nobody told them apart.
    pub either: u64,
}

impl Unfinite {
    /// So many NaN or Inf.
    pub fn unknown(count: u64) -> Unfinite {
        Unfinite { either: count, ..Unfinite::default() }
    }

    /// Of one row.
    pub fn of(row: &[f32]) -> Unfinite {
        // A product with 0 is 0, or NaN.
        let sum = vectorized(
            #[inline(always)]
            || in_lanes(row, row, |x, _| f64::from(x * 0.0)),
        );
        if sum == 0.0 {
            return Unfinite::default();
        }
        let count = |is: fn(f32) -> bool| row.iter().filter(|x| is(**x)).count() as u64;
        Unfinite { nan: count(f32::is_nan), inf: count(f32::is_infinite), either: 0 }
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.nan + self.inf + self.either
    }
}

impl fmt::Display for Unfinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nan, self.inf, self.either) {
            (nan, 0, 0) => write!(f, "{nan} NaN"),
            (0, inf, 0) => write!(f, "{inf} Inf"),
            (nan, inf, 0) => write!(f, "{nan} NaN and {inf} Inf"),
            _ => write!(f, "{} NaN or Inf", self.total()),
        }
    }
}

/// The rows of a checkpoint that hold some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfiniteRows {
    /// How many there are.
    pub count: Unfinite,
    /// Where.
    pub positions: BTreeSet<u32>,
}

impl UnfiniteRows {
    /// Adds what a row has.
    pub fn add(&mut self, position: u32, found: Unfinite) {
        if found.total() > 0 {
            self.count.nan += found.nan;
            self.count.inf += found.inf;
            self.count.either += found.either;
            self.positions.insert(position);
        }
    }
}

/// One side of a comparison, or the subject of an audit.
pub trait Recording: Sync {
    /// Who, with which model, on which tokens, in which steps.
    fn manifest(&self) -> &Manifest;

    /// Checkpoints that have rows, each once; in which order they are computed, a graph says.
    fn checkpoints(&self) -> Vec<Checkpoint>;

    /// Positions of which a checkpoint has rows, ascending; empty where it was not recorded.
    fn positions(&self, checkpoint: Checkpoint) -> Vec<u32>;

    /// Rows at `positions`, (positions, width); `None` where one is missing or the rows differ in width, as
    /// those of the attention matrices do.
    fn gather(&self, checkpoint: Checkpoint, positions: &[u32]) -> Option<Matrix<f32>>;

    /// One row of any checkpoint, of the attention matrices (H, position + 1): where it lies, or converted into
    /// `buffer`. `None` where missing.
    fn row<'a>(
        &'a self,
        checkpoint: Checkpoint,
        position: u32,
        buffer: &'a mut Vec<f32>,
    ) -> Option<&'a [f32]>;

    /// Shape of one token row, e.g. [H, E].
    fn row_shape(&self, checkpoint: Checkpoint) -> Vec<usize>;

    /// Whether what was recorded of it is kept in f32: numbers of a narrower type are those of its producer then.
    fn is_in_f32(&self, _checkpoint: Checkpoint) -> bool {
        true
    }

    /// What is known of a checkpoint that was only printed, step by step.
    fn seen(&self, _checkpoint: Checkpoint) -> &[SeenPart] {
        &[]
    }

    /// The rows of a checkpoint that hold NaN or Inf: of all that there are.
    fn unfinite(&self, checkpoint: Checkpoint) -> UnfiniteRows {
        let mut found = UnfiniteRows::default();
        let mut buffer = Vec::new();
        for position in self.positions(checkpoint) {
            if let Some(row) = self.row(checkpoint, position, &mut buffer) {
                found.add(position, Unfinite::of(row));
            }
        }
        found
    }

    /// Token at each position.
    fn tokens(&self) -> &[u32] {
        &self.manifest().tokens
    }

    /// Who computed the values.
    fn producer(&self) -> &Producer {
        &self.manifest().producer
    }
}

impl Recording for Dump {
    fn manifest(&self) -> &Manifest {
        self.manifest()
    }

    fn tokens(&self) -> &[u32] {
        self.tokens()
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.checkpoints().collect()
    }

    fn positions(&self, checkpoint: Checkpoint) -> Vec<u32> {
        let chosen = |row: &u32| self.is_chosen(Some(*row));
        self.get(checkpoint).map_or(Vec::new(), |recorded| recorded.positions().filter(chosen).collect())
    }

    fn gather(&self, checkpoint: Checkpoint, positions: &[u32]) -> Option<Matrix<f32>> {
        let cols = self.get(checkpoint)?.width();
        let data = self.gather(checkpoint, positions)?;
        (data.len() == positions.len() * cols).then(|| Matrix::new(positions.len(), cols, data))
    }

    fn row<'a>(
        &'a self,
        checkpoint: Checkpoint,
        position: u32,
        buffer: &'a mut Vec<f32>,
    ) -> Option<&'a [f32]> {
        let recorded = self.get(checkpoint)?;
        Some(self.row_values(recorded, recorded.find(position)?, buffer))
    }

    fn row_shape(&self, checkpoint: Checkpoint) -> Vec<usize> {
        self.get(checkpoint).map_or(Vec::new(), parity_dump::Recorded::row_shape)
    }

    fn is_in_f32(&self, checkpoint: Checkpoint) -> bool {
        self.get(checkpoint).is_some_and(parity_dump::Recorded::is_in_f32)
    }

    fn seen(&self, checkpoint: Checkpoint) -> &[SeenPart] {
        self.seen(checkpoint)
    }
}

impl From<DumpError> for Error {
    fn from(error: DumpError) -> Error {
        let mut out = Error::file(&error.path, &error.message);
        if let Some(expected) = &error.expected {
            out = out.expected(expected);
        }
        if let Some(found) = &error.found {
            out = out.found(found);
        }
        if let Some(hint) = &error.hint {
            out = out.hint(hint);
        }
        out
    }
}
