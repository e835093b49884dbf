//! Executes a graph and shows every output to a probe.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use parity_dump::manifest::Producer;

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;

/// Consecutive token positions that are computed in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// (T,) token ids.
    pub tokens: &'a [u32],
    /// Position of the first token; the others follow.
    pub first: usize,
}

/// Values of one checkpoint, row-major, shape by [`crate::model::graph::Dims::shape`].
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// As engines compute.
    F32(&'a [f32]),
    /// As engines that are in a hurry store.
    F16(&'a [half::f16]),
    /// As the judge computes.
    F64(&'a [f64]),
}

/// Watches an engine. Asking for a checkpoint never changes a value.
pub trait Probe {
    /// Whether the values at `checkpoint` are to be handed over.
    fn wants(&self, checkpoint: Checkpoint) -> bool;

    /// Takes the values of one step at a wanted checkpoint; `shape` has the slowest axis first.
    fn record(
        &mut self,
        checkpoint: Checkpoint,
        batch: &Batch<'_>,
        shape: &[usize],
        values: Values<'_>,
    ) -> Result<()>;

    /// (T, `width`) values that the engine goes on with in place of its own. `None`, as everywhere but where
    /// nodes are looked at in isolation: its own.
    fn fed(&mut self, _checkpoint: Checkpoint, _batch: &Batch<'_>, _width: usize) -> Option<Vec<f32>> {
        None
    }
}

/// Something that executes a [`crate::model::graph::Graph`] and keeps the keys and values of earlier steps.
pub trait Engine {
    /// Who computes: name, version, device, numerics.
    fn producer(&self) -> Producer;

    /// Computes one step after the positions computed so far. Returns the logits of its last row, (V,),
    /// or `None` where the graph ends before the logits.
    fn step(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>>;
}
