//! The settings of config.json that one key of a model file carries.
//!
//! Keys and defaults are those of llama.cpp's converter (conversion/base.py) and loaders (llama-model.cpp, models/).

use super::config::{Config, Converted};

/// What llama.cpp does where a file lacks a key.
#[derive(Clone, Copy)]
pub enum Default {
    /// Takes this value.
    Is(f64),
    /// Computes it from other keys, or has it in the graph of the architecture.
    By(fn(&Config, &Converted<'_>) -> Option<f64>),
    /// Does not load the file.
    Fails,
    /// Nobody knows here: only what both say is compared.
    Unknown,
}

/// Which values mean that there is nothing.
#[derive(Clone, Copy, PartialEq)]
pub enum Neutral {
    /// None.
    No,
    /// 0, which is read as 1.
    Zero,
    /// Null and absence in config.json, which are 0.
    Absent,
}

/// One setting.
pub struct Fact {
    /// Its name in answers.
    pub name: &'static str,
    /// Of config.json: the first that is there counts.
    pub keys: &'static [&'static str],
    /// Of the file, without the architecture.
    pub key: &'static str,
    /// What llama.cpp does without it.
    pub default: Default,
    /// Which values mean nothing.
    pub neutral: Neutral,
    /// What comes of a difference.
    pub effect: &'static str,
}

const fn fact(
    name: &'static str,
    keys: &'static [&'static str],
    key: &'static str,
    default: Default,
    effect: &'static str,
) -> Fact {
    Fact { name, keys, key, default, neutral: Neutral::No, effect }
}

const SHAPES: &str = "matrices are read in other shapes, or the file does not load";
const EXPERTS: &str = "the output of every layer of experts differs";
const SCALED: &str = "values are scaled by another factor from there on";
const STATE: &str = "the recurrent layers compute something else, or the file does not load";

