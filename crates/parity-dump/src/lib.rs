//! Checkpoint ids and the `parity-dump/1` format, for any Rust engine that wants to be compared.
//!
//! ```
//! use parity_dump::{Checkpoint, Dump, Kind, Producer, Writer};
//! # let dir = tempfile::tempdir()?;
//! # let dir = dir.path();
//! let producer = Producer { name: "my-engine".into(), ..Producer::default() };
//! let mut writer = Writer::create(dir, producer, Default::default())?;
//! writer.begin_step(&[9707, 1879], &[0, 1], 1)?;
//! writer.tensor_f32(Checkpoint::layer(Kind::AttnNorm, 0), &[2, 3], &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])?;
//! writer.end_step()?;
//! writer.finish()?;
//! assert_eq!(Dump::open(dir)?.tokens(), [9707, 1879]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod checkpoint;
mod dtype;
mod error;
mod files;
pub mod hashes;
mod leaves;
pub mod life;
pub mod manifest;
mod orders;
pub mod packed;
mod reader;
mod recorded;
pub mod seen;
pub mod single;
mod steps;
mod symbol;
pub mod writer;

pub use checkpoint::{Checkpoint, Kind, usual_order};
pub use dtype::Element;
pub use error::DumpError;
pub use files::{
    POSITIONS_MAX, open_regular, read_manifest, read_text, refuse_numbered, refuse_unknown, write_manifest,
};
pub use leaves::Leaf;
pub use life::{Event, Life, RowKey};
pub use manifest::{GraphFile, Manifest, ModelInfo, Producer, Step, Stopped};
pub use reader::Dump;
pub use recorded::{Part, Recorded};
pub use symbol::{NAME_MAX, Symbol};
pub use writer::{CONTEXT, Writer};
