//! One step of a model as a graph, from the metadata and tensors of its file alone: one file per family.
//!
//! A builder draws the ops that llama.cpp 0.5.0 computes, in its order and with its names for leaves and nodes, so
//! that a built graph can be executed like a recorded one and compared with it (`model::diff`). What a builder does
//! not know, it refuses: a tensor that is left over, a key that may change the computation.

mod attention;
mod blocks;
mod decoder;
mod experts;
mod facts;
mod gemma3;
mod gpt_oss;
mod inputs;
mod keys;
mod shape;
mod sketch;

use parity_graph::Graph;

use crate::error::{Error, Result};
use crate::gguf::Gguf;

pub use facts::Facts;
pub use inputs::{CAUSAL_MASK, Values, inputs, known};
pub use shape::{Cache, Kept, Shape};

use blocks::Builder;
use facts::Family;

/// Which columns of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// i and i + dims/2 (NeoX, Qwen2, Hugging Face).
    Half,
    /// 2i and 2i + 1 (GPT-J, the `llama` architecture in GGUF).
    Interleaved,
}

/// Draws all of one family's graph.
type Draw = fn(&mut Builder<'_>) -> Result<()>;

/// Every family that can be built: its facts, and its file's function. A new one is one file and one line.
const FAMILIES: &[(Family, Draw)] = &[
    (decoder::QWEN2, decoder::draw),
    (decoder::LLAMA, decoder::draw),
    (decoder::QWEN3, decoder::draw),
    (decoder::QWEN3MOE, decoder::draw),
    (gemma3::FAMILY, gemma3::draw),
    (gpt_oss::FAMILY, gpt_oss::draw),
];

/// A graph that was built, and what its inputs follow from.
#[derive(Clone, Debug)]
pub struct Built {
    /// One step.
    pub graph: Graph,
    /// For which shape.
    pub shape: Shape,
    /// The model's numbers.
    pub facts: Facts,
}

/// Architectures that can be built, by `general.architecture`.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(family, _)| family.name)
}

/// Whether there is a builder for this `general.architecture`.
pub fn knows(architecture: &str) -> bool {
    architectures().any(|name| name == architecture)
}

/// Which columns of a head rotary embedding pairs in an architecture, where there is a builder for it.
pub fn pairing(architecture: &str) -> Option<Pairing> {
    let (family, _) = FAMILIES.iter().find(|(family, _)| family.name == architecture)?;
    Some(if family.rope_mode == 0 { Pairing::Interleaved } else { Pairing::Half })
}

/// Builds one step of a model.
///
/// # Errors
/// An architecture without a builder, a key or a tensor that a builder does not know, a shape that cannot be.
pub fn build(gguf: &Gguf, shape: Shape) -> Result<Built> {
    let name = gguf.require_str("general.architecture")?;
    let Some((family, draw)) = FAMILIES.iter().find(|(family, _)| family.name == name) else {
        let names: Vec<&str> = architectures().collect();
        return Err(Error::file(gguf.path(), "an architecture that parity has no builder for")
            .expected(names.join(", "))
            .found(name)
            .hint(
                "record llama.cpp: `parity record -o RECORDING -- …`; a recorded graph is executed and judged as it is, \
                 and another engine's dump by it: `parity diff DUMP RECORDING -m MODEL.gguf`",
            ));
    };
    shape.check(gguf)?;
    let facts = Facts::read(gguf, *family)?;
    let mut builder = Builder::new(gguf, &facts, &shape);
    draw(&mut builder)?;
    let graph = builder.finish()?;
    Ok(Built { graph, shape, facts })
}
