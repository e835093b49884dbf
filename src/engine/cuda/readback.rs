//! Brings wanted values to the host while the GPU computes on: pieces of the arena go through a ring of pinned
//! buffers on the copy stream, and the probe reads them there.

use std::collections::VecDeque;

use half::f16;
use rayon::prelude::*;

use super::calls::Address;
use super::device::{Device, Pinned, error};
use super::event::Event;
use super::plan::Output;
use crate::engine::Values;
use crate::error::Result;
use crate::numerics::Storage;

/// Pinned buffers that copies go through.
const RING: usize = 4;
/// The largest piece that is copied at once, in bytes: half a millisecond of PCIe 5.
const PIECE_MAX: usize = 32 << 20;
/// The first two pieces are not smaller than this, the next two not smaller than twice that, and so on up to the
/// largest: copying begins early, does not run ahead of computing, and later little time is lost to starting
/// copies, which takes as long as copying some 100 KB.
const PIECE_MIN: usize = 512 << 10;

/// Bytes between two outputs from which on they are not copied together: values compared on the device lie there.
const GAP: usize = 4096;

/// Bytes that one task copies on the host.
const COPY_TASK: usize = 1 << 20;

/// One copy: consecutive bytes of the arena.
struct Transfer {
    /// From the start of the arena.
    offset: usize,
    bytes: usize,
    /// The outputs that are whole when it has arrived.
    outputs: std::ops::Range<usize>,
    /// The work that must be done before.
    after: usize,
}

/// The transfers of one plan.
pub struct Transfers {
    list: Vec<Transfer>,
    /// Marks that the work before a transfer is done.
    computed: Vec<Event>,
}

impl Transfers {
    /// Cuts the outputs, which lie in the order of the arena, into pieces.
    pub fn new(device: &Device, outputs: &[Output]) -> Result<Transfers> {
        let list = cut(outputs, PIECE_MIN, PIECE_MAX);
        let computed = list.iter().map(|_| Event::new(device)).collect::<Result<_>>()?;
        Ok(Transfers { list, computed })
    }

    fn largest(&self) -> usize {
        self.list.iter().map(|transfer| transfer.bytes).max().unwrap_or(0)
    }
}

/// Consecutive outputs in two pieces of at least `first` bytes, two of twice that and so on, unless they are the
/// last, and at most `max`: an output that is larger makes several pieces.
fn cut(outputs: &[Output], first: usize, max: usize) -> Vec<Transfer> {
    let mut list: Vec<Transfer> = Vec::new();
    for (index, output) in outputs.iter().enumerate() {
        let min = (0..list.len().saturating_sub(1) / 2).fold(first, |min, _| max.min(2 * min));
        let (offset, end) = (output.place.offset, output.place.offset + output.place.bytes());
        if let Some(open) = list.last_mut()
            && open.bytes < min
            && end - open.offset <= max
            && offset < open.offset + open.bytes + GAP
            && outputs[open.outputs.start].place.offset == open.offset
        {
            open.bytes = end - open.offset;
            open.outputs.end = index + 1;
            open.after = open.after.max(output.after);
            continue;
        }
        let mut start = offset;
        while end - start > max {
            list.push(Transfer { offset: start, bytes: max, outputs: index..index, after: output.after });
            start += max;
        }
        list.push(Transfer {
            offset: start,
            bytes: end - start,
            outputs: index..index + 1,
            after: output.after,
        });
    }
    list
}

/// The ring of pinned buffers, and how far the transfers of the step are that uses it.
#[derive(Default)]
pub struct Ring {
    slots: Vec<(Pinned, Event)>,
    /// An output that comes in several pieces is put together here.
    collected: Collected,
    /// Transfers whose work has been enqueued, how many have been started, those that have not been shown.
    enqueued: usize,
    started: usize,
    under_way: VecDeque<usize>,
}

impl Ring {
    /// Makes the ring ready for a step with these transfers, and large enough.
    pub fn prepare(&mut self, device: &Device, transfers: &Transfers) -> Result<()> {
        let bytes = transfers.largest();
        if bytes > 0 && self.slots.first().is_none_or(|(pinned, _)| pinned.len() < bytes) {
            self.slots.clear();
            for _ in 0..RING {
                self.slots.push((device.pinned(bytes.next_power_of_two())?, Event::new(device)?));
            }
        }
        self.collected.len = 0;
        (self.enqueued, self.started) = (0, 0);
        self.under_way.clear();
        Ok(())
    }
}

/// One step's transfers under way.
pub struct Reading<'a> {
    /// Whose memory is read.
    pub device: &'a Device,
    /// Where values arrive, and how far they are.
    pub ring: &'a mut Ring,
    /// What is copied.
    pub transfers: &'a Transfers,
    /// What is in it.
    pub outputs: &'a [Output],
    /// Start of the arena.
    pub arena: Address,
}

/// Bytes at an address that every number may have.
#[derive(Default)]
struct Collected {
    words: Vec<u64>,
    len: usize,
}

impl Collected {
    fn push(&mut self, bytes: &[u8]) {
        let start = self.len;
        self.len += bytes.len();
        if self.words.len() < self.len.div_ceil(8) {
            self.words.resize(self.len.div_ceil(8), 0);
        }
        // SAFETY: the words hold that many bytes.
        let all = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), self.len) };
        let pairs = all[start..].par_chunks_mut(COPY_TASK).zip(bytes.par_chunks(COPY_TASK));
        pairs.for_each(|(to, from)| to.copy_from_slice(from));
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the words hold that many bytes.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }
}

