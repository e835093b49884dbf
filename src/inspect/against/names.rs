//! What tensors are called on both sides, and how a conversion rearranges them.

use parity_graph::weights::{self, BIAS, Name, WEIGHT};

/// Which part of a stored tensor is one of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Rows of queries, keys or values in one matrix: 0, 1 or 2.
    Qkv(usize),
    /// The first or the second half of the rows.
    Half(usize),
    /// Every second row, from the first or from the second.
    Alternate(usize),
}

/// A name of a Hugging Face tensor, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// Which layer.
    pub layer: Option<u32>,
    /// Which expert, where each has a tensor of its own.
    pub expert: Option<usize>,
    /// What remains: `self_attn.q_proj.weight`, `mlp.experts.gate_proj.weight`.
    pub rest: Vec<&'a str>,
}

/// What lists of layers are called.
const LAYERS: [&str; 5] = ["layers", "h", "blocks", "layer", "block"];
/// What models and their text parts are called, before the names of their modules.
const MODELS: [&str; 6] = ["model", "language_model", "transformer", "text_model", "base_model", "decoder"];

impl Place<'_> {
    /// Takes a name apart.
    pub fn of(name: &str) -> Place<'_> {
        let mut words = name.split('.').peekable();
        let (mut layer, mut expert, mut rest) = (None, None, Vec::new());
        while let Some(word) = words.next() {
            let number = words.peek().and_then(|next| next.parse::<u32>().ok());
            match number {
                Some(number) if layer.is_none() && LAYERS.contains(&word) => {
                    layer = Some(number);
                    rest.clear();
                    words.next();
                }
                Some(number) if expert.is_none() && word == "experts" => {
                    expert = Some(number as usize);
                    rest.push(word);
                    words.next();
                }
                _ if rest.is_empty() && MODELS.contains(&word) => {}
                _ => rest.push(word),
            }
        }
        Place { layer, expert, rest }
    }

    /// Without `.weight` or `.bias`, joined; and whether it was a bias.
    pub fn module(&self) -> (String, bool) {
        match self.rest.split_last() {
            Some((&"bias", module)) => (module.join("."), true),
            Some((&"weight", module)) => (module.join("."), false),
            _ => {
                let whole = self.rest.join(".");
                match whole.strip_suffix("_bias") {
                    Some(module) => (module.to_owned(), true),
                    None => (whole, false),
                }
            }
        }
    }
}

/// Role of a tensor of a file -> modules that it is made of, the likeliest first.
const ROLES: &[(&str, &[(&str, Part)])] = &[
    (
        weights::TOKEN_EMBD,
        &[("embed_tokens", Part::Whole), ("wte", Part::Whole), ("word_embeddings", Part::Whole)],
    ),
    (weights::OUTPUT, &[("lm_head", Part::Whole), ("embed_out", Part::Whole), ("embed_tokens", Part::Whole)]),
    (weights::OUTPUT_NORM, &[("norm", Part::Whole), ("ln_f", Part::Whole), ("final_layernorm", Part::Whole)]),
    (weights::ATTN_NORM, &[("input_layernorm", Part::Whole), ("ln_1", Part::Whole)]),
    (
        weights::ATTN_Q,
        &[
            ("self_attn.q_proj", Part::Whole),
            ("self_attn.qkv_proj", Part::Qkv(0)),
            ("attn.c_attn", Part::Qkv(0)),
        ],
    ),
    (
        weights::ATTN_K,
        &[
            ("self_attn.k_proj", Part::Whole),
            ("self_attn.qkv_proj", Part::Qkv(1)),
            ("attn.c_attn", Part::Qkv(1)),
        ],
    ),
    (
        weights::ATTN_V,
        &[
            ("self_attn.v_proj", Part::Whole),
            ("self_attn.qkv_proj", Part::Qkv(2)),
            ("attn.c_attn", Part::Qkv(2)),
        ],
    ),
    (
        weights::ATTN_QKV,
        &[
            ("self_attn.qkv_proj", Part::Whole),
            ("attn.c_attn", Part::Whole),
            ("self_attn.query_key_value", Part::Whole),
        ],
    ),
    (
        weights::ATTN_OUTPUT,
        &[("self_attn.o_proj", Part::Whole), ("self_attn.dense", Part::Whole), ("attn.c_proj", Part::Whole)],
    ),
    (weights::ATTN_Q_NORM, &[("self_attn.q_norm", Part::Whole), ("self_attn.q_layernorm", Part::Whole)]),
    (weights::ATTN_K_NORM, &[("self_attn.k_norm", Part::Whole), ("self_attn.k_layernorm", Part::Whole)]),
    (weights::ATTN_SINKS, &[("self_attn.sinks", Part::Whole)]),
    // Where a layer has four norms, that before the feed-forward part has a name of its own.
    (
        weights::FFN_NORM,
        &[
            ("pre_feedforward_layernorm", Part::Whole),
            ("post_attention_layernorm", Part::Whole),
            ("ln_2", Part::Whole),
        ],
    ),
    (weights::POST_ATTENTION_NORM, &[("post_attention_layernorm", Part::Whole)]),
    (weights::POST_FFW_NORM, &[("post_feedforward_layernorm", Part::Whole)]),
    (
        weights::FFN_GATE,
        &[
            ("mlp.gate_proj", Part::Whole),
            ("mlp.gate_up_proj", Part::Half(0)),
            ("feed_forward.w1", Part::Whole),
        ],
    ),
    (
        weights::FFN_UP,
        &[
            ("mlp.up_proj", Part::Whole),
            ("mlp.gate_up_proj", Part::Half(1)),
            ("mlp.c_fc", Part::Whole),
            ("feed_forward.w3", Part::Whole),
        ],
    ),
    (
        weights::FFN_DOWN,
        &[("mlp.down_proj", Part::Whole), ("mlp.c_proj", Part::Whole), ("feed_forward.w2", Part::Whole)],
    ),
    (
        weights::FFN_GATE_INP,
        &[
            ("mlp.gate", Part::Whole),
            ("mlp.router", Part::Whole),
            ("block_sparse_moe.gate", Part::Whole),
            ("mlp.router.gate", Part::Whole),
        ],
    ),
    (
        weights::FFN_GATE_EXPS,
        &[
            ("mlp.experts.gate_proj", Part::Whole),
            ("block_sparse_moe.experts.w1", Part::Whole),
            ("mlp.experts.gate_up_proj", Part::Half(0)),
            ("mlp.experts.gate_up_proj", Part::Alternate(0)),
        ],
    ),
    (
        weights::FFN_UP_EXPS,
        &[
            ("mlp.experts.up_proj", Part::Whole),
            ("block_sparse_moe.experts.w3", Part::Whole),
            ("mlp.experts.gate_up_proj", Part::Half(1)),
            ("mlp.experts.gate_up_proj", Part::Alternate(1)),
        ],
    ),
    (
        weights::FFN_DOWN_EXPS,
        &[("mlp.experts.down_proj", Part::Whole), ("block_sparse_moe.experts.w2", Part::Whole)],
    ),
    (
        weights::FFN_GATE_SHEXP,
        &[("mlp.shared_expert.gate_proj", Part::Whole), ("mlp.shared_experts.gate_proj", Part::Whole)],
    ),
    (
        weights::FFN_UP_SHEXP,
        &[("mlp.shared_expert.up_proj", Part::Whole), ("mlp.shared_experts.up_proj", Part::Whole)],
    ),
    (
        weights::FFN_DOWN_SHEXP,
        &[("mlp.shared_expert.down_proj", Part::Whole), ("mlp.shared_experts.down_proj", Part::Whole)],
    ),
    (weights::FFN_GATE_INP_SHEXP, &[("mlp.shared_expert_gate", Part::Whole)]),
];

