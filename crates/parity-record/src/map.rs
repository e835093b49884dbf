//! What of a graph is recorded: every arithmetic node under its label, and the fixed checkpoints in the shapes of
//! the vocabulary.

use std::collections::BTreeSet;
use std::sync::Arc;

use parity_dump::{Checkpoint, Element, Kind};
use parity_graph::known::{self, Found, Known};
use parity_graph::{Graph, Id, Leaf, Op, axis, label};

use crate::region::Region;

/// What a graph holds for parity.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// Checkpoints in the order in which their nodes are computed.
    pub captures: Vec<Capture>,
    /// Inputs that nodes read.
    pub leaves: Vec<LeafCapture>,
    /// What has a checkpoint and cannot be recorded, and why, each once.
    pub unmapped: Vec<String>,
    /// What is known by structure.
    pub known: Known,
    /// What the graph does with a cache.
    pub cache: Cached,
}

/// What a graph does with the cells of a cache, or with another state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cached {
    /// Whether it reads or writes any: an encoder does not.
    pub is_there: bool,
    /// Whether what nodes compute of cells that their rows do not see is recorded: attention tile by tile keeps it to itself.
    pub is_shown: bool,
    /// The input that says into which cells the rows are written.
    pub cells: Option<Id>,
}

/// One checkpoint and where its values are.
#[derive(Clone, Debug)]
pub struct Capture {
    /// Its id.
    pub checkpoint: Checkpoint,
    /// Element type in the dump.
    pub element: Element,
    /// Whether the values are i32 and become f32, exactly: indices below 2²⁴.
    pub from_i32: bool,
    /// Shape by the checkpoint vocabulary, slowest axis first. Attention matrices stand here with all
    /// columns of the cache, used or not.
    pub shape: Arc<[usize]>,
    /// Its bytes.
    pub region: Arc<Region>,
    /// Leaf with the indices of the rows that were kept, where some were picked out.
    pub picked: Option<Id>,
    /// Whether the values have no token axis: they are one row, at the last position of the step.
    pub whole: bool,
}

/// One input leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafCapture {
    /// The leaf.
    pub leaf: Id,
    /// Name in the dump, without `leaf.`.
    pub name: String,
    /// Checkpoints that are computed from it with nothing but movements in between.
    pub readers: Vec<Checkpoint>,
}

/// Finds the checkpoints of a graph. A graph that is no forward pass has none.
pub fn map(graph: &Graph) -> Mapping {
    let known = known::find(graph);
    if known.tokens.is_none() && known.found.is_empty() && !graph.is_shift() && !is_multiplied(graph) {
        return Mapping { known, ..Mapping::default() };
    }
    let labels = label::labels_of(graph, &known);
    let axes = axis::token_axes_of(graph, &known);
    let picked = picked_rows(graph, &axes);
    let mut mapping = Mapping::default();
    let mut add = |checkpoint: Checkpoint, tensor: Id, capture: Option<Capture>| match capture {
        Some(mut capture) => {
            capture.picked = picked[capture.region.storage];
            mapping.captures.push(capture);
        }
        None => {
            let tensor = graph.get(tensor);
            let line = format!("{checkpoint}: {} {} {:?}", tensor.op, tensor.dtype, tensor.ne);
            mapping.unmapped.push(line);
        }
    };
    for (checkpoint, found) in known.each() {
        add(checkpoint, found.tensor, fixed(graph, checkpoint, found, axes[found.tensor]));
    }
    for (id, label) in labels.iter().enumerate() {
        if let Some(checkpoint) = label.filter(|label| !known.found.contains_key(label)) {
            add(checkpoint, id, named(graph, checkpoint, id, axes[id]));
        }
    }
    mapping.captures.sort_by_key(|capture| capture.region.storage);
    mapping.leaves = leaves(graph, &labels);
    mapping.cache = cached(graph, known.rows);
    mapping.known = known;
    mapping
}

