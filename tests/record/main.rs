//! Recording: llama.cpp, other engines, and what they are told.

mod ab;
mod builtin;
mod contexts;
mod engines;
mod levels;
mod life;
mod loaded;
mod mistakes;
mod peers;
mod preload;
mod rolled_back;
mod rpc;
#[path = "../support/lib.rs"]
mod support;
mod towers;