/// All of them.
pub const FACTS: &[Fact] = &[
    fact(
        "config.num_hidden_layers",
        &["num_hidden_layers", "n_layers", "n_layer", "num_layers"],
        "block_count",
        Default::Fails,
        "layers are left out, or the file does not load",
    ),
    fact(
        "config.hidden_size",
        &["hidden_size", "n_embd", "dim", "d_model"],
        "embedding_length",
        Default::Fails,
        SHAPES,
    ),
    fact(
        "config.num_attention_heads",
        &["num_attention_heads", "n_head", "n_heads"],
        "attention.head_count",
        Default::Fails,
        "queries are cut into other heads: every attention differs",
    ),
    fact(
        "config.num_key_value_heads",
        &["num_key_value_heads", "n_kv_heads", "n_head_kv"],
        "attention.head_count_kv",
        Default::By(heads),
        "queries read other heads of keys and values",
    ),
    fact(
        "config.head_dim",
        &["head_dim"],
        "attention.key_length",
        Default::By(width),
        "heads are cut at other places, and scores scaled otherwise",
    ),
    fact(
        "config.head_dim_of_values",
        &["v_head_dim", "head_dim"],
        "attention.value_length",
        Default::By(width),
        "values are cut into other heads",
    ),
    fact(
        "config.rope_theta",
        &["rope_theta", "global_rope_theta", "rope_global_theta", "rope_theta_global", "rotary_emb_base"],
        "rope.freq_base",
        Default::Is(10000.0),
        "rotary angles differ at every position but 0",
    ),
    fact(
        "config.rope_local_base_freq",
        &[
            "rope_local_base_freq",
            "local_rope_theta",
            "rope_local_theta",
            "rope_theta_local",
            "swa_rope_theta",
        ],
        "rope.freq_base_swa",
        Default::By(base_of_window),
        "rotary angles of the layers with a window differ",
    ),
    fact(
        "config.rms_norm_eps",
        &["rms_norm_eps", "rms_norm_epsilon", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"],
        "attention.layer_norm_rms_epsilon",
        Default::Unknown,
        "every RMS norm differs, most where its input is small",
    ),
    fact(
        "config.layer_norm_eps",
        &["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"],
        "attention.layer_norm_epsilon",
        Default::Unknown,
        "every layer norm differs, most where its input is small",
    ),
    fact(
        "config.num_experts",
        &["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
        "expert_count",
        Default::Is(0.0),
        EXPERTS,
    ),
    fact(
        "config.num_experts_per_tok",
        &["num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk"],
        "expert_used_count",
        Default::Is(0.0),
        "another number of experts is added up for each token",
    ),
    fact(
        "config.n_shared_experts",
        &["n_shared_experts", "num_shared_experts"],
        "expert_shared_count",
        Default::Unknown,
        EXPERTS,
    ),
    fact(
        "config.moe_intermediate_size",
        &["moe_intermediate_size"],
        "expert_feed_forward_length",
        Default::Unknown,
        SHAPES,
    ),
    fact(
        "config.first_k_dense_replace",
        &["first_k_dense_replace"],
        "leading_dense_block_count",
        Default::Unknown,
        "a layer is read as one of experts, or not",
    ),
    fact(
        "config.n_group",
        &["n_group"],
        "expert_group_count",
        Default::Unknown,
        "experts are chosen from other groups",
    ),
    fact(
        "config.topk_group",
        &["topk_group"],
        "expert_group_used_count",
        Default::Unknown,
        "experts are chosen from more or fewer groups",
    ),
    Fact {
        neutral: Neutral::Zero,
        ..fact(
            "config.routed_scaling_factor",
            &["routed_scaling_factor", "route_scale", "moe_router_scaling_factor"],
            "expert_weights_scale",
            Default::Is(1.0),
            "the sum of the chosen experts has another factor in every layer of experts",
        )
    },
    fact(
        "config.norm_topk_prob",
        &["norm_topk_prob", "route_norm"],
        "expert_weights_norm",
        Default::By(normalised),
        "the weights of the chosen experts are made to sum to 1, or are not",
    ),
    Fact {
        neutral: Neutral::Absent,
        ..fact(
            "config.final_logit_softcapping",
            &["final_logit_softcapping"],
            "final_logit_softcapping",
            Default::By(cap_of_logits),
            "large logits are squeezed otherwise: the order stays, probabilities differ",
        )
    },
    Fact {
        neutral: Neutral::Absent,
        ..fact(
            "config.attn_logit_softcapping",
            &["attn_logit_softcapping"],
            "attn_logit_softcapping",
            Default::By(cap_of_scores),
            "large scores of attention are squeezed otherwise",
        )
    },
    Fact {
        neutral: Neutral::Zero,
        ..fact(
            "config.embedding_multiplier",
            &["embedding_multiplier", "scale_emb"],
            "embedding_scale",
            Default::Is(1.0),
            SCALED,
        )
    },
    Fact {
        neutral: Neutral::Zero,
        ..fact(
            "config.residual_multiplier",
            &["residual_multiplier"],
            "residual_scale",
            Default::Is(1.0),
            SCALED,
        )
    },
    fact(
        "config.attention_multiplier",
        &["attention_multiplier"],
        "attention.scale",
        Default::By(scale_of_scores),
        "scores of attention have another factor",
    ),
    Fact {
        neutral: Neutral::Zero,
        ..fact(
            "config.logits_scaling",
            &["logits_scaling", "logit_scale"],
            "logit_scale",
            Default::Is(1.0),
            "logits have another factor",
        )
    },
    Fact {
        neutral: Neutral::Absent,
        ..fact(
            "config.clip_qkv",
            &["clip_qkv"],
            "attention.clamp_kqv",
            Default::Is(0.0),
            "large queries, keys and values are cut off, or are not",
        )
    },
    fact(
        "config.use_parallel_residual",
        &["use_parallel_residual"],
        "use_parallel_residual",
        Default::Unknown,
        "the feed-forward reads the residual stream before attention, or after it",
    ),
    fact(
        "config.is_causal",
        &["is_causal"],
        "attention.causal",
        Default::Is(1.0),
        "tokens see later ones, or do not",
    ),
    fact(
        "config.full_attention_interval",
        &["full_attention_interval"],
        "full_attention_interval",
        Default::Unknown,
        "other layers are recurrent",
    ),
    fact(
        "config.conv_kernel",
        &["conv_kernel", "mamba_d_conv", "d_conv", "linear_conv_kernel_dim"],
        "ssm.conv_kernel",
        Default::Unknown,
        STATE,
    ),
    fact(
        "config.state_size",
        &["state_size", "mamba_d_state", "d_state", "ssm_state_size", "linear_key_head_dim"],
        "ssm.state_size",
        Default::Unknown,
        STATE,
    ),
    fact(
        "config.n_groups",
        &["mamba_n_groups", "n_groups", "linear_num_key_heads"],
        "ssm.group_count",
        Default::Unknown,
        STATE,
    ),
];

fn heads(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    converted.number("attention.head_count")
}

fn width(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    Some(
        converted.number("embedding_length")?
            / converted.number("attention.head_count").filter(|n| *n > 0.0)?,
    )
}

fn base_of_window(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    let own = converted.number("rope.freq_base").unwrap_or(10000.0);
    Some(if converted.is_a(&["gemma3", "gemma-embedding"]) { 10000.0 } else { own })
}

/// Soft caps that the graph of an architecture has without a key.
fn cap_of_logits(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    Some(if converted.architecture == "gemma2" { 30.0 } else { 0.0 })
}

fn cap_of_scores(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    Some(if converted.architecture == "gemma2" { 50.0 } else { 0.0 })
}

fn scale_of_scores(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    converted.head_width().map(|width| 1.0 / width.sqrt())
}

/// Graphs that renormalise the weights of the chosen experts without a key.
const NORMALISED: [&str; 14] = [
    "arctic",
    "dbrx",
    "ernie4_5-moe",
    "granite",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "kimi-linear",
    "lfm2moe",
    "llama",
    "minimax",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
];

fn normalised(_: &Config, converted: &Converted<'_>) -> Option<f64> {
    // Where the graph follows the key, its absence is false.
    Some(f64::from(u8::from(NORMALISED.contains(&converted.architecture))))
}
