//! The numbers of a model that engines and reports need beside its nodes, as the builders read them.

use super::graph::Dims;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::builders::Facts;
use parity_graph::weights;

/// An architecture that engines have nodes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Qwen2 and Qwen2.5: Q/K/V biases, halves rotated.
    Qwen2,
    /// Llama, SmolLM2, TinyLlama, Mistral without sliding window: neighbours rotated.
    Llama,
    /// Qwen3: per-head q/k norms, halves rotated.
    Qwen3,
}

impl Architecture {
    /// All, with the name that `general.architecture` has for it.
    pub const ALL: [(Architecture, &'static str); 3] =
        [(Architecture::Qwen2, "qwen2"), (Architecture::Llama, "llama"), (Architecture::Qwen3, "qwen3")];

    /// The GGUF name.
    pub fn name(self) -> &'static str {
        Architecture::ALL.iter().find(|(a, _)| *a == self).map_or("", |(_, name)| name)
    }

    /// That of this `general.architecture`, if it is one of them.
    pub fn of(name: &str) -> Option<Architecture> {
        Architecture::ALL.iter().find(|(_, known)| *known == name).map(|(architecture, _)| *architecture)
    }
}

/// A model's hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `general.architecture`
    pub architecture: Architecture,
    /// Widths of the axes.
    pub dims: Dims,
    /// `{arch}.context_length`: positions the model was trained for.
    pub context: usize,
    /// Whether the output product uses the embedding table.
    pub tied: bool,
}

impl Config {
    /// Of the numbers that a graph was built by.
    ///
    /// # Errors
    /// An architecture that engines have no nodes for.
    pub fn new(gguf: &Gguf, facts: &Facts) -> Result<Config> {
        let architecture = Architecture::of(facts.family.name).ok_or_else(|| {
            let names: Vec<&str> = Architecture::ALL.iter().map(|(_, name)| *name).collect();
            Error::file(gguf.path(), "an architecture that parity's engines have no nodes for")
                .expected(names.join(", "))
                .found(facts.family.name)
                .hint("parity run executes it op by op, on the CPU; parity audit and diff judge its dumps")
        })?;
        let dims = Dims {
            layers: facts.layers,
            model: facts.model,
            heads: facts.heads,
            kv_heads: facts.kv_heads,
            head_width: facts.head_width,
            ffn: facts.ffn,
            vocab: facts.vocab,
        };
        Ok(Config {
            architecture,
            dims,
            context: facts.context,
            tied: gguf.tensor(&weights::weight(weights::OUTPUT)).is_none(),
        })
    }
}
