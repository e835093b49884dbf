//! Llama (arXiv 2302.13971) and what is converted to it: neighbouring columns are rotated, since the
//! conversion permutes the rows of Q and K; `rope_freqs.weight` from Llama 3.1 on.

use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::build::{Choices, decoder};
use crate::model::config::Config;
use crate::model::graph::Graph;

/// The graph of one model.
pub fn graph(gguf: &Gguf, config: &Config) -> Result<Graph> {
    decoder(gguf, config, Choices { qkv_bias: true, qk_norm: false })
}
