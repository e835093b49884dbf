//! Gemma 3 (arXiv 2503.19786): norms before and after both halves of a layer, per-head norms of Q and K, scaled
//! embeddings and queries, sliding windows in most layers. Its norms' `1 + w` is in the weights of the file.

use parity_graph::{Id, Op};

use crate::checkpoint::Kind;
use crate::error::Result;

use super::attention::Attention;
use super::blocks::{Builder, Scale};
use super::facts::{Family, Keys, Window};
use super::sketch::Word;
use parity_graph::weights;

/// Halves are rotated; five layers of six have a window, where the file gives one.
pub const FAMILY: Family = Family { name: "gemma3", rope_mode: 2, window: Window::Optional(6) };

/// GEGLU with ggml's number of it.
const GEGLU: (Op, i32) = (Op::Geglu, 1);

/// Layers of the 27B model, whose queries are scaled by D/H instead of E.
const LAYERS_27B: usize = 62;

/// Draws the graph.
///
/// # Errors
/// A key or a tensor that does not fit.
pub fn draw(builder: &mut Builder<'_>) -> Result<()> {
    let facts = builder.facts;
    let width = if facts.layers == LAYERS_27B { facts.model / facts.heads } else { facts.head_width };
    let attention = Attention {
        qk_norm: true,
        query: Some(1.0 / (width as f32).sqrt()),
        scale: 1.0,
        two_caches: facts.window.is_some(),
        ..Attention::default()
    };
    let x = builder.embed()?;
    let mut x = builder.scaled(x, (facts.model as f32).sqrt(), "inp_scaled");
    for layer in 0..facts.layers {
        x = draw_layer(builder, layer, x, &attention)?;
    }
    let logits = builder.head(x)?;
    if let Some(cap) = Keys::new(builder.gguf, FAMILY.name).nonzero("final_logit_softcapping")? {
        let scaled = builder.scaled(logits, 1.0 / cap, "result_output_scaled");
        let bent = builder.sketch.same(Op::Tanh, &[scaled], &[("unary", Word::Int(TANH))]);
        builder.sketch.name(bent, "result_output_tanh");
        builder.scaled(bent, cap, "result_output");
    }
    Ok(())
}

/// ggml's number of TANH among the unary functions.
const TANH: i32 = 4;

fn draw_layer(builder: &mut Builder<'_>, layer: usize, input: Id, attention: &Attention) -> Result<Id> {
    let part = |part: &str| weights::in_layer(layer, part);
    let node = |name: &str| format!("{name}-{layer}");
    let normed = builder.norm(&part(weights::ATTN_NORM), input, &node("attn_norm"))?;
    let mut out = builder.attention(layer, normed, attention)?;
    let last = layer + 1 == builder.facts.layers;
    if last {
        out = builder.output_rows(out);
    }
    let out = builder.norm(&part(weights::POST_ATTENTION_NORM), out, &node("attn_post_norm"))?;
    let residual = if last { builder.output_rows(input) } else { input };
    let residual = builder.sum(out, residual, &node(Kind::AttnResidual.name()));
    let normed = builder.norm(&part(weights::FFN_NORM), residual, &node("ffn_norm"))?;
    let out = builder.feed_forward(layer, normed, GEGLU, Scale::Idle)?;
    // llama.cpp gives this one no layer.
    let out = builder.norm_called(&part(weights::POST_FFW_NORM), out, "norm", &node("ffn_post_norm"))?;
    Ok(builder.sum(out, residual, &node(Kind::LayerOut.name())))
}
