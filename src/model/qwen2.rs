//! Qwen2, Qwen2.5 (arXiv 2407.10671): biases on Q, K and V; halves of a head are rotated.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::build::{Choices, decoder};
use crate::model::config::Config;
use crate::model::graph::Graph;

/// The graph of one model.
pub fn graph(gguf: &Gguf, config: &Config) -> Result<Graph> {
    decoder(gguf, config, Choices { qkv_bias: true, qk_norm: false })
}
