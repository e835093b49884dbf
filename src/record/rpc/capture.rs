//! Records the graphs that pass through a proxy: has them computed node by node, or whole with their nodes kept, and reads
//! the values from the server.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use parity_graph::Op;
use parity_graph::graph::without_copy_marks;
use parity_graph::known::is_weight;
use parity_record::api::RawTensor;
use parity_record::kept::{survivors, unmark};
use parity_record::recorder::Recorder;

use super::connection::{failure, speak, with_server};
use super::library::{Given, Library, reader};
use super::model::{Model, Sent};
use super::proxy::{Server, Watch};
use super::wire::{COMPUTE, Version, WireGraph, WireTensor};
use crate::error::{Error, Result};
use crate::gguf::DType;

/// Bytes of token rows in one pass.
const ROWS_BYTES_MAX: usize = 1 << 30;

/// What the connections of one recording share.
pub struct Recording {
    /// Writes the dump.
    pub recorder: Recorder,
    /// The file behind the client.
    pub model: Model,
    /// Protocol of the server that computes.
    pub version: Option<Version>,
    /// Whether any pass was recorded.
    pub begun: bool,
}

/// Memory of a server's device that nodes are kept in.
#[derive(Clone, Copy)]
struct Arena {
    buffer: u64,
    base: u64,
    bytes: u64,
    align: u64,
}

/// One connection.
pub struct Capture<'a> {
    shared: &'a Mutex<Recording>,
    ops: usize,
    /// Names of contexts, by device and the address of their first weight: the recorder knows them by the names' addresses.
    contexts: HashMap<(u32, u64), Box<CString>>,
    arenas: HashMap<u32, Arena>,
    /// Whether passes of this connection were recorded.
    recorded: bool,
}

