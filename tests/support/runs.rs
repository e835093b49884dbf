//! Models in the repository, and random numbers.

use std::path::{Path, PathBuf};

use parity::engine::fused::Model;
use parity::gguf::Gguf;
use parity::random;

/// Where a committed model is, or one of the folder `PARITY_MODELS`.
pub fn path(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models");
    let folders = [Some(own), std::env::var_os("PARITY_MODELS").map(PathBuf::from)];
    folders.into_iter().flatten().map(|dir| dir.join(name)).find(|path| path.exists())
}

/// Its file.
pub fn gguf(name: &str) -> Option<Gguf> {
    Some(Gguf::open(&path(name)?).unwrap())
}

/// The model.
pub fn model(name: &str) -> Option<Model> {
    Some(Model::open(&path(name)?).unwrap())
}

/// A small generator.
pub struct Random(pub u64);

impl Random {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(random::GAMMA);
        (random::mixed(self.0) % n as u64) as usize
    }

    /// Tokens below `n`.
    pub fn tokens(&mut self, count: usize, n: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(n) as u32).collect()
    }
}
