//! A reference that stays on the device while its number stays the same, and is compared there while the step is
//! computed: behind each group of checkpoints one launch compares them, by turns on two streams of low priority, and
//! what it finds goes to pinned memory in few copies. The second such step is recorded with all of that as one CUDA graph,
//! which it and the next ones launch: events between launches of a stream end their overlap, in a graph they do not. (There
//! all launches have the same priority.)
//!
//! Behind each copy goes the number of the step, so that nothing that a step before has left is taken for what was found:
//! whether an event that a graph marks is past may tell of the launch before, which drivers are not told to rule out.
//!
//! Values that a probe wants are written once and keep their bytes ([`super::layout`]), so that a comparison that comes
//! late reads what was computed. The step ends when the last has been shown, so that the next does not write over them.

use std::sync::Arc;

use cudarc::driver::{CudaGraph, CudaStream};

use super::calls::{self, Address, Call, StatsPair};
use super::device::{Buffer, Device, Pinned, error, failed};
use super::event::Event;
use super::layout::ALIGNMENT;
use super::modules::Modules;
use super::plan::Output;
use super::returned::{Entry, Group, Piece, arrange, places, shown};
use crate::engine::{Batch, Probe, ReferenceId, RowStats};
use crate::error::Result;

/// Bytes of results that are copied together, at least: starting a copy takes as long as copying some 100 KB, and
/// behind the last comparison at most about as much is waited for.
const PIECE_MIN: usize = 1 << 20;
/// Pinned memory for what comes back, at most.
const RETURNED_MAX: usize = 512 << 20;
/// A reference takes at most one part in so many of the memory that is free: others want some too.
const FREE_PARTS: usize = 2;

/// What is compared with what. A reference is compared with only in steps that are equal to the one that it was
/// uploaded for.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Which reference.
    pub id: ReferenceId,
    /// Position of the first token.
    pub first: usize,
    /// T
    pub rows: usize,
    /// Start of the arena.
    pub arena: Address,
    /// What is compared, and where it lies.
    pub outputs: Vec<Output>,
}

/// Where comparisons and what they find go, beside computing and other copies.
struct Streams {
    /// Kernels that compare, by turns, so that one begins where the last rows of another leave room: those that compute
    /// go first.
    compare: [Arc<CudaStream>; 2],
    /// Copies of what they find.
    results: Arc<CudaStream>,
}

impl Streams {
    fn new(device: &Device) -> Result<Streams> {
        Ok(Streams { compare: [device.low_stream()?, device.low_stream()?], results: device.low_stream()? })
    }
}

/// A reference on the device, and the comparison with it.
pub struct Held {
    /// The step with its comparisons as one launch. Dropped before what it names.
    graph: Option<CudaGraph>,
    /// Whether it is to be recorded when the step is repeated: not where that has failed.
    recordable: bool,
    streams: Streams,
    step: Step,
    entries: Vec<Entry>,
    groups: Vec<Group>,
    pieces: Vec<Piece>,
    /// By group.
    calls: Vec<Call>,
    computed: Vec<Event>,
    compared: Vec<Event>,
    /// By piece.
    arrived: Vec<Event>,
    returned: Buffer,
    pinned: Pinned,
    /// Kept because the calls refer to them.
    _inputs: [Buffer; 2],
    /// Number of this step, counted from 1, on the device too; and by piece as it came back with it.
    step_number: u32,
    sent: Buffer,
    came_back: Pinned,
    /// Behind the graph.
    ended: Event,
    /// Groups that have been enqueued in this step, pieces that have been shown.
    enqueued: usize,
    shown: usize,
    under_way: bool,
}

