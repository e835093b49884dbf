//! How closely a computation is looked at: an eval callback makes the scheduler compute node by node, with a
//! synchronisation behind each. Where the wanted nodes are marked as outputs before their memory is laid out, the allocator
//! keeps all of them; the graph then runs whole, and everything is read afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt;
use std::str::FromStr;

use parity_graph::{Graph, Id};

use crate::api::{RawSched, RawTensor, text};
use crate::describe::{Described, Reader};

/// `GGML_TENSOR_FLAG_OUTPUT`
const FLAG_OUTPUT: i32 = 2;

/// Backends whose kept outputs have the bits of nodes that are asked for one by one, by their names without number:
/// `scripts/ab-observe.sh` shows it (of CUDA reports/backends/observe-cuda-h200.txt). Vulkan has other bits (llvmpipe, llama.cpp 0.5.0):
/// where a matmul is an output, the addition behind it sums squares for the norm after it, in another order
/// (reports/backends/README.md).
const SHOWN: [&str; 2] = [HOST, "CUDA"];
/// The one that computes in the program's own memory.
const HOST: &str = "CPU";

/// Part of a card's free memory that kept nodes may take: the rest is for what else is laid out, and for libraries that take
/// memory when they first compute.
const SHARE_OF_CARD: u64 = 2;

/// Bytes that kept nodes may take on the cards of a scheduler, where any tells.
///
/// # Safety
/// The reader's library made `sched`.
pub unsafe fn room_on_cards(reader: Reader<'_>, sched: RawSched) -> Option<u64> {
    let free = |backend| {
        let (of, memory) = reader.api.backend_get_device.zip(reader.api.dev_memory)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a backend of the scheduler, and functions of its library.
        unsafe {
            let device = of(backend);
            (!device.is_null()).then(|| memory(device, &raw mut free, &raw mut total))?;
        }
        Some(free as u64 / SHARE_OF_CARD)
    };
    // SAFETY: by the caller's promise.
    let all = unsafe { backends(reader, sched) };
    let cards = all.into_iter().filter(|(name, _)| name != HOST);
    cards.filter_map(|(_, backend)| free(backend)).min()
}

/// Names of a scheduler's backends, and these.
///
/// # Safety
/// The reader's library made `sched`.
pub unsafe fn backends(reader: Reader<'_>, sched: RawSched) -> Vec<(String, *mut c_void)> {
    // SAFETY: by the caller's promise.
    let count = unsafe { (reader.api.sched_get_n_backends)(sched) };
    let named = |index| {
        // SAFETY: as above; ggml's strings live with it.
        unsafe {
            let backend = (reader.api.sched_get_backend)(sched, index);
            let name = text((reader.api.backend_name)(backend)).unwrap_or_default();
            (name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned(), backend)
        }
    };
    (0..count).map(named).collect()
}

/// Whether there are backends, and [`SHOWN`] lists all of them.
pub fn all_shown(backends: &[(String, *mut c_void)]) -> bool {
    !backends.is_empty() && backends.iter().all(|(name, _)| SHOWN.contains(&name.as_str()))
}

/// How closely is looked at what these backends compute: by itself not at all of a card's nodes at once where the library does not tell
/// how much memory the card has.
pub fn level(asked: Observe, reader: Reader<'_>, backends: &[(String, *mut c_void)]) -> Observe {
    let tells = reader.api.dev_memory.is_some() || backends.iter().all(|(name, _)| name == HOST);
    if asked == Observe::Auto && !tells { Observe::Nodes } else { asked.on(backends) }
}

/// How closely is looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Observe {
    /// [`Observe::Outputs`] where that was shown to have the same bits on every backend, [`Observe::Nodes`] elsewhere.
    #[default]
    Auto,
    /// Not at all: the logits are read that the program computes anyway.
    None,
    /// The graph runs whole, with its nodes kept as outputs.
    Outputs,
    /// Node by node, with a callback.
    Nodes,
}

impl Observe {
    /// All of them, in the order of a list.
    const ALL: [Observe; 4] = [Observe::Auto, Observe::None, Observe::Outputs, Observe::Nodes];

    /// How closely a graph is looked at that these backends compute.
    #[must_use]
    pub fn on(self, backends: &[(String, *mut c_void)]) -> Observe {
        match self {
            Observe::Auto if all_shown(backends) => Observe::Outputs,
            Observe::Auto => Observe::Nodes,
            chosen => chosen,
        }
    }
}

impl fmt::Display for Observe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Observe::Auto => "auto",
            Observe::None => "none",
            Observe::Outputs => "outputs",
            Observe::Nodes => "nodes",
        })
    }
}

impl FromStr for Observe {
    type Err = String;

