//! Printed nodes as graphs, one for each forward pass, and the printed values of each checkpoint.

use std::collections::{BTreeMap, HashMap, HashSet};

use parity_dump::seen::{SeenPart, SeenRow, SeenSum};
use parity_dump::{Checkpoint, Kind};
use parity_graph::graph::{contiguous, without_copy_marks};
use parity_graph::weights::{ATTN_QKV, BIAS, Name, TOKEN_EMBD, WEIGHT};
use parity_graph::{Graph, Id, Op, Params, Tensor, View};
use parity_record::map::{Capture, Mapping, map};

use super::text::PrintedNode;

/// Half a unit of the last digit of `%12.4f`.
pub const VALUE_HALF_UNIT: f64 = 0.5e-4;
/// Half a unit of the last digit of `%f`.
pub const SUM_HALF_UNIT: f64 = 0.5e-6;

/// One forward pass.
pub struct Pass<'t> {
    nodes: &'t [PrintedNode],
    graph: Graph,
    /// What its graph holds.
    pub mapping: Mapping,
    /// T
    pub rows: usize,
}

/// Whether the printed sums are of all values, or of the printed ones alone as up to August 2025.
pub fn sums_are_of_printed(nodes: &[PrintedNode]) -> bool {
    let gaps = nodes.iter().filter(|node| node.values.len() < node.elements());
    let mut sums = gaps.filter_map(|node| node.sum.map(|sum| (node, sum))).peekable();
    sums.peek().is_some()
        && sums.all(|(node, sum)| {
            let printed: f64 = node.values.iter().map(|(_, value)| f64::from(*value)).sum();
            let size: f64 = node.values.iter().map(|(_, value)| f64::from(value.abs())).sum();
            let n = node.values.len() as f64;
            // Each value was rounded to its last digit, and the sum in f32 after each.
            let explained = n * VALUE_HALF_UNIT + SUM_HALF_UNIT + n * f64::from(f32::EPSILON) * size;
            !sum.is_finite() || !printed.is_finite() || (sum - printed).abs() <= explained
        })
}

/// Takes the nodes apart into forward passes: one begins with the embedding of its tokens, or, where that
/// was not printed, where a weight of a layer is used again.
pub fn passes(nodes: &[PrintedNode]) -> Vec<Pass<'_>> {
    let mut starts = vec![0];
    let mut used: HashSet<(&str, &str)> = HashSet::new();
    for (index, node) in nodes.iter().enumerate() {
        let sources = || node.sources.iter().map(|(name, _)| without_copy_marks(name));
        let embedding = |name| matches!(Name::of(name), Name { layer: None, part: TOKEN_EMBD, kind: WEIGHT });
        let embeds = node.op == "GET_ROWS" && sources().next().is_some_and(embedding);
        let in_layer = |name: &&str| Name::of(name).layer.is_some();
        let mut weights = sources().filter(|name| in_layer(name) && Name::of(name).kind == WEIGHT);
        let again = weights.any(|name| !used.insert((&node.op, name)));
        if (embeds && !used.is_empty()) || again {
            starts.push(index);
            used.clear();
            used.extend(sources().filter(in_layer).map(|name| (&*node.op, name)));
        }
    }
    starts.push(nodes.len());
    starts.windows(2).map(|ends| Pass::new(&nodes[ends[0]..ends[1]])).collect()
}

