//! For which step a graph is built: how many tokens, how much of a cache, which form of attention.

use parity_graph::{Graph, Id, Op, Tensor};

use crate::arithmetic::cache_blocks;
use crate::error::{Error, Result};
use crate::gguf::{DType, Gguf};

use super::sketch::type_name;

/// What the caches of keys and of values are kept in: a choice of the run, not of the model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Keys.
    pub keys: Kept,
    /// Values.
    pub values: Kept,
}

/// What one of them is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Element type.
    pub dtype: DType,
    /// Columns that are rotated together before they are kept, if any are: llama.cpp multiplies parts of heads by a
    /// Hadamard matrix of this width before it quantises them, and queries or contexts by the same.
    pub rotated: Option<usize>,
}

impl Kept {
    /// Values as they are, in a type.
    pub const fn plain(dtype: DType) -> Kept {
        Kept { dtype, rotated: None }
    }

    fn words(&self, name: &str) -> String {
        match self.rotated {
            Some(width) => format!("{name} in {}, {width} columns rotated together", type_name(self.dtype)),
            None => format!("{name} in {}", type_name(self.dtype)),
        }
    }
}

/// llama.cpp rotates heads whose width is a multiple of this, before they are quantised (llama-kv-cache.cpp,
/// `attn_rot_k`): as many columns of keys as possible, twice this and so on, and this many of values.
const ROTATED: usize = 64;

impl Cache {
    /// Both in f16.
    pub const F16: Cache = Cache { keys: Kept::plain(DType::F16), values: Kept::plain(DType::F16) };
    /// Both in bf16.
    pub const BF16: Cache = Cache { keys: Kept::plain(DType::BF16), values: Kept::plain(DType::BF16) };
    /// Both in f32.
    pub const F32: Cache = Cache { keys: Kept::plain(DType::F32), values: Kept::plain(DType::F32) };

    /// The same where what is quantised is rotated before, as llama.cpp does with heads of this width if it is a multiple of
    /// 64; the same where it is none.
    #[must_use]
    pub fn rotated(self, head_width: usize) -> Cache {
        let rotate = |kept: Kept, width: usize| match head_width.is_multiple_of(ROTATED)
            && cache_blocks::is_kept(kept.dtype)
        {
            true => Kept { rotated: Some(width), ..kept },
            false => kept,
        };
        let widest = 1 << head_width.trailing_zeros();
        Cache { keys: rotate(self.keys, widest), values: rotate(self.values, ROTATED) }
    }

    /// Whether keys or values are kept in quantised blocks.
    pub fn is_in_blocks(&self) -> bool {
        [self.keys, self.values].iter().any(|kept| cache_blocks::is_kept(kept.dtype))
    }

    /// In words.
    pub fn words(&self) -> String {
        match self.keys == self.values {
            true => self.keys.words("keys and values"),
            false => format!("{}, {}", self.keys.words("keys"), self.values.words("values")),
        }
    }

    /// What a recorded graph keeps them in; f16 where it does not say it.
    fn of(graph: &Graph) -> Cache {
        let leaves = || graph.tensors[graph.nodes..].iter();
        let kept = |part: &str| {
            let cache = leaves().find(|leaf| leaf.name.starts_with(&format!("cache_{part}_l")));
            let dtype = DType::all().find(|dtype| cache.is_some_and(|leaf| leaf.dtype == type_name(*dtype)));
            let rotation = leaves().find(|leaf| leaf.name == format!("attn_inp_{part}_rot"));
            Kept { dtype: dtype.unwrap_or(DType::F16), rotated: rotation.map(|leaf| leaf.ne[0]) }
        };
        Cache { keys: kept("k"), values: kept("v") }
    }
}

/// The cache of one kind of layer, in cells of one position each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cells {
    /// All that there are.
    pub all: usize,
    /// Those that this step looks at, from the first.
    pub seen: usize,
}

/// What fixes the shapes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of the step.
    pub tokens: usize,
    /// Rows that logits are computed for.
    pub outputs: usize,
    /// Cells of layers that see everything.
    pub cells: Cells,
    /// Cells of layers with a sliding window.
    pub sliding: Cells,
    /// Whether attention is one op (FLASH_ATTN_EXT) or three (MUL_MAT, SOFT_MAX, MUL_MAT).
    pub flash: bool,
    /// What the caches are kept in.
    pub cache: Cache,
}

/// llama.cpp looks at a multiple of so many cells (llama-kv-cache.cpp, `get_n_kv`).
const SEEN_MULTIPLE: usize = 256;

