//! What of one forward pass is recorded, decided before it is computed.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use parity_dump::{Checkpoint, Element, Kind, Life};

use crate::api::RawTensor;
use crate::describe::{Described, Reader};
use crate::filter::Filter;
use crate::map::{Capture, LeafCapture, Mapping};
use crate::region::{Bytes, Region};
use crate::store::Announced;
use parity_graph::Id;

/// One checkpoint to be recorded.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its id.
    pub checkpoint: Checkpoint,
    /// Element type.
    pub element: Element,
    /// Whether the values are i32 and become f32.
    pub from_i32: bool,
    /// Slowest axis first.
    pub shape: Arc<[usize]>,
    /// Numbers of its rows where these are not all of the step's.
    pub rows: Option<Vec<u32>>,
    /// Where its bytes are.
    pub region: Arc<Region>,
}

impl Planned {
    /// What its values are, for who writes them.
    pub fn announced(&self) -> Announced {
        let Planned { checkpoint, element, ref shape, ref rows, .. } = *self;
        Announced::Checkpoint { checkpoint, element, shape: shape.clone(), rows: rows.clone() }
    }
}

/// The plan of one pass.
pub struct PassPlan {
    /// (T,) token ids.
    pub tokens: Vec<u32>,
    /// (T,) numbers of the rows.
    pub positions: Vec<u32>,
    /// What the rows are.
    pub life: Life,
    /// Checkpoints in order of computation.
    pub planned: Vec<Planned>,
    /// Indices into `planned` by the node that they wait for.
    pub wanted: HashMap<RawTensor, Range<usize>>,
    /// Inputs to be recorded, with their addresses.
    pub leaves: Vec<(LeafCapture, RawTensor)>,
    /// Caches that are recorded before the pass: name, leaf and address.
    pub states: Vec<(String, Id, RawTensor)>,
    /// Checkpoints of which this pass computes no row.
    pub without_rows: Vec<Checkpoint>,
    /// The node of the logits and the numbers of its rows; where there are none, as of embeddings, the last node with a checkpoint.
    pub logits: Option<(RawTensor, Vec<u32>)>,
    /// What of the graph could not be recorded.
    pub unmapped: Vec<String>,
}

impl PassPlan {
    /// Waits no more for the nodes whose values were taken: tensors by their indices into `planned`.
    pub fn forget(&mut self, taken: &[(usize, Bytes)]) {
        let taken: HashSet<usize> = taken.iter().map(|(index, _)| *index).collect();
        self.wanted.retain(|_, indices| !indices.clone().any(|index| taken.contains(&index)));
    }

    /// Plans the pass of `tokens`, rows with the numbers `positions`, all (T,).
    ///
    /// # Safety
    /// The reader's library made the graph, whose input data is set.
    pub unsafe fn new(
        reader: Reader<'_>,
        described: &Described,
        mapping: &Mapping,
        filter: &Filter,
        (tokens, positions): (Vec<u32>, Vec<u32>),
        life: Life,
    ) -> PassPlan {
        let at = if life.at.is_empty() { &positions } else { &life.at }.clone();
        let mut plan = PassPlan {
            tokens,
            positions,
            life,
            planned: Vec::new(),
            wanted: HashMap::with_capacity(mapping.captures.len()),
            leaves: Vec::new(),
            states: Vec::new(),
            without_rows: Vec::new(),
            logits: None,
            unmapped: mapping.unmapped.clone(),
        };
        let mut picks: HashMap<usize, Option<Vec<u32>>> = HashMap::new();
        let layers = mapping.layers();
        let logits = mapping.captures.iter().find(|capture| capture.checkpoint.kind() == Kind::Logits);
        let last = mapping.captures.last().filter(|_| mapping.known.tokens.is_some());
        let hashed = logits.or(last).map(|capture| capture.region.storage);
        // Read only when asked for: it is as large as the attention matrix of one head.
        let mut mask: Option<bool> = None;
        for capture in &mapping.captures {
            let own;
            let rows = match capture.picked {
                // Without token rows it is one row, at the end of the step.
                _ if capture.whole => plan.positions.last().map(std::slice::from_ref),
                None => Some(&plan.positions[..]),
                Some(leaf) => {
                    // SAFETY: a leaf of a graph whose inputs are set.
                    let find = || unsafe { picked(reader, described.address[leaf], &plan.positions) };
                    own = picks.entry(leaf).or_insert_with(find).clone();
                    own.as_deref()
                }
            };
            let storage = described.address[capture.region.storage];
            if let (true, Some(rows)) = (hashed == Some(capture.region.storage), &rows) {
                plan.logits = Some((storage, rows.to_vec()));
            }
            if !filter.wants(capture.checkpoint, layers) {
                continue;
            }
            let matrix = capture.checkpoint.kind().is_optional();
            let causal = || {
                let leaf = mapping.known.mask.map(|leaf| described.address[leaf]);
                // SAFETY: as above.
                leaf.is_some_and(|leaf| unsafe { is_causal(reader, leaf, &at) })
            };
            let cached = at.last().map_or(0, |&last| last as usize + 1);
            let cut = (matrix && *mask.get_or_insert_with(causal)).then_some(cached);
            match rows.and_then(|rows| planned(capture, rows, &plan.positions, cut)) {
                Some(entry) if entry.region.elements() == 0 => plan.without_rows.push(entry.checkpoint),
                Some(entry) => plan.add(storage, entry),
                None => plan.unmapped.push(format!(
                    "{}: rows or columns could not be told apart, shape {:?}",
                    capture.checkpoint, capture.shape
                )),
            }
        }
        plan.leaves = leaves(described, mapping, filter);
        plan
    }

