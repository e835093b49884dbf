//! How closely a computation is looked at: an eval callback makes the scheduler compute node by node, with a
//! synchronisation behind each. Where the wanted nodes are marked as outputs before their memory is laid out, the allocator
//! keeps all of them; the graph then runs whole, and everything is read afterwards.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use parity_graph::{Graph, Id};

use crate::api::RawTensor;
use crate::describe::{Described, Reader};
use crate::map::Mapping;

/// `GGML_TENSOR_FLAG_OUTPUT`
const FLAG_OUTPUT: i32 = 2;

/// How closely is looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Observe {
    /// Not at all: the logits are read that the program computes anyway.
    None,
    /// The graph runs whole, with its nodes kept as outputs.
    Outputs,
    /// Node by node, with a callback.
    #[default]
    Nodes,
}

impl fmt::Display for Observe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Observe::None => "none",
            Observe::Outputs => "outputs",
            Observe::Nodes => "nodes",
        })
    }
}

impl FromStr for Observe {
    type Err = String;

    fn from_str(text: &str) -> Result<Observe, String> {
        let all = [Observe::None, Observe::Outputs, Observe::Nodes];
        let found = all.into_iter().find(|level| level.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is none of none, outputs and nodes"))
    }
}

/// The nodes whose memory must stay until a graph is computed, so that some nodes can be read then; `None` where a later
/// node writes over one of them, which nothing can keep.
pub fn memory(graph: &Graph, nodes: impl Iterator<Item = Id>) -> Option<BTreeSet<Id>> {
    let mut all = BTreeSet::new();
    for node in nodes {
        let root = graph.root(node);
        if graph.writers(root).any(|writer| writer > node) {
            return None;
        }
        all.extend([node, root].into_iter().filter(|&id| !graph.is_leaf(id)));
    }
    Some(all)
}

/// Marks what is to be kept of a graph that is about to get its memory; what was marked, so that it can be undone.
///
/// # Safety
/// The reader's library made the graph.
pub unsafe fn mark(
    reader: Reader<'_>,
    described: &Described,
    mapping: &Mapping,
    wanted: &dyn Fn(usize) -> bool,
) -> Vec<RawTensor> {
    let captures = mapping.captures.iter().enumerate().filter(|(index, _)| wanted(*index));
    let storages = captures.map(|(_, capture)| capture.region.storage);
    let Some(nodes) = memory(&described.graph, storages) else { return Vec::new() };
    let mut marked = Vec::new();
    for raw in nodes.into_iter().map(|node| described.address[node]) {
        // SAFETY: a tensor of the graph.
        if !unsafe { is_kept(reader, raw) } {
            // SAFETY: as above.
            unsafe { set(reader, raw, true) };
            marked.push(raw);
        }
    }
    marked
}

/// Undoes [`mark`].
///
/// # Safety
/// As there: what was marked is still alive.
pub unsafe fn unmark(reader: Reader<'_>, marked: &[RawTensor]) {
    // SAFETY: by the caller's promise.
    marked.iter().for_each(|&raw| unsafe { set(reader, raw, false) });
}

/// Whether a tensor's memory stays until the graph is computed.
///
/// # Safety
/// A live tensor of the reader's library.
pub unsafe fn is_kept(reader: Reader<'_>, raw: RawTensor) -> bool {
    // SAFETY: the layout was measured on this library.
    unsafe { flags(reader, raw).read() & FLAG_OUTPUT != 0 }
}

unsafe fn set(reader: Reader<'_>, raw: RawTensor, kept: bool) {
    // SAFETY: as above.
    let flags = unsafe { flags(reader, raw) };
    // SAFETY: as above; nobody else changes the flags of a graph that is about to get its memory.
    unsafe { flags.write(if kept { flags.read() | FLAG_OUTPUT } else { flags.read() & !FLAG_OUTPUT }) };
}

unsafe fn flags(reader: Reader<'_>, raw: RawTensor) -> *mut i32 {
    // SAFETY: the field lies within the tensor.
    unsafe { raw.cast::<u8>().add(reader.layout.flags).cast() }
}

#[cfg(test)]
mod tests {
    use parity_graph::{Op, Tensor, View};

    use super::*;

    fn tensor(op: Op, srcs: Vec<Option<Id>>, view: Option<View>) -> Tensor {
        let ne = [4, 1, 1, 1];
        Tensor {
            name: String::new(),
            op,
            params: parity_graph::Params([0; 16]),
            dtype: "f32".to_owned(),
            ne,
            nb: parity_graph::graph::contiguous("f32", ne),
            srcs,
            view,
            computed: true,
            backend: None,
        }
    }

    #[test]
    fn what_a_later_node_writes_over_cannot_be_kept() {
        let view = Some(View { root: 0, offset: 0 });
        let nodes = vec![
            tensor(Op::Add, vec![Some(3), Some(3)], None),
            tensor(Op::Mul, vec![Some(0), Some(3)], None),
            tensor(Op::Scale, vec![Some(0)], view),
            tensor(Op::None, vec![], None),
        ];
        let graph = Graph { tensors: nodes, nodes: 3 };
        assert_eq!(memory(&graph, [1].into_iter()), Some(BTreeSet::from([1])));
        // What is computed in place keeps what it lies in.
        assert_eq!(memory(&graph, [2].into_iter()), Some(BTreeSet::from([0, 2])));
        assert_eq!(memory(&graph, [0].into_iter()), None);
    }

    #[test]
    fn levels_are_spelt_as_they_are_read() {
        for level in [Observe::None, Observe::Outputs, Observe::Nodes] {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!("all".parse::<Observe>().is_err());
    }
}
