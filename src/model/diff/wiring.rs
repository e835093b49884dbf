//! A graph reduced to what it computes: arithmetic nodes, what they read through movements of data, and the numbers
//! that fix them. Both forms of attention become one node, caches are read through.

use std::collections::{BTreeMap, BTreeSet};

use parity_graph::graph::element_size;
use parity_graph::known::{adapter_rank, is_weight};
use parity_graph::params::{HINT_HADAMARD, Kind as WordKind, fields};
use parity_graph::{Graph, Id, Leaf, Op};

use super::parameter::{
    ADAPTER_SCALE, HEADS, KEY_HEADS, NORM_WIDTH, Parameter, QUERY_HEADS, ROPE_WIDTH, parameter,
};

/// A number that fixes what a node computes.
#[derive(Clone, Copy, Debug)]
pub enum Number {
    /// A count or a choice.
    Int(i64),
    /// A quantity.
    Float(f32),
}

/// How many units in the last place two computations of one quantity may differ by: a scale or a factor of YaRN is
/// a chain of at most so many f32 operations.
const CHAIN: f32 = 4.0;

impl Number {
    /// Whether both are one number, but for the rounding of their computation.
    pub fn same(self, other: Number) -> bool {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => a == b,
            (Number::Float(a), Number::Float(b)) => {
                a.to_bits() == b.to_bits() || (a - b).abs() <= CHAIN * f32::EPSILON * a.abs().min(b.abs())
            }
            _ => false,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Int(value) => write!(f, "{value}"),
            Number::Float(value) => f.write_str(&parity_graph::text::float(*value)),
        }
    }
}

/// What a source is, with views, copies and caches walked through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum From {
    /// Another node, by its place in [`Wiring::nodes`].
    Node(usize),
    /// A tensor of the model file.
    Weight(String),
    /// An input, or a cache that nothing was written into.
    Input(Id),
}

/// One source of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where the values come from.
    pub from: From,
    /// The parts of it that are read: bytes from its start, and the share of its elements as a fraction.
    pub parts: Vec<(usize, [usize; 2])>,
}

/// One node that computes.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its tensor.
    pub id: Id,
    /// What it computes; attention is [`Op::FlashAttn`] in whichever form.
    pub op: Op,
    /// The numbers that fix it.
    pub numbers: Vec<(Parameter, Number)>,
    /// By slot.
    pub sources: Vec<Option<Source>>,
    /// Who reads it, and in which slot.
    pub readers: Vec<(usize, usize)>,
}

impl Node {
    /// Whether its first two sources may change places.
    pub fn commutes(&self) -> bool {
        matches!(self.op, Op::Add | Op::Mul)
    }