/// More columns than any head has.
const WIDEST: usize = 1 << 12;

/// More cells or tokens than any context has; a hostile shape must not overflow a count of elements.
const LONGEST: usize = 1 << 28;

impl Shape {
    /// A step of `tokens` tokens at positions from `first`, logits for all of them, with a cache for `context`
    /// positions in all layers.
    pub fn step(first: usize, tokens: usize, context: usize, flash: bool, cache: Cache) -> Shape {
        let all = context.max(first + tokens).next_multiple_of(SEEN_MULTIPLE);
        let seen = (first + tokens).next_multiple_of(SEEN_MULTIPLE).min(all);
        let cells = Cells { all, seen };
        Shape { tokens, outputs: tokens, cells, sliding: cells, flash, cache }
    }

    /// The shape that a recorded graph was made for, so that a built one can stand beside it. What the graph does not
    /// show is as in [`Shape::step`].
    pub fn of(graph: &Graph) -> Shape {
        let rows = |id: Option<Id>| id.map(|id| graph.get(id).elements());
        let is_weight = |id: Id| graph.is_leaf(id) && graph.get(id).name.ends_with(".weight");
        let embed = graph
            .computed()
            .find(|&id| graph.get(id).op == Op::GetRows && graph.src(id, 0).is_some_and(is_weight));
        let tokens = rows(embed.and_then(|id| graph.src(id, 1))).unwrap_or(1);
        let last = graph.computed().last();
        let outputs = last.map_or(tokens, |id| graph.get(id).ne[1]);
        let flash = graph.computed().any(|id| graph.get(id).op == Op::FlashAttn);
        let caches: Vec<&Tensor> =
            graph.tensors[graph.nodes..].iter().filter(|leaf| leaf.name.starts_with("cache_k_l")).collect();
        let cache = Cache::of(graph);
        let all = caches.iter().map(|leaf| leaf.ne[1]);
        let seen: Vec<usize> = graph.computed().filter_map(|id| seen(graph, id)).collect();
        let (most, least) = (seen.iter().max().copied(), seen.iter().min().copied());
        let default = Shape::step(0, tokens, tokens, flash, cache).cells;
        // Older releases have caches of one axis: no fewer cells than are seen.
        let cells = |all: Option<usize>, seen: Option<usize>| {
            let seen = seen.unwrap_or(default.seen);
            Cells { all: all.unwrap_or(default.all).max(seen), seen }
        };
        let (cells, sliding) = (cells(all.clone().max(), most), cells(all.min(), least));
        Shape { tokens, outputs, cells, sliding, flash, cache }
    }

    /// What a run chooses and a model file does not say, in words: the form of attention, and the caches.
    pub fn choices(&self) -> String {
        let form = if self.flash { "flash attention" } else { "attention in three ops" };
        format!("{form}, {}, {}", self.cache.keys.words("keys"), self.cache.values.words("values"))
    }

    /// Refuses what no step has.
    ///
    /// # Errors
    /// Names the file and the number.
    pub fn check(&self, gguf: &Gguf) -> Result<()> {
        let error = |what: &str, found: usize, expected: String| {
            Err(Error::file(gguf.path(), format!("a step cannot have {found} {what}")).expected(expected))
        };
        if !(1..=LONGEST).contains(&self.tokens) {
            return error("tokens", self.tokens, format!("1 to {LONGEST}"));
        }
        if !(1..=self.tokens).contains(&self.outputs) {
            return error("rows of logits", self.outputs, format!("1 to {}", self.tokens));
        }
        for cells in [self.cells, self.sliding] {
            if !(1..=LONGEST).contains(&cells.all) {
                return error("cells", cells.all, format!("1 to {LONGEST}"));
            }
            if !(1..=cells.all).contains(&cells.seen) {
                return error("cells that are seen", cells.seen, format!("1 to {}", cells.all));
            }
        }
        for kept in [self.cache.keys, self.cache.values] {
            if let Some(width) = kept.rotated.filter(|width| !width.is_power_of_two() || *width > WIDEST) {
                return error(
                    "columns that are rotated together",
                    width,
                    format!("a power of 2 up to {WIDEST}"),
                );
            }
        }
        Ok(())
    }
}

/// How many cells a node that computes attention looks at.
fn seen(graph: &Graph, id: Id) -> Option<usize> {
    let mask = match graph.get(id).op {
        Op::FlashAttn => graph.src(id, 3)?,
        Op::SoftMax => graph.src(id, 1)?,
        _ => return None,
    };
    Some(graph.get(mask).ne[0])
}
