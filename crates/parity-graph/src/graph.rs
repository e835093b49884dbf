//! Tensors, their sources and the storage they share.

use crate::known::is_weight;
use crate::op::Op;
use crate::params::Params;

/// Index of a tensor within its [`Graph`].
pub type Id = usize;

/// Source slots of a tensor in every ggml known.
pub const MAX_SRC: usize = 10;

/// A window into the storage of another tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The tensor whose storage it is: never a view itself.
    pub root: Id,
    /// Bytes from the start of that storage.
    pub offset: usize,
}

/// One tensor of a graph.
///
/// `ne` and `nb` are as ggml has them, fastest axis first; [`Tensor::shape`] and [`Tensor::strides`] are the one
/// place that reverses them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name, without the marks of a copy on another backend: a weight's is its name in the model file.
    pub name: String,
    /// What computes it.
    pub op: Op,
    /// The words of `op_params`.
    pub params: Params,
    /// Element type by ggml's name, e.g. `f32`, `q4_K`.
    pub dtype: String,
    /// Extents.
    pub ne: [usize; 4],
    /// Strides in bytes.
    pub nb: [usize; 4],
    /// What it is computed from, by slot; a slot before a used one may be empty. No empty slots at the end.
    pub srcs: Vec<Option<Id>>,
    /// Whose memory it lies in, where that is not its own: of views, of what is computed in place, and of what is
    /// written into a cache or a state.
    pub view: Option<View>,
    /// Whether it is computed at all: some nodes stand in a graph and are skipped, and so is one without elements.
    pub computed: bool,
    /// The backend that computes it, where that is known, e.g. `CPU`, `CUDA0`.
    pub backend: Option<String>,
}

impl Tensor {
    /// Extents, slowest axis first.
    pub fn shape(&self) -> [usize; 4] {
        let [a, b, c, d] = self.ne;
        [d, c, b, a]
    }

    /// Strides in elements, slowest axis first; `None` of a block-quantised type.
    pub fn strides(&self) -> Option<[usize; 4]> {
        let size = element_size(&self.dtype)?;
        let [a, b, c, d] = self.nb.map(|bytes| bytes / size);
        Some([d, c, b, a])
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.ne.iter().product()
    }

    /// Whether elements lie one behind the other without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.nb == contiguous(&self.dtype, self.ne)
    }
}

/// Bytes of an element, `None` of a block-quantised or unknown type.
pub fn element_size(dtype: &str) -> Option<usize> {
    match dtype {
        "f64" | "i64" => Some(8),
        "f32" | "i32" => Some(4),
        "f16" | "bf16" | "i16" => Some(2),
        "i8" => Some(1),
        _ => None,
    }
}

/// Strides of a tensor without gaps. Those of quantised types, which only weights and caches have, are given as if
/// an element had four bytes.
pub fn contiguous(dtype: &str, ne: [usize; 4]) -> [usize; 4] {
    let mut nb = [element_size(dtype).unwrap_or(4); 4];
    for axis in 1..4 {
        nb[axis] = nb[axis - 1].saturating_mul(ne[axis - 1]);
    }
    nb
}

/// What a leaf is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// A tensor of the model file.
    Weight,
    /// Memory that outlives a forward pass: a cache, a recurrent state.
    State,
    /// What the program fills in before each forward pass.
    Input,
}

/// One graph: nodes in execution order, then the leaves that they read.
#[derive(Clone, Debug, Default, PartialEq)]
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

    /// Whether it turns cached keys to other positions: RoPE, and nothing that is computed of weights.
    pub fn is_shift(&self) -> bool {
        let has = |op: Op| self.computed().any(|id| self.get(id).op == op);
        has(Op::Rope) && !has(Op::MulMat)
    }

    /// Whether a tensor is no node.
    pub fn is_leaf(&self, id: Id) -> bool {
        id >= self.nodes
    }

    /// What a leaf without a view is; `None` of any other tensor.
    ///
    /// Weights are named as in the model file, with a dot; states are written by nodes, or named as llama.cpp names
    /// its caches.
    pub fn leaf(&self, id: Id) -> Option<Leaf> {
        let tensor = &self.tensors[id];
        if !self.is_leaf(id) || tensor.view.is_some() {
            return None;
        }
        Some(if tensor.name.starts_with("cache_") || self.writers(id).next().is_some() {
            Leaf::State
        } else if is_weight(&tensor.name) {
            Leaf::Weight
        } else {
            Leaf::Input
        })
    }

    /// Whether a node computes values, which then have a checkpoint: it is computed, has elements, and does not only
    /// move values. Rows that are picked from a weight are computed: they are decoded.
    pub fn is_arithmetic(&self, id: Id) -> bool {
        let tensor = &self.tensors[id];
        let rows_of_weight = || {
            let table = self.src(id, 0).map(|table| self.root(table));
            tensor.op == Op::GetRows && table.is_some_and(|table| self.leaf(table) == Some(Leaf::Weight))
        };
        id < self.nodes
            && tensor.computed
            && tensor.elements() > 0
            && (!tensor.op.is_movement() || rows_of_weight())
    }

    /// The tensor itself.
    pub fn get(&self, id: Id) -> &Tensor {
        &self.tensors[id]
    }

    /// The source in slot `slot` of a tensor.
    pub fn src(&self, id: Id, slot: usize) -> Option<Id> {
        self.tensors[id].srcs.get(slot).copied().flatten()
    }

    /// The sources of a tensor that are set, in order of their slots.
    pub fn sources(&self, id: Id) -> impl Iterator<Item = Id> + '_ {
        self.tensors[id].srcs.iter().flatten().copied()
    }

    /// The tensor whose memory the values of `id` lie in: itself where it is no view.
    pub fn root(&self, id: Id) -> Id {
        self.tensors[id].view.map_or(id, |view| view.root)
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
            match self.src(id, 0) {
                Some(src) if through(&self.tensors[id].op) => id = src,
                _ => break,
            }
        }
        id
    }

    /// Storage edges: for each leaf that nodes write into (a cache, a state), the nodes that write, in execution
    /// order. What is read of it after a write is what was written.
    pub fn writers(&self, leaf: Id) -> impl Iterator<Item = Id> + '_ {
        self.computed().filter(move |&id| {
            let tensor = &self.tensors[id];
            !tensor.op.is_view() && tensor.view.is_some_and(|view| view.root == leaf)
        })
    }
}

/// What a recording calls the CPU of an ARM machine, which llama.cpp's `CPU` has other kernels for.
pub const CPU_OF_ARM: &str = "CPU-ARM";

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
