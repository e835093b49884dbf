//! A recording in memory that keeps only the rows that an audit reads.
//!
//! A forward pass of a large model on a long prompt makes gigabytes of activations. The comparison sees
//! every row as it is computed; the audit recomputes a sample of rows, and attention also needs the keys and
//! values of every position.

use std::collections::BTreeMap;

use indexmap::IndexMap;

use super::{Recording, Unfinite, UnfiniteRows};
use crate::checkpoint::{Checkpoint, Kind};
use crate::tensor::Matrix;
use parity_dump::manifest::{Manifest, ModelInfo, Producer, Step};

/// The rows of a run that an audit reads.
pub struct Kept {
    manifest: Manifest,
    rows: IndexMap<Checkpoint, KeptRows>,
    /// NaN and Inf of rows that need not be kept.
    unfinite: IndexMap<Checkpoint, UnfiniteRows>,
}

#[derive(Default)]
struct KeptRows {
    shape: Vec<usize>,
    by_position: BTreeMap<u32, Vec<f32>>,
}

impl Kept {
    /// Nothing yet, of a run of `producer`.
    pub fn new(producer: Producer, model: ModelInfo) -> Kept {
        let manifest = Manifest { complete: true, ..Manifest::new(producer, model) };
        Kept { manifest, rows: IndexMap::new(), unfinite: IndexMap::new() }
    }

    /// What the recording says of itself, to add a prompt or provenance to.
    pub fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    /// Notes a step of consecutive positions from `first`.
    pub fn add_step(&mut self, tokens: &[u32], first: usize) {
        self.manifest.tokens.truncate(first);
        self.manifest.tokens.extend_from_slice(tokens);
        let positions = (first as u32..(first + tokens.len()) as u32).collect();
        self.manifest.steps.push(Step { file: String::new(), positions });
    }

    /// Whether every row of a kind is kept, sampled or not: what attention reads of other positions.
    pub fn keeps_all(kind: Kind) -> bool {
        matches!(kind, Kind::KRope | Kind::V)
    }

    /// Notes NaN and Inf of a row, kept or not.
    pub fn note_unfinite(&mut self, checkpoint: Checkpoint, position: u32, found: Unfinite) {
        if found.total() > 0 {
            self.unfinite.entry(checkpoint).or_default().add(position, found);
        }
    }

    /// Keeps one row; `shape` is that of the row.
    pub fn keep(&mut self, checkpoint: Checkpoint, shape: &[usize], position: u32, values: &[f32]) {
        let rows = self.rows.entry(checkpoint).or_default();
        if rows.shape.is_empty() {
            rows.shape = shape.to_vec();
        }
        rows.by_position.insert(position, values.to_vec());
    }
}

impl Recording for Kept {
    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn checkpoints(&self) -> Vec<Checkpoint> {
        self.rows.keys().copied().collect()
    }

    fn unfinite(&self, checkpoint: Checkpoint) -> UnfiniteRows {
        let mut found = self.unfinite.get(&checkpoint).cloned().unwrap_or_default();
        for (position, row) in self.rows.get(&checkpoint).iter().flat_map(|rows| &rows.by_position) {
            if !found.positions.contains(position) {
                found.add(*position, Unfinite::of(row));
            }
        }
        found
    }

    fn positions(&self, checkpoint: Checkpoint) -> Vec<u32> {
        self.rows.get(&checkpoint).map_or(Vec::new(), |rows| rows.by_position.keys().copied().collect())
    }

    fn gather(&self, checkpoint: Checkpoint, positions: &[u32]) -> Option<Matrix<f32>> {
        let rows = self.rows.get(&checkpoint)?;
        let cols: usize = rows.shape.iter().product();
        let mut data = Vec::with_capacity(positions.len() * cols);
        for position in positions {
            data.extend_from_slice(rows.by_position.get(position)?);
        }
        (data.len() == positions.len() * cols).then(|| Matrix::new(positions.len(), cols, data))
    }

    fn row<'a>(
        &'a self,
        checkpoint: Checkpoint,
        position: u32,
        _buffer: &'a mut Vec<f32>,
    ) -> Option<&'a [f32]> {
        self.rows.get(&checkpoint)?.by_position.get(&position).map(Vec::as_slice)
    }

    fn row_shape(&self, checkpoint: Checkpoint) -> Vec<usize> {
        self.rows.get(&checkpoint).map_or(Vec::new(), |rows| rows.shape.clone())
    }
}
