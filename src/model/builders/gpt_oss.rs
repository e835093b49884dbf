//! gpt-oss (arXiv 2508.10925): biases everywhere, a sink for each head, every other layer with a sliding window, YaRN,
//! experts with a clamped gate.

use parity_graph::{Id, Op};

use crate::checkpoint::Kind;
use crate::error::Result;

use super::attention::Attention;
use super::blocks::Builder;
use super::experts::{Experts, Routing};
use super::facts::{Family, Keys, Window};
use super::sketch::Word;
use parity_graph::weights;

/// Halves are rotated; every other layer has a window.
pub const FAMILY: Family = Family { name: "gpt-oss", rope_mode: 2, window: Window::Always(2) };

/// Slope of the gate's sigmoid, and where gate and up are cut (llama.cpp: constants of `build_moe_ffn`).
const ALPHA_LIMIT: [f32; 2] = [1.702, 7.0];

/// ggml's number of SWIGLU_OAI.
const SWIGLU_OAI: i32 = 3;

/// Draws the graph.
///
/// # Errors
/// A key or a tensor that does not fit.
pub fn draw(builder: &mut Builder<'_>) -> Result<()> {
    let facts = builder.facts;
    let keys = Keys::new(builder.gguf, FAMILY.name);
    if facts.experts == 0 {
        return Err(keys.unsupported("expert_count", "1 or more", 0));
    }
    if facts.rope.dims != facts.head_width {
        return Err(keys.unsupported("rope.dimension_count", facts.head_width, facts.rope.dims));
    }
    let attention = Attention {
        scale: 1.0 / (facts.head_width as f32).sqrt(),
        sinks: true,
        two_caches: true,
        ..Attention::default()
    };
    let [alpha, limit] = ALPHA_LIMIT;
    let experts = Experts {
        ffn: keys.count("expert_feed_forward_length")?,
        glu: Op::SwigluOai,
        words: vec![
            ("glu", Word::Int(SWIGLU_OAI)),
            ("alpha", Word::Float(alpha)),
            ("limit", Word::Float(limit)),
        ],
        routing: Routing::SoftmaxOfChosen,
        bias: true,
    };
    let mut x = builder.embed()?;
    for layer in 0..facts.layers {
        x = draw_layer(builder, layer, x, &attention, &experts)?;
    }
    let x = builder.output_rows(x);
    builder.head(x)?;
    Ok(())
}

fn draw_layer(
    builder: &mut Builder<'_>,
    layer: usize,
    input: Id,
    attention: &Attention,
    experts: &Experts,
) -> Result<Id> {
    let part = |part: &str| weights::in_layer(layer, part);
    let node = |name: &str| format!("{name}-{layer}");
    let normed = builder.norm(&part(weights::ATTN_NORM), input, &node("attn_norm"))?;
    let out = builder.attention(layer, normed, attention)?;
    let residual = builder.sum(out, input, &node(Kind::AttnResidual.name()));
    let normed = builder.norm(&part(weights::POST_ATTENTION_NORM), residual, &node("attn_post_norm"))?;
    let out = builder.experts(layer, normed, experts)?;
    Ok(builder.sum(out, residual, &node(Kind::LayerOut.name())))
}
