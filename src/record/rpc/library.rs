//! A graph that crossed the wire in the form that the recorder reads: as tensors of a ggml library, whose functions are here.
//! Values are read from the server when they are asked for.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::LazyLock;

use parity_graph::graph::without_copy_marks;
use parity_record::api::{Api, InitParams, RawGraph, RawSched, RawTensor};
use parity_record::describe::Reader;
use parity_record::layout::TensorLayout;

use super::connection::speak;
use super::ops;
use super::wire::{COMPUTE, SOURCES, Told, WireGraph, WireTensor, named};
use crate::error::Result;
use crate::gguf::DType;

/// A tensor as the recorder reads it.
#[repr(C)]
pub struct Held {
    dtype: i32,
    buffer: usize,
    ne: [i64; 4],
    nb: [usize; 4],
    op: u32,
    params: [u32; 16],
    /// `GGML_TENSOR_FLAG_*`
    pub flags: u32,
    src: [RawTensor; SOURCES],
    view_src: RawTensor,
    view_offs: usize,
    data: usize,
    /// One byte longer than on the wire, so that it ends in zero.
    name: [u8; 65],
    description: &'static CStr,
    backend: *const CString,
    bytes: usize,
    /// As it crosses the wire.
    pub wire: WireTensor,
    /// Its values, where these are here and not on the server.
    pub local: Option<Vec<u8>>,
}

const LAYOUT: TensorLayout = TensorLayout {
    bytes: None,
    dtype: offset_of!(Held, dtype),
    ne: offset_of!(Held, ne),
    nb: offset_of!(Held, nb),
    op: offset_of!(Held, op),
    op_params: offset_of!(Held, params),
    flags: offset_of!(Held, flags),
    src: offset_of!(Held, src),
    view_src: offset_of!(Held, view_src),
    view_offs: offset_of!(Held, view_offs),
    data: offset_of!(Held, data),
    name: offset_of!(Held, name),
};
// The recorder reads the buffer right before the extents.
const _: () = assert!(offset_of!(Held, buffer) + size_of::<usize>() == offset_of!(Held, ne));

/// The buffer of values that are here.
const HERE: usize = usize::MAX;
/// The backend of what the client computed.
static CLIENT: LazyLock<CString> = LazyLock::new(|| c"CPU".to_owned());

impl Held {
    fn new(wire: WireTensor, ops: usize, backend: &CString) -> Told<Held> {
        let of = |what: String| format!("tensor `{}`: {what}", wire.name());
        let described = ops::description(wire.op, &wire.params, ops);
        let description = described.ok_or_else(|| of(format!("its op is number {} of {ops}", wire.op)))?;
        let mut name = [0; 65];
        name[..64].copy_from_slice(&wire.name);
        let mut held = Held {
            dtype: wire.dtype as i32,
            buffer: 0,
            ne: wire.ne.map(i64::from),
            nb: wire.nb.map(|bytes| bytes as usize),
            op: wire.op,
            params: wire.params,
            flags: wire.flags,
            src: [null_mut(); SOURCES],
            view_src: null_mut(),
            view_offs: wire.view_offs as usize,
            data: 0,
            name,
            description,
            backend,
            bytes: wire.bytes().map_err(of)? as usize,
            wire,
            local: None,
        };
        held.place(held.wire.buffer, held.wire.data);
        Ok(held)
    }

    /// Puts it to an address of a buffer of the server's.
    pub fn place(&mut self, buffer: u64, data: u64) {
        (self.wire.buffer, self.wire.data) = (buffer, data);
        (self.buffer, self.data) = (buffer as usize, data as usize);
    }