    fn from_str(text: &str) -> Result<Observe, String> {
        let found = Observe::ALL.into_iter().find(|level| level.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is none of auto, none, outputs and nodes"))
    }
}

/// The tensors whose memory must stay until a graph is computed, so that `nodes` can be read then: all but those that a
/// later node writes over, which nothing can keep.
pub fn memory(graph: &Graph, nodes: impl Iterator<Item = Id>) -> BTreeSet<Id> {
    let kept = |&node: &Id| !graph.writers(graph.root(node)).any(|writer| writer > node);
    let with_root = nodes.filter(kept).flat_map(|node| [node, graph.root(node)]);
    with_root.filter(|&id| !graph.is_leaf(id)).collect()
}

/// Marks these nodes of a graph that is about to get its memory as its outputs; what was marked, so that it can be undone.
///
/// # Safety
/// The reader's library made the tensors.
pub unsafe fn mark(reader: Reader<'_>, nodes: &[RawTensor]) -> Vec<RawTensor> {
    // SAFETY: by the caller's promise.
    let unmarked = |raw: &&RawTensor| unsafe { flags(reader, **raw).read() & FLAG_OUTPUT == 0 };
    let marked: Vec<RawTensor> = nodes.iter().filter(unmarked).copied().collect();
    // SAFETY: as above.
    marked.iter().for_each(|&raw| unsafe { set(reader, raw, true) });
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

/// Which of the nodes of a graph that has its memory still have their values when it was computed, by the memory that later
/// nodes, and copies that the scheduler makes for them, lie in: a mark that came too late keeps nothing.
///
/// # Safety
/// The reader's library made the graph, and has given it memory.
pub unsafe fn survivors(reader: Reader<'_>, described: &Described) -> Vec<bool> {
    let graph = &described.graph;
    let mut survives = vec![true; graph.nodes];
    // What later nodes write, by buffer and first byte, without overlaps: the last byte behind.
    let mut written: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for id in (0..graph.nodes).rev() {
        let raw = described.address[id];
        let tensor = graph.get(id);
        if tensor.op.is_view() || !tensor.computed {
            continue;
        }
        // SAFETY: a tensor of the graph.
        let own = unsafe { reader.place(raw) };
        survives[id] = own.is_some_and(|own| is_free(&written, own));
        // SAFETY: as above, and its sources.
        let copies =
            unsafe { reader.copies_for(raw) }.into_iter().filter_map(|src| unsafe { reader.place(src) });
        own.into_iter().chain(copies).for_each(|place| occupy(&mut written, place));
    }
    survives
}

/// A buffer, its first byte that is taken and the one behind the last.
pub type Place = (usize, usize, usize);

/// Whether nothing of a place is written.
fn is_free(written: &BTreeMap<(usize, usize), usize>, (buffer, begin, end): Place) -> bool {
    let last = written.range((buffer, 0)..(buffer, end)).next_back();
    last.is_none_or(|(_, &behind)| behind <= begin)
}

/// Notes that a place is written, joined with those that it meets.
fn occupy(written: &mut BTreeMap<(usize, usize), usize>, (buffer, mut begin, mut end): Place) {
    while let Some((&(_, from), &to)) = written.range((buffer, 0)..=(buffer, end)).next_back() {
        if to < begin {
            break;
        }
        (begin, end) = (begin.min(from), end.max(to));
        written.remove(&(buffer, from));
    }
    if begin < end {
        written.insert((buffer, begin), end);
    }
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
        assert_eq!(memory(&graph, [1].into_iter()), BTreeSet::from([1]));
        // What is computed in place keeps what it lies in.
        assert_eq!(memory(&graph, [2].into_iter()), BTreeSet::from([0, 2]));
        assert_eq!(memory(&graph, [0, 1].into_iter()), BTreeSet::from([1]));
    }

    #[test]
    fn what_is_written_is_told_from_what_is_free() {
        let mut written = BTreeMap::new();
        for place in [(1, 10, 20), (1, 40, 50), (2, 20, 40), (1, 15, 30), (1, 30, 30)] {
            occupy(&mut written, place);
        }
        assert_eq!(written, BTreeMap::from([((1, 10), 30), ((1, 40), 50), ((2, 20), 40)]));
        for (place, free) in [
            ((1, 30, 40), true),
            ((1, 29, 40), false),
            ((1, 30, 41), false),
            ((1, 0, 100), false),
            ((1, 0, 10), true),
            ((2, 0, 20), true),
            ((2, 10, 30), false),
            ((3, 0, 99), true),
        ] {
            assert_eq!(is_free(&written, place), free, "{place:?}");
        }
    }

    #[test]
    fn outputs_are_kept_where_every_backend_was_shown_to_have_the_same_bits() {
        let on = |level: Observe, names: &[&str]| {
            level.on(&names.iter().map(|n| ((*n).to_owned(), std::ptr::null_mut())).collect::<Vec<_>>())
        };
        assert_eq!(on(Observe::Auto, &["CPU"]), Observe::Outputs);
        assert_eq!(on(Observe::Auto, &["CUDA", "CPU"]), Observe::Outputs);
        assert_eq!(on(Observe::Auto, &["Vulkan", "CPU"]), Observe::Nodes);
        assert_eq!(on(Observe::Auto, &[]), Observe::Nodes);
        assert_eq!(on(Observe::Outputs, &["Unheard"]), Observe::Outputs);
    }

    #[test]
    fn levels_are_spelt_as_they_are_read() {
        for level in Observe::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!("all".parse::<Observe>().is_err());
    }
}
