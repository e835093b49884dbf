//! Records the forward passes of one llama.cpp context into a dump.

mod inputs;
mod life;
mod looking;
mod seen;
mod step;

use life::Context;
pub use life::{BatchRow, Touch};
use looking::{Marked, Reading};
use seen::Seen;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::Arc;

use parity_dump::{Kind, Life};
use parity_graph::{Graph, text as graph_text};

use crate::api::{RawGraph, RawSched, RawTensor};
use crate::describe::{Described, Reader};
use crate::filter::Filter;
use crate::forced::Forced;
use crate::gather::Gather;
use crate::hashes::Hashes;
use crate::inject::Injection;
use crate::kept::Observe;
use crate::map::Mapping;
pub use crate::options::{Host, Options, another};
use crate::plan::{PassPlan, Planned, indices_as_f32};
use crate::producer::of_this_machine;
use crate::sequence::{Pass, Sequences};
use crate::store::{BUFFER_BYTES, Store};

/// The state of a recording.
pub struct Recorder {
    options: Options,
    host: Arc<dyn Host>,
    sequences: Sequences,
    store: Option<Store>,
    hashes: Option<Hashes>,
    /// The context whose passes are recorded.
    sched: Option<usize>,
    /// Whether that has no tokens: it encodes images or sounds.
    is_tower: bool,
    plan: Option<PassPlan>,
    context: Context,
    injections: Vec<Injection>,
    /// When the values of the pass are read.
    reading: Reading,
    /// What brings small values of a card all at once.
    gather: Gather,
    /// What was kept of the graph that got its memory last.
    marked: Option<Marked>,
    /// Bytes of nodes for which memory was asked so far.
    laid_out: u64,
    /// How closely was looked so far.
    observed: Option<Observe>,
    /// The graph that was computed last.
    last: Option<Seen>,
    /// Graphs seen so far, with what they hold: most passes compute one of a few.
    graphs: Vec<(Graph, Arc<Mapping>)>,
    /// Number of each of them in the dump, where it has it.
    written: Vec<Option<usize>>,
    /// How many graphs the dump has.
    graphs_written: usize,
    unmapped: BTreeSet<String>,
    stopped: bool,
    /// Sequences that the parent process was told of.
    reported: usize,
    said: BTreeSet<String>,
}

// SAFETY: raw tensors in a plan are only used between `begin` and `end`, by the thread that computes.
unsafe impl Send for Recorder {}

impl Recorder {
    /// A recording that has not begun.
    pub fn new(mut options: Options, host: Arc<dyn Host>) -> Recorder {
        if options.observe == Observe::None {
            options.filter = Filter { layers: None, globs: vec![Kind::Logits.name().to_owned()] };
        }
        let sequences = Sequences::new(options.sequence);
        Recorder {
            options,
            host,
            sequences,
            store: None,
            hashes: None,
            sched: None,
            is_tower: false,
            plan: None,
            context: Context::default(),
            injections: Vec::new(),
            reading: Reading::NodeByNode,
            gather: Gather::default(),
            marked: None,
            laid_out: 0,
            observed: None,
            last: None,
            graphs: Vec::new(),
            written: Vec::new(),
            graphs_written: 0,
            unmapped: BTreeSet::new(),
            stopped: false,
            reported: 0,
            said: BTreeSet::new(),
        }
    }

    /// Takes a graph that is about to be computed. Whether nodes of it are wanted.
    ///
    /// # Safety
    /// The reader's library made `sched` and `graph`, whose input data is set.
    pub unsafe fn begin(&mut self, reader: Reader<'_>, sched: RawSched, graph: RawGraph) -> bool {
        if self.stopped || self.plan.is_some() {
            return false;
        }
        // SAFETY: by the caller's promise.
        let seen = unsafe { self.see(reader, sched, graph) };
        // SAFETY: as above.
        let asked = unsafe { self.begin_seen(reader, sched, &seen) };
        self.last = Some(seen);
        asked
    }

