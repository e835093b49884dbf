//! A ggml graph as plain data: what the mapping to checkpoints reads, wherever it came from.

use std::fmt;

/// Index of a tensor within its [`Graph`].
pub type Id = usize;

/// What a tensor is computed by, in the words of `ggml_op_desc`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A leaf: a weight, an input, a cache.
    None,
    /// The same bytes seen with other extents.
    Reshape,
    /// A window into another tensor.
    View,
    /// Axes in another order.
    Permute,
    /// Two axes swapped.
    Transpose,
    /// A contiguous copy.
    Cont,
    /// A copy, perhaps of another type, perhaps into a cache.
    Cpy,
    /// A copy.
    Dup,
    /// Rows written into a cache; the result is the whole cache.
    SetRows,
    /// Rows picked by index.
    GetRows,
    /// Sum.
    Add,
    /// Product, element by element.
    Mul,
    /// Product with a factor.
    Scale,
    /// Matrix product.
    MulMat,
    /// RMS norm without its weight.
    RmsNorm,
    /// Rotary position embedding.
    Rope,
    /// Softmax with scale and mask.
    SoftMax,
    /// Attention tile by tile.
    FlashAttn,
    /// Any other, by its description.
    Other(String),
}

/// Every known op with ggml's description.
const OPS: [(Op, &str); 18] = [
    (Op::None, "NONE"),
    (Op::Reshape, "RESHAPE"),
    (Op::View, "VIEW"),
    (Op::Permute, "PERMUTE"),
    (Op::Transpose, "TRANSPOSE"),
    (Op::Cont, "CONT"),
    (Op::Cpy, "CPY"),
    (Op::Dup, "DUP"),
    (Op::SetRows, "SET_ROWS"),
    (Op::GetRows, "GET_ROWS"),
    (Op::Add, "ADD"),
    (Op::Mul, "MUL"),
    (Op::Scale, "SCALE"),
    (Op::MulMat, "MUL_MAT"),
    (Op::RmsNorm, "RMS_NORM"),
    (Op::Rope, "ROPE"),
    (Op::SoftMax, "SOFT_MAX"),
    (Op::FlashAttn, "FLASH_ATTN_EXT"),
];

impl Op {
    /// The op that ggml describes so.
    pub fn parse(description: &str) -> Op {
        let known = OPS.iter().find(|(_, name)| *name == description);
        known.map_or_else(|| Op::Other(description.to_owned()), |(op, _)| op.clone())
    }

    /// ggml's description.
    pub fn name(&self) -> &str {
        match self {
            Op::Other(description) => description,
            known => OPS.iter().find(|(op, _)| op == known).map_or("", |(_, name)| name),
        }
    }

    /// Whether nothing is computed: the bytes are another tensor's.
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape | Op::View | Op::Permute | Op::Transpose)
    }

    /// Whether values are only moved.
    pub fn is_copy(&self) -> bool {
        matches!(self, Op::Cont | Op::Cpy | Op::Dup)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Other(description) => f.write_str(description),
            known => write!(f, "{known:?}"),
        }
    }
}

/// One tensor of a graph.
///
/// `ne` and `nb` are as ggml has them, fastest axis first; [`crate::region`] turns them round.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, without the marks of a copy on another backend.
    pub name: String,
    /// What computes it.
    pub op: Op,
    /// Element type by ggml's name, e.g. `f32`, `q4_K`.
    pub dtype: String,
    /// Extents.
    pub ne: [usize; 4],
    /// Strides in bytes.
    pub nb: [usize; 4],
    /// What it is computed from, as far as ggml lists it.
    pub srcs: Vec<Id>,
    /// Bytes from the start of the storage that it is a view into; 0 for no view.
    pub view_offset: usize,
    /// Whether it is computed at all: some nodes stand in a graph and are skipped.
    pub computed: bool,
}

/// One graph: nodes in execution order, then the leaves that they read.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Nodes and leaves.
    pub tensors: Vec<Tensor>,
    /// How many of them are nodes.
    pub nodes: usize,
}

impl Graph {
    /// The nodes that are computed, in execution order.
    pub fn computed(&self) -> impl Iterator<Item = Id> + '_ {
        (0..self.nodes).filter(|&id| self.tensors[id].computed)
    }

    /// Whether a tensor is no node.
    pub fn is_leaf(&self, id: Id) -> bool {
        id >= self.nodes
    }

    /// The tensor itself.
    pub fn get(&self, id: Id) -> &Tensor {
        &self.tensors[id]
    }

    /// The source number `index` of a tensor.
    pub fn src(&self, id: Id, index: usize) -> Option<Id> {
        self.tensors[id].srcs.get(index).copied()
    }

    /// The tensor that really computes the bytes of `id`: views are walked through.
    pub fn storage(&self, id: Id) -> Id {
        self.walk(id, Op::is_view)
    }

    /// Where the values of `id` come from: views and copies are walked through.
    pub fn origin(&self, id: Id) -> Id {
        self.walk(id, |op| op.is_view() || op.is_copy())
    }

    fn walk(&self, mut id: Id, through: impl Fn(&Op) -> bool) -> Id {
        // A source always stands before its user, except for leaves, which end the walk: but a graph is
        // foreign data, so the walk is bounded.
        for _ in 0..self.tensors.len() {
            match self.tensors[id].srcs.first() {
                Some(&src) if through(&self.tensors[id].op) => id = src,
                _ => break,
            }
        }
        id
    }
}

/// The name of a tensor that the scheduler copied to another backend, without `BACKEND#` and `#copy`.
pub fn without_copy_marks(name: &str) -> &str {
    let Some((_, rest)) = name.split_once('#') else { return name };
    match rest.rsplit_once('#') {
        Some((inner, number)) if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => inner,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_lose_their_marks_and_nothing_else() {
        assert_eq!(without_copy_marks("CUDA0#blk.0.attn_q.weight#0"), "blk.0.attn_q.weight");
        assert_eq!(without_copy_marks("CUDA0#inp_tokens#12"), "inp_tokens");
        for name in ["blk.0.attn_q.weight", "a#b", "a#b#", "a#b#c"] {
            assert_eq!(without_copy_marks(name), name);
        }
    }
}
