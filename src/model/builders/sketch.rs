//! Draws a graph op by op: shapes, strides and views follow from the sources as in ggml's constructors.

use parity_graph::params::field;
use parity_graph::{Graph, Id, Op, Params, Tensor, View};

use crate::gguf::DType;

/// A graph in the making. Leaves and nodes are numbered as they come; [`Sketch::finish`] puts leaves last.
#[derive(Default)]
pub struct Sketch {
    tensors: Vec<Tensor>,
    leaf: Vec<bool>,
}

/// The element type by ggml's name: `f32`, `q4_K`.
pub fn type_name(dtype: DType) -> String {
    let lower = dtype.name().to_ascii_lowercase();
    lower.strip_suffix("_k").map_or(lower.clone(), |stem| format!("{stem}_K"))
}

/// Strides in bytes of a tensor without gaps: ggml's `nb`.
fn strides(dtype: DType, ne: [usize; 4]) -> [usize; 4] {
    let row = ne[0] / dtype.block_len() * dtype.block_bytes();
    [dtype.block_bytes(), row, row * ne[1], row * ne[1] * ne[2]]
}

/// Words of an op by their names; integers and floats as they are meant.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// An i32.
    Int(i32),
    /// An f32.
    Float(f32),
}

impl Sketch {
    /// The tensor itself.
    pub fn get(&self, id: Id) -> &Tensor {
        &self.tensors[id]
    }

    /// Gives a tensor llama.cpp's name for it.
    pub fn name(&mut self, id: Id, name: impl Into<String>) -> Id {
        self.tensors[id].name = name.into();
        id
    }

    fn push(&mut self, tensor: Tensor, leaf: bool) -> Id {
        self.tensors.push(tensor);
        self.leaf.push(leaf);
        self.tensors.len() - 1
    }

    /// A weight, a cache or an input, extents fastest axis first.
    pub fn leaf(&mut self, name: &str, dtype: DType, ne: [usize; 4]) -> Id {
        let tensor = Tensor {
            name: name.to_owned(),
            op: Op::None,
            params: Params::default(),
            dtype: type_name(dtype),
            ne,
            nb: strides(dtype, ne),
            srcs: Vec::new(),
            view: None,
            computed: false,
            backend: None,
        };
        self.push(tensor, true)
    }

    /// A node with memory of its own.
    pub fn node(
        &mut self,
        op: Op,
        dtype: DType,
        ne: [usize; 4],
        srcs: &[Option<Id>],
        words: &[(&str, Word)],
    ) -> Id {
        let mut params = Params::default();
        for (name, word) in words {
            match (field(&op, name), word) {
                (Some(field), Word::Int(value)) => params.set_int(field.word, *value),
                (Some(field), Word::Float(value)) => params.set_float(field.word, *value),
                (None, _) => {}
            }
        }
        let mut srcs = srcs.to_vec();
        while srcs.last() == Some(&None) {
            srcs.pop();
        }
        let tensor = Tensor {
            name: String::new(),
            op,
            params,
            dtype: type_name(dtype),
            ne,
            nb: strides(dtype, ne),
            srcs,
            view: None,
            computed: true,
            backend: None,
        };
        self.push(tensor, false)
    }

    /// A node of f32 in the shape of its first source.
    pub fn same(&mut self, op: Op, srcs: &[Id], words: &[(&str, Word)]) -> Id {
        let ne = self.get(srcs[0]).ne;
        let srcs: Vec<Option<Id>> = srcs.iter().copied().map(Some).collect();
        self.node(op, DType::F32, ne, &srcs, words)
    }

    /// A node that is another tensor's memory.
    fn window(&mut self, op: Op, src: Id, offset: usize, ne: [usize; 4], nb: [usize; 4]) -> Id {
        let from = self.get(src);
        let root = from.view.map_or(src, |view| view.root);
        let start = from.view.map_or(0, |view| view.offset);
        let tensor = Tensor {
            name: format!("{} (view)", from.name),
            op,
            params: Params::default(),
            dtype: from.dtype.clone(),
            ne,
            nb,
            srcs: vec![Some(src)],
            view: Some(View { root, offset: start + offset }),
            computed: true,
            backend: None,
        };
        self.push(tensor, false)
    }

    /// The same elements with other extents.
    pub fn reshape(&mut self, src: Id, ne: [usize; 4]) -> Id {
        let mut nb = [self.get(src).nb[0]; 4];
        for axis in 1..4 {
            nb[axis] = nb[axis - 1] * ne[axis - 1];
        }
        self.window(Op::Reshape, src, 0, ne, nb)
    }

