//! Comparisons on the GPU for probes that hand over a reference: of each token row a few numbers come back, and
//! only the rows that are asked for.

use half::f16;

use super::calls::{self, Address, StatsPair};
use super::device::{Buffer, Device};
use super::modules::Modules;
use super::plan::Output;
use crate::engine::{Batch, Probe, RowStats};
use crate::error::Result;
use crate::numerics::Storage;

/// Device memory for one reference and its comparison, used again.
#[derive(Default)]
pub struct Compare {
    memory: Option<Buffer>,
}

impl Compare {
    /// Compares the output, which has been computed, with what the probe has of it. `shape` is (T, …).
    pub fn run(
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
            return probe.record(checkpoint, batch, shape, crate::engine::Values::F32(&values));
        }
        let size = 4 * place.len + rows * size_of::<RowStats>();
        if self.memory.as_ref().is_none_or(|memory| memory.bytes < size) {
            self.memory = None;
            self.memory = Some(device.alloc("a comparison", size)?);
        }
        let found = self.memory.as_ref().map_or(0, |memory| memory.address);
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