/// Whether anything is multiplied by a weight: tokens are not all that models read.
fn is_multiplied(graph: &Graph) -> bool {
    let is_product = |id: &Id| graph.get(*id).op == Op::MulMat;
    let of_weight = |id: Id| graph.leaf(graph.origin(id)) == Some(Leaf::Weight);
    graph.computed().filter(is_product).any(|id| graph.sources(id).any(of_weight))
}

/// What a graph of so many rows does with a cache.
fn cached(graph: &Graph, rows: usize) -> Cached {
    let states: BTreeSet<Id> =
        (graph.nodes..graph.tensors.len()).filter(|&id| graph.leaf(id) == Some(Leaf::State)).collect();
    let of_state = |id: Id| states.contains(&graph.root(id));
    let shows = |&id: &Id| graph.is_arithmetic(id) && graph.get(id).op != Op::FlashAttn;
    let writers = graph.computed().filter(|&id| graph.get(id).op == Op::SetRows && of_state(id));
    let mut indices = writers.filter_map(|id| Some(graph.origin(graph.src(id, 1)?)));
    Cached {
        is_there: !states.is_empty(),
        is_shown: (0..graph.nodes).filter(shows).any(|id| graph.sources(id).any(of_state)),
        cells: indices.find(|&leaf| graph.get(leaf).dtype == "i64" && graph.get(leaf).elements() == rows),
    }
}

/// The capture of a fixed id, in the shape that the vocabulary gives it.
fn fixed(graph: &Graph, checkpoint: Checkpoint, found: &Found, axis: Option<usize>) -> Option<Capture> {
    let matrix = checkpoint.kind().is_optional();
    let mut region = match axis {
        Some(_) if !matrix => Region::rows(graph, found.tensor, axis)?,
        _ => Region::of(graph, found.tensor)?,
    };
    if let Some(storage) = found.within {
        region = region.within(storage);
    }
    let shape = if matrix {
        // (H, T, S); with several sequences in the cache there would be a fourth axis.
        (region.extents.len() <= 3).then(|| three(&region.extents))?
    } else {
        let width: usize = region.extents[1..].iter().product();
        let rows = region.extents[0];
        let heads = match (found.heads, region.extents.len()) {
            // Without a token axis in sight, as in graphs that were printed, the heads tell rows apart.
            (Some((heads, head)), _)
                if axis.is_none() && heads * head > 0 && region.elements() % (heads * head) == 0 =>
            {
                return whole_rows(graph, checkpoint, region, heads, head);
            }
            (Some((heads, head)), _) if heads * head == width => Some((heads, head)),
            (None, 3) if is_in_heads(checkpoint.kind()) => Some((region.extents[1], region.extents[2])),
            _ => None,
        };
        match heads {
            Some((heads, head)) => vec![rows, heads, head],
            None => vec![rows, width],
        }
    };
    if matrix {
        region.strides = [vec![0; 3 - region.extents.len()], region.strides].concat();
        region.extents = shape.clone();
    }
    capture(graph, checkpoint, region, shape, false)
}

/// Rows of heads of a tensor whose token axis is not known.
fn whole_rows(
    graph: &Graph,
    checkpoint: Checkpoint,
    region: Region,
    heads: usize,
    head: usize,
) -> Option<Capture> {
    let shape = vec![region.elements() / (heads * head), heads, head];
    capture(graph, checkpoint, region, shape, false)
}

/// Whether the vocabulary splits rows of this kind into heads.
fn is_in_heads(kind: Kind) -> bool {
    matches!(kind, Kind::Q | Kind::K | Kind::V | Kind::QNorm | Kind::KNorm | Kind::QRope | Kind::KRope)
}

/// The capture of a name: token rows first, then the other axes in order.
fn named(graph: &Graph, checkpoint: Checkpoint, id: Id, axis: Option<usize>) -> Option<Capture> {
    let region = Region::rows(graph, id, axis)?;
    let shape = match axis {
        Some(_) => region.extents.clone(),
        None => vec![1, region.elements()],
    };
    capture(graph, checkpoint, region, shape, axis.is_none())
}