impl Reading<'_> {
    /// Tells that `done` pieces of work have been enqueued; starts the copies that can start.
    pub fn after(&mut self, done: usize) -> Result<()> {
        while self.transfers.list.get(self.ring.enqueued).is_some_and(|transfer| transfer.after <= done) {
            self.transfers.computed[self.ring.enqueued].record(&self.device.compute)?;
            self.ring.enqueued += 1;
        }
        self.start()
    }

    fn start(&mut self) -> Result<()> {
        let ring = &mut *self.ring;
        while ring.started < ring.enqueued && ring.under_way.len() < RING {
            let transfer = &self.transfers.list[ring.started];
            let (pinned, arrived) = &mut ring.slots[ring.started % RING];
            self.transfers.computed[ring.started].hold(&self.device.copy)?;
            let from = self.arena + transfer.offset as Address;
            let to = &mut pinned.bytes_mut()[..transfer.bytes];
            self.device.start_download(from, to, &self.device.copy)?;
            arrived.record(&self.device.copy)?;
            ring.under_way.push_back(ring.started);
            ring.started += 1;
        }
        Ok(())
    }

    /// Whether copies wait for a buffer and one has arrived: then it should be shown before more is launched.
    pub fn is_full(&self) -> Result<bool> {
        let ring = &*self.ring;
        match ring.under_way.front() {
            Some(first) if ring.under_way.len() == RING && ring.started < ring.enqueued => {
                ring.slots[first % RING].1.is_past()
            }
            _ => Ok(false),
        }
    }

    /// Waits for the next transfer and shows its outputs; `false` when all have been shown.
    pub fn show_next(&mut self, mut show: impl FnMut(&Output, Values<'_>) -> Result<()>) -> Result<bool> {
        let Some(index) = self.ring.under_way.pop_front() else { return Ok(false) };
        let (transfer, outputs) = (&self.transfers.list[index], self.outputs);
        let Ring { slots, collected, .. } = &mut *self.ring;
        let (pinned, arrived) = &slots[index % RING];
        arrived.wait()?;
        let bytes = &pinned.bytes()[..transfer.bytes];
        if transfer.outputs.is_empty() || collected.len > 0 {
            collected.push(bytes);
        }
        for output in &outputs[transfer.outputs.clone()] {
            if collected.len == 0 {
                let start = output.place.offset - transfer.offset;
                show(output, values(&bytes[start..start + output.place.bytes()], output)?)?;
            } else {
                show(output, values(collected.bytes(), output)?)?;
                collected.len = 0;
            }
        }
        self.start()?;
        Ok(true)
    }
}

/// The logits of the last row on their way to the host, apart from what a probe wants.
pub struct Logits {
    row: Pinned,
    arrived: Event,
}

impl Logits {
    /// Room for (V,) in f32.
    pub fn new(device: &Device, vocab: usize) -> Result<Logits> {
        Ok(Logits { row: device.pinned(4 * vocab)?, arrived: Event::new(device)? })
    }

    /// Starts the copy behind all kernels so far.
    pub fn start(&mut self, device: &Device, from: Address) -> Result<()> {
        device.start_download(from, self.row.bytes_mut(), &device.compute)?;
        self.arrived.record(&device.compute)
    }

    /// Whether they have arrived.
    pub fn are_there(&self) -> Result<bool> {
        self.arrived.is_past()
    }

    /// Waits for them.
    pub fn take(&self) -> Result<Vec<f32>> {
        self.arrived.wait()?;
        Ok(self.row.bytes().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// The bytes as what they are.
pub fn values<'b>(bytes: &'b [u8], output: &Output) -> Result<Values<'b>> {
    let misaligned = || error(format!("{} did not arrive whole", output.checkpoint));
    // SAFETY: any bits are a number of these types; a slice that is not aligned leaves a head.
    unsafe {
        match output.place.storage {
            Storage::F32 => match bytes.align_to::<f32>() {
                ([], values, []) => Ok(Values::F32(values)),
                _ => Err(misaligned()),
            },
            _ => match bytes.align_to::<f16>() {
                ([], values, []) => Ok(Values::F16(values)),
                _ => Err(misaligned()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Place;
    use super::*;
    use crate::checkpoint::{Checkpoint, Kind};

    #[test]
    fn pieces_cover_all_outputs_once_and_in_order() {
        let mut offset = 0;
        let lens = [10usize, 300, 5, 5, 5, 2500, 1, 40, 1000];
        let outputs: Vec<Output> = lens
            .iter()
            .enumerate()
            .map(|(i, &len)| {
                let place = Place { offset, len, storage: Storage::F32 };
                offset += (4 * len).next_multiple_of(256);
                Output { checkpoint: Checkpoint::layer(Kind::Q, i as u32), place, after: 2 * i }
            })
            .collect();
        let (min, max) = (1024, 4096);
        let list = cut(&outputs, min, max);
        let shown: Vec<usize> = list.iter().flat_map(|transfer| transfer.outputs.clone()).collect();
        assert_eq!(shown, (0..lens.len()).collect::<Vec<_>>());
        for transfer in &list {
            assert!(transfer.bytes <= max);
            for output in &outputs[transfer.outputs.clone()] {
                assert!(output.after <= transfer.after);
                assert!(output.place.offset + output.place.bytes() <= transfer.offset + transfer.bytes);
            }
        }
        let copied: usize =
            list.iter().filter(|t| t.outputs.contains(&5) || t.outputs == (5..5)).map(|t| t.bytes).sum();
        assert_eq!(copied, 4 * lens[5], "a large output comes in pieces that add up to it");
    }
}
