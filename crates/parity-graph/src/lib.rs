//! A forward pass as data: tensors, each the output of one op with its parameters, its sources and its weights.
//!
//! One form for a graph that was recorded from llama.cpp and for one that is built from a model file. Nothing here
//! computes, and nothing links llama.cpp.

pub mod op;

pub mod params;

pub mod graph;

pub mod text;
pub mod rewrite;

pub mod fault;

pub use graph::{Graph, Id, MAX_SRC, Tensor, View};
pub use op::Op;
pub use params::Params;
