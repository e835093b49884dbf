//! parity finds the first tensor where an LLM engine leaves llama.cpp, says whether that is
//! rounding or a bug, and names the bug.
//!
//! The modules stand in the order of the flow; a module uses only those above it.

#[cfg(not(unix))]
pub mod elsewhere;

pub mod text;
pub mod watch;

pub mod error;

pub mod files;
pub mod hub;
pub mod memory;
pub mod random;
pub mod scalar;
pub mod settings;
pub mod tensor;

pub mod checkpoint;
pub mod numerics;

pub mod gguf;

pub mod arithmetic;

pub mod ops;

pub mod tokenizer;

pub mod model;

pub mod engine;

pub mod dump;

pub mod foreign;

pub mod record;

pub mod inspect;

pub mod report;

pub mod audit;

pub mod faults;

pub mod select;

pub mod compare;

pub mod references;

pub mod remote;

pub mod verdict;

pub mod sensitivity;

pub mod jobs;

pub mod gate;

#[cfg(feature = "history")]
pub mod history;

pub mod cli;