impl Held {
    /// Asks the probe for the reference of every output and brings it to the device, in the order of the compute stream.
    /// `None` where there is too little memory. What has another size is left out.
    pub fn upload(
        device: &Device,
        step: Step,
        batch: &Batch<'_>,
        probe: &mut dyn Probe,
    ) -> Result<Option<Held>> {
        let sizes = step.outputs.iter().map(|output| (4 * output.place.len).next_multiple_of(ALIGNMENT));
        let bytes: usize = sizes.sum();
        let stats = step.outputs.len() * step.rows * size_of::<RowStats>();
        if bytes > device.free_memory()? / FREE_PARTS || stats > RETURNED_MAX {
            return Ok(None);
        }
        let Ok(references) = device.alloc("a reference", bytes) else { return Ok(None) };
        let (mut entries, mut lists) = (Vec::new(), Vec::<Vec<i32>>::new());
        let (mut reference, mut list_of) = (0, Vec::new());
        for &output in &step.outputs {
            let asked = probe.asked(output.checkpoint, batch);
            if asked.reference.len() != output.place.len {
                continue;
            }
            device.upload(&asked.reference, references.address + reference as Address)?;
            let rows = shown(&asked.rows, step.rows);
            let list = places(&rows, step.rows);
            // Checkpoints mostly show the same rows.
            let known = lists.iter().rposition(|known| *known == list);
            list_of.push(known.unwrap_or(lists.len()));
            if known.is_none() {
                lists.push(list);
            }
            entries.push(Entry { output, rows, reference, stats: 0, shown: 0 });
            reference += (4 * output.place.len).next_multiple_of(ALIGNMENT);
        }
        let (groups, pieces) = arrange(&mut entries, step.rows, PIECE_MIN);
        let size = pieces.last().map_or(0, |piece| piece.bytes.end);
        let lists = lists.concat();
        let Some((returned, places, pinned)) = room(device, size, &lists) else { return Ok(None) };
        device.upload(&lists, places.address)?;
        let list = |index: usize| places.address + (4 * step.rows * list_of[index]) as Address;
        let pair = |index: usize| entries[index].pair(&step, [&references, &returned], list(index));
        let call = |group: &Group| {
            let pairs: Vec<StatsPair> = group.entries.clone().map(pair).collect();
            calls::stats(&pairs, step.rows, returned.address + entries[group.entries.start].stats as Address)
        };
        let calls = groups.iter().map(call).collect();
        let events = |n: usize| (0..n).map(|_| Event::new(device)).collect::<Result<Vec<Event>>>();
        let n_pieces = pieces.len();
        Ok(Some(Held {
            computed: events(groups.len())?,
            compared: events(groups.len())?,
            arrived: events(pieces.len())?,
            _inputs: [references, places],
            step,
            entries,
            groups,
            pieces,
            calls,
            returned,
            pinned,
            graph: None,
            recordable: true,
            streams: Streams::new(device)?,
            step_number: 0,
            sent: device.alloc("the number of a step", size_of::<u32>())?,
            came_back: device.pinned(size_of::<u32>() * n_pieces)?,
            ended: Event::new(device)?,
            enqueued: 0,
            shown: 0,
            under_way: false,
        }))
    }

    /// Whether the reference was uploaded for this step.
    pub fn is_of(&self, step: &Step) -> bool {
        self.step == *step
    }

    /// Makes ready for one more step.
    pub fn restart(&mut self, device: &Device) -> Result<()> {
        (self.enqueued, self.shown) = (0, 0);
        self.step_number = self.step_number.wrapping_add(1);
        device.upload(&[self.step_number], self.sent.address)
    }

    /// Whether the step is to be recorded: it is made once more, and has not been.
    pub fn wants_recording(&self) -> bool {
        self.step_number > 1 && self.graph.is_none() && self.recordable
    }

    /// Lets the compute stream wait for all comparisons and copies, so that a recording ends there.
    pub fn join(&self, device: &Device) -> Result<()> {
        let Some(last) = self.compared.last() else { return Ok(()) };
        last.record(&self.streams.results)?;
        last.hold(&device.compute)
    }

    /// Keeps what was recorded, of which nothing has been done; with no graph, that the step cannot be recorded.
    pub fn keep(&mut self, graph: Option<CudaGraph>) {
        (self.enqueued, self.recordable) = (0, graph.is_some());
        self.graph = graph;
    }

    /// Enqueues the whole step as it was recorded; `false` where it was not.
    pub fn launch(&mut self, device: &Device) -> Result<bool> {
        let Some(graph) = &self.graph else { return Ok(false) };
        self.under_way = true;
        graph.launch().map_err(failed("the graph of a comparison"))?;
        self.ended.record(&device.compute)?;
        self.enqueued = self.groups.len();
        Ok(true)
    }

    /// Whether the output's reference is on the device.
    pub fn has(&self, output: &Output) -> bool {
        self.entries.binary_search_by_key(&output.place.offset, |entry| entry.output.place.offset).is_ok()
    }

    /// Waits for comparisons that have been enqueued and that nobody has waited for.
    pub fn settle(&mut self, device: &Device) -> Result<()> {
        if self.under_way {
            device.synchronize()?;
            for compare in &self.streams.compare {
                compare.synchronize().map_err(failed("a comparison"))?;
            }
            self.streams.results.synchronize().map_err(failed("a copy"))?;
            self.under_way = false;
        }
        Ok(())
    }

