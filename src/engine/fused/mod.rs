//! Parity's own engines: a graph of few, large nodes, which fast kernels compute on the CPU here and on GPUs in
//! `engine/cuda`.
//!
//! The nodes are lowered from the graph that is built of a model file ([`lower`]); nobody but the engines knows them. What
//! they cannot express is refused, and executed op by op instead.

mod attention;
pub mod config;
pub mod cpu;
pub mod file;
pub mod graph;
pub(crate) mod linear;
mod lower;
mod nodes;
mod norm;
mod pointwise;
mod rope;

pub(crate) use attention::TILE_ROWS;
pub use nodes::{Inputs, Rows, execute};

use std::path::Path;

use crate::error::Result;
use crate::gguf::Gguf;
use crate::model;
use parity_dump::manifest::ModelInfo;

use config::Config;
use file::ModelFile;
use graph::Graph;

/// A model file and the graph that runs it.
pub struct Model {
    /// The file.
    pub gguf: Gguf,
    /// Its hyperparameters.
    pub config: Config,
    /// Its forward pass.
    pub graph: Graph,
}

impl Model {
    /// Opens a model and builds its graph.
    ///
    /// # Errors
    /// Names the file and what is wrong with it, or what of it is not supported.
    pub fn open(path: &Path) -> Result<Model> {
        match ModelFile::open(path)? {
            ModelFile::Nodes(model) => Ok(*model),
            ModelFile::Refused(_, refused) => Err(refused),
        }
    }

    /// What a dump says of the model it was made with.
    pub fn info(&self) -> ModelInfo {
        model::info(&self.gguf)
    }

    /// Refuses a dump that was made with another model, where both fingerprints are known.
    ///
    /// # Errors
    /// Names the dump and both models.
    pub fn refuse_other(&self, dump: &Path, made_with: &ModelInfo) -> Result<()> {
        model::refuse_other(&self.gguf, dump, made_with)
    }
}
