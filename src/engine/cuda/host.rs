//! Executes single nodes on the host, on values that are downloaded and uploaded: injected mistakes that no kernel
//! makes.

use std::collections::HashMap;
use std::ops::Range;

use half::f16;

use super::calls::Address;
use super::device::{Buffer, Device, error};
use super::layout::{Layout, Place};
use crate::checkpoint::Checkpoint;
use crate::engine::fused::graph::{Graph, Node};
use crate::engine::fused::{self, Inputs, Rows};
use crate::engine::{Batch, Probe, Values};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Storage};
use crate::tensor::{Matrix, View};

/// What the host needs for a step.
pub struct Host<'a> {
    /// The model file.
    pub gguf: &'a Gguf,
    /// The graph.
    pub graph: &'a Graph,
    /// The engine's arithmetic.
    pub numerics: &'a Numerics,
    /// The GPU.
    pub device: &'a Device,
    /// Where values lie.
    pub layout: &'a Layout,
    /// Keys and values.
    pub cache: &'a HashMap<Checkpoint, Buffer>,
    /// Start of the arena.
    pub arena: Address,
    /// Scores and probabilities, which stay on the host: (T, H·S).
    pub kept: HashMap<Checkpoint, Matrix<f32>>,
}

impl Host<'_> {
    /// Computes one node and puts its result where the next kernel looks for it.
    pub fn execute(&mut self, node: &Node, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<()> {
        let rows = batch.tokens.len();
        let end = batch.first + rows;
        let positions = batch.positions();
        let steps: Vec<Range<u32>> = vec![batch.first as u32..end as u32; rows];
        let mut inputs = Vec::new();
        for (index, input) in node.inputs.iter().enumerate() {
            inputs.push(match self.kept.get(input) {
                Some(kept) => kept.clone(),
                None if node.op.reads_cache(index) => self.cached(*input, end)?,
                None => self.download(*input, rows)?,
            });
        }
        let values: Vec<View<'_, f32>> = inputs.iter().map(Matrix::view).collect();
        let rows = Rows { tokens: batch.tokens, positions: &positions, steps: &steps };
        let out = fused::execute(node, self.gguf, Inputs { rows, values: &values }, self.numerics)?;
        if !node.checkpoint.kind().is_optional() {
            return self.upload(node.checkpoint, &out);
        }
        if probe.wants(node.checkpoint) {
            let shape = self.graph.dims.shape(node.checkpoint.kind(), out.rows, end);
            // (T, H·S) in memory, (H, T, S) by contract.
            let heads = (0..shape[0]).flat_map(|head| (0..out.rows).map(move |t| (head, t)));
            let values: Vec<f32> =
                heads.flat_map(|(head, t)| &out.row(t)[head * end..(head + 1) * end]).copied().collect();
            probe.record(node.checkpoint, batch, &shape, Values::F32(&values))?;
        }
        self.kept.insert(node.checkpoint, out);
        Ok(())
    }

    /// (T, width) of a checkpoint in the arena.
    pub fn download(&self, checkpoint: Checkpoint, rows: usize) -> Result<Matrix<f32>> {
        let place = self.place(checkpoint)?;
        let values = self.fetch(self.arena + place.offset as Address, place.len, place.storage)?;
        Ok(Matrix::new(rows, place.len / rows, values))
    }

    /// (S, K·E) keys or values of all positions before `end`.
    fn cached(&self, checkpoint: Checkpoint, end: usize) -> Result<Matrix<f32>> {
        let width = self.graph.dims.width(checkpoint.kind(), 0);
        let buffer = self.cache.get(&checkpoint).ok_or_else(|| not_computed(checkpoint))?;
        Ok(Matrix::new(end, width, self.fetch(buffer.address, end * width, self.numerics.kv)?))
    }

    fn fetch(&self, from: Address, len: usize, storage: Storage) -> Result<Vec<f32>> {
        match storage {
            Storage::F32 => self.device.download(from, len),
            _ => Ok(self.device.download::<f16>(from, len)?.iter().map(|value| value.to_f32()).collect()),
        }
    }

    /// Puts values where later kernels read those of a checkpoint.
    pub fn upload(&self, checkpoint: Checkpoint, out: &Matrix<f32>) -> Result<()> {
        let place = self.place(checkpoint)?;
        // The logits may be wanted of the last row alone.
        let values = &out.data[out.data.len().saturating_sub(place.len)..];
        if values.len() != place.len {
            return Err(Error::new(checkpoint, "the node's result does not have the model's shape")
                .expected(format!("{} values", place.len))
                .found(out.data.len()));
        }
        let to = self.arena + place.offset as Address;
        match place.storage {
            Storage::F32 => self.device.upload(values, to),
            _ => {
                let values: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
                self.device.upload(&values, to)
            }
        }
    }

    /// Where a checkpoint lies in the arena.
    pub fn place(&self, checkpoint: Checkpoint) -> Result<Place> {
        self.layout.places.get(&checkpoint).copied().ok_or_else(|| not_computed(checkpoint))
    }
}

fn not_computed(checkpoint: Checkpoint) -> Error {
    error(format!("{checkpoint} has not been computed"))
}
