//! A live `ggml_cgraph` as plain data.

use std::collections::HashMap;
use std::ffi::CString;

use crate::api::{Api, RawGraph, RawTensor, text};
use crate::graph::{Graph, Id, Op, Tensor, without_copy_marks};
use crate::layout::{FLAG_COMPUTE, Layout, MAX_SRC};

/// A graph with the addresses of its tensors.
pub struct Described {
    /// As plain data.
    pub graph: Graph,
    /// Address of each tensor of it.
    pub address: Vec<RawTensor>,
}

/// Reads fields of tensors.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    /// The library that made the tensors.
    pub api: &'a Api,
    /// Its layout.
    pub layout: &'a Layout,
}

impl Reader<'_> {
    /// # Safety
    /// `tensor` is a live tensor of the library, and a `T` stands `offset` bytes into it.
    unsafe fn field<T: Copy>(&self, tensor: RawTensor, offset: usize) -> T {
        // SAFETY: by the caller's promise.
        unsafe { tensor.cast::<u8>().add(offset).cast::<T>().read_unaligned() }
    }

    /// Sources that are set.
    unsafe fn sources(&self, tensor: RawTensor) -> Vec<RawTensor> {
        // SAFETY: the layout was measured on this library.
        let all: [RawTensor; MAX_SRC] = unsafe { self.field(tensor, self.layout.src) };
        all.into_iter().take_while(|src| !src.is_null()).collect()
    }

    unsafe fn tensor(&self, raw: RawTensor) -> Tensor {
        let extents = |values: [i64; 4]| values.map(|value| usize::try_from(value).unwrap_or(0));
        // SAFETY: the layout was measured on this library, and ggml's strings live with it.
        unsafe {
            let name = text((self.api.get_name)(raw)).unwrap_or_default();
            let op = text((self.api.op_desc)(raw)).unwrap_or_default();
            let flags: i32 = self.field(raw, self.layout.flags);
            Tensor {
                name: without_copy_marks(&name).to_owned(),
                op: Op::parse(&op),
                dtype: text((self.api.type_name)(self.field(raw, self.layout.dtype)))
                    .unwrap_or_default()
                    .into_owned(),
                ne: extents(self.field(raw, self.layout.ne)),
                nb: extents(self.field(raw, self.layout.nb)),
                srcs: Vec::new(),
                view_offset: self.field(raw, self.layout.view_offs),
                // Libraries without the flag compute every node and never set the bit.
                computed: !self.api.has_compute_flag || flags & FLAG_COMPUTE != 0,
            }
        }
    }

    /// Describes a graph that is about to be computed.
    ///
    /// # Safety
    /// `graph` is a live graph of the library.
    pub unsafe fn describe(&self, graph: RawGraph) -> Described {
        // SAFETY: by the caller's promise.
        let nodes = usize::try_from(unsafe { (self.api.graph_n_nodes)(graph) }).unwrap_or(0);
        let address: Vec<RawTensor> =
            // SAFETY: the index is within the graph.
            (0..nodes).map(|i| unsafe { (self.api.graph_node)(graph, i as i32) }).collect();
        let mut known: HashMap<RawTensor, Id> =
            address.iter().enumerate().map(|(id, &raw)| (raw, id)).collect();
        // SAFETY: nodes of a live graph.
        let tensors = address.iter().map(|&raw| unsafe { self.tensor(raw) }).collect();
        let mut described = Described { graph: Graph { tensors, nodes }, address };
        let mut by_name: HashMap<String, Id> = HashMap::new();
        for id in 0..nodes {
            // SAFETY: a node of a live graph, whose sources are alive too.
            let sources = unsafe { self.sources(described.address[id]) };
            let srcs = sources
                .into_iter()
                // SAFETY: as above.
                .map(|raw| unsafe { self.source(graph, raw, &mut described, &mut known, &by_name) })
                .collect();
            described.graph.tensors[id].srcs = srcs;
            by_name.insert(described.graph.tensors[id].name.clone(), id);
        }
        described
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
        // SAFETY: the source of a live node.
        let mut tensor = unsafe { self.tensor(raw) };
        let mut address = raw;
        // SAFETY: as above.
        let full_name = unsafe { text((self.api.get_name)(raw)) }.unwrap_or_default();
        if full_name != tensor.name {
            let same = |id: &&usize| described.graph.tensors[**id].ne == tensor.ne;
            if let Some(&id) = by_name.get(&tensor.name).filter(same) {
                return id;
            }
            if let Ok(name) = CString::new(tensor.name.as_str()) {
                // SAFETY: a live graph and a C string.
                let original = unsafe { (self.api.graph_get_tensor)(graph, name.as_ptr()) };
                if let Some(&id) = known.get(&original) {
                    return id;
                }
                address = if original.is_null() { raw } else { original };
            }
        }
        // Views of leaves are followed, so that a cache or an input is told by its own name.
        // SAFETY: as above.
        let sources = unsafe { self.sources(raw) };
        let id = described.graph.tensors.len();
        known.insert(raw, id);
        known.insert(address, id);
        tensor.srcs = Vec::new();
        described.graph.tensors.push(tensor);
        described.address.push(address);
        // SAFETY: as above.
        let srcs =
            sources.into_iter().map(|src| unsafe { self.source(graph, src, described, known, by_name) });
        let srcs: Vec<Id> = srcs.collect();
        described.graph.tensors[id].srcs = srcs;
        id
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

    /// Reads a leaf of f32 or f16: its columns, and which elements are zero, row after row.
    ///
    /// # Safety
    /// `raw` is a live tensor whose data is set.
    pub unsafe fn zeros(&self, raw: RawTensor) -> Option<(usize, Vec<bool>)> {
        // SAFETY: by the caller's promise; bytes are asked for within the tensor.
        unsafe {
            let size = match &*text((self.api.type_name)(self.field(raw, self.layout.dtype)))? {
                "f32" => 4,
                "f16" => 2,
                _ => return None,
            };
            if (self.api.get_data)(raw).is_null() {
                return None;
            }
            let ne: [i64; 4] = self.field(raw, self.layout.ne);
            let mut bytes = vec![0u8; (self.api.nbytes)(raw)];
            (self.api.tensor_get)(raw, bytes.as_mut_ptr().cast(), 0, bytes.len());
            let zero = bytes.chunks_exact(size).map(|element| element.iter().all(|&byte| byte == 0));
            Some((usize::try_from(ne[0]).ok().filter(|&columns| columns > 0)?, zero.collect()))
        }
    }
}