    /// Keeps its values here.
    pub fn keep(&mut self, values: Vec<u8>) {
        (self.buffer, self.data) = (HERE, values.as_ptr() as usize);
        self.local = Some(values);
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What the client computed before the graph: token rows of the embedding, as one more node in front.
pub struct Given {
    /// Index of the leaf that has the rows.
    pub rows: usize,
    /// The table of the model file: a name, a type and extents, without values.
    pub table: WireTensor,
    /// (T,) ids.
    pub tokens: Vec<u32>,
    /// (T, D) rows, f32.
    pub values: Vec<u8>,
}

/// A graph as the recorder reads it. Tensors point at each other: it is never moved once it is made.
pub struct Library {
    /// Nodes and leaves as in the message, then what was put in front.
    pub tensors: Box<[Held]>,
    nodes: Vec<RawTensor>,
}

impl Library {
    /// Makes one of a message, with what the client computed in front. `backend` outlives it.
    ///
    /// # Errors
    /// An op that the version does not have.
    pub fn new(graph: &WireGraph, ops: usize, backend: &CString, given: Option<Given>) -> Told<Library> {
        let index = graph.indices();
        let mut tensors = Vec::with_capacity(graph.tensors.len() + 3);
        for wire in &graph.tensors {
            tensors.push(Held::new(wire.clone(), ops, backend)?);
        }
        let rows = given.as_ref().map(|given| given.rows);
        if let Some(given) = given {
            in_front(&mut tensors, given, ops)?;
        }
        let mut library = Library { tensors: tensors.into_boxed_slice(), nodes: Vec::new() };
        let here = library.tensors.as_mut_ptr();
        let at = |index: usize| -> RawTensor { here.wrapping_add(index).cast() };
        let first = graph.tensors.len();
        // Whoever reads the rows reads the node that they are of.
        let of = |id: u64| match index.get(&id) {
            Some(&leaf) if Some(leaf) == rows => at(first),
            Some(&index) => at(index),
            None => null_mut(),
        };
        for wire in 0..first {
            let held = &mut library.tensors[wire];
            held.src = held.wire.src.map(of);
            held.view_src = of(held.wire.view_src);
        }
        if rows.is_some() {
            library.tensors[first].src[..2].copy_from_slice(&[at(first + 1), at(first + 2)]);
            library.nodes.push(at(first));
        }
        library.nodes.extend(graph.nodes.iter().map(|&node| at(node)));
        Ok(library)
    }

    /// Gives leaves that stay with the client, and of which it sent copies of views, the values of these. `read` reads a
    /// copy from the server.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn take_copied_views(&mut self, read: &mut dyn FnMut(&WireTensor) -> Result<Vec<u8>>) -> Result<()> {
        let copies: Vec<WireTensor> = self.tensors.iter().map(|held| held.wire.clone()).collect();
        for index in 0..copies.len() {
            let view = &copies[index];
            let leaf = self
                .view_of(index)
                .filter(|&leaf| copies[leaf].buffer == 0 && self.tensors[leaf].local.is_none());
            let Some(leaf) = leaf.filter(|_| view.buffer == 0 && !view.ne.contains(&0)) else { continue };
            let name = view.name();
            let is_copy = |copy: &&WireTensor| {
                let own = copy.name();
                copy.buffer != 0
                    && own != name
                    && without_copy_marks(&own) == name
                    && (copy.ne, copy.nb) == (view.ne, view.nb)
            };
            // Parts of a leaf are not put together: a view of all of it is what there is.
            let is_whole = view.view_offs == 0 && view.bytes() == copies[leaf].bytes();
            if let Some(copy) = copies.iter().find(is_copy).filter(|_| is_whole) {
                let values = read(copy)?;
                self.tensors[leaf].keep(values);
            }
        }
        Ok(())
    }

    /// For the recorder, as long as this is not moved.
    pub fn raw(&mut self) -> RawGraph {
        std::ptr::from_mut(self).cast()
    }

    /// The nodes: indices, in their order, with their addresses.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, RawTensor)> {
        self.nodes.iter().map(|&raw| (self.index(raw), raw))
    }

    /// Sends the flags that the recorder has set or cleared.
    pub fn take_flags(&mut self) {
        self.tensors.iter_mut().for_each(|held| held.wire.flags = held.flags);
    }

