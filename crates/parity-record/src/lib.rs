//! What a ggml graph is to parity: which node is which checkpoint, and how its values get to disk while
//! the model runs.
//!
//! Shared by the library that is loaded into a foreign llama.cpp process, by the built-in llama.cpp and
//! by the reader of printed tensors. Nothing here links llama.cpp: its functions come as an [`api::Api`].

#[cfg(not(unix))]
mod elsewhere;

pub mod map;
pub mod region;

pub mod filter;
pub mod sequence;

pub mod api;
pub mod describe;
pub mod image;
pub mod layout;

pub mod forced;
mod gather;
mod hashes;
mod hashing;
pub mod plan;
mod producer;
pub mod store;

mod inject;
pub mod kept;
mod values;
pub use parity_graph::fault::Wanted;

mod options;
pub mod recorder;
