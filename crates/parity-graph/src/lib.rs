//! A forward pass as data: tensors, each the output of one op with its parameters, its sources and its weights.
//!
//! One form for a graph that was recorded from llama.cpp and for one that is built from a model file. Nothing here
//! computes, and nothing links llama.cpp.

pub mod op;

pub mod params;

pub mod graph;

pub mod text;

mod attention;
pub mod known;

pub mod axis;
pub mod label;
pub mod weights;

pub mod edit;
pub mod fusion;
pub mod reads;
pub mod rewrite;
pub mod states;

pub mod fault;

pub use graph::{CPU_OF_ARM, Graph, Id, Leaf, MAX_SRC, Tensor, View};
pub use op::Op;
pub use params::Params;