    /// The index of a tensor of it.
    pub fn index(&self, raw: RawTensor) -> usize {
        (raw as usize - self.tensors.as_ptr() as usize) / size_of::<Held>()
    }

    /// The index of the tensor that a tensor is a view of.
    pub fn view_of(&self, index: usize) -> Option<usize> {
        Some(self.tensors[index].view_src).filter(|raw| !raw.is_null()).map(|raw| self.index(raw))
    }
}

/// Puts the node of the embedding, its table and its token ids behind the tensors of the message.
fn in_front(tensors: &mut Vec<Held>, given: Given, ops: usize) -> Told<()> {
    let leaf = tensors[given.rows].wire.clone();
    let number = (0..ops as u32).find(|&op| ops::description(op, &[0; 16], ops) == Some(c"GET_ROWS"));
    let own = without_copy_marks(&leaf.name()).to_owned();
    let node = WireTensor { op: number.unwrap_or(0), flags: COMPUTE, name: named(&own), ..leaf.clone() };
    let count = given.tokens.len() as u32;
    let ids = WireTensor {
        dtype: DType::I32.number(),
        ne: [count, 1, 1, 1],
        nb: [4, 4 * count, 4 * count, 4 * count],
        name: named("inp_tokens"),
        ..leaf
    };
    for (wire, values) in [
        (node, Some(given.values)),
        (given.table, None),
        (ids, Some(given.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect())),
    ] {
        let mut held = Held::new(wire, ops, &CLIENT)?;
        values.into_iter().for_each(|values| held.keep(values));
        tensors.push(held);
    }
    Ok(())
}

/// ggml's names of types by their numbers.
static TYPES: LazyLock<HashMap<i32, CString>> = LazyLock::new(|| {
    let name = |dtype: DType| {
        let name = dtype.name().to_ascii_lowercase();
        CString::new(name.strip_suffix("_k").map_or(name.clone(), |stem| format!("{stem}_K")))
            .unwrap_or_default()
    };
    DType::all().map(|dtype| (dtype.number() as i32, name(dtype))).collect()
});

/// A reader of such graphs.
pub fn reader() -> Reader<'static> {
    Reader { api: &API, layout: &LAYOUT }
}

// SAFETY (of all below): the recorder calls them with tensors and graphs of a `Library`, and with a backend's name in the
// place of a scheduler and of a backend.
unsafe fn held<'a>(raw: RawTensor) -> &'a Held {
    // SAFETY: see above.
    unsafe { &*raw.cast::<Held>() }
}

unsafe fn library<'a>(raw: RawGraph) -> &'a Library {
    // SAFETY: see above.
    unsafe { &*raw.cast::<Library>() }
}

unsafe extern "C" fn get_name(raw: RawTensor) -> *const c_char {
    // SAFETY: see above.
    unsafe { held(raw) }.name.as_ptr().cast()
}

unsafe extern "C" fn get_data(raw: RawTensor) -> *mut c_void {
    // SAFETY: see above.
    unsafe { held(raw) }.data as *mut c_void
}

unsafe extern "C" fn op_desc(raw: RawTensor) -> *const c_char {
    // SAFETY: see above.
    unsafe { held(raw) }.description.as_ptr()
}

unsafe extern "C" fn type_name(number: c_int) -> *const c_char {
    TYPES.get(&number).map_or(c"".as_ptr(), |name| name.as_ptr())
}

unsafe extern "C" fn nbytes(raw: RawTensor) -> usize {
    // SAFETY: see above.
    unsafe { held(raw) }.bytes
}

unsafe extern "C" fn tensor_get(raw: RawTensor, out: *mut c_void, offset: usize, bytes: usize) {
    // SAFETY: see above; the caller has room for the bytes.
    let (held, out) = unsafe { (held(raw), std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes)) };
    match held.local.as_ref().map(|local| local.get(offset..offset + bytes)) {
        Some(Some(local)) => out.copy_from_slice(local),
        Some(None) => {
            drop(speak(|server| Err::<(), _>(server.peer.error("has fewer values than were asked for"))))
        }
        // What goes wrong is kept, and asked for before the values count.
        None => drop(speak(|server| server.get(&held.wire, offset as u64, out))),
    }
}

