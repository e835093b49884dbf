//! A model file that was opened once, whether or not parity's engines have nodes for it.

use std::path::Path;

use super::{Model, lower};
use crate::error::{Error, Result};
use crate::gguf::Gguf;

/// A model file.
pub enum ModelFile {
    /// With the nodes that parity's engines execute.
    Nodes(Box<Model>),
    /// Without, and why: what is done with it goes op by op, by a graph.
    Refused(Box<Gguf>, Error),
}

impl ModelFile {
    /// Opens a file.
    ///
    /// # Errors
    /// A file that is no GGUF.
    pub fn open(path: &Path) -> Result<ModelFile> {
        Gguf::open(path).map(ModelFile::of)
    }

    /// Of a file that is open.
    pub fn of(gguf: Gguf) -> ModelFile {
        match lower::graph(&gguf) {
            Ok((config, graph)) => ModelFile::Nodes(Box::new(Model { gguf, config, graph })),
            Err(refused) => ModelFile::Refused(Box::new(gguf), refused),
        }
    }

    /// The file as such.
    pub fn gguf(&self) -> &Gguf {
        match self {
            ModelFile::Nodes(model) => &model.gguf,
            ModelFile::Refused(gguf, _) => gguf,
        }
    }

    /// The file alone.
    pub fn into_gguf(self) -> Gguf {
        match self {
            ModelFile::Nodes(model) => model.gguf,
            ModelFile::Refused(gguf, _) => *gguf,
        }
    }

    /// The nodes that parity's engines execute.
    ///
    /// # Errors
    /// Why it has none.
    pub fn nodes(&self) -> Result<&Model> {
        match self {
            ModelFile::Nodes(model) => Ok(model),
            ModelFile::Refused(_, refused) => Err(refused.clone()),
        }
    }

    /// Why it has none, in a line.
    pub fn refused(&self) -> Option<String> {
        let why = self.nodes().err()?;
        why.to_string().lines().next().map(str::to_owned)
    }
}