fn capture(
    graph: &Graph,
    checkpoint: Checkpoint,
    region: Region,
    shape: Vec<usize>,
    whole: bool,
) -> Option<Capture> {
    let (element, from_i32) = match graph.get(region.storage).dtype.as_str() {
        "f32" => (Element::F32, false),
        "f16" => (Element::F16, false),
        "bf16" => (Element::Bf16, false),
        "i32" => (Element::F32, true),
        _ => return None,
    };
    let (shape, region) = (shape.into(), Arc::new(region));
    Some(Capture { checkpoint, element, from_i32, shape, region, picked: None, whole })
}

/// Extents with axes of extent 1 put in front.
fn three(extents: &[usize]) -> Vec<usize> {
    [vec![1; 3 - extents.len()], extents.to_vec()].concat()
}

/// The inputs that computed nodes read.
fn leaves(graph: &Graph, labels: &[Option<Checkpoint>]) -> Vec<LeafCapture> {
    // Nodes that have a label.
    let mut readers: Vec<Vec<Id>> = vec![Vec::new(); graph.tensors.len()];
    let mut read = vec![false; graph.tensors.len()];
    // From the last node to the first: what reads a movement reads what is moved. What is written into a cache is read
    // by whoever reads the cache.
    for id in (0..graph.nodes).rev().filter(|&id| graph.get(id).computed) {
        let of: Vec<Id> = match labels[id] {
            Some(_) => vec![id],
            None => [&readers[id][..], &readers[graph.root(id)][..]].concat(),
        };
        for src in graph.sources(id).flat_map(|src| [src, graph.root(src)]) {
            read[src] = true;
            readers[src].extend(&of);
            if readers[src].len() > 1 {
                readers[src].sort_unstable();
                readers[src].dedup();
            }
        }
    }
    let names = label::leaf_names(graph).into_iter().enumerate();
    let inputs = names.filter(|(leaf, _)| read[*leaf] && graph.leaf(*leaf) == Some(Leaf::Input));
    inputs
        .filter_map(|(leaf, name)| {
            let readers = readers[leaf].iter().filter_map(|&id| labels[id]).collect();
            Some(LeafCapture { leaf, name: name?, readers })
        })
        .collect()
}

/// Axis of token rows, of a matrix (T, D).
const ROWS: usize = 2;

/// For each tensor, the leaf whose indices say which token rows were picked on the way to it.
fn picked_rows(graph: &Graph, axes: &[Option<usize>]) -> Vec<Option<Id>> {
    let mut picked: Vec<Option<Id>> = vec![None; graph.tensors.len()];
    for id in (0..graph.nodes).filter(|&id| axes[id].is_some()) {
        // Rows that are picked of a state, by sequence, are no token rows.
        let own = (graph.get(id).op == Op::GetRows)
            .then(|| Some((graph.src(id, 0)?, graph.storage(graph.src(id, 1)?))))
            .flatten()
            .filter(|&(table, leaf)| axes[table] == Some(ROWS) && graph.is_leaf(leaf) && axes[leaf].is_none())
            .map(|(_, leaf)| leaf);
        let mut rows = graph.sources(id).filter(|&src| axes[src].is_some());
        picked[id] = own.or_else(|| rows.find_map(|src| picked[src]));
    }
    picked
}

impl Mapping {
    /// The layers that checkpoints are in: one more than the last.
    pub fn layers(&self) -> u32 {
        let layers = self.captures.iter().filter_map(|capture| capture.checkpoint.layer_index());
        layers.max().map_or(0, |last| last + 1)
    }

    /// The nodes that hold checkpoints.
    pub fn nodes(&self) -> BTreeSet<Id> {
        self.captures.iter().map(|capture| capture.region.storage).collect()
    }
}
