//! A live `ggml_cgraph` as plain data.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};

use parity_graph::graph::{contiguous, element_size, without_copy_marks};
use parity_graph::params::WORDS;
use parity_graph::{Graph, Id, MAX_SRC, Op, Params, Tensor, View};

use crate::api::{Api, RawGraph, RawSched, RawTensor, text};
use crate::kept::Place;
use crate::layout::{FLAG_COMPUTE, TensorLayout};

/// A graph with the addresses of its tensors.
pub struct Described {
    /// As plain data.
    pub graph: Graph,
    /// Address of each tensor of it.
    pub address: Vec<RawTensor>,
    /// Tensors that are no nodes, as they were met: each is pointed to by a node or one before it.
    pub(crate) met: Vec<RawTensor>,
    /// Copies of leaves to other backends that were met, by their names.
    copied: HashMap<String, usize>,
}

/// Reads fields of tensors.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    /// The library that made the tensors.
    pub api: &'a Api,
    /// Its layout.
    pub layout: &'a TensorLayout,
}

impl Reader<'_> {
    /// # Safety
    /// `tensor` is a live tensor of the library, and a `T` stands `offset` bytes into it.
    unsafe fn field<T: Copy>(&self, tensor: RawTensor, offset: usize) -> T {
        // SAFETY: by the caller's promise.
        unsafe { tensor.cast::<u8>().add(offset).cast::<T>().read_unaligned() }
    }

    /// Sources by slot, without empty ones at the end. `ggml_cast` marks its result as a source of itself: that slot
    /// is empty here.
    unsafe fn sources(&self, tensor: RawTensor) -> Vec<Option<RawTensor>> {
        // SAFETY: the layout was measured on this library.
        let all: [RawTensor; MAX_SRC] = unsafe { self.field(tensor, self.layout.src) };
        let mut slots: Vec<Option<RawTensor>> =
            all.into_iter().map(|src| Some(src).filter(|src| !src.is_null() && *src != tensor)).collect();
        while slots.last() == Some(&None) {
            slots.pop();
        }
        slots
    }

    /// What a tensor says of itself, without its sources.
    ///
    /// # Safety
    /// `raw` is a live tensor of the library.
    pub unsafe fn tensor(&self, raw: RawTensor) -> Tensor {
        let extents = |values: [i64; 4]| values.map(|value| usize::try_from(value).unwrap_or(0));
        // SAFETY: the layout was measured on this library, and ggml's strings live with it.
        unsafe {
            let name = text((self.api.get_name)(raw)).unwrap_or_default();
            let op = text((self.api.op_desc)(raw)).unwrap_or_default();
            let flags: i32 = self.field(raw, self.layout.flags);
            let dtype = text((self.api.type_name)(self.field(raw, self.layout.dtype))).unwrap_or_default();
            let ne = extents(self.field(raw, self.layout.ne));
            let words: [u32; WORDS] = self.field(raw, self.layout.op_params);
            let is_view = !self.field::<RawTensor>(raw, self.layout.view_src).is_null();
            // A tensor with memory of its own has no gaps; of quantised types only ggml knows the strides.
            let plain = !is_view && element_size(&dtype).is_none();
            Tensor {
                name: without_copy_marks(&name).to_owned(),
                op: Op::parse(&op),
                params: Params(words),
                nb: if plain { contiguous(&dtype, ne) } else { extents(self.field(raw, self.layout.nb)) },
                dtype: dtype.into_owned(),
                ne,
                srcs: Vec::new(),
                view: None,
                // Libraries without the flag compute every node and never set the bit.
                computed: (!self.api.has_compute_flag || flags & FLAG_COMPUTE != 0) && !ne.contains(&0),
                backend: None,
            }
        }
    }

    /// The numbers that the library's own enumeration gives the ops of some tensors, by ggml's description: they move from
    /// release to release.
    ///
    /// # Safety
    /// Live tensors of the library.
    pub unsafe fn op_numbers(&self, tensors: &[RawTensor]) -> BTreeMap<String, i32> {
        let of = |&raw: &RawTensor| {
            // SAFETY: the layout was measured on this library, and ggml's strings live with it.
            let (name, number) = unsafe { (text((self.api.op_desc)(raw)), self.field(raw, self.layout.op)) };
            Some((name?.into_owned(), number))
        };
        tensors.iter().filter_map(of).collect()
    }

    /// Describes a graph that `sched` is about to compute.
    ///
    /// # Safety
    /// `graph` is a live graph of the library, `sched` null or its scheduler.
    pub unsafe fn describe(&self, sched: RawSched, graph: RawGraph) -> Described {
        // SAFETY: by the caller's promise.
        let nodes = usize::try_from(unsafe { (self.api.graph_n_nodes)(graph) }).unwrap_or(0);
        let address: Vec<RawTensor> =
            // SAFETY: the index is within the graph.
            (0..nodes).map(|i| unsafe { (self.api.graph_node)(graph, i as i32) }).collect();
        let mut known: HashMap<RawTensor, Id> =
            address.iter().enumerate().map(|(id, &raw)| (raw, id)).collect();
        // SAFETY: nodes of a live graph.
        let tensors = address.iter().map(|&raw| unsafe { self.tensor(raw) }).collect();
        let graph_so_far = Graph { tensors, nodes };
        let mut described =
            Described { graph: graph_so_far, address, met: Vec::new(), copied: HashMap::new() };
        let mut by_name: HashMap<String, Id> = HashMap::new();
        let mut backends: HashMap<RawTensor, Option<String>> = HashMap::new();
        for id in 0..nodes {
            let raw = described.address[id];
            // SAFETY: a node of a live graph, whose sources are alive too.
            unsafe { self.edges(graph, raw, id, &mut described, &mut known, &by_name) };
            by_name.insert(described.graph.tensors[id].name.clone(), id);
            // SAFETY: as above.
            described.graph.tensors[id].backend = unsafe { self.backend(sched, raw, &mut backends) };
        }
        described
    }

    /// Name of the backend that a node is computed on.
    unsafe fn backend(
        &self,
        sched: RawSched,
        raw: RawTensor,
        known: &mut HashMap<RawTensor, Option<String>>,
    ) -> Option<String> {
        if sched.is_null() {
            return None;
        }
        // SAFETY: by the caller's promise.
        let backend = unsafe { (self.api.sched_get_tensor_backend)(sched, raw) };
        let name = || {
            // SAFETY: a backend of the scheduler, and ggml's strings live with it.
            (!backend.is_null()).then(|| unsafe { text((self.api.backend_name)(backend)) }).flatten()
        };
        known.entry(backend).or_insert_with(|| name().map(std::borrow::Cow::into_owned)).clone()
    }

    /// Notes the sources of tensor `id`, and whose memory it lies in.
    unsafe fn edges(
        &self,
        graph: RawGraph,
        raw: RawTensor,
        id: Id,
        described: &mut Described,
        known: &mut HashMap<RawTensor, Id>,
        by_name: &HashMap<String, Id>,
    ) {
        // SAFETY: by the caller's promise.
        let sources = unsafe { self.sources(raw) };
        let mut srcs = Vec::with_capacity(sources.len());
        for source in sources {
            // SAFETY: as above.
            srcs.push(source.map(|raw| unsafe { self.source(graph, raw, described, known, by_name) }));
        }
        // SAFETY: the layout was measured on this library.
        let (view, offset) = unsafe {
            let view: RawTensor = self.field(raw, self.layout.view_src);
            (view, self.field::<usize>(raw, self.layout.view_offs))
        };
        let root = (!view.is_null()).then(|| {
            // SAFETY: as above.
            unsafe { self.source(graph, view, described, known, by_name) }
        });
        let tensors = &mut described.graph.tensors;
        tensors[id].srcs = srcs;
        // What was copied from another backend may have lost the view that it was made from.
        let root = root.map(|root| (root, tensors[root].view));
        tensors[id].view = root.filter(|(root, _)| *root != id).map(|(root, of)| match of {
            Some(of) => View { root: of.root, offset: of.offset + offset },
            None => View { root, offset },
        });
    }

    /// The id of a source: a node, a leaf met before, or a new leaf.
    ///
    /// What the scheduler copied to another backend counts as what it is a copy of: the latest node of
    /// that name and size, or the leaf that the program itself fills.
    unsafe fn source(
        &self,
        graph: RawGraph,
        raw: RawTensor,
        described: &mut Described,
        known: &mut HashMap<RawTensor, Id>,
        by_name: &HashMap<String, Id>,
    ) -> Id {
        if let Some(&id) = known.get(&raw) {
            return id;
        }
        described.met.push(raw);
        // SAFETY: the source of a live node.
        let tensor = unsafe { self.tensor(raw) };
        let mut address = raw;
        // SAFETY: as above.
        let full_name = unsafe { text((self.api.get_name)(raw)) }.unwrap_or_default();
        if full_name != tensor.name {
            let same = |id: &&usize| described.graph.tensors[**id].ne == tensor.ne;
            if let Some(&id) = by_name.get(&tensor.name).filter(same) {
                return id;
            }
            if let Ok(name) = CString::new(tensor.name.as_str()) {
                // Copies of several leaves with one name have one name too, and come in their order.
                let count = described.copied.entry(full_name.into_owned()).or_insert(0);
                *count += 1;
                let before = *count;
                // SAFETY: a live graph and a C string.
                let first = unsafe { self.named(graph, &name, 1) };
                let is_leaf = |raw: &RawTensor| {
                    // SAFETY: a tensor of the graph.
                    let alike = |raw| unsafe { self.tensor(raw) }.ne == tensor.ne;
                    !raw.is_null()
                        && known.get(raw).is_none_or(|&id| id >= described.graph.nodes)
                        && alike(*raw)
                };
                let original = match before {
                    nth if nth > 1 && is_leaf(&first) => {
                        // SAFETY: as above.
                        Some(unsafe { self.named(graph, &name, nth) }).filter(is_leaf).unwrap_or(first)
                    }
                    _ => first,
                };
                if !original.is_null() {
                    described.met.push(original);
                }
                if let Some(&id) = known.get(&original) {
                    return id;
                }
                address = if original.is_null() { raw } else { original };
            }
        }
        // Views of leaves are followed, so that a cache or an input is told by its own name.
        let id = described.graph.tensors.len();
        known.insert(raw, id);
        known.insert(address, id);
        described.graph.tensors.push(Tensor { computed: true, ..tensor });
        described.address.push(address);
        // SAFETY: as above.
        unsafe { self.edges(graph, raw, id, described, known, by_name) };
        id
    }

    /// The tensor number `n`, from 1 on, of a graph that has this name. The library finds the first one: the name of each
    /// that was found is changed until the search is over.
    ///
    /// # Safety
    /// `graph` is a live graph of the library that nobody else uses meanwhile.
    unsafe fn named(&self, graph: RawGraph, name: &CStr, n: usize) -> RawTensor {
        /// No name of a tensor begins so.
        const HIDDEN: u8 = 1;
        let Some(&first) = name.to_bytes().first() else { return std::ptr::null_mut() };
        let mut hidden: Vec<*mut u8> = Vec::new();
        let mut found = std::ptr::null_mut();
        for nth in 1..=n {
            // SAFETY: by the caller's promise; a name is the tensor's own memory and not empty.
            unsafe {
                found = (self.api.graph_get_tensor)(graph, name.as_ptr());
                if found.is_null() {
                    break;
                }
                if nth < n {
                    let letter = (self.api.get_name)(found).cast_mut().cast::<u8>();
                    letter.write(HIDDEN);
                    hidden.push(letter);
                }
            }
        }
        // SAFETY: as above.
        hidden.into_iter().for_each(|letter| unsafe { letter.write(first) });
        found
    }

    /// The bytes of a leaf, in logical order, with its element type by ggml's name; `None` where it has no memory or
    /// gaps.
    ///
    /// # Safety
    /// `raw` is a live tensor whose data is set.
    pub unsafe fn bytes(&self, raw: RawTensor) -> Option<Vec<u8>> {
        // SAFETY: by the caller's promise; bytes are asked for within the tensor.
        unsafe {
            if (self.api.get_data)(raw).is_null() {
                return None;
            }
            let mut bytes = vec![0u8; (self.api.nbytes)(raw)];
            (self.api.tensor_get)(raw, bytes.as_mut_ptr().cast(), 0, bytes.len());
            Some(bytes)
        }
    }

    /// The memory that a tensor lies in: its buffer, its first byte and the one behind its last; `None` where it has none.
    ///
    /// # Safety
    /// `raw` is a live tensor of the library.
    pub unsafe fn place(&self, raw: RawTensor) -> Option<Place> {
        // SAFETY: the layout was measured on this library; the buffer is the pointer before the extents.
        let (buffer, data, bytes) = unsafe {
            let buffer: RawTensor = self.field(raw, self.layout.ne - size_of::<RawTensor>());
            (buffer as usize, (self.api.get_data)(raw) as usize, (self.api.nbytes)(raw))
        };
        (data != 0).then_some((buffer, data, data + bytes))
    }

    /// Whether what lies in a buffer, by its address, lies in the program's own memory, as far as the library tells.
    ///
    /// # Safety
    /// A live buffer of the library, or none.
    pub unsafe fn is_host(&self, buffer: usize) -> bool {
        // SAFETY: by the caller's promise.
        buffer != 0 && self.api.buffer_is_host.is_some_and(|ask| unsafe { ask(buffer as RawTensor) })
    }

    /// Sources that the scheduler copied to another backend, as it marks them by their names.
    ///
    /// # Safety
    /// `raw` is a live tensor of the library.
    pub unsafe fn copies_for(&self, raw: RawTensor) -> Vec<RawTensor> {
        // SAFETY: by the caller's promise.
        let sources = unsafe { self.sources(raw) };
        let is_copy = |src: &RawTensor| {
            // SAFETY: the source of a live tensor, and ggml's strings live with it.
            let name = unsafe { text((self.api.get_name)(*src)) };
            name.is_some_and(|name| without_copy_marks(&name) != name)
        };
        sources.into_iter().flatten().filter(is_copy).collect()
    }

    /// The source in a slot; null where the slot is empty.
    ///
    /// # Safety
    /// `tensor` is a live tensor of the library.
    pub unsafe fn source_in(&self, tensor: RawTensor, slot: usize) -> RawTensor {
        assert!(slot < MAX_SRC, "a tensor has {MAX_SRC} sources");
        // SAFETY: the layout was measured on this library.
        unsafe { self.field(tensor, self.layout.src + slot * size_of::<RawTensor>()) }
    }

    /// Reads a leaf of 32-bit integers.
    ///
    /// # Safety
    /// `raw` is a live tensor whose data is set.
    pub unsafe fn i32s(&self, raw: RawTensor) -> Option<Vec<i32>> {
        // SAFETY: by the caller's promise; bytes are asked for within the tensor.
        unsafe {
            if text((self.api.type_name)(self.field(raw, self.layout.dtype)))? != "i32"
                || (self.api.get_data)(raw).is_null()
            {
                return None;
            }
            let mut bytes = vec![0u8; (self.api.nbytes)(raw)];
            (self.api.tensor_get)(raw, bytes.as_mut_ptr().cast(), 0, bytes.len());
            Some(bytes.chunks_exact(4).map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
    }

    /// Reads a mask of f32 or f16: its columns, and which elements are not -inf, row after row. Where distances are added
    /// to the scores (ALiBi), they stand in the mask.
    ///
    /// # Safety
    /// `raw` is a live tensor whose data is set.
    pub unsafe fn visible(&self, raw: RawTensor) -> Option<(usize, Vec<bool>)> {
        // SAFETY: by the caller's promise; bytes are asked for within the tensor.
        unsafe {
            let hidden = match &*text((self.api.type_name)(self.field(raw, self.layout.dtype)))? {
                "f32" => f32::NEG_INFINITY.to_ne_bytes().to_vec(),
                "f16" => half::f16::NEG_INFINITY.to_ne_bytes().to_vec(),
                _ => return None,
            };
            if (self.api.get_data)(raw).is_null() {
                return None;
            }
            let ne: [i64; 4] = self.field(raw, self.layout.ne);
            let mut bytes = vec![0u8; (self.api.nbytes)(raw)];
            (self.api.tensor_get)(raw, bytes.as_mut_ptr().cast(), 0, bytes.len());
            let visible = bytes.chunks_exact(hidden.len()).map(|element| element != hidden);
            Some((usize::try_from(ne[0]).ok().filter(|&columns| columns > 0)?, visible.collect()))
        }
    }
}
