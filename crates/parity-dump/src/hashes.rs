//! What is kept of a step where its values are not: `step-NNNN.hashes`, a JSON line for each checkpoint.

use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::error::DumpError;
use crate::files::read_text;
use crate::reader::Dump;

/// What a manifest requires of readers of a dump whose values were not kept.
pub const HASHES: &str = "hashes";

/// Longest file of hashes.
const BYTES_MAX: u64 = 1 << 30;

/// One checkpoint of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hashed {
    /// Its id.
    pub id: Checkpoint,
    /// As computed, slowest axis first.
    pub shape: Vec<usize>,
    /// As safetensors names it.
    pub dtype: String,
    /// Along the slowest axis: token rows of all but attention matrices.
    pub rows: Vec<HashedRow>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HashedRow {
    /// Position of its token; null where the axis is not one of tokens.
    pub position: Option<u32>,
    /// xxh3-128 of the little-endian values, as hex.
    pub hash: String,
    /// Euclidean norm; null where it is not finite.
    pub norm: Option<f64>,
    /// How many values are NaN or Inf.
    pub nonfinite: u64,
}

impl Dump {
    /// Whether hashes were kept in the place of values.
    pub fn is_hashed(&self) -> bool {
        self.manifest().requires.iter().any(|name| name == HASHES)
    }

    /// The hashes of a step; none where values were kept.
    ///
    /// # Errors
    /// A file that cannot be read, or is no such file.
    pub fn hashes(&self, step: usize) -> Result<Vec<Hashed>, DumpError> {
        let Some(file) = self.manifest().steps.get(step).and_then(|step| step.hashes.clone()) else {
            return Ok(Vec::new());
        };
        if file.contains(['/', '\\']) {
            return Err(DumpError::new(self.path(), "a file of hashes lies outside the folder")
                .expected_found("a file name", file));
        }
        let path = self.path().join(file);
        let text = read_text(&path, BYTES_MAX)?;
        let wrong = |e| DumpError::new(&path, format!("is no file of hashes: {e}"));
        text.lines().map(|line| serde_json::from_str(line).map_err(wrong)).collect()
    }
}
