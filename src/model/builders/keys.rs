//! Which metadata keys a builder reads, which must have a neutral value, and which llama.cpp does not read.
//!
//! From the loaders of llama.cpp 0.5.0 (llama-model.cpp and models/*.cpp). A key that is in none of these lists may
//! change the computation in a way that is not known here, and is refused.

use crate::error::{Error, Result};
use crate::gguf::{Array, Gguf, Value};

/// Read for every architecture, or without influence on the arithmetic.
const READ: &[&str] = &[
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
    "pooling_type",
    "classifier.output_labels",
    "tensor_data_layout",
];

/// Read for every architecture, and known at one value only.
const NEUTRAL: &[(&str, &[f64])] = &[
    ("nextn_predict_layers", &[0.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("attention.causal", &[1.0]),
    ("embedding_length_out", &[0.0]),
];

/// Keys that llama.cpp reads for some architectures only: a builder whose architecture is one of them reads them too,
/// and elsewhere llama.cpp never looks at them, whatever their value. A name that ends in a dot stands for all that
/// begin so.
const OTHERS: &[&str] = &[
    "leading_dense_block_count",
    "expert_feed_forward_length",
    "expert_latent_length",
    "expert_shared_feed_forward_length",
    "expert_chunk_feed_forward_length",
    "expert_shared_count",
    "expert_group_used_count",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_gating_func",
    "expert_group_scale",
    "experts_per_group",
    "moe_every_n_layers",
    "moe_latent_size",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "use_parallel_residual",
    "n_deepstack_layers",
    "deepstack_mapping",
    "hidden_activation",
    "logit_scale",
    "decoder_start_token_id",
    "decoder_block_count",
    "attn_logit_softcapping",
    "router_logit_softcapping",
    "final_logit_softcapping",
    "swin_norm",
    "rescale_every_n_layers",
    "time_mix_extra_dim",
    "time_decay_extra_dim",
    "residual_scale",
    "embedding_scale",
    "token_shift_count",
    "interleave_moe_layer_step",
    "full_attention_interval",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
    "attention.group_norm_groups",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.kv_lora_rank_swa",
    "attention.decay_lora_rank",
    "attention.iclr_lora_rank",
    "attention.value_residual_mix_lora_rank",
    "attention.gate_lora_rank",
    "attention.relative_buckets_count",
    "attention.rope_pattern",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.scale",
    "attention.output_scale",
    "attention.value_scale",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.key_length_mla_swa",
    "attention.value_length_mla_swa",
    "attention.output_group_count",
    "attention.output_lora_rank",
    "attention.compress_rope_freq_base",
    "attention.compress_ratios",
    "attention.shared_kv_layers",
    "attention.recurrent_layers",
    "attention.indexer.",
    "hyper_connection.",
    "hash_layer_count",
    "rope.dimension_sections",
    "rope.freq_base_swa",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "hrm.",
    "ple.",
    "ssm.",
    "kda.",
    "wkv.",
    "posnet.",
    "convnext.",
    "shortconv.",
    "attn_res.",
    "activation.",
    "dense_2_feat_in",
    "dense_2_feat_out",
    "dense_3_feat_in",
    "dense_3_feat_out",
];

/// Refuses keys that may change the computation and are not understood.
///
/// # Errors
/// Names the key, the value that would have been neutral and the one that was found.
pub fn refuse_unknown(gguf: &Gguf, arch: &str) -> Result<()> {
    for (key, value) in gguf.metadata() {
        let Some(name) = key.strip_prefix(arch).and_then(|rest| rest.strip_prefix('.')) else { continue };
        let other = |known: &&str| name == *known || known.ends_with('.') && name.starts_with(known);
        if READ.contains(&name) || OTHERS.iter().any(other) {
            continue;
        }
        let neutral = NEUTRAL.iter().find(|(known, _)| *known == name);
        let number = number(value);
        if neutral.is_some_and(|(_, values)| number.is_some_and(|number| values.contains(&number))) {
            continue;
        }
        let expected = neutral.map_or("no such key".to_owned(), |(_, values)| {
            let values: Vec<String> = values.iter().map(f64::to_string).collect();
            format!("none, or {}", values.join(" or "))
        });
        return Err(Error::file(
            gguf.path(),
            format!("{key} may change the computation and is not supported"),
        )
        .expected(expected)
        .found(value)
        .hint("a recording of this model is judged by its own graph: parity audit DUMP -m MODEL"));
    }
    Ok(())
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        _ => value.as_float().or(value.as_integer().map(|integer| integer as f64)),
    }
}

/// A size that a file may give once or once for every layer, if it is the same in all.
///
/// # Errors
/// Another type, or different sizes in different layers.
pub fn uniform(gguf: &Gguf, key: &str) -> Result<Option<u32>> {
    let Some(Value::Array(array)) = gguf.get(key) else { return gguf.u32(key) };
    let values: Vec<Option<f64>> = array.values().map(|value| number(&value)).collect();
    match values.split_first() {
        Some((Some(first), rest)) if rest.iter().all(|value| value == &Some(*first)) && *first >= 0.0 => {
            Ok(Some(*first as u32))
        }
        _ => Err(Error::file(gguf.path(), format!("{key} differs from layer to layer"))
            .expected("one size for all layers")
            .found(Value::Array(array.clone()))),
    }
}

/// A flag for every layer, given as flags or integers; `None` where it is no array.
pub fn flags(array: &Array) -> Option<Vec<bool>> {
    array.values().map(|value| number(&value).map(|number| number != 0.0)).collect()
}
