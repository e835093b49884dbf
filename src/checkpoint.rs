//! The vocabulary of checkpoints; spelt in `crates/parity-dump`, which other engines link too.

pub use parity_dump::checkpoint::{Checkpoint, Kind, UnknownCheckpoint, usual_order};
