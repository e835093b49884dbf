//! Checkpoint ids and the `parity-dump/1` format, for any Rust engine that wants to be compared.

pub mod checkpoint;
pub mod manifest;

pub use checkpoint::{Checkpoint, Kind};