impl<'a> Capture<'a> {
    /// A connection through which nothing has passed.
    pub fn new(shared: &'a Mutex<Recording>) -> Capture<'a> {
        Capture { shared, ops: 0, contexts: HashMap::new(), arenas: HashMap::new(), recorded: false }
    }

    /// Whether passes of this connection were recorded.
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Token rows of the embedding that the client computed, where the graph reads any.
    fn given(&self, server: &mut Server, graph: &WireGraph, model: &Model) -> Result<Option<Given>> {
        let computed: HashSet<usize> = graph.nodes.iter().copied().collect();
        for (index, leaf) in graph.tensors.iter().enumerate() {
            let is_copy = without_copy_marks(&leaf.name()) != leaf.name() && leaf.view_src == 0;
            let is_rows = leaf.dtype == DType::F32.number() && leaf.ne[0] as usize == model.width();
            let bytes = 4 * model.width() * leaf.ne[1] as usize;
            if computed.contains(&index) || !is_copy || !is_rows || leaf.bytes() != Ok(bytes as u64) {
                continue;
            }
            if bytes > ROWS_BYTES_MAX {
                return Err(server.peer.error("computes more token rows in one graph than are taken"));
            }
            let mut values = vec![0; bytes];
            server.get(leaf, 0, &mut values)?;
            if let Some(tokens) = model.tokens(&values) {
                let table = model.table_on_the_wire();
                return Ok(table.map(|table| Given { rows: index, table, tokens, values }));
            }
        }
        Ok(None)
    }

    /// The name of the context that computes a graph: of those with other weights it is another.
    fn context(&mut self, graph: &WireGraph) -> *const CString {
        let weight = graph.tensors.iter().find(|leaf| is_weight(&leaf.name()) && leaf.op == 0);
        let known = self.contexts.iter().find(|((device, _), _)| *device == graph.device);
        let name = match (weight, known) {
            // What reads no weights, as a shift of a cache does, is the first's.
            (None, Some((_, name))) => name,
            _ => self.contexts.entry((graph.device, weight.map_or(0, |weight| weight.data))).or_insert_with(
                || Box::new(CString::new(format!("RPC{}", graph.device)).unwrap_or_default()),
            ),
        };
        &raw const **name
    }

    /// Gives nodes that are to be kept memory of their own, where later nodes would write over them; nothing where the server
    /// has none.
    ///
    /// # Safety
    /// `marked` are tensors of the library.
    unsafe fn relocate(&mut self, library: &mut Library, marked: &[RawTensor], device: u32) -> Result<bool> {
        let raw = library.raw();
        // SAFETY: a graph of this library.
        let described = unsafe { reader().describe(std::ptr::null_mut(), raw) };
        // SAFETY: as above; all have their memory.
        let survives = unsafe { survivors(reader(), &described) };
        let lost = |raw: &RawTensor| {
            described
                .address
                .iter()
                .position(|at| at == raw)
                .is_some_and(|id| id < survives.len() && !survives[id])
        };
        let moved: Vec<usize> =
            marked.iter().filter(|raw| lost(raw)).map(|&raw| library.index(raw)).collect();
        let moved: Vec<usize> = moved.into_iter().filter(|&index| library.view_of(index).is_none()).collect();
        if moved.is_empty() {
            return Ok(true);
        }
        let align = self.arenas.get(&device).map_or(128, |arena| arena.align);
        let room = |index: &usize| (library.tensors[*index].bytes() as u64).next_multiple_of(align) + align;
        let needed = moved.iter().map(room).sum::<u64>();
        let arena = match self.arenas.get(&device) {
            Some(arena) if arena.bytes >= needed => *arena,
            // Twice as much as is asked for: what came before stays until the connection ends, since servers forget their
            // graphs with any buffer that is freed.
            _ => match speak(|server| server.allocate(device, 2 * needed))? {
                None => return Ok(false),
                Some((buffer, base, align)) => Arena { buffer, base, bytes: 2 * needed, align },
            },
        };
        self.arenas.insert(device, arena);
        let mut next = arena.base.next_multiple_of(arena.align);
        for &index in &moved {
            library.tensors[index].place(arena.buffer, next);
            next = (next + library.tensors[index].bytes() as u64).next_multiple_of(arena.align);
        }
        for index in 0..library.tensors.len() {
            if let Some(root) = library.view_of(index).filter(|root| moved.contains(root)) {
                let (buffer, data) = (library.tensors[root].wire.buffer, library.tensors[root].wire.data);
                let offset = library.tensors[index].wire.view_offs;
                library.tensors[index].place(buffer, data.wrapping_add(offset));
            }
        }
        Ok(true)
    }

    /// Computes a graph as the recorder wants it; whether it did.
    fn pass(&mut self, recorder: &mut Recorder, graph: &WireGraph, given: Option<Given>) -> Result<bool> {
        let context = self.context(graph);
        // SAFETY: the name stays where it is until the connection ends.
        let name = unsafe { &*context };
        let sched = context.cast_mut().cast();
        let mut library = Library::new(graph, self.ops, name, given).map_err(|e| Error::new("a graph", e))?;
        library.take_copied_views(&mut |copy| {
            let mut values = vec![0; copy.bytes().unwrap_or(0) as usize];
            speak(|server| server.get(copy, 0, &mut values))?;
            Ok(values)
        })?;
        // SAFETY: a graph of this library, which stays where it is while it is recorded.
        let marked = unsafe { recorder.mark(reader(), sched, library.raw()) };
        library.take_flags();
        // SAFETY: marked by the recorder just now.
        if !marked.is_empty() && !unsafe { self.relocate(&mut library, &marked, graph.device) }? {
            // SAFETY: as above.
            unsafe { unmark(reader(), &marked) };
            library.take_flags();
            recorder.cannot_keep("the server has no memory to keep all of its nodes at once");
        }
        let raw = library.raw();
        // SAFETY: as above.
        let asked = unsafe { recorder.begin(reader(), sched, raw) };
        if !recorder.is_in_pass() {
            return failure().map_or(Ok(false), Err);
        }
        let computed = compute(recorder, &library, graph, asked);
        // SAFETY: the pass that was begun.
        unsafe { recorder.end(reader(), sched, computed.is_ok()) };
        computed.and(failure().map_or(Ok(true), Err))
    }
}

/// Has the nodes computed: all at once, or up to each that is asked for.
fn compute(recorder: &mut Recorder, library: &Library, graph: &WireGraph, asked: bool) -> Result<()> {
    let indices = graph.indices();
    let mut group = Vec::new();
    for (index, raw) in library.nodes() {
        let held = &library.tensors[index];
        // SAFETY: a node of the graph that the recorder has begun.
        let wanted = asked && unsafe { recorder.wants(reader(), raw) };
        if held.local.is_none() {
            group.push(index);
        }
        if wanted {
            flush(library, graph, &indices, &mut group)?;
            // SAFETY: as above; it has been computed.
            unsafe { recorder.computed(reader(), raw) };
        }
    }
    flush(library, graph, &indices, &mut group)
}

/// Has some nodes computed, one behind the other: what they read that is none of them becomes a leaf.
fn flush(
    library: &Library,
    graph: &WireGraph,
    indices: &HashMap<u64, usize>,
    group: &mut Vec<usize>,
) -> Result<()> {
    let is_computed = |index: &usize| {
        let wire = &library.tensors[*index].wire;
        wire.flags & COMPUTE != 0 && !wire.ne.contains(&0)
    };
    if !group.iter().any(is_computed) {
        group.clear();
        return Ok(());
    }
    let own: HashSet<usize> = group.iter().copied().collect();
    let mut needed: Vec<bool> = vec![false; graph.tensors.len()];
    // From the last to the first: sources stand before what reads them.
    for index in (0..graph.tensors.len()).rev() {
        let wire = &library.tensors[index].wire;
        let is_own = own.contains(&index);
        needed[index] |= is_own;
        if needed[index] {
            let sources = wire.src.iter().filter(|_| is_own).chain([&wire.view_src]);
            sources.filter_map(|id| indices.get(id)).for_each(|&source| needed[source] = true);
        }
    }
    let mut part = WireGraph { device: graph.device, ..WireGraph::default() };
    let mut places = HashMap::new();
    for index in (0..graph.tensors.len()).filter(|&index| needed[index]) {
        let mut wire: WireTensor = library.tensors[index].wire.clone();
        if !own.contains(&index) {
            (wire.op, wire.src) = (0, [0; 10]);
        }
        places.insert(index, part.tensors.len());
        part.tensors.push(wire);
    }
    part.nodes = group.drain(..).filter_map(|index| places.get(&index).copied()).collect();
    speak(|server| server.compute(&part))
}

impl Watch for Capture<'_> {
    fn met(&mut self, version: Version) -> Result<()> {
        self.ops = version.ops().unwrap_or(0);
        let mut recording = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        recording.recorder.set_version(Some(format!("ggml RPC {version}")));
        recording.version = Some(version);
        Ok(())
    }