    /// Enqueues the groups that `done` pieces of work have computed, and copies of what they find.
    pub fn after(&mut self, device: &Device, modules: &mut Modules, done: usize) -> Result<()> {
        let streams = &self.streams;
        while self.groups.get(self.enqueued).is_some_and(|group| group.after <= done) {
            let index = self.enqueued;
            self.under_way = true;
            let compare = &streams.compare[index % streams.compare.len()];
            self.computed[index].record(&device.compute)?;
            self.computed[index].hold(compare)?;
            let call = &self.calls[index];
            device.launch_on(modules.function(call, device)?, call, compare)?;
            self.compared[index].record(compare)?;
            self.enqueued += 1;
            let ends = |piece: &Piece| piece.groups.end == self.enqueued;
            if let Some(piece) = self.pieces.iter().position(ends) {
                for group in self.pieces[piece].groups.clone() {
                    self.compared[group].hold(&streams.results)?;
                }
                let bytes = self.pieces[piece].bytes.clone();
                let from = self.returned.address + bytes.start as Address;
                device.start_download(from, &mut self.pinned.bytes_mut()[bytes], &streams.results)?;
                let number = &mut self.came_back.bytes_mut()[size_of::<u32>() * piece..][..size_of::<u32>()];
                device.start_download(self.sent.address, number, &streams.results)?;
                self.arrived[piece].record_for_host(&streams.results)?;
            }
        }
        Ok(())
    }

    /// Waits for what has been found and shows it, piece by piece while later ones are compared: (T,) numbers, and
    /// the rows that were asked for.
    ///
    /// # Errors
    /// Those of `show`, and a step that has not been enqueued to its end.
    pub fn show(
        &mut self,
        mut show: impl FnMut(&Output, &[RowStats], &[(usize, Vec<f32>)]) -> Result<()>,
    ) -> Result<()> {
        if self.enqueued != self.groups.len() || self.shown > 0 {
            return Err(error("a comparison that was not made"));
        }
        for (index, (piece, arrived)) in self.pieces.iter().zip(&self.arrived).enumerate() {
            arrived.wait()?;
            if self.came_back.word(index) != self.step_number {
                self.ended.wait()?;
            }
            if self.came_back.word(index) != self.step_number {
                return Err(error("a comparison that did not come back"));
            }
            for group in &self.groups[piece.groups.clone()] {
                for entry in &self.entries[group.entries.clone()] {
                    let bytes = self.pinned.bytes();
                    let values = entry.values(bytes, self.step.rows)?;
                    show(&entry.output, entry.found(bytes, self.step.rows)?, &values)?;
                }
            }
            self.shown += 1;
        }
        self.under_way = false;
        Ok(())
    }
}

/// Memory for so many bytes that come back, on the device and on the host, and for lists of rows; `None` where there is too
/// little.
fn room(device: &Device, size: usize, lists: &[i32]) -> Option<(Buffer, Buffer, Pinned)> {
    if size > RETURNED_MAX {
        return None;
    }
    let returned = device.alloc("what comparisons find", size).ok()?;
    let places = device.alloc("which rows are shown", size_of_val(lists)).ok()?;
    Some((returned, places, device.pinned(size).ok()?))
}

impl Entry {
    /// What the kernel is told, with where all references and all that comes back begin.
    fn pair(&self, step: &Step, [references, returned]: [&Buffer; 2], list: Address) -> StatsPair {
        let place = self.output.place;
        StatsPair {
            a: step.arena + place.offset as Address,
            b: references.address + self.reference as Address,
            width: place.len / step.rows,
            storage: place.storage,
            places: if self.rows.is_empty() { 0 } else { list },
            shown: returned.address + self.shown as Address,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Place;
    use super::*;
    use crate::checkpoint::{Checkpoint, Kind};
    use crate::numerics::Storage;

    fn outputs(n: usize, rows: usize) -> Vec<Output> {
        let output = |i: usize| {
            let place = Place { offset: 4096 * i, len: rows * (7 + i), storage: Storage::F16 };
            Output { checkpoint: Checkpoint::layer(Kind::Q, i as u32), place, after: i }
        };
        (0..n).map(output).collect()
    }

    #[test]
    fn a_reference_is_of_one_step_alone() {
        let id = ReferenceId::unique();
        let step = Step { id, first: 0, rows: 4, arena: 4096, outputs: outputs(3, 4) };
        assert_eq!(step, step.clone());
        let mut moved = step.outputs.clone();
        moved[1].place.offset += 256;
        let mut reshaped = step.outputs.clone();
        reshaped[1].place.len += 4;
        let mut renamed = step.outputs.clone();
        renamed[1].checkpoint = Checkpoint::layer(Kind::K, 1);
        for other in [
            Step { id: ReferenceId::unique(), ..step.clone() },
            Step { first: 4, ..step.clone() },
            Step { rows: 8, ..step.clone() },
            Step { arena: 8192, ..step.clone() },
            Step { outputs: outputs(2, 4), ..step.clone() },
            Step { outputs: moved, ..step.clone() },
            Step { outputs: reshaped, ..step.clone() },
            Step { outputs: renamed, ..step.clone() },
        ] {
            assert_ne!(other, step);
        }
    }
}
