//! Qwen3 (arXiv 2505.09388): a norm over each head of Q and K before the rotation, no biases.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::build::{Choices, decoder};
use crate::model::config::Config;
use crate::model::graph::Graph;

/// The graph of one model.
pub fn graph(gguf: &Gguf, config: &Config) -> Result<Graph> {
    decoder(gguf, config, Choices { qkv_bias: false, qk_norm: true })
}
