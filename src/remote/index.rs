//! What `parity push` writes beside a dump: the hash of everything in it, so that what is fetched can be checked, and what was
//! fetched before is known again wherever it comes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Name and version of the format.
pub const SCHEMA: &str = "parity-index/1";
/// Under which key a manifest's provenance has the SHA-256 of the index that belongs to it.
pub const KEY: &str = "index";
/// Its name.
pub const FILE: &str = "parity-index.json";

/// The index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// [`SCHEMA`].
    pub schema: String,
    /// Files that are read whole: SHA-256 by name.
    pub files: BTreeMap<String, String>,
    /// Step files by name.
    pub steps: BTreeMap<String, Step>,
}

/// One step file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Bytes of the header, with its length in front.
    pub head_bytes: u64,
    /// SHA-256 of these.
    pub head: String,
    /// SHA-256 of the stored bytes of each tensor, by name.
    pub tensors: BTreeMap<String, String>,
}