    /// The weights that it reads.
    pub fn weights(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().flatten().filter_map(|source| match &source.from {
            From::Weight(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// Whether it has no neighbours: it reads inputs and caches alone, and no node reads it.
    pub fn stands_alone(&self) -> bool {
        let input = |source: &Source| matches!(source.from, From::Input(_));
        self.readers.is_empty() && self.sources.iter().flatten().all(input)
    }
}

/// A graph reduced to what it computes.
pub struct Wiring {
    /// In execution order.
    pub nodes: Vec<Node>,
}

/// Words that change nothing of what is computed: how it is to be rounded, what the op's name says already, or how many
/// states of a scan are kept beside the last.
const SILENT: [&str; 7] = ["prec", "hint", "prec_src1", "n_kv_max", "unary", "glu", "snapshots"];

/// Whether any node turns columns of heads by a matrix.
pub fn turns(graph: &Graph) -> bool {
    graph.computed().any(|id| turns_by(graph, id).is_some())
}

/// Reduces a graph.
pub fn reduce(graph: &Graph) -> Wiring {
    reduced(graph, &BTreeSet::new())
}

/// [`reduce`] of a graph that is compared with one whose cache is of numbers, where heads are turned before a cache of blocks and
/// back behind it: that is another form of the same.
pub fn reduce_turned(graph: &Graph) -> Wiring {
    reduced(graph, &turned_back(graph, &plain_attention(graph)))
}

fn reduced(graph: &Graph, turned: &BTreeSet<Id>) -> Wiring {
    let (whole, gated, adapted) = (plain_attention(graph), plain_gate(graph), adapter_sums(graph));
    let attention = whole.iter().flatten().flat_map(|&[scores, probs]| [scores, probs]);
    let partial = adapted.values().flat_map(|sum| sum.absorbed.iter().copied());
    let absorbed: BTreeSet<Id> = attention.chain(gated.iter().flatten().copied()).chain(partial).collect();
    let mut place: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    let mut nodes: Vec<Node> = Vec::new();
    for id in graph.computed() {
        if is_moved(graph, id) || absorbed.contains(&id) || turned.contains(&id) {
            continue;
        }
        let (op, slots, settings) = match whole[id] {
            Some([scores, probs]) => (Op::FlashAttn, attention_slots(graph, id, scores, probs), Some(probs)),
            None => match (gated[id], adapted.get(&id)) {
                (Some(silu), _) => (Op::Swiglu, vec![graph.src(silu, 0), graph.src(id, 1)], None),
                (None, Some(sum)) => (Op::Add, sum.parts.iter().copied().map(Some).collect(), None),
                (None, None) => (graph.get(id).op.clone(), graph.get(id).srcs.clone(), None),
            },
        };
        let sources: Vec<Option<Source>> =
            slots.iter().map(|slot| slot.map(|src| resolve(graph, turned, &place, src, id))).collect();
        let numbers = numbers(graph, settings.unwrap_or(id), &op, &slots);
        for (slot, source) in sources.iter().enumerate() {
            if let Some(Source { from: From::Node(node), .. }) = source {
                let reader = nodes.len();
                nodes[*node].readers.push((reader, slot));
            }
        }
        place[id] = Some(nodes.len());
        nodes.push(Node { id, op, numbers, sources, readers: Vec::new() });
    }
    Wiring { nodes }
}

/// Whether a tensor's values are those of its first source, moved. Rows that an input picks from computed values are:
/// the rows that logits are wanted for.
fn is_moved(graph: &Graph, id: Id) -> bool {
    let tensor = graph.get(id);
    match tensor.op {
        Op::SetRows | Op::Repeat => true,
        Op::GetRows => {
            let ids = graph.src(id, 1).map(|ids| graph.origin(ids));
            let table = graph.src(id, 0).map(|table| graph.origin(table));
            ids.is_some_and(|ids| graph.is_leaf(ids)) && table.is_some_and(|table| !graph.is_leaf(table))
        }
        ref op => op.is_view() || op.is_copy(),
    }
}

/// By node: the scores and probabilities of the attention whose context it is, where attention is in three nodes.
fn plain_attention(graph: &Graph) -> Vec<Option<[Id; 2]>> {
    let computed = |id: Option<Id>, op: Op| id.filter(|&id| !graph.is_leaf(id) && graph.get(id).op == op);
    let find = |id: Id| {
        computed(Some(id), Op::MulMat)?;
        let probs = computed(graph.src(id, 1).map(|src| graph.origin(src)), Op::SoftMax)?;
        let scores = computed(graph.src(probs, 0).map(|src| graph.origin(src)), Op::MulMat)?;
        let keys = graph.src(scores, 0).map(|src| graph.origin(src))?;
        let weights = graph.is_leaf(keys) && is_weight(&graph.get(keys).name);
        (!weights).then_some([scores, probs])
    };
    (0..graph.tensors.len()).map(find).collect()
}

/// The matrix by which a node turns columns of heads, where it does: an input, which is its own inverse.
fn turns_by(graph: &Graph, id: Id) -> Option<Id> {
    let tensor = graph.get(id);
    let word = fields(&tensor.op).iter().find(|field| field.name == "hint")?.word;
    let matrix = graph.src(id, 0)?;
    (!graph.is_leaf(id) && tensor.op == Op::MulMat && tensor.params.int(word) == HINT_HADAMARD)
        .then_some(matrix)
        .filter(|matrix| graph.leaf(*matrix) == Some(Leaf::Input))
}

/// The nodes that turn heads before a cache of blocks and undo it behind: queries and keys by one matrix, which their products do
/// not show, or values and contexts by one.
fn turned_back(graph: &Graph, whole: &[Option<[Id; 2]>]) -> BTreeSet<Id> {
    let turns: BTreeMap<Id, Id> =
        graph.computed().filter_map(|id| Some((id, turns_by(graph, id)?))).collect();
    let (mut out, nowhere) = (BTreeSet::new(), vec![None; graph.tensors.len()]);
    if turns.is_empty() {
        return out;
    }
    // What moves is walked through, to the node that computed it.
    let came_from =
        |src: Id, reader: Id| walk(graph, &BTreeSet::new(), &nowhere, src, reader, &mut |_, _| ());
    let mut read: BTreeMap<Id, Vec<Id>> = BTreeMap::new();
    for id in graph.computed().filter(|&id| !is_moved(graph, id)) {
        graph.sources(id).for_each(|src| read.entry(came_from(src, id)).or_default().push(id));
    }
    for id in graph.computed() {
        let slots = match whole[id] {
            Some([scores, probs]) => attention_slots(graph, id, scores, probs),
            None if graph.get(id).op == Op::FlashAttn => graph.get(id).srcs.clone(),
            None => continue,
        };
        let [Some(q), Some(k), Some(v), ..] = slots[..] else { continue };
        let [q, k, v] = [q, k, v].map(|src| came_from(src, id));
        let matrix = |id: &Id| turns.get(id);
        if matrix(&q).is_some() && matrix(&q) == matrix(&k) {
            out.extend([q, k]);
        }
        let readers = read.get(&id).map_or(&[][..], Vec::as_slice);
        if matrix(&v).is_some() && readers.iter().all(|reader| matrix(reader) == matrix(&v)) {
            out.extend(readers.iter().chain([&v]));
        }
    }
    out
}

/// By node: the SILU of a gate that it multiplies with, as releases before SWIGLU was an op of its own did.
fn plain_gate(graph: &Graph) -> Vec<Option<Id>> {
    let find = |id: Id| {
        let gate = graph.src(id, 0).map(|src| graph.origin(src))?;
        let gated = !graph.is_leaf(gate) && graph.get(gate).op == Op::Silu;
        (graph.get(id).op == Op::Mul && gated).then_some(gate)
    };
    (0..graph.tensors.len()).map(find).collect()
}

/// What several adapters add to a product, as one sum.
struct AdapterSum {
    /// The product, then what each adds, by the names of their matrices: llama.cpp adds them in any order.
    parts: Vec<Id>,
    /// The sums of fewer.
    absorbed: Vec<Id>,
}

/// By the last node of each sum.
fn adapter_sums(graph: &Graph) -> BTreeMap<Id, AdapterSum> {
    let mut sums: BTreeMap<Id, AdapterSum> = BTreeMap::new();
    for id in graph.computed().filter(|&id| graph.get(id).op == Op::Add) {
        let (Some(base), Some(added)) = (graph.src(id, 0), graph.src(id, 1)) else { continue };
        if adapter_rank(graph, added).is_none() {
            continue;
        }
        let before = sums.remove(&base).map(|mut sum| {
            sum.absorbed.push(base);
            sum
        });
        let mut sum = before.unwrap_or_else(|| AdapterSum { parts: vec![base], absorbed: Vec::new() });
        sum.parts.push(added);
        sum.parts[1..].sort_by_key(|&scale| {
            let matrix = graph.src(scale, 0).and_then(|product| graph.src(product, 0));
            matrix.map(|matrix| graph.get(matrix).name.clone())
        });
        sums.insert(id, sum);
    }
    sums
}

/// Q, K, V, mask and sinks of attention in three nodes, as FLASH_ATTN_EXT has them.
fn attention_slots(graph: &Graph, context: Id, scores: Id, probs: Id) -> Vec<Option<Id>> {
    let mut slots = vec![
        graph.src(scores, 1),
        graph.src(scores, 0),
        graph.src(context, 0),
        graph.src(probs, 1),
        graph.src(probs, 2),
    ];
    while slots.last() == Some(&None) {
        slots.pop();
    }
    slots
}

fn numbers(graph: &Graph, id: Id, op: &Op, slots: &[Option<Id>]) -> Vec<(Parameter, Number)> {
    let tensor = graph.get(id);
    // Attention in three nodes has the words of SOFT_MAX, of which FLASH_ATTN_EXT has the first two.
    let mut numbers: Vec<_> = fields(op)
        .iter()
        .filter(|field| !SILENT.contains(&field.name))
        .map(|field| {
            let number = match field.kind {
                WordKind::Int => Number::Int(i64::from(tensor.params.int(field.word))),
                WordKind::Float => Number::Float(tensor.params.float(field.word)),
            };
            let of_adapter = field.name == "scale" && adapter_rank(graph, id).is_some();
            (if of_adapter { ADAPTER_SCALE } else { parameter(op, field) }, number)
        })
        .collect();
    let extent = |id: Id, axis: usize| Number::Int(graph.get(id).ne[axis] as i64);
    match op {
        Op::Rope | Op::RopeBack => numbers.extend([(ROPE_WIDTH, extent(id, 0)), (HEADS, extent(id, 1))]),
        Op::RmsNorm | Op::Norm => numbers.push((NORM_WIDTH, extent(id, 0))),
        Op::FlashAttn => {
            if let [Some(q), Some(k), ..] = slots {
                numbers.extend([(QUERY_HEADS, extent(*q, 2)), (KEY_HEADS, extent(*k, 2))]);
            }
        }
        _ => {}
    }
    numbers
}

/// Where the values of `src` come from, as node `reader` sees it.
fn resolve(graph: &Graph, turned: &BTreeSet<Id>, place: &[Option<usize>], src: Id, reader: Id) -> Source {
    let mut parts = Vec::new();
    let id = walk(graph, turned, place, src, reader, &mut |id, next| match next {
        Some(next) => parts.extend(part(graph, id, next)),
        None => parts.clear(),
    });
    let from = match place[id] {
        Some(node) => From::Node(node),
        None if is_weight(&graph.get(id).name) => From::Weight(graph.get(id).name.clone()),
        None => From::Input(id),
    };
    Source { from, parts }
}

/// The tensor that the values of `src` are those of, as node `reader` sees it. `step` is told of each tensor on the way and of what
/// it moves; of none where that is what was written into a leaf.
fn walk(
    graph: &Graph,
    turned: &BTreeSet<Id>,
    place: &[Option<usize>],
    src: Id,
    reader: Id,
    step: &mut dyn FnMut(Id, Option<Id>),
) -> Id {
    let mut id = src;
    // Every step goes to a source or a writer that stands before; foreign data may go in a circle.
    for _ in 0..graph.tensors.len() {
        if graph.is_leaf(id) {
            let Some(written) = written(graph, id, reader) else { break };
            step(id, None);
            id = written;
            continue;
        }
        if place[id].is_some() {
            break;
        }
        let next = match turned.contains(&id) {
            true => graph.src(id, 1),
            false => graph.src(id, 0).filter(|_| is_moved(graph, id)),
        };
        let Some(next) = next else { break };
        step(id, Some(next));
        id = next;
    }
    id
}

/// What was written last into a leaf before `reader` reads it. Texts from before the memory of copies was written
/// down have only their destination to tell it, or its name.
fn written(graph: &Graph, leaf: Id, reader: Id) -> Option<Id> {
    let into = |id: &Id| {
        let tensor = graph.get(*id);
        let slot = match tensor.op {
            Op::Cpy => 1,
            Op::SetRows => 2,
            _ => return false,
        };
        let told = tensor.view.map(|view| view.root).or(graph.src(*id, slot).map(|to| graph.root(to)));
        // A copy into memory of its own, a cast of what the cache holds, is named after that alone.
        let named = |rest: &str| rest.starts_with(" (") && (slot == 2 || rest.contains("(copy of "));
        told.map_or_else(
            || tensor.name.strip_prefix(&graph.get(leaf).name).is_some_and(named),
            |memory| memory == leaf,
        )
    };
    graph.src(graph.computed().take_while(|&id| id < reader).filter(into).last()?, 0)
}

/// What a view leaves out of its source, if anything.
fn part(graph: &Graph, id: Id, src: Id) -> Option<(usize, [usize; 2])> {
    let (tensor, from) = (graph.get(id), graph.get(src));
    let (some, all) = (tensor.elements(), from.elements());
    if !tensor.op.is_view() || some == all || some == 0 {
        return None;
    }
    let start = |view: Option<parity_graph::View>| view.map_or(0, |view| view.offset);
    let offset = start(tensor.view).saturating_sub(start(from.view));
    let (offset, [some, all]) = of_one_token(graph, src, offset, some).unwrap_or((offset, [some, all]));
    let divisor = gcd(some, all);
    Some((offset, [some / divisor, all / divisor]))
}

/// What of a scan is read, as in a step of one token that keeps one state: its output, one behind the other for all tokens,
/// lies in front of the states, so that of more tokens or states the same parts are other shares. `None` of anything else.
fn of_one_token(graph: &Graph, scan: Id, offset: usize, some: usize) -> Option<(usize, [usize; 2])> {
    let slot = match graph.get(scan).op {
        Op::SsmScan => 1,
        Op::GatedDeltaNet => 2,
        _ => return None,
    };
    let values = graph.get(graph.src(scan, slot)?);
    let (output, tokens) = (values.elements(), values.ne[2]);
    let kept = usize::try_from(graph.get(scan).params.int(0)).unwrap_or(0).max(1);
    let states = graph.get(scan).elements().checked_sub(output)? / kept;
    let of_one = output.checked_div(tokens)?;
    let bytes = |elements: usize| elements.checked_mul(element_size(&graph.get(scan).dtype)?);
    let all = of_one + states;
    match offset.checked_sub(bytes(output)?) {
        Some(behind) => Some((bytes(of_one)?.checked_add(behind)?, [some, all])),
        None if offset == 0 && some.is_multiple_of(tokens) && some <= output => {
            Some((0, [some / tokens, all]))
        }
        None => None,
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}
