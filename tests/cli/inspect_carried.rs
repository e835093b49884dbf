//! `parity inspect MODEL --against FOLDER` compares everything that a conversion carries: mistakes in seven families are
//! named one by one, and nothing is said where nothing differs.

use std::process::{Command, Output};

use parity::gguf::Value;
use serde_json::{Value as Json, json};

use super::originals::{EXPERTS, FAMILIES, Pair, TEMPLATE, family, llama3_factors, special};
use crate::support::tiny_model::{change, tensor, values};

/// Runs the comparison; `flags` beside `--format json`.
fn against(pair: &Pair, flags: &[&str]) -> Output {
    let scratch = tempfile::tempdir().unwrap();
    pair.write(scratch.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(scratch.path()).args(["inspect", "model.gguf", "--against", "hf"]).args(flags);
    command.output().unwrap()
}

/// Exit code, names of findings, and names of mistakes in weights.
fn found(pair: &Pair, flags: &[&str]) -> (i32, Vec<String>, Vec<String>, Json) {
    let out = against(pair, &[flags, &["--format", "json"]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    let json: Json = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    let names = |list: &Json, key: &str| -> Vec<String> {
        let all = list.as_array().into_iter().flatten();
        all.map(|item| item[key].as_str().unwrap_or("none").to_owned()).collect()
    };
    let mut weights = names(&json["left_out"], "fault");
    for tensor in json["tensors"].as_array().unwrap() {
        weights.extend(names(&tensor["mistakes"], "fault"));
    }
    (out.status.code().unwrap(), names(&json["findings"], "name"), weights, json)
}

#[test]
fn nothing_is_said_of_a_right_conversion() {
    for name in FAMILIES {
        let (code, findings, weights, json) = found(&family(name), &["--strict"]);
        assert_eq!((code, findings.len(), weights.len()), (0, 0, 0), "{name}: {json:#}");
        assert_eq!(json["not_compared"], json!([]), "{name}");
    }
}

type Edit = fn(&mut Pair);

/// Family, name, mistake.
const MISTAKES: &[(&str, &str, Edit)] = &[
    // Settings.
    ("qwen2", "config.rope_theta", |p| p.set("qwen2.rope.freq_base", Value::F32(10_000.0))),
    ("llama", "config.rope_theta", |p| p.remove("llama.rope.freq_base")),
    ("qwen2", "config.rms_norm_eps", |p| p.set("qwen2.attention.layer_norm_rms_epsilon", Value::F32(1e-5))),
    ("phi3", "config.rms_norm_eps", |p| p.json("config.json")["rms_norm_eps"] = 1e-5.into()),
    ("qwen2", "config.num_key_value_heads", |p| p.remove("qwen2.attention.head_count_kv")),
    ("llama", "config.num_attention_heads", |p| p.set("llama.attention.head_count", Value::U32(8))),
    ("gemma2", "config.head_dim", |p| p.set("gemma2.attention.key_length", Value::U32(32))),
    ("qwen2", "config.num_hidden_layers", |p| p.set("qwen2.block_count", Value::U32(2))),
    ("qwen2", "config.intermediate_size", |p| p.set("qwen2.feed_forward_length", Value::U32(64))),
    ("qwen2", "config.rope_scaling.type", |p| p.remove("qwen2.rope.scaling.type")),
    ("qwen2", "config.rope_scaling.factor", |p| p.set("qwen2.rope.scaling.factor", Value::F32(8.0))),
    ("qwen2", "config.rope_scaling.original_max_position_embeddings", |p| {
        p.remove("qwen2.rope.scaling.original_context_length");
    }),
    ("qwen2", "config.rope_scaling.attention_factor", |p| {
        p.json("config.json")["rope_scaling"]["attention_factor"] = 1.0.into();
    }),
    ("qwen2", "config.rope_scaling.beta_fast", |p| {
        p.json("config.json")["rope_scaling"]["beta_fast"] = 16.into()
    }),
    ("llama", "config.rope_scaling.type", |p| {
        p.model.tensors.retain(|(name, ..)| name != "rope_freqs.weight")
    }),
    ("llama", "config.rope_scaling.factor", |p| {
        let wrong = llama3_factors(32.0);
        change(&mut p.model, "rope_freqs.weight", |index, _| wrong[index]);
    }),
    ("gemma2", "config.rope_scaling.type", |p| {
        p.json("config.json")["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
    }),
    ("deepseek2", "config.rope_scaling.mscale_all_dim", |p| {
        p.remove("deepseek2.rope.scaling.yarn_log_multiplier");
    }),
    ("phi3", "config.rope_scaling.long_factor", |p| {
        change(&mut p.model, "rope_factors_long.weight", |index, value| if index == 3 { 9.0 } else { value });
    }),
    ("phi3", "config.rope_scaling.attention_factor", |p| p.remove("phi3.rope.scaling.attn_factor")),
    ("phi3", "config.rope_scaling.original_max_position_embeddings", |p| {
        p.set("phi3.rope.scaling.original_context_length", Value::U32(256));
    }),
    ("phi3", "config.partial_rotary_factor", |p| p.remove("phi3.rope.dimension_count")),
    ("llama", "config.partial_rotary_factor", |p| {
        p.json("config.json")["partial_rotary_factor"] = 0.5.into()
    }),
    ("gemma2", "config.final_logit_softcapping", |p| p.remove("gemma2.final_logit_softcapping")),
    ("gemma2", "config.attn_logit_softcapping", |p| {
        p.json("config.json")["attn_logit_softcapping"] = Json::Null;
    }),
    ("gemma2", "config.sliding_window", |p| p.remove("gemma2.attention.sliding_window")),
    ("gemma2", "config.layer_types", |p| {
        p.json("config.json")["layer_types"] =
            json!(["full_attention", "sliding_attention", "full_attention"]);
    }),
    ("gemma2", "config.query_pre_attn_scalar", |p| {
        p.json("config.json")["query_pre_attn_scalar"] = 24.into()
    }),
    ("gemma2", "config.hidden_act", |p| p.json("config.json")["hidden_activation"] = "silu".into()),
    ("qwen3moe", "config.num_experts", |p| p.set("qwen3moe.expert_count", Value::U32(8))),
    ("qwen3moe", "config.num_experts_per_tok", |p| p.set("qwen3moe.expert_used_count", Value::U32(4))),
    ("qwen3moe", "config.norm_topk_prob", |p| p.json("config.json")["norm_topk_prob"] = false.into()),
    ("deepseek2", "config.scoring_func", |p| p.remove("deepseek2.expert_gating_func")),
    ("deepseek2", "config.norm_topk_prob", |p| p.remove("deepseek2.expert_weights_norm")),
    ("deepseek2", "config.n_group", |p| p.set("deepseek2.expert_group_count", Value::U32(4))),
    ("deepseek2", "config.topk_group", |p| p.set("deepseek2.expert_group_used_count", Value::U32(8))),
    ("deepseek2", "config.first_k_dense_replace", |p| {
        p.set("deepseek2.leading_dense_block_count", Value::U32(0));
    }),
    // Scales that were left out.
    ("deepseek2", "config.routed_scaling_factor", |p| p.remove("deepseek2.expert_weights_scale")),
    ("granite", "config.embedding_multiplier", |p| p.remove("granite.embedding_scale")),
    ("granite", "config.residual_multiplier", |p| p.remove("granite.residual_scale")),
    ("granite", "config.attention_multiplier", |p| p.remove("granite.attention.scale")),
    ("granite", "config.logits_scaling", |p| p.remove("granite.logit_scale")),
    // The tokenizer.
    ("qwen2", "tokens.ids", |p| p.strings("tokenizer.ggml.tokens").swap(65, 66)),
    ("qwen2", "tokens.merges", |p| p.strings("tokenizer.ggml.merges").swap(3, 4)),
    ("granite", "tokens.merges", |p| p.strings("tokenizer.ggml.merges").truncate(11)),
    ("qwen2", "tokens.pre_tokenizer", |p| p.set("tokenizer.ggml.pre", Value::String("llama-bpe".into()))),
    ("llama", "tokens.pre_tokenizer", |p| p.set("tokenizer.ggml.pre", Value::String("qwen2".into()))),
    ("qwen2", "tokens.added", |p| p.types()[special("<|im_start|>")] = 1),
    ("phi3", "tokens.added", |p| {
        p.strings("tokenizer.ggml.tokens")[special("<|im_start|>")] = "<|start|>".into()
    }),
    ("qwen2", "tokens.bos_added", |p| p.set("tokenizer.ggml.add_bos_token", Value::Bool(true))),
    ("llama", "tokens.bos_added", |p| p.set("tokenizer.ggml.add_bos_token", Value::Bool(false))),
    ("llama", "tokens.bos", |p| p.set("tokenizer.ggml.bos_token_id", Value::U32(7))),
    ("gemma2", "tokens.eos", |p| p.set("tokenizer.ggml.eos_token_id", Value::U32(7))),
    ("granite", "tokens.eos_added", |p| p.set("tokenizer.ggml.add_eos_token", Value::Bool(true))),
    // Weights and the order of their rows.
    ("llama", "linear.qk_permuted", |p| {
        let plain = p.tensors["model.layers.1.self_attn.q_proj.weight"].1.clone();
        change(&mut p.model, "blk.1.attn_q.weight", |index, _| plain[index]);
    }),
    ("gemma2", "norm.unit_offset", |p| {
        let plain = p.tensors["model.layers.1.input_layernorm.weight"].1.clone();
        change(&mut p.model, "blk.1.attn_norm.weight", |index, _| plain[index]);
    }),
    ("qwen3moe", "moe.expert_index", |p| {
        let all = values(&mut p.model, "blk.0.ffn_up_exps.weight");
        let of_one = all.len() / EXPERTS;
        change(&mut p.model, "blk.0.ffn_up_exps.weight", |index, _| all[(index + of_one) % all.len()]);
    }),
    ("qwen2", "linear.no_bias", |p| p.model.tensors.retain(|(name, ..)| name != "blk.2.attn_v.bias")),
    ("granite", "linear.wrong_layer", |p| {
        let other = values(&mut p.model, "blk.0.ffn_up.weight");
        change(&mut p.model, "blk.2.ffn_up.weight", |index, _| other[index]);
    }),
    ("llama", "logits.untied", |p| p.model.tensors.retain(|(name, ..)| name != "output.weight")),
    ("qwen2", "config.tie_word_embeddings", |p| {
        let mut head = tensor(&mut p.model, "token_embd.weight").clone();
        head.0 = "output.weight".to_owned();
        head.3.reverse();
        p.model.tensors.push(head);
    }),
];

#[test]
fn mistakes_of_conversion_are_named() {
    assert!(MISTAKES.len() >= 60, "{}", MISTAKES.len());
    let mut wrong = Vec::new();
    for (name, expected, edit) in MISTAKES {
        let mut pair = family(name);
        edit(&mut pair);
        let (code, findings, weights, _) = found(&pair, &[]);
        let first = findings.first().or(weights.first()).map(String::as_str);
        let named = first == Some(*expected) || weights.iter().any(|fault| fault == expected);
        // One mistake may show in two places, and not in more.
        if !(code == 1 && named && findings.len() <= 2) {
            wrong.push(format!("{name} {expected}: {code} {findings:?} {weights:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Differences by which no logit differs: notes, and failures only where they are asked for.
const NOTES: &[(&str, &str, Edit)] = &[
    ("qwen2", "template.default", |p| {
        p.set("tokenizer.chat_template", Value::String(TEMPLATE.replace(".strip()", "")));
    }),
    ("gemma2", "template.default", |p| p.remove("tokenizer.chat_template")),
    ("llama", "template.default", |p| {
        let other = TEMPLATE.replace("assistant", "model");
        p.set("tokenizer.chat_template", Value::String(other));
    }),
    ("qwen2", "generation.temperature", |p| p.remove("general.sampling.temp")),
    ("phi3", "generation.top_k", |p| p.set("general.sampling.top_k", Value::I32(40))),
    ("qwen2", "generation.eos_token_id", |p| p.json("generation_config.json")["eos_token_id"] = json!([7])),
    ("qwen2", "config.unread", |p| p.json("config.json")["a_new_scale"] = 3.0.into()),
    ("qwen2", "config.max_position_embeddings", |p| p.set("qwen2.context_length", Value::U32(128))),
    ("llama", "config.sliding_window", |p| p.json("config.json")["sliding_window"] = 32.into()),
    ("granite", "tokens.bos", |p| p.set("tokenizer.ggml.bos_token_id", Value::U32(7))),
];

#[test]
fn notes_fail_only_where_they_are_asked_for() {
    let mut wrong = Vec::new();
    for (name, expected, edit) in NOTES {
        let mut pair = family(name);
        edit(&mut pair);
        let (code, findings, weights, json) = found(&pair, &[]);
        let note = json["findings"][0]["changes_logits"] == false;
        if !(code == 0 && findings == [*expected] && weights.is_empty() && note)
            || found(&pair, &["--strict"]).0 != 1
        {
            wrong.push(format!("{name} {expected}: {code} {findings:?} {weights:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A template that means the same in other words is the same.
#[test]
fn templates_are_compared_by_what_they_make() {
    let mut pair = family("qwen2");
    let other = "{%- for message in messages %}\n{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";
    pair.set("tokenizer.chat_template", Value::String(other.to_owned()));
    assert_eq!(found(&pair, &["--strict"]).1, Vec::<String>::new());
    // Templates that never end and that grow without end are not followed.
    for hostile in [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') }}",
    ] {
        pair.set("tokenizer.chat_template", Value::String(hostile.to_owned()));
        let (code, findings, ..) = found(&pair, &[]);
        assert_eq!((code, findings), (0, vec!["template.default".to_owned()]), "{hostile}");
    }
}

#[test]
fn the_text_names_the_difference_first() {
    let mut pair = family("qwen2");
    pair.set("qwen2.rope.freq_base", Value::F32(10_000.0));
    pair.remove("general.sampling.temp");
    let out = against(&pair, &[]);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        text.starts_with("NOT THE SAME MODEL: config.rope_theta · the same weights: 38 tensors\n"),
        "{text}"
    );
    assert!(text.contains("config.rope_theta: 10000, the original says 1000000\n"), "{text}");
    assert!(text.contains("in config.json rope_theta, qwen2.rope.freq_base\n"), "{text}");
    assert!(text.contains("0.8, llama.cpp's own: the file has no general.sampling.temp"), "{text}");
    // Files that are not there, and files that are no JSON.
    pair.files.remove("config.json");
    pair.files.remove("tokenizer.json");
    let out = against(&pair, &[]);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("not compared: config.json: not in the folder"), "{text}");
    assert_eq!(out.status.code(), Some(0));
    let scratch = tempfile::tempdir().unwrap();
    pair.write(scratch.path());
    std::fs::write(scratch.path().join("hf/config.json"), "version https://git-lfs").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    let out = command
        .current_dir(scratch.path())
        .args(["inspect", "model.gguf", "--against", "hf"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && said.contains("config.json: is no JSON"), "{said}");
}