impl<'t> Pass<'t> {
    fn new(nodes: &'t [PrintedNode]) -> Pass<'t> {
        let mut graph = graph(nodes);
        separate_windows(&mut graph);
        let mapping = map(&graph);
        let of_whole = mapping.captures.iter().filter(|capture| capture.picked.is_none());
        let widest = of_whole.map(rows_of).max().unwrap_or(0);
        let rows = if mapping.known.rows > 0 { mapping.known.rows } else { widest };
        Pass { nodes, graph, mapping, rows }
    }

    /// The printed values of each checkpoint; `first` is the position of the first row. What cannot be
    /// placed is named in `unmapped`.
    pub fn seen(
        &self,
        first: usize,
        of_printed: bool,
        unmapped: &mut Vec<String>,
    ) -> HashMap<Checkpoint, SeenPart> {
        let mut aliases: BTreeMap<Id, Vec<Id>> = BTreeMap::new();
        for id in 0..self.graph.nodes {
            let known = !matches!(self.graph.get(id).op, Op::Permute | Op::Transpose)
                && (self.graph.get(id).op != Op::View || start(&self.graph, id) > 0 || self.is_window(id));
            if known {
                aliases.entry(self.graph.storage(id)).or_default().push(id);
            }
        }
        let mut out = HashMap::new();
        // Whoever computes what was printed has no more than the fixed checkpoints.
        for capture in self.mapping.captures.iter().filter(|capture| capture.checkpoint.kind().is_fixed()) {
            let Some(positions) = self.positions(capture, first) else {
                unmapped.push(format!("{}: which rows these are was not printed", capture.checkpoint));
                continue;
            };
            if !rows_fit(capture) {
                unmapped.push(format!(
                    "{}: its rows are not as wide as where they were computed",
                    capture.checkpoint
                ));
                continue;
            }
            let nodes = aliases.get(&capture.region.storage).map_or(&[][..], Vec::as_slice);
            out.insert(capture.checkpoint, self.part(capture, &positions, nodes, of_printed));
        }
        out
    }

    /// Whether a view is one of the windows of a fused product, whose places are known.
    fn is_window(&self, id: Id) -> bool {
        let storage = self.graph.storage(id);
        self.graph.get(id).op == Op::View
            && self.mapping.captures.iter().any(|capture| {
                capture.region.storage == storage
                    && capture.region.elements() < self.graph.get(storage).ne.iter().product()
            })
    }

    /// Positions of a checkpoint's rows: all, or the last where only that one was picked.
    fn positions(&self, capture: &Capture, first: usize) -> Option<Vec<u32>> {
        let rows = rows_of(capture);
        let positions = match (capture.picked, rows) {
            (_, rows) if rows == self.rows => first..first + rows,
            (Some(_), 0) => 0..0,
            (Some(_), 1) => (first + self.rows).checked_sub(1)?..first + self.rows,
            _ => return None,
        };
        positions.map(|position| u32::try_from(position).ok()).collect()
    }

    fn part(&self, capture: &Capture, positions: &[u32], nodes: &[Id], of_printed: bool) -> SeenPart {
        let matrix = capture.checkpoint.kind().is_optional();
        let storage = &self.nodes[capture.region.storage];
        // Where a sum is of the values of one node, no other node's may join them.
        let nodes = if of_printed { std::slice::from_ref(&capture.region.storage) } else { nodes };
        let mut rows: Vec<BTreeMap<u32, f32>> = vec![BTreeMap::new(); positions.len()];
        for &id in nodes {
            for &(flat, value) in &self.nodes[id].values {
                let place = self.offset(id, flat).and_then(|offset| index(capture, offset));
                let Some(at) = place else { continue };
                let (row, column) = match (matrix, &at[..]) {
                    (false, [row, rest @ ..]) => {
                        let inner = rest.iter().zip(&capture.region.extents[1..]);
                        (*row, inner.fold(0, |column, (i, n)| column * n + i))
                    }
                    (true, &[head, row, cached]) => {
                        let visible = positions.get(row).map_or(0, |&position| position as usize + 1);
                        if cached >= visible {
                            continue;
                        }
                        (row, head * visible + cached)
                    }
                    _ => continue,
                };
                if let (Some(row), Ok(column)) = (rows.get_mut(row), u32::try_from(column)) {
                    row.entry(column).or_insert(value);
                }
            }
        }
        let whole = capture.region.elements() == storage.elements();
        // Masked scores and the padding of the cache are in the sum and nobody's concern.
        let sum = storage.sum.filter(|_| whole && !matrix);
        SeenPart {
            row_shape: if matrix {
                vec![capture.shape[0], capture.shape[2]]
            } else {
                capture.shape[1..].to_vec()
            },
            half_unit: VALUE_HALF_UNIT,
            rows: positions.iter().zip(rows).map(|(&position, row)| seen_row(position, row)).collect(),
            sum: sum.map(|value| SeenSum {
                value: Some(value).filter(|value| value.is_finite()),
                half_unit: SUM_HALF_UNIT,
                of_seen: of_printed,
            }),
        }
    }

    /// Byte offset of a node's value within its storage.
    fn offset(&self, id: Id, mut flat: usize) -> Option<usize> {
        let tensor = self.graph.get(id);
        let mut offset = start(&self.graph, id);
        for axis in 0..tensor.ne.len() {
            offset = offset.checked_add((flat % tensor.ne[axis].max(1)).checked_mul(tensor.nb[axis])?)?;
            flat /= tensor.ne[axis].max(1);
        }
        Some(offset)
    }
}

fn seen_row(position: u32, row: BTreeMap<u32, f32>) -> SeenRow {
    let (columns, values) = row
        .into_iter()
        .map(|(column, value)| (column, Some(value).filter(|value| value.is_finite())))
        .unzip();
    SeenRow { position, columns, values }
}

/// Whether a token row has as many values in memory as its shape says: a text can say two things.
fn rows_fit(capture: &Capture) -> bool {
    let product = |sizes: &[usize]| sizes.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
    let (shape, extents) = (capture.shape.get(1..), capture.region.extents.get(1..));
    let row = shape.zip(extents).map(|(shape, extents)| (product(shape), product(extents)));
    capture.checkpoint.kind().is_optional()
        || row.is_some_and(|(shape, extents)| shape.is_some() && shape == extents)
}

/// Token rows of a checkpoint.
fn rows_of(capture: &Capture) -> usize {
    capture.shape.get(usize::from(capture.checkpoint.kind().is_optional())).copied().unwrap_or(0)
}

/// Indices within a checkpoint's region of the value that stands `offset` bytes into its storage.
fn index(capture: &Capture, offset: usize) -> Option<Vec<usize>> {
    let region = &capture.region;
    let mut rest = offset.checked_sub(region.offset)?;
    let mut axes: Vec<usize> = (0..region.extents.len()).filter(|&axis| region.extents[axis] > 1).collect();
    axes.sort_by_key(|&axis| std::cmp::Reverse(region.strides[axis]));
    let mut index = vec![0; region.extents.len()];
    for axis in axes {
        let stride = region.strides[axis].max(1);
        index[axis] = rest / stride;
        rest %= stride;
        if index[axis] >= region.extents[axis] {
            return None;
        }
    }
    (rest == 0).then_some(index)
}

/// The nodes as a graph: a source is the latest node of its name and extents, or a leaf.
fn graph(nodes: &[PrintedNode]) -> Graph {
    let mut graph = Graph { tensors: Vec::new(), nodes: nodes.len() };
    let mut latest: HashMap<(&str, [usize; 4]), Id> = HashMap::new();
    let mut sources = Vec::new();
    for (id, node) in nodes.iter().enumerate() {
        graph.tensors.push(tensor(&node.name, Op::parse(&node.op), &node.dtype, node.ne));
        let found = node.sources.iter().map(|(name, ne)| {
            let name = without_copy_marks(name);
            (name, *ne, latest.get(&(name, *ne)).copied())
        });
        sources.push(found.collect::<Vec<_>>());
        latest.insert((without_copy_marks(&node.name), node.ne), id);
    }
    let mut leaves: HashMap<(&str, [usize; 4]), Id> = HashMap::new();
    for (id, sources) in sources.into_iter().enumerate() {
        for (name, ne, node) in sources {
            let src = node.unwrap_or_else(|| {
                *leaves.entry((name, ne)).or_insert_with(|| {
                    graph.tensors.push(tensor(name, Op::None, "", ne));
                    graph.tensors.len() - 1
                })
            });
            graph.tensors[id].srcs.push(Some(src));
        }
    }
    // Where a view begins is not printed: at the start, until separate_windows finds out.
    for id in 0..graph.nodes {
        if graph.get(id).op.is_view() {
            let root = graph.storage(id);
            graph.tensors[id].view = (root != id).then_some(View { root, offset: 0 });
        }
    }
    graph
}

/// Bytes from the start of the memory that a view lies in.
fn start(graph: &Graph, id: Id) -> usize {
    graph.get(id).view.map_or(0, |view| view.offset)
}

/// A tensor without gaps: what strides a view has is not printed.
fn tensor(name: &str, op: Op, dtype: &str, ne: [usize; 4]) -> Tensor {
    Tensor {
        name: without_copy_marks(name).to_owned(),
        op,
        params: Params::default(),
        dtype: dtype.to_owned(),
        ne,
        nb: contiguous(dtype, ne),
        srcs: Vec::new(),
        view: None,
        computed: true,
        backend: None,
    }
}

/// Gives the windows of a fused product of queries, keys and values the places that they have: one behind
/// the other in each row. Queries are what attention looks with, values are not turned.
fn separate_windows(graph: &mut Graph) {
    let fused: Vec<Id> = graph.computed().filter(|&id| reads_fused(graph, id)).collect();
    for whole in fused {
        let mut roles: HashMap<Kind, Id> = HashMap::new();
        for id in 0..graph.nodes {
            if graph.get(id).op != Op::View || graph.src(id, 0).map(|src| graph.storage(src)) != Some(whole) {
                continue;
            }
            roles.entry(role(graph, id)).or_insert(id);
        }
        let windows: Option<Vec<Id>> =
            [Kind::Q, Kind::K, Kind::V].iter().map(|kind| roles.get(kind).copied()).collect();
        let row_bytes = graph.get(whole).nb[1];
        let rows = graph.get(whole).ne[1];
        let width = |id: Id| graph.get(id).ne.iter().product::<usize>().checked_div(rows).unwrap_or(0);
        let Some(windows) =
            windows.filter(|w| w.iter().map(|&id| width(id)).sum::<usize>() == graph.get(whole).ne[0])
        else {
            continue;
        };
        let mut offset = 0usize;
        for (id, width) in windows.iter().map(|&id| (id, width(id))).collect::<Vec<_>>() {
            let bytes = width.saturating_mul(graph.get(id).nb[0]);
            let tensor = &mut graph.tensors[id];
            tensor.view = Some(View { root: whole, offset });
            // The axis of rows is the last one: (E, H, T) or (H·E, T).
            let axis = if tensor.ne[2] == rows && tensor.ne[1] != rows || tensor.ne[2] > 1 { 2 } else { 1 };
            for nb in &mut tensor.nb[axis..] {
                *nb = row_bytes;
            }
            offset = offset.saturating_add(bytes);
        }
    }
}

/// Whether a node is the product with a fused weight, or, where there is one, the sum with its bias.
fn reads_fused(graph: &Graph, id: Id) -> bool {
    let reads = |id: Id, kind: &str| {
        let is_fused = |name: &Name<'_>| (name.part, name.kind) == (ATTN_QKV, kind) && name.layer.is_some();
        graph.sources(id).any(|src| graph.is_leaf(src) && is_fused(&Name::of(&graph.get(src).name)))
    };
    let biased = || (0..graph.nodes).any(|sum| graph.sources(sum).any(|src| src == id) && reads(sum, BIAS));
    reads(id, BIAS) || reads(id, WEIGHT) && !biased()
}

/// What a window holds, by where its values go.
fn role(graph: &Graph, window: Id) -> Kind {
    let turned = graph.computed().find(|&id| {
        graph.get(id).op == Op::Rope && graph.src(id, 0).is_some_and(|src| reaches(graph, src, window))
    });
    let Some(turned) = turned else { return Kind::V };
    let looks = graph.computed().any(|id| {
        let query = match graph.get(id).op {
            Op::MulMat => graph.src(id, 1),
            Op::FlashAttn => graph.src(id, 0),
            _ => None,
        };
        query.is_some_and(|src| graph.origin(src) == turned)
    });
    if looks { Kind::Q } else { Kind::K }
}

/// Whether a chain of views, copies and norms leads from `id` to `target`.
fn reaches(graph: &Graph, mut id: Id, target: Id) -> bool {
    for _ in 0..graph.tensors.len() {
        let tensor = graph.get(id);
        let passes = tensor.op.is_view() || tensor.op.is_copy() || matches!(tensor.op, Op::RmsNorm | Op::Mul);
        match graph.src(id, 0) {
            _ if id == target => return true,
            Some(src) if passes => id = src,
            _ => return false,
        }
    }
    false
}