    /// [`Recorder::begin`], of a graph that was looked at.
    unsafe fn begin_seen(&mut self, reader: Reader<'_>, sched: RawSched, seen: &Seen) -> bool {
        let Seen { described, mapping, .. } = seen;
        // Graphs that shift a cache, or that encode an image, have no embedding of tokens.
        let Some(tokens) = mapping.known.tokens else {
            let is_own = self.sched == Some(sched as usize);
            if self.sched.is_none_or(|_| is_own) && self.encodes(mapping, &described.graph) {
                self.sched = Some(sched as usize);
                let numbers = self.row_of_pass();
                // SAFETY: by the caller's promise.
                return unsafe { self.start(reader, sched, seen, (vec![0], numbers, Life::default())) };
            }
            if !is_own || !described.graph.is_shift() || self.options.sequence.is_some() {
                self.sequences.shift(is_own && described.graph.is_shift());
                if is_own {
                    self.lost_pass(mapping);
                }
                return false;
            }
            let (numbers, life) = self.row_of_cache();
            // SAFETY: by the caller's promise.
            return unsafe { self.start(reader, sched, seen, (vec![0], numbers, life)) };
        };
        if self.sched.is_none() && !self.host.claim() {
            self.host.say("another process of this program is being recorded: this one is not");
            self.stopped = true;
            return false;
        }
        if *self.sched.get_or_insert(sched as usize) != sched as usize {
            self.say_once("a second llama.cpp context computes in this process: it is not recorded here");
            return false;
        }
        // SAFETY: by the caller's promise.
        let inputs = unsafe { self.inputs(reader, sched, described, mapping, tokens) };
        let pass = match &inputs {
            Some((tokens, positions)) => {
                let context = &self.context;
                self.sequences.pass(tokens, positions, &|| context.begins_again(tokens, positions))
            }
            None => self.sequences.unknown(),
        };
        self.report_sequences();
        if let Pass::Lost(why) = &pass {
            self.stop(why);
            return false;
        }
        let Some((mut own, positions)) = inputs else {
            self.say_once("a pass without token ids is not recorded");
            return false;
        };
        if pass == Pass::Skip {
            return false;
        }
        if pass == Pass::StartAgain {
            (self.store, self.hashes, self.observed) = (None, None, None);
            self.written.fill(None);
            self.graphs_written = 0;
            self.forget_rows();
            self.options.forced.iter_mut().for_each(Forced::begin_again);
        }
        // SAFETY: by the caller's promise; the leaf holds the tokens.
        let (numbers, life) = unsafe {
            let rows = self.rows(reader, (described, mapping), &own, &positions);
            self.force(reader, described.address[tokens], (&mut own, &rows.0, &rows.1));
            rows
        };
        // SAFETY: as above.
        unsafe { self.start(reader, sched, seen, (own, numbers, life)) }
    }

    /// Starts the step of a pass: its graph, and its tokens, numbers of its rows and what these are. Whether nodes of it are
    /// wanted.
    unsafe fn start(
        &mut self,
        reader: Reader<'_>,
        sched: RawSched,
        seen: &Seen,
        (tokens, numbers, life): (Vec<u32>, Vec<u32>, Life),
    ) -> bool {
        let Seen { described, mapping, number, .. } = seen;
        self.note_graph(&described.graph);
        let filter = &self.options.filter;
        // SAFETY: by the caller's promise.
        let mut plan = unsafe { PassPlan::new(reader, described, mapping, filter, (tokens, numbers), life) };
        // SAFETY: as above.
        let opened = unsafe { self.open(reader, sched, &plan, mapping, described) };
        match opened.and_then(|()| self.states((described, mapping))) {
            Ok(states) => {
                plan.life.events.extend(self.context.unsaid());
                plan.states = states;
            }
            Err(reason) => {
                self.stop(&reason);
                return false;
            }
        }
        self.start_step(&plan, *number);
        // SAFETY: as above.
        unsafe { self.record_leaves(reader, described, &plan) };
        self.injections = self.injections(described);
        // SAFETY: as above.
        self.reading = unsafe { self.reading(reader, sched, seen, &plan) };
        let asked = self.store.is_some() && plan.wanted.keys().any(|&node| self.reading.asks_for(node));
        self.plan = Some(plan);
        asked || !self.injections.is_empty()
    }

    /// Notes llama.cpp's version, for the manifest.
    pub fn set_version(&mut self, version: Option<String>) {
        self.options.version = version;
    }

    /// Tells the parent process something.
    pub fn status(&self, key: &str, value: &str) {
        self.host.status(key, value);
    }

    /// Whether rows that the program asks no logits of would be recorded further than they are computed.
    pub fn wants_tail(&self, layers: Option<u32>) -> bool {
        self.options.filter.wants_tail(layers)
    }

    /// Whether a pass has begun that must be ended.
    pub fn is_in_pass(&self) -> bool {
        self.plan.is_some()
    }

    /// Whether the values of a node that is about to be computed are wanted.
    ///
    /// # Safety
    /// As for [`Recorder::computed`], right before the computation.
    pub unsafe fn wants(&mut self, reader: Reader<'_>, tensor: RawTensor) -> bool {
        let mut apart = false;
        for injection in &mut self.injections {
            // SAFETY: by the caller's promise `tensor` is a tensor of the graph that is being computed.
            match unsafe { injection.asked(reader, tensor) } {
                Ok(asked) => apart |= asked,
                Err(reason) => {
                    self.stop(&format!("the mistake cannot be injected: {reason}"));
                    return false;
                }
            }
        }
        if apart {
            return !self.stopped;
        }
        !self.stopped
            && self.reading.asks_for(tensor)
            && self.plan.as_ref().is_some_and(|plan| plan.wanted.contains_key(&tensor))
    }

