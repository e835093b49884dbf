//! Executes a model: by fused kernels on the CPU or on GPUs, which show every output to a probe, or any graph op by op.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use parity_dump::manifest::Producer;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod fused;
pub mod op_by_op;

/// Consecutive token positions that are computed in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// (T,) token ids.
    pub tokens: &'a [u32],
    /// Position of the first token; the others follow.
    pub first: usize,
}

impl<'a> Batch<'a> {
    /// Without the first `rows`.
    pub fn after(&self, rows: usize) -> Batch<'a> {
        Batch { tokens: &self.tokens[rows..], first: self.first + rows }
    }

    /// (T,) position of each token.
    pub fn positions(&self) -> Vec<u32> {
        (self.first..self.first + self.tokens.len()).map(|position| position as u32).collect()
    }
}

/// Values of one checkpoint, row-major, shape by [`crate::engine::fused::graph::Dims::shape`].
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// As engines compute.
    F32(&'a [f32]),
    /// As engines that are in a hurry store.
    F16(&'a [half::f16]),
    /// As the judge computes.
    F64(&'a [f64]),
}

/// What a comparison by the engine needs.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// (T, W) values of the reference. Where they have another size the values are recorded as any others.
    pub reference: Vec<f32>,
    /// Rows of the step whose values are to be shown as well, each once.
    pub rows: Vec<usize>,
}

/// Which reference a probe compares with: an engine may keep what it has been given under one and not ask again.
///
/// Nobody but [`ReferenceId::unique`] makes one, so that references of different probes are never taken for one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceId(u64);

impl ReferenceId {
    /// One that differs from all others of the process.
    pub fn unique() -> ReferenceId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        ReferenceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What the comparison of one row a with a reference b comes to, in f64. Pairs that are not two finite numbers
/// are counted and left out of everything else.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowStats {
    /// Σ |a - b|
    pub abs_error: f64,
    /// Σ (a - b)²
    pub squared_error: f64,
    /// Σ a²
    pub squared_a: f64,
    /// Σ b²
    pub squared_b: f64,
    /// Σ a·b
    pub product: f64,
    /// max |a - b|
    pub max: f64,
    /// max |a - b| / |b|, where 0/0 counts as nothing.
    pub ratio: f64,
    /// The first column with the maximum.
    pub column: i64,
    /// a there.
    pub a: f32,
    /// b there.
    pub b: f32,
    /// How often a > b.
    pub positive: u32,
    /// How often they differ.
    pub differing: u32,
    /// NaN and infinite values of a.
    pub nonfinite_a: u32,
    /// NaN and infinite values of b.
    pub nonfinite_b: u32,
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

    /// The first row of a step whose logits are of interest, besides the last: an engine may leave out those before
    /// it. The others have the same bits either way.
    fn first_logits(&self, _batch: &Batch<'_>) -> usize {
        0
    }

    /// Whether an engine that computes elsewhere than on the host may compare the values for the probe: it then
    /// asks for the reference and shows only what [`Asked`] names.
    fn compares(&self, _checkpoint: Checkpoint, _batch: &Batch<'_>) -> bool {
        false
    }

    /// The same as in an earlier step as long as [`Probe::asked`] gives the same for every checkpoint of a step of as
    /// many rows from the same position on: what was asked then may be used again. `None`, as of all probes that see each
    /// step once: everything is asked for anew, and held nowhere.
    fn reference(&self, _batch: &Batch<'_>) -> Option<ReferenceId> {
        None
    }

    /// What a comparison for the probe needs; asked only where [`Probe::compares`].
    fn asked(&mut self, _checkpoint: Checkpoint, _batch: &Batch<'_>) -> Asked {
        Asked::default()
    }

    /// Takes such a comparison: (T,) rows, and the values (W,) of the rows that were asked for, each with its
    /// number in the step.
    fn compared(
        &mut self,
        _checkpoint: Checkpoint,
        _batch: &Batch<'_>,
        _shape: &[usize],
        _rows: &[RowStats],
        _values: &[(usize, Vec<f32>)],
    ) -> Result<()> {
        Ok(())
    }

    /// Whether values are fed. An engine that merges nodes computes each by itself then.
    fn feeds(&self) -> bool {
        false
    }

    /// (T, `width`) values that the engine goes on with in place of its own, rounded to the type that it stores
    /// values in. `None`, as everywhere but where nodes are looked at in isolation: its own.
    fn fed(&mut self, _checkpoint: Checkpoint, _batch: &Batch<'_>, _width: usize) -> Option<Vec<f32>> {
        None
    }
}

/// Something that executes a [`crate::engine::fused::graph::Graph`] and keeps the keys and values of earlier steps.
pub trait Engine {
    /// Who computes: name, version, device, numerics.
    fn producer(&self) -> Producer;

    /// Forgets all positions: the next step begins at 0.
    fn reset(&mut self);

    /// Computes one step after the positions computed so far. Returns the logits of its last row, (V,),
    /// or `None` where the graph ends before the logits.
    fn step(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>>;
}