    /// Adds an entry of a node; those of one node come one behind the other.
    fn add(&mut self, node: RawTensor, entry: Planned) {
        let at = self.planned.len();
        self.wanted.entry(node).or_insert(at..at).end = at + 1;
        self.planned.push(entry);
    }
}

/// The inputs that are recorded, with their addresses.
fn leaves(described: &Described, mapping: &Mapping, filter: &Filter) -> Vec<(LeafCapture, RawTensor)> {
    let read = |reader: &Checkpoint| filter.wants(*reader, mapping.layers());
    // What only says how a state is written is read by later steps.
    let wanted =
        |leaf: &&LeafCapture| filter.is_all() || leaf.readers.is_empty() || leaf.readers.iter().any(read);
    let wanted = mapping.leaves.iter().filter(wanted);
    wanted.map(|leaf| (leaf.clone(), described.address[leaf.leaf])).collect()
}

/// The entry for a capture whose rows are `rows`; `None` where its shape has another number of them. A matrix is `cut` to
/// the columns that hold a position, which come first: where the mask does not show which these are, all are kept.
fn planned(capture: &Capture, rows: &[u32], positions: &[u32], cut: Option<usize>) -> Option<Planned> {
    let matrix = capture.checkpoint.kind().is_optional();
    if capture.shape.get(usize::from(matrix)) != Some(&rows.len()) {
        return None;
    }
    let Capture { checkpoint, element, from_i32, mut shape, mut region, .. } = capture.clone();
    if let Some(cached) = cut {
        if shape[2] < cached {
            return None;
        }
        Arc::make_mut(&mut shape)[2] = cached;
        Arc::make_mut(&mut region).extents[2] = cached;
    }
    let rows = (rows != positions).then(|| rows.to_vec());
    Some(Planned { checkpoint, element, from_i32, shape, rows, region })
}

/// Positions of the rows that a leaf of indices picks.
unsafe fn picked(reader: Reader<'_>, leaf: RawTensor, positions: &[u32]) -> Option<Vec<u32>> {
    // SAFETY: by the caller's promise.
    let indices = unsafe { reader.i32s(leaf) }?;
    indices.into_iter().map(|i| positions.get(usize::try_from(i).ok()?).copied()).collect()
}

/// Whether column s of the cache is position s, for every row: then the mask shows s <= p and no more.
unsafe fn is_causal(reader: Reader<'_>, leaf: RawTensor, positions: &[u32]) -> bool {
    // SAFETY: by the caller's promise.
    let Some((columns, visible)) = (unsafe { reader.visible(leaf) }) else { return false };
    // Without a cache a step has no columns but its own.
    positions.iter().all(|&position| (position as usize) < columns)
        && visible.len() >= positions.len() * columns
        && positions.iter().zip(visible.chunks_exact(columns)).all(|(&position, row)| {
            row.iter().enumerate().all(|(column, &seen)| seen == (column <= position as usize))
        })
}

/// Indices become f32, which has all of them up to 2²⁴ exactly.
pub(crate) fn indices_as_f32(bytes: &mut [u8]) {
    for word in bytes.chunks_exact_mut(4) {
        let index = i32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        word.copy_from_slice(&(index as f32).to_ne_bytes());
    }
}

/// The name that safetensors has for an input's element type.
pub(crate) fn leaf_dtype(dtype: &str) -> Option<&'static str> {
    match dtype {
        "f32" => Some("F32"),
        "f16" => Some("F16"),
        "bf16" => Some("BF16"),
        "i32" => Some("I32"),
        "i64" => Some("I64"),
        _ => None,
    }
}
