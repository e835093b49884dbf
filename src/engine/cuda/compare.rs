//! Comparisons on the GPU for probes that hand over a reference: of each token row a few numbers come back, and
//! only the rows that are asked for. Where a probe says that its reference stays the same it is held on the device
//! and compared while the step is computed ([`super::held`]); else, and what is not held, one checkpoint at a time.

use half::f16;

use super::calls::{self, Address, StatsPair};
use super::device::{Buffer, Device, address_of};
use super::held::{Held, Step};
use super::modules::Modules;
use super::plan::Output;
use crate::engine::fused::graph::Dims;
use crate::engine::{Batch, Probe, RowStats, Values};
use crate::error::Result;
use crate::numerics::Storage;

/// The comparisons of one engine.
#[derive(Default)]
pub struct Compare {
    /// The reference that the device holds.
    pub held: Option<Held>,
    /// Device memory for one reference and its comparison, used again.
    memory: Option<Buffer>,
}

impl Compare {
    /// Starts a step whose `outputs` lie in the arena at an address: what the device holds of another reference is
    /// forgotten, and that of the probe uploaded, if it says which one it is and there is room.
    pub fn begin(
        &mut self,
        device: &Device,
        (outputs, arena): (&[Output], Address),
        batch: &Batch<'_>,
        probe: &mut dyn Probe,
    ) -> Result<()> {
        self.settle(device)?;
        let id = if outputs.is_empty() { None } else { probe.reference(batch) };
        let Some(id) = id else {
            self.held = None;
            return Ok(());
        };
        let step =
            Step { id, first: batch.first, rows: batch.tokens.len(), arena, outputs: outputs.to_vec() };
        if !self.held.as_ref().is_some_and(|held| held.is_of(&step)) {
            self.held = None;
            self.held = Held::upload(device, step, batch, probe)?;
        }
        self.held.as_mut().map_or(Ok(()), |held| held.restart(device))
    }

    /// Shows the probe what has been found of all `outputs`: what the device holds is waited for, the rest is
    /// compared now.
    pub fn show(
        &mut self,
        (device, modules): (&Device, &mut Modules),
        (outputs, arena): (&[Output], Address),
        dims: &Dims,
        batch: &Batch<'_>,
        probe: &mut dyn Probe,
    ) -> Result<()> {
        let (rows, end) = (batch.tokens.len(), batch.first + batch.tokens.len());
        let shape = |output: &Output| dims.shape(output.checkpoint.kind(), rows, end);
        if let Some(held) = &mut self.held {
            held.show(|output, stats, values| {
                probe.compared(output.checkpoint, batch, &shape(output), stats, values)
            })?;
        }
        for output in outputs {
            if self.held.as_ref().is_none_or(|held| !held.has(output)) {
                self.run((device, &mut *modules), (output, arena), batch, &shape(output), probe)?;
            }
        }
        Ok(())
    }

    /// Forgets what the device holds.
    pub fn forget(&mut self, device: &Device) -> Result<()> {
        self.settle(device)?;
        self.held = None;
        Ok(())
    }

    /// Waits for comparisons that a step which failed has left under way: they read the arena, and write.
    pub fn settle(&mut self, device: &Device) -> Result<()> {
        self.held.as_mut().map_or(Ok(()), |held| held.settle(device))
    }

    /// Compares the output, which has been computed, with what the probe has of it. `shape` is (T, …).
    fn run(
        &mut self,
        (device, modules): (&Device, &mut Modules),
        (output, arena): (&Output, Address),
        batch: &Batch<'_>,
        shape: &[usize],
        probe: &mut dyn Probe,
    ) -> Result<()> {
        let (place, checkpoint) = (output.place, output.checkpoint);
        let rows = batch.tokens.len();
        let width = place.len / rows;
        let from = arena + place.offset as Address;
        let asked = probe.asked(checkpoint, batch);
        if asked.reference.len() != place.len {
            // Of another shape: the probe says so when it sees the values.
            let values = fetch(device, from, place.len, place.storage)?;
            return probe.record(checkpoint, batch, shape, Values::F32(&values));
        }
        let size = 4 * place.len + rows * size_of::<RowStats>();
        if self.memory.as_ref().is_none_or(|memory| memory.bytes < size) {
            self.memory = None;
            self.memory = Some(device.alloc("a comparison", size)?);
        }
        let found = address_of(&self.memory);
        let reference = found + (rows * size_of::<RowStats>()) as Address;
        device.upload(&asked.reference, reference)?;
        let pair = StatsPair { a: from, b: reference, width, storage: place.storage, places: 0, shown: 0 };
        let call = calls::stats(&[pair], rows, found);
        device.launch(modules.function(&call, device)?, &call)?;
        let stats = device.download::<RowStats>(found, rows)?;
        let bytes = (place.bytes() / rows) as Address;
        let row = |t: &usize| Ok((*t, fetch(device, from + *t as Address * bytes, width, place.storage)?));
        let values: Vec<(usize, Vec<f32>)> =
            asked.rows.iter().filter(|t| **t < rows).map(row).collect::<Result<_>>()?;
        probe.compared(checkpoint, batch, shape, &stats, &values)
    }
}

fn fetch(device: &Device, from: Address, len: usize, storage: Storage) -> Result<Vec<f32>> {
    match storage {
        Storage::F32 => device.download(from, len),
        _ => Ok(device.download::<f16>(from, len)?.iter().map(|value| value.to_f32()).collect()),
    }
}
