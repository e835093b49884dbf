//! Whether a graph is computed once more as it was: told by the bytes of its tensors. To describe one of a thousand tensors takes
//! 2 ms, longer than a GPU takes to compute it; to compare its bytes takes 0.05 ms.

use crate::api::{RawGraph, RawSched, RawTensor};
use crate::describe::{Described, Reader};

/// The bytes of all tensors that a description was made of.
pub struct Image {
    sched: RawSched,
    graph: RawGraph,
    nodes: usize,
    /// The nodes, then every other tensor behind one that points to it.
    tensors: Vec<RawTensor>,
    bytes: Vec<u8>,
}

impl Image {
    /// The image of a graph that was just described; `None` where the library does not say how large a tensor is.
    ///
    /// # Safety
    /// As for [`Reader::describe`], whose result `described` is.
    pub unsafe fn of(
        reader: Reader<'_>,
        sched: RawSched,
        graph: RawGraph,
        described: &Described,
    ) -> Option<Image> {
        let nodes = described.graph.nodes;
        let size = reader.layout.bytes?;
        let tensors: Vec<RawTensor> =
            described.address[..nodes].iter().chain(&described.met).copied().collect();
        let mut bytes = Vec::with_capacity(size * tensors.len());
        for &raw in &tensors {
            // SAFETY: a live tensor of the library, which has at least so many bytes.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(raw.cast::<u8>(), size) });
        }
        Some(Image { sched, graph, nodes, tensors, bytes })
    }

    /// Whether that graph is the one that is about to be computed, and nothing of it has changed.
    ///
    /// # Safety
    /// As for [`Reader::describe`].
    pub unsafe fn is_still(&self, reader: Reader<'_>, sched: RawSched, graph: RawGraph) -> bool {
        let Some(size) = reader.layout.bytes else { return false };
        let node = |id: usize| {
            // SAFETY: a live graph, of which that many nodes are there.
            unsafe { (reader.api.graph_node)(graph, id as i32) }
        };
        // SAFETY: a live graph.
        let nodes = || usize::try_from(unsafe { (reader.api.graph_n_nodes)(graph) }) == Ok(self.nodes);
        if (self.sched, self.graph) != (sched, graph) || !nodes() {
            return false;
        }
        // Nodes are alive, and so is what tensors point to that are as they were: none is read before one that leads to it.
        (0..self.nodes).all(|id| self.tensors[id] == node(id))
            && self.tensors.iter().zip(self.bytes.chunks_exact(size)).all(|(raw, bytes)| {
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts(raw.cast::<u8>(), size) == bytes }
            })
    }
}