    /// A window `offset` bytes after the start of `src`; `nb` are the strides of the three slower axes.
    pub fn view(&mut self, src: Id, ne: [usize; 4], nb: [usize; 3], offset: usize) -> Id {
        let first = self.get(src).nb[0];
        let id = self.window(Op::View, src, offset, ne, [first, nb[0], nb[1], nb[2]]);
        let words = &mut self.tensors[id].params;
        words.0[0] = offset as u32;
        words.0[1] = (offset as u64 >> 32) as u32;
        id
    }

    /// Axis k of the source becomes axis `axes[k]`.
    pub fn permute(&mut self, src: Id, axes: [usize; 4]) -> Id {
        let (mut ne, mut nb) = ([1; 4], [0; 4]);
        for (from, &to) in axes.iter().enumerate() {
            (ne[to], nb[to]) = (self.get(src).ne[from], self.get(src).nb[from]);
        }
        let id = self.window(Op::Permute, src, 0, ne, nb);
        for (word, axis) in axes.iter().enumerate() {
            self.tensors[id].params.set_int(word, *axis as i32);
        }
        self.tensors[id].name = format!("{} (permuted)", self.get(src).name);
        id
    }

    /// A copy without gaps.
    pub fn cont(&mut self, src: Id, ne: [usize; 4]) -> Id {
        self.node(Op::Cont, DType::F32, ne, &[Some(src)], &[])
    }

    /// Rows picked by index, in f32.
    pub fn get_rows(&mut self, table: Id, ids: Id) -> Id {
        let (width, [a, b, c, _]) = (self.get(table).ne[0], self.get(ids).ne);
        self.node(Op::GetRows, DType::F32, [width, a, b, c], &[Some(table), Some(ids)], &[])
    }

    /// Rows written into `cache` by index; the result is all of the cache.
    pub fn set_rows(&mut self, cache: Id, rows: Id, ids: Id) -> Id {
        let (ne, nb) = (self.get(cache).ne, self.get(cache).nb);
        let id = self.window(Op::SetRows, cache, 0, ne, nb);
        self.tensors[id].srcs = vec![Some(rows), Some(ids), Some(cache)];
        id
    }

    /// `weight` (m, k) times each row of `x`.
    pub fn mul_mat(&mut self, weight: Id, x: Id) -> Id {
        let (rows, [_, b, c, d]) = (self.get(weight).ne[1], self.get(x).ne);
        self.node(Op::MulMat, DType::F32, [rows, b, c, d], &[Some(weight), Some(x)], &[])
    }

    /// As `mul_mat`, by the experts that `ids` names.
    pub fn mul_mat_id(&mut self, weight: Id, x: Id, ids: Id) -> Id {
        let ne = [self.get(weight).ne[1], self.get(ids).ne[0], self.get(x).ne[2], 1];
        self.node(Op::MulMatId, DType::F32, ne, &[Some(weight), Some(x), Some(ids)], &[])
    }

    /// Changes a word of a node, named as in [`parity_graph::params::fields`].
    pub fn set(&mut self, id: Id, name: &str, value: i32) {
        if let Some(field) = field(&self.tensors[id].op, name) {
            self.tensors[id].params.set_int(field.word, value);
        }
    }

    /// The graph: nodes in the order in which they were drawn, then leaves.
    pub fn finish(self) -> Graph {
        let n = self.tensors.len();
        let nodes = self.leaf.iter().filter(|leaf| !**leaf).count();
        let mut place = vec![0; n];
        let (mut next_node, mut next_leaf) = (0, nodes);
        for (id, leaf) in self.leaf.iter().enumerate() {
            let next = if *leaf { &mut next_leaf } else { &mut next_node };
            place[id] = *next;
            *next += 1;
        }
        let mut ordered: Vec<(usize, Tensor)> = self.tensors.into_iter().enumerate().collect();
        ordered.sort_by_key(|(id, _)| place[*id]);
        let tensors = ordered.into_iter().map(|(_, mut tensor)| {
            for src in tensor.srcs.iter_mut().flatten() {
                *src = place[*src];
            }
            if let Some(view) = &mut tensor.view {
                view.root = place[view.root];
            }
            tensor
        });
        Graph { tensors: tensors.collect(), nodes }
    }
}
