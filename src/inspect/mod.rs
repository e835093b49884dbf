//! What a file holds and what looks wrong in it: models and dumps.

pub mod against;
mod checks;
mod cleared;
mod dump;
mod expected;
mod graph;
mod layout;
mod model;
mod stats;
mod text;

use std::path::Path;

use serde::Serialize;

pub use dump::DumpInspection;
pub use graph::dot::dot;
pub use model::ModelInspection;
pub use stats::Stats;

use crate::error::Result;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// An engine that reads the file as it says computes something else than the model's makers did.
    Wrong,
    /// Right files can have it, but few do.
    Unusual,
}

/// Something that looks wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// The tensor, metadata key or checkpoint.
    pub subject: String,
    /// What about it.
    pub text: String,
}

impl Finding {
    fn wrong(subject: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding { level: Level::Wrong, subject: subject.into(), text: text.into() }
    }

    fn unusual(subject: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding { level: Level::Unusual, subject: subject.into(), text: text.into() }
    }
}

/// What a file holds.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Inspection {
    /// A GGUF file.
    Model(Box<ModelInspection>),
    /// A dump folder or a `.safetensors` file of activations.
    Dump(Box<DumpInspection>),
}

impl Inspection {
    /// What looks wrong, the worst first.
    pub fn findings(&self) -> &[Finding] {
        match self {
            Inspection::Model(model) => &model.findings,
            Inspection::Dump(dump) => &dump.findings,
        }
    }

    /// For people: what looks wrong comes first. `all_tensors` lists each tensor on its own line where
    /// otherwise layers are summed up.
    pub fn to_text(&self, all_tensors: bool) -> String {
        match self {
            Inspection::Model(model) => text::model(model, all_tensors),
            Inspection::Dump(dump) => text::dump(dump),
        }
    }
}

/// How the names of files end that are dumps.
const DUMPS: [&str; 4] = ["safetensors", "npz", "pt", "pth"];

/// Reads all of a model, or of a dump.
pub fn inspect(path: &Path) -> Result<Inspection> {
    if path.is_dir() || path.extension().is_some_and(|ending| DUMPS.iter().any(|known| ending == *known)) {
        return Ok(Inspection::Dump(Box::new(dump::inspect(path)?)));
    }
    Ok(Inspection::Model(Box::new(model::inspect(path)?)))
}
