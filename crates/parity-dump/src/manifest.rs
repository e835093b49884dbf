//! `manifest.json` of a dump folder: who computed what, on which tokens.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::checkpoint::{Checkpoint, by_spelling};
use crate::hashes::HASHES;
use crate::life::{Life, SEQUENCES};
use crate::packed::ZSTD_SHUFFLE;

/// The format's name and version.
pub const SCHEMA: &str = "parity-dump/1";
/// File name of the manifest within a dump folder.
pub const MANIFEST_FILE: &str = "manifest.json";

/// How the names of a step's inputs begin: what no node computes, as positions and masks.
pub const LEAF_PREFIX: &str = "leaf.";

/// What a dump folder says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`SCHEMA`].
    pub schema: String,
    /// Who computed the values.
    pub producer: Producer,
    /// The model that was run.
    #[serde(default, deserialize_with = "null_is_default")]
    pub model: ModelInfo,
    /// Token at each position, 0 to n-1; of each row where rows are numbered.
    pub tokens: Vec<u32>,
    /// The text that the first tokens come from.
    #[serde(default)]
    pub prompt: Option<String>,
    /// One entry per forward pass, in order.
    pub steps: Vec<Step>,
    /// Positions, or numbers of rows, that a checkpoint has, listed only where it lacks some of its steps'.
    #[serde(default, serialize_with = "rows_by_spelling", deserialize_with = "null_is_default")]
    pub rows: HashMap<Checkpoint, Vec<u32>>,
    /// The recorded graphs, and which steps computed which.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub graphs: Vec<GraphFile>,
    /// Nodes of the producer that no checkpoint id could be given to.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub unmapped: Vec<String>,
    /// How the dump was made: flags, date, anything worth keeping.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_is_default")]
    pub provenance: BTreeMap<String, String>,
    /// Where and why the recording ended before what it records did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<Stopped>,
    /// What a reader must know to read it rightly; see [`KNOWN`].
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub requires: Vec<String>,
    /// How closely was looked: `nodes` (one by one), `outputs` (kept until the whole graph was computed) or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<String>,
    /// Written last; `false` in an interrupted recording.
    #[serde(default, deserialize_with = "null_is_default")]
    pub complete: bool,
}

/// What a manifest may require of its readers, and this one fulfils.
pub const KNOWN: &[&str] = &[HASHES, SEQUENCES, ZSTD_SHUFFLE];

/// Where and why a recording ended early.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// Index of the last step that was recorded; null before the first.
    #[serde(default)]
    pub after_step: Option<usize>,
    /// The position that would have been recorded next.
    #[serde(default)]
    pub position: Option<u32>,
    /// Why, as the middle of a sentence.
    #[serde(default)]
    pub reason: String,
}

impl Manifest {
    /// A dump of nothing yet.
    pub fn new(producer: Producer, model: ModelInfo) -> Manifest {
        Manifest {
            schema: SCHEMA.to_owned(),
            producer,
            model,
            tokens: Vec::new(),
            prompt: None,
            steps: Vec::new(),
            rows: HashMap::new(),
            graphs: Vec::new(),
            unmapped: Vec::new(),
            provenance: BTreeMap::new(),
            stopped: None,
            requires: Vec::new(),
            observed: None,
            complete: false,
        }
    }

    /// Says that the recording ended behind its last step, for a `reason`; the first that was told counts.
    pub fn stop(&mut self, reason: &str) {
        self.complete = false;
        self.stopped.get_or_insert_with(|| Stopped {
            after_step: self.steps.len().checked_sub(1),
            position: u32::try_from(self.tokens.len()).ok(),
            reason: reason.to_owned(),
        });
    }

    /// Whether everything that was to be recorded is there.
    pub fn is_whole(&self) -> bool {
        self.complete && self.stopped.is_none()
    }
}

fn rows_by_spelling<S: Serializer>(
    rows: &HashMap<Checkpoint, Vec<u32>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    by_spelling(rows).serialize(serializer)
}

/// Who computed the values of a dump.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Producer {
    /// Engine, e.g. `parity`, `llama.cpp`.
    pub name: String,
    /// Version of the engine.
    #[serde(default)]
    pub version: Option<String>,
    /// `cpu`, `cuda`, …
    #[serde(default)]
    pub backend: Option<String>,
    /// Name of the device.
    #[serde(default)]
    pub device: Option<String>,
    /// The arithmetic, in the words of parity's `numerics.rs`, e.g. `llama-cpu kv=f16 flash=on`.
    #[serde(default)]
    pub numerics: Option<String>,
}

/// The model that a dump was made with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// File name, without folders.
    #[serde(default)]
    pub file: Option<String>,
    /// What tells one model file from another; see parity's `Model::fingerprint`.
    #[serde(default)]
    pub fingerprint: Option<String>,
    /// `general.architecture`.
    #[serde(default)]
    pub architecture: Option<String>,
    /// `general.name`.
    #[serde(default)]
    pub name: Option<String>,
}

/// One recorded graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphFile {
    /// File within the folder, `graph-NNNN.txt`.
    pub file: String,
    /// Indices of the steps that computed it.
    pub steps: Vec<usize>,
}

/// One forward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// File within the folder, `step-NNNN.safetensors`.
    pub file: String,
    /// (T,) numbers of its rows: their positions, or, where a position repeats, counted over all steps in their order.
    pub positions: Vec<u32>,
    /// File of hashes within the folder, `step-NNNN.hashes`, where values were not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hashes: Option<String>,
    /// Sequences, cells and events.
    #[serde(flatten)]
    pub life: Life,
}

/// A field that is null is as one that is not there.
pub(crate) fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}
