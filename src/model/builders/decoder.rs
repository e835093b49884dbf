//! Qwen2 and Qwen2.5 (arXiv 2407.10671), Llama and its relatives, Qwen3 (arXiv 2505.09388), each with a feed-forward
//! layer or with experts: a pre-norm decoder whose architectures differ in a few choices.

use parity_graph::{Id, Op};

use crate::checkpoint::Kind;
use crate::error::Result;

use super::attention::Attention;
use super::blocks::{Builder, Scale};
use super::experts::{Experts, Routing};
use super::facts::{Family, Keys, Window};
use super::sketch::Word;
use parity_graph::weights;

/// Biases on Q, K and V; halves are rotated.
pub const QWEN2: Family = Family { name: "qwen2", rope_mode: 2, window: Window::Never };
/// Neighbours are rotated, perhaps with frequency factors.
pub const LLAMA: Family = Family { name: "llama", rope_mode: 0, window: Window::Never };
/// Per-head norms of Q and K; halves are rotated.
pub const QWEN3: Family = Family { name: "qwen3", rope_mode: 2, window: Window::Never };
/// Qwen3 with experts.
pub const QWEN3MOE: Family = Family { name: "qwen3moe", rope_mode: 2, window: Window::Never };

/// SWIGLU with ggml's number of it.
const SWIGLU: (Op, i32) = (Op::Swiglu, 2);

/// Draws the graph.
///
/// # Errors
/// A key or a tensor that does not fit.
pub fn draw(builder: &mut Builder<'_>) -> Result<()> {
    let facts = builder.facts;
    let name = facts.family.name;
    if facts.rope.dims != facts.head_width {
        let keys = Keys::new(builder.gguf, name);
        return Err(keys.unsupported("rope.dimension_count", facts.head_width, facts.rope.dims));
    }
    let attention = Attention {
        qk_norm: name.starts_with("qwen3"),
        factors: (name == LLAMA.name).then_some(weights::ROPE_FREQS),
        scale: 1.0 / (facts.head_width as f32).sqrt(),
        ..Attention::default()
    };
    if name == QWEN3.name {
        // The head of classifiers and rerankers, which a graph for logits does not compute.
        builder.idle(&weights::weight(weights::CLS_OUTPUT));
        builder.idle(&weights::bias(weights::CLS_OUTPUT));
    }
    let experts = experts(builder)?;
    let mut x = builder.embed()?;
    for layer in 0..facts.layers {
        x = draw_layer(builder, layer, x, &attention, experts.as_ref())?;
    }
    builder.head(x)?;
    Ok(())
}

/// What the experts of this model are, if it has any.
fn experts(builder: &Builder<'_>) -> Result<Option<Experts>> {
    let facts = builder.facts;
    let keys = Keys::new(builder.gguf, facts.family.name);
    let moe = facts.family.name == QWEN3MOE.name;
    if moe && facts.experts == 0 {
        return Err(keys.unsupported("expert_count", "1 or more", 0));
    }
    if facts.experts == 0 {
        return Ok(None);
    }
    if !moe && facts.family.name != LLAMA.name {
        return Err(keys.unsupported("expert_count", "none, or 0", facts.experts));
    }
    let ffn = match keys.count("expert_feed_forward_length")? {
        _ if !moe => facts.ffn,
        0 => facts.ffn / facts.experts_used,
        ffn => ffn,
    };
    Ok(Some(Experts {
        ffn,
        glu: SWIGLU.0,
        words: vec![("glu", Word::Int(SWIGLU.1))],
        routing: Routing::SoftmaxThenSum,
        bias: false,
    }))
}

fn draw_layer(
    builder: &mut Builder<'_>,
    layer: usize,
    input: Id,
    attention: &Attention,
    experts: Option<&Experts>,
) -> Result<Id> {
    let node = |kind: Kind| format!("{}-{layer}", kind.name());
    let part = |part: &str| weights::in_layer(layer, part);
    let normed = builder.norm(&part(weights::ATTN_NORM), input, &format!("attn_norm-{layer}"))?;
    let mut out = builder.attention(layer, normed, attention)?;
    let mut residual = input;
    if layer + 1 == builder.facts.layers {
        (out, residual) = (builder.output_rows(out), builder.output_rows(residual));
    }
    let residual = builder.sum(out, residual, &node(Kind::AttnResidual));
    let normed = builder.norm(&part(weights::FFN_NORM), residual, &format!("ffn_norm-{layer}"))?;
    let out = match experts {
        Some(experts) => builder.experts(layer, normed, experts)?,
        None => {
            // llama.cpp hands the scales of the feed-forward layer on in all of these but Qwen2.
            let scale = if builder.facts.family.name == QWEN2.name { Scale::Idle } else { Scale::AfterBias };
            builder.feed_forward(layer, normed, SWIGLU, scale)?
        }
    };
    Ok(builder.sum(out, residual, &node(Kind::LayerOut)))
}
