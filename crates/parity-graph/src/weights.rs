//! What the tensors of a model file are called: the one place where these names are spelt.
//!
//! A name is a part with `.weight` or `.bias` behind it, in a layer with `blk.N.` before it: `blk.7.attn_q.weight`.

/// (V, D) table of the tokens' embeddings.
pub const TOKEN_EMBD: &str = "token_embd";
/// (V, D) table of the logits, where it is another.
pub const OUTPUT: &str = "output";
/// (classes, D) head of a classifier or reranker.
pub const CLS_OUTPUT: &str = "cls.output";
/// (D,) last norm.
pub const OUTPUT_NORM: &str = "output_norm";
/// (dims/2,) divisors of RoPE's angles.
pub const ROPE_FREQS: &str = "rope_freqs";
/// The same for long contexts.
pub const ROPE_FACTORS_LONG: &str = "rope_factors_long";
/// The same for short contexts.
pub const ROPE_FACTORS_SHORT: &str = "rope_factors_short";
/// (D,) norm before attention.
pub const ATTN_NORM: &str = "attn_norm";
/// (H·E, D) queries.
pub const ATTN_Q: &str = "attn_q";
/// (K·E, D) keys.
pub const ATTN_K: &str = "attn_k";
/// (K·E, D) values.
pub const ATTN_V: &str = "attn_v";
/// ((H + 2 K)·E, D) all three in one matrix.
pub const ATTN_QKV: &str = "attn_qkv";
/// (E,) norm of each query head.
pub const ATTN_Q_NORM: &str = "attn_q_norm";
/// (E,) norm of each key head.
pub const ATTN_K_NORM: &str = "attn_k_norm";
/// (H,) scores that take part in the softmax and lead nowhere.
pub const ATTN_SINKS: &str = "attn_sinks";
/// (D, H·E) what attention gives back.
pub const ATTN_OUTPUT: &str = "attn_output";
/// (D,) norm behind attention.
pub const POST_ATTENTION_NORM: &str = "post_attention_norm";
/// (D,) norm before the feed-forward part.
pub const FFN_NORM: &str = "ffn_norm";
/// (F, D) gate.
pub const FFN_GATE: &str = "ffn_gate";
/// (F, D) up.
pub const FFN_UP: &str = "ffn_up";
/// (D, F) down.
pub const FFN_DOWN: &str = "ffn_down";
/// (D,) norm behind the feed-forward part.
pub const POST_FFW_NORM: &str = "post_ffw_norm";
/// (experts, D) router.
pub const FFN_GATE_INP: &str = "ffn_gate_inp";
/// (experts, F, D) gates of the experts.
pub const FFN_GATE_EXPS: &str = "ffn_gate_exps";
/// (experts, F, D) ups of the experts.
pub const FFN_UP_EXPS: &str = "ffn_up_exps";
/// (experts, D, F) downs of the experts.
pub const FFN_DOWN_EXPS: &str = "ffn_down_exps";
/// (F, D) gate of the shared expert.
pub const FFN_GATE_SHEXP: &str = "ffn_gate_shexp";
/// (F, D) up of the shared expert.
pub const FFN_UP_SHEXP: &str = "ffn_up_shexp";
/// (D, F) down of the shared expert.
pub const FFN_DOWN_SHEXP: &str = "ffn_down_shexp";
/// (1, D) how much the shared expert counts.
pub const FFN_GATE_INP_SHEXP: &str = "ffn_gate_inp_shexp";

/// What stands before the number of a layer.
pub const LAYER_PREFIX: &str = "blk.";
/// What a matrix, or the factors of a norm, have behind their part.
pub const WEIGHT: &str = "weight";
/// What is added has this behind its part.
pub const BIAS: &str = "bias";

/// The first matrix of an adapter has this behind the name of the weight that it is for: `blk.7.attn_q.weight.lora_a`.
pub const LORA_A: &str = "lora_a";
/// The second one.
pub const LORA_B: &str = "lora_b";

/// Stands between the name of a weight and the number of the adapter that its matrices are of, from the second on:
/// `blk.7.attn_q.weight@2.lora_a`. llama.cpp calls those of all adapters alike.
const ADAPTER: char = '@';

/// The name of a matrix of an adapter: that with this number, from 0, of those that have matrices for the weight.
pub fn in_adapter(weight: &str, kind: &str, number: usize) -> String {
    match number {
        0 => format!("{weight}.{kind}"),
        _ => format!("{weight}{ADAPTER}{}.{kind}", number + 1),
    }
}

/// The weight, the kind and the number of [`in_adapter`]; `None` of what is no matrix of an adapter.
pub fn of_adapter(name: &str) -> Option<(&str, &str, usize)> {
    let (of, kind) = name.rsplit_once('.').filter(|(_, kind)| [LORA_A, LORA_B].contains(kind))?;
    match of.rsplit_once(ADAPTER) {
        Some((weight, number)) => Some((weight, kind, number.parse::<usize>().ok()?.checked_sub(1)?)),
        None => Some((of, kind, 0)),
    }
}

/// `attn_q` as `attn_q.weight`, with its layer or without.
pub fn weight(part: &str) -> String {
    format!("{part}.{WEIGHT}")
}

/// `attn_q` as `attn_q.bias`, with its layer or without.
pub fn bias(part: &str) -> String {
    format!("{part}.{BIAS}")
}

/// `attn_q` as `blk.7.attn_q`.
pub fn in_layer(layer: impl std::fmt::Display, part: &str) -> String {
    format!("{LAYER_PREFIX}{layer}.{part}")
}

/// `blk.7.attn_q.weight` as 7 and `attn_q.weight`.
pub fn layer_weight(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix(LAYER_PREFIX)?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// A name taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name<'a> {
    /// The layer, if it is in one.
    pub layer: Option<u32>,
    /// `attn_q`
    pub part: &'a str,
    /// [`WEIGHT`], [`BIAS`], or whatever else stands behind the last dot; empty where there is none.
    pub kind: &'a str,
}

impl Name<'_> {
    /// `blk.7.attn_q.weight` as 7, `attn_q` and `weight`.
    pub fn of(name: &str) -> Name<'_> {
        let (layer, rest) = layer_weight(name).map_or((None, name), |(layer, rest)| (Some(layer), rest));
        let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, ""));
        Name { layer, part, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_as_they_are_put_together() {
        let name = weight(&in_layer(7, ATTN_Q));
        assert_eq!(name, "blk.7.attn_q.weight");
        assert_eq!(Name::of(&name), Name { layer: Some(7), part: ATTN_Q, kind: WEIGHT });
        assert_eq!(Name::of(&bias(OUTPUT)), Name { layer: None, part: OUTPUT, kind: BIAS });
        assert_eq!(Name::of("cache"), Name { layer: None, part: "cache", kind: "" });
        assert_eq!(layer_weight("blk.x.attn_q.weight"), None);
    }
}
