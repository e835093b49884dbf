//! A graph made ready to be executed: checked, with the roles of its leaves and the lifetimes of its values.

use std::collections::HashMap;

use parity_graph::{Graph, Id, Tensor};

use super::Memory;
use crate::error::{Error, Result};
use crate::gguf::DType;

/// A graph and what is needed to execute it.
pub struct Program {
    /// The graph.
    pub graph: Graph,
    /// What errors call each tensor.
    pub names: Vec<String>,
    /// By tensor that is no view: the last node that reads or writes its memory.
    last_use: Vec<usize>,
    /// By leaf: whether nodes write into it.
    written: Vec<bool>,
    /// By tensor that is no view: whether nodes read a view of it.
    viewed: Vec<bool>,
    /// By tensor: what its memory is kept under from step to step.
    keys: Vec<String>,
}

/// Where the elements of a tensor lie in the memory that it is a view of, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tensor whose memory it is.
    pub root: Id,
    /// Element (0, 0, 0, 0).
    pub offset: usize,
    /// Extents, slowest axis first.
    pub shape: [usize; 4],
    /// Strides, slowest axis first.
    pub strides: [usize; 4],
}

impl Place {
    /// One more than the last element that it reaches; `None` where that is beyond what can be counted.
    pub fn end(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = self.offset;
        for (extent, stride) in self.shape.iter().zip(self.strides) {
            last = last.checked_add((extent - 1).checked_mul(stride)?)?;
        }
        last.checked_add(1)
    }

    /// Where row (a, b, c) begins.
    pub fn row(&self, [a, b, c]: [usize; 3]) -> usize {
        self.offset + a * self.strides[0] + b * self.strides[1] + c * self.strides[2]
    }
}

impl Program {
    /// Takes a graph; `names` are what errors call its tensors, by their own names where it is shorter.
    ///
    /// # Errors
    /// A source or a view that is no tensor of the graph: the text was damaged.
    pub fn new(graph: Graph, mut names: Vec<String>) -> Result<Program> {
        let n = graph.tensors.len();
        for (id, tensor) in graph.tensors.iter().enumerate() {
            let root = tensor.view.map_or(id, |view| view.root);
            let wrong = tensor.srcs.iter().flatten().chain([&root]).find(|&&other| other >= n);
            if let Some(wrong) = wrong {
                return Err(damaged(tensor, format!("tensor {wrong} of {n}")));
            }
            if graph.tensors[root].view.is_some() {
                return Err(damaged(tensor, "a view of a view's memory".to_owned()));
            }
            if tensor.ne.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent)).is_none() {
                return Err(damaged(tensor, format!("extents {:?}", tensor.ne)));
            }
        }
        names.extend(graph.tensors[names.len().min(n)..].iter().map(|tensor| tensor.name.clone()));
        let (mut last_use, mut written, mut viewed) = (vec![0; n], vec![false; n], vec![false; n]);
        for id in graph.computed() {
            for used in graph.sources(id).chain([id]) {
                last_use[graph.root(used)] = id;
                viewed[graph.root(used)] |= graph.root(used) != used && !graph.get(id).op.is_view();
            }
            let tensor = graph.get(id);
            if tensor.view.is_some() && !tensor.op.is_view() {
                written[graph.root(id)] = true;
            }
        }
        let keys = keys(&graph);
        Ok(Program { graph, names, last_use, written, viewed, keys })
    }

    /// Whether the memory of a tensor that is no view is read or written after node `id`.
    pub fn is_used_after(&self, root: Id, id: Id) -> bool {
        self.last_use[root] > id
    }

    /// Whether nodes write into a leaf: it is a cache or a state.
    pub fn is_written(&self, leaf: Id) -> bool {
        self.graph.is_leaf(leaf) && self.written[leaf]
    }

    /// The nodes that write into the memory of a leaf, in order.
    pub fn writers(&self, leaf: Id) -> impl Iterator<Item = Id> + '_ {
        self.executed().filter(move |&id| self.graph.root(id) == leaf)
    }

    /// What the memory of a leaf is kept under from step to step.
    pub fn key(&self, leaf: Id) -> &str {
        &self.keys[leaf]
    }

    /// Whether nodes read views of a tensor that is no view.
    pub fn is_viewed(&self, root: Id) -> bool {
        self.viewed[root]
    }

    /// Nodes that are executed, in order: views, what is skipped and what has no elements are not.
    pub fn executed(&self) -> impl Iterator<Item = Id> + '_ {
        self.graph.computed().filter(|&id| {
            let tensor = self.graph.get(id);
            !tensor.op.is_view() && tensor.elements() > 0
        })
    }

    /// The memory of a step in which nothing was computed yet.
    pub fn memory<S>(&self) -> Memory<S> {
        self.graph.tensors.iter().map(|_| None).collect()
    }

    /// Where a tensor's elements lie; `None` where its type or its strides are not understood.
    pub fn place(&self, id: Id) -> Option<Place> {
        let tensor = self.graph.get(id);
        let dtype = dtype(tensor)?;
        let (bytes, values) = (dtype.block_bytes(), dtype.block_len());
        // Strides of quantised types are those of blocks, which are never cut.
        let elements = |distance: usize| distance.is_multiple_of(bytes).then(|| distance / bytes * values);
        let [_, b, c, d] = tensor.nb;
        let along = if values == 1 { elements(tensor.nb[0])? } else { 1 };
        Some(Place {
            root: self.graph.root(id),
            offset: elements(tensor.view.map_or(0, |view| view.offset))?,
            shape: tensor.shape(),
            strides: [elements(d)?, elements(c)?, elements(b)?, along],
        })
    }
}

/// Names of leaves with types and extents, and a number where several have all of these in common: two caches of a
/// layer may have one name.
fn keys(graph: &Graph) -> Vec<String> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    let of_leaf = |(id, tensor): (usize, &Tensor)| {
        if !graph.is_leaf(id) {
            return String::new();
        }
        let key = format!("{} {} {:?}", tensor.name, tensor.dtype, tensor.ne);
        let count = counts.entry(key.clone()).or_insert(0);
        *count += 1;
        format!("{key} {count}")
    };
    graph.tensors.iter().enumerate().map(of_leaf).collect()
}

fn damaged(tensor: &Tensor, found: String) -> Error {
    Error::new(&tensor.name, "does not fit the graph that it stands in")
        .expected("sources and views that are tensors of the graph")
        .found(found)
        .hint("the text of this graph is damaged: record it again")
}

/// The element type of a tensor, if it is known.
pub fn dtype(tensor: &Tensor) -> Option<DType> {
    DType::all().find(|dtype| dtype.name().eq_ignore_ascii_case(&tensor.dtype))
}