    /// Prepares the mistake that is wanted, if any.
    fn injections(&mut self, described: &Described) -> Vec<Injection> {
        let Some(wanted) = self.options.inject.as_ref() else { return Vec::new() };
        match Injection::find(wanted, described) {
            Ok(found) => {
                match found.first() {
                    Some(first) => self.host.status("injected", first.text()),
                    None => self.say_once(&format!("{wanted}: no node of this graph has a place for it")),
                }
                found
            }
            Err(reason) => {
                self.stop(&reason);
                Vec::new()
            }
        }
    }

    /// Takes the values of a node that has just been computed.
    ///
    /// # Safety
    /// The reader's library made `tensor`, and has just computed it.
    pub unsafe fn computed(&mut self, reader: Reader<'_>, tensor: RawTensor) {
        let mut failed = None;
        for injection in &mut self.injections {
            // SAFETY: by the caller's promise.
            failed = failed.or(unsafe { injection.computed(reader, tensor) }.err());
        }
        if let Some(reason) = failed {
            self.stop(&format!("the mistake cannot be injected: {reason}"));
        }
        let (Some(store), Some(plan)) = (&mut self.store, &mut self.plan) else { return };
        for index in plan.wanted.remove(&tensor).unwrap_or_default() {
            let Planned { element, from_i32, ref region, .. } = plan.planned[index];
            store.announce(plan.planned[index].announced());
            let mut read = |offset: usize, out: &mut [u8]| {
                // SAFETY: the region lies within the tensor, by ggml's own extents and strides.
                unsafe { (reader.api.tensor_get)(tensor, out.as_mut_ptr().cast(), offset, out.len()) }
            };
            region.copy(element.size(), BUFFER_BYTES, &mut read, &mut |fill, bytes| match from_i32 {
                false => store.bytes(bytes, fill),
                true => store.bytes(bytes, &mut |out| {
                    fill(out);
                    indices_as_f32(out);
                }),
            });
        }
        if let Some(failure) = store.failure() {
            let reason = failure.to_string();
            self.stop(&reason);
        }
    }

    /// Ends a pass; `whole` says whether it was computed to its end.
    ///
    /// # Safety
    /// As for [`Recorder::begin`], after the computation.
    pub unsafe fn end(&mut self, reader: Reader<'_>, sched: RawSched, whole: bool) {
        if matches!(self.reading, Reading::Behind(_)) && whole {
            // SAFETY: by the caller's promise.
            unsafe { self.read_kept(reader, sched) };
        }
        if let Some(reason) = self.host.broken() {
            self.stop(&reason);
        }
        let Some(plan) = self.plan.take() else { return };
        self.injections.clear();
        if !whole {
            self.drop_rows(plan.tokens.len());
        }
        if let Some(store) = &mut self.store {
            let missed: Vec<String> = plan
                .wanted
                .values()
                .cloned()
                .flatten()
                .map(|i| plan.planned[i].checkpoint.to_string())
                .collect();
            if whole && !missed.is_empty() {
                self.unmapped.extend(missed.into_iter().map(|id| format!("{id}: never computed")));
                let unmapped = self.unmapped.iter().cloned().collect();
                store.edit(move |manifest| manifest.unmapped = unmapped);
            }
            if whole {
                self.host.computed();
            }
            store.end(whole);
            if let Some(failure) = store.failure() {
                let reason = failure.to_string();
                self.stop(&reason);
            }
        }
        if let (Some(hashes), true) = (&mut self.hashes, whole) {
            // SAFETY: by the caller's promise; the logits are an output, whose data stays.
            let written = unsafe { hashes.add(reader, sched, &plan) };
            if let Err(error) = written {
                self.say_once(&format!("the logits could not be noted: {error}"));
            }
        }
    }

    /// Waits until all that was recorded is on disk.
    pub fn settle(&mut self) {
        let Some(store) = &mut self.store else { return };
        store.settle();
        if let Some(failure) = store.failure() {
            let reason = failure.to_string();
            self.stop(&reason);
        }
    }

    /// Stops recording for good, and says why. The program goes on.
    pub fn stop(&mut self, reason: &str) {
        if !self.stopped {
            self.stopped = true;
            self.host.say(&format!("recording stopped: {reason}"));
            self.host.status("stopped", reason);
            if let Some(store) = &mut self.store {
                store.stop(reason);
            }
        }
        (self.store, self.plan) = (None, None);
    }

    /// Appends the graph to the file of graphs, where one is wanted.
    fn note_graph(&mut self, graph: &Graph) {
        let Some(path) = &self.options.graphs else { return };
        let file = OpenOptions::new().create(true).append(true).open(path);
        let text = graph_text::write(&of_this_machine(graph));
        if let Err(error) = file.and_then(|mut file| file.write_all(text.as_bytes())) {
            self.say_once(&format!("the graph could not be noted in {}: {error}", path.display()));
        }
    }

    fn report_sequences(&mut self) {
        let seen = self.sequences.seen();
        if seen != self.reported {
            self.reported = seen;
            self.host.status("sequences", &seen.to_string());
        }
    }

    fn say_once(&mut self, message: &str) {
        if self.said.insert(message.to_owned()) {
            self.host.say(message);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.settle();
    }
}