    fn set(&mut self, tensor: &WireTensor, offset: u64, piece: &[u8]) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).model.sent(
            tensor,
            offset,
            Sent::Bytes(piece),
        );
    }

    fn set_kept(&mut self, tensor: &WireTensor, offset: u64, hash: u64) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).model.sent(
            tensor,
            offset,
            Sent::Hash(hash),
        );
    }

    fn compute(&mut self, server: &mut Server, graph: &Rc<WireGraph>) -> Result<bool> {
        let shared = self.shared;
        let mut recording = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Recording { recorder, model, begun, .. } = &mut *recording;
        if let Some(name) = model.other_weight() {
            let name = name.to_owned();
            recorder
                .stop(&format!("the client sent other bytes of {name} than {} holds", model.path.display()));
            return Ok(false);
        }
        let given = self.given(server, graph, model)?;
        // Without rows of tokens it is a part of a pass, another model, or what encodes images; or a shift of a cache.
        if given.is_none() && self.multiplies(graph) {
            if *begun && graph.tensors.iter().any(|tensor| model.has(&tensor.name())) {
                recorder.stop(
                    "a graph begins with no rows of the file's token embedding: where the client or another device computes a \
                     part of each pass, -ngl 99 without -ot, -nkvo and a second device leaves all to one",
                );
            }
            return Ok(false);
        }
        let recorded = with_server(server, || self.pass(recorder, graph, given))?;
        *begun |= recorded;
        self.recorded |= recorded;
        Ok(recorded)
    }
}

impl Capture<'_> {
    /// Whether a graph has products.
    fn multiplies(&self, graph: &WireGraph) -> bool {
        let is_product = |&node: &usize| {
            let wire = &graph.tensors[node];
            let name = super::ops::description(wire.op, &wire.params, self.ops);
            name.is_some_and(|name| Op::parse(&name.to_string_lossy()) == Op::MulMat)
        };
        graph.nodes.iter().any(is_product)
    }
}