unsafe extern "C" fn tensor_set(raw: RawTensor, bytes: *const c_void, offset: usize, length: usize) {
    // SAFETY: see above; the caller has the bytes.
    let (held, bytes) = unsafe { (held(raw), std::slice::from_raw_parts(bytes.cast::<u8>(), length)) };
    drop(speak(|server| server.put(&held.wire, offset as u64, bytes)));
}

unsafe extern "C" fn graph_n_nodes(raw: RawGraph) -> c_int {
    // SAFETY: see above.
    unsafe { library(raw) }.nodes.len() as c_int
}

unsafe extern "C" fn graph_node(raw: RawGraph, index: c_int) -> RawTensor {
    // SAFETY: see above.
    unsafe { library(raw) }.nodes.get(index as usize).copied().unwrap_or(null_mut())
}

/// The node of a name: what leaves were copied from stays with the client.
unsafe extern "C" fn graph_get_tensor(graph: RawGraph, name: *const c_char) -> RawTensor {
    // SAFETY: see above; a C string.
    let (nodes, name) = unsafe { (&library(graph).nodes, CStr::from_ptr(name)) };
    // SAFETY: see above.
    let is_it = |raw: &&RawTensor| CStr::from_bytes_until_nul(unsafe { &held(**raw).name }) == Ok(name);
    nodes.iter().find(is_it).copied().unwrap_or(null_mut())
}

unsafe extern "C" fn tensor_backend(_sched: RawSched, raw: RawTensor) -> *mut c_void {
    // SAFETY: see above.
    unsafe { held(raw) }.backend.cast_mut().cast()
}

unsafe extern "C" fn backends(_sched: RawSched) -> c_int {
    1
}

unsafe extern "C" fn backend(sched: RawSched, _index: c_int) -> *mut c_void {
    sched
}

unsafe extern "C" fn backend_name(backend: *mut c_void) -> *const c_char {
    // SAFETY: see above.
    unsafe { &*backend.cast::<CString>() }.as_ptr()
}

// A layout that is known is not measured, and ops are known by their descriptions.
unsafe extern "C" fn no_arena(_params: InitParams) -> *mut c_void {
    null_mut()
}
unsafe extern "C" fn nothing(_: *mut c_void) {}
unsafe extern "C" fn no_tensor(_: *mut c_void, _: c_int, _: i64, _: i64, _: i64, _: i64) -> RawTensor {
    null_mut()
}
unsafe extern "C" fn no_sum(_: *mut c_void, _: RawTensor, _: RawTensor) -> RawTensor {
    null_mut()
}
unsafe extern "C" fn no_norm(_: *mut c_void, _: RawTensor, _: f32) -> RawTensor {
    null_mut()
}
unsafe extern "C" fn no_view(_: *mut c_void, _: RawTensor, _: i64, _: usize) -> RawTensor {
    null_mut()
}
unsafe extern "C" fn no_name(_number: c_int) -> *const c_char {
    std::ptr::null()
}

static API: Api = Api {
    init: no_arena,
    free: nothing,
    new_tensor_4d: no_tensor,
    add: no_sum,
    rms_norm: no_norm,
    view_1d: no_view,
    set_input: nothing,
    get_name,
    get_data,
    op_desc,
    type_name,
    nbytes,
    op_name: no_name,
    tensor_set,
    tensor_get,
    graph_n_nodes,
    graph_node,
    graph_get_tensor,
    sched_get_tensor_backend: tensor_backend,
    sched_get_n_backends: backends,
    sched_get_backend: backend,
    sched_synchronize: nothing,
    backend_name,
    version: None,
    commit: None,
    backend_get_device: None,
    dev_memory: None,
    buffer_is_host: None,
    has_compute_flag: true,
};