/// Modules that a tensor of a file is made of, by its role: `attn_q`.
pub fn modules(role: &str) -> &'static [(&'static str, Part)] {
    ROLES.iter().find(|(known, _)| *known == role).map_or(&[], |(_, modules)| modules)
}

/// Whether a module is one that files have a tensor of.
pub fn is_known(module: &str) -> bool {
    ROLES.iter().any(|(_, modules)| modules.iter().any(|(known, _)| *known == module))
}

/// Role, layer, and whether it is a bias: `blk.3.attn_q.bias` -> (`attn_q`, 3, true).
pub fn role(name: &str) -> (&str, Option<u32>, bool) {
    match Name::of(name) {
        Name { layer, part, kind: BIAS } => (part, layer, true),
        Name { layer, part, kind: WEIGHT } => (part, layer, false),
        Name { layer, .. } => (weights::layer_weight(name).map_or(name, |(_, rest)| rest), layer, false),
    }
}

/// What only a conversion makes: computed from the configuration.
pub fn is_made(role: &str) -> bool {
    matches!(role, weights::ROPE_FREQS | weights::ROPE_FACTORS_LONG | weights::ROPE_FACTORS_SHORT)
}

/// What a folder may hold that is no weight of the text model: buffers, other modalities, further heads.
pub fn is_beside(name: &str, place: &Place<'_>) -> bool {
    const BESIDE: [&str; 9] = [
        "visual",
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "audio_tower",
        "mtp",
        "inv_freq",
        "masked_bias",
        "embed_vision",
    ];
    let buffer = matches!(place.rest.last(), Some(&"inv_freq" | &"masked_bias"));
    buffer || name.split('.').any(|word| BESIDE.contains(&word))
}

/// What an architecture's files hold of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The values as they are.
    AsStored,
    /// The rows of every head in pairs.
    Pairs,
    /// 1 + w
    PlusOne,
}

/// What an architecture's files hold of a role; `None` where that is not known here: then all layers must agree.
pub fn wanted(architecture: &str, role: &str) -> Option<Wanted> {
    let halves = ["qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "gpt-oss", "phi3"];
    let known = architecture == "llama" || halves.contains(&architecture);
    match role {
        weights::ATTN_Q | weights::ATTN_K if architecture == "llama" => Some(Wanted::Pairs),
        _ if known && role.ends_with("norm") && architecture.starts_with("gemma") => Some(Wanted::PlusOne),
        _ if known => Some(Wanted::AsStored),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_sides_are_taken_apart() {
        let place = Place::of("model.language_model.layers.12.self_attn.q_proj.bias");
        assert_eq!((place.layer, place.module()), (Some(12), ("self_attn.q_proj".to_owned(), true)));
        let expert = Place::of("model.layers.0.mlp.experts.7.gate_proj.weight");
        assert_eq!(expert.expert, Some(7));
        assert_eq!(expert.module(), ("mlp.experts.gate_proj".to_owned(), false));
        assert!(Place::of("model.layers.3.mlp.experts.down_proj_bias").module().1);
        assert_eq!(Place::of("model.norm.weight").module().0, "norm");
        assert_eq!(role("blk.3.attn_q.bias"), ("attn_q", Some(3), true));
        assert_eq!(role("token_embd.weight"), ("token_embd", None, false));
    }
}
