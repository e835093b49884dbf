//! Keys of config.json that no comparison reads.

use super::Carried;
use super::config::Config;
use super::facts::FEED_FORWARD;
use super::table::FACTS;

/// Keys that say nothing of what a model computes, or whose effect the weights show.
const HARMLESS: &[&str] = &[
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "initializer_factor",
    "_name_or_path",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "bias",
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "classifier_dropout",
    "embedding_dropout",
    "pretraining_tp",
    "vocab_size",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "problem_type",
    "id2label",
    "label2id",
    "task_specific_params",
    "quantization_config",
    "_attn_implementation",
    "attn_implementation",
    "_flash_attn_2_enabled",
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
    "decoder_sparse_step",
    "mlp_only_layers",
    "aux_loss_alpha",
    "seq_aux",
    "cache_implementation",
    "max_window_layers",
    "use_sliding_window",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "vision_config",
    "audio_config",
    "text_config",
    "llm_config",
    "language_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "is_llama_config",
    "rope_interleaved",
    "num_nextn_predict_layers",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "ep_size",
    "moe_layer_freq",
    "topk_method",
    "max_length",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "attention_type",
    "embd_layer",
    "sep_token_id",
    "unsloth_version",
    "unsloth_fixed",
    "swiglu_limit",
    "experts_per_token",
    "initial_context_length",
    "rope_ratio",
    "time_step_rank",
    "mamba_dt_rank",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "query_pre_attn_scalar",
    "hidden_act",
    "hidden_activation",
    "activation_function",
];

/// What no comparison here reads.
pub fn compare(config: &Config, out: &mut Carried) {
    let known = |key: &str| {
        let read = FACTS.iter().any(|fact| fact.keys.contains(&key))
            || READ_BESIDE.contains(&key)
            || FEED_FORWARD.contains(&key);
        read || HARMLESS.contains(&key)
    };
    let said = |key: &&str| config.get(key).is_some_and(|value| !value.is_null());
    let unread: Vec<&str> = config.keys().filter(|key| !known(key)).filter(said).collect();
    if !unread.is_empty() {
        let effect =
            "nothing of the file is compared with these keys: look up what they mean where one is new to you";
        let original = unread.join(", ");
        out.note("config.unread", "config.json".to_owned(), (original, "nothing known".to_owned()), effect);
    }
}

/// Keys that are read outside of the table.
const READ_BESIDE: [&str; 16] = [
    "scoring_func",
    "score_function",
    "score_func",
    "moe_router_activation",
    "moe_router_activation_func",
    "expert_selection_fn",
    "partial_rotary_factor",
    "rotary_pct",
    "rope_pct",
    "rope_percent",
    "rotary_dim",
    "n_ctx",
    "n_positions",
    "num_labels",
    "scale_depth",
    "dim_model_base",
];
