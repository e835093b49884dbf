//! Small models of several families beside the Hugging Face folders that they were converted from, all of it right.

use std::collections::BTreeMap;
use std::path::Path;

use parity::gguf::{Array, DType, Value};
use serde_json::{Value as Json, json};

use super::inspect_against::{Tensors, folder_of, pairs, write};
use crate::support::gguf_writer::GgufWriter;
use crate::support::tiny_model::{
    FFN, HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, MODEL, VOCAB, change, tensor, tiny_qwen2, values,
};

const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MERGES: [(&str, &str); 12] = [
    ("t", "h"),
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("i", "n"),
    ("e", "r"),
    ("l", "l"),
    ("e", "ll"),
    ("1", "2"),
    ("12", "3"),
    ("o", "r"),
    ("Ġ", "w"),
];
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
pub const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'].strip() + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

pub const FAMILIES: [&str; 7] = ["qwen2", "llama", "gemma2", "qwen3moe", "granite", "deepseek2", "phi3"];
pub const EXPERTS: usize = 4;

/// A model file and what it was converted from.
#[derive(Clone)]
pub struct Pair {
    pub model: GgufWriter,
    pub tensors: Tensors,
    /// Files of the folder, by name.
    pub files: BTreeMap<&'static str, Json>,
}

impl Pair {
    /// Writes `model.gguf` and the folder `hf`.
    pub fn write(&self, scratch: &Path) {
        let folder = scratch.join("hf");
        std::fs::create_dir_all(&folder).unwrap();
        write(&folder.join("model.safetensors"), &self.tensors);
        for (name, json) in &self.files {
            std::fs::write(folder.join(name), json.to_string()).unwrap();
        }
        std::fs::write(scratch.join("model.gguf"), self.model.bytes()).unwrap();
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.remove(key);
        self.model.metadata.push((key.to_owned(), value));
    }

    pub fn remove(&mut self, key: &str) {
        self.model.metadata.retain(|(known, _)| known != key);
    }

    pub fn strings(&mut self, key: &str) -> &mut Vec<String> {
        match &mut self.model.metadata.iter_mut().find(|(known, _)| known == key).unwrap().1 {
            Value::Array(Array::String(strings)) => strings,
            other => panic!("{key} is {other}"),
        }
    }

    pub fn types(&mut self) -> &mut Vec<i32> {
        let entry = self.model.metadata.iter_mut().find(|(known, _)| known == "tokenizer.ggml.token_type");
        match &mut entry.unwrap().1 {
            Value::Array(Array::I32(types)) => types,
            other => panic!("types are {other}"),
        }
    }

    pub fn json(&mut self, file: &'static str) -> &mut Json {
        self.files.get_mut(file).unwrap()
    }

    /// A setting of config.json with the key of the file that carries it.
    fn both(&mut self, theirs: &str, original: Json, key: &str, own: Value) {
        self.json("config.json")[theirs] = original;
        self.set(key, own);
    }

    fn add(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.model.tensors.push((name.to_owned(), DType::F32, shape.to_vec(), bytes));
    }
}

/// The characters that stand for bytes in byte-level vocabularies.
fn alphabet() -> Vec<String> {
    let printed = |byte: u32| (33..=126).contains(&byte) || (161..=172).contains(&byte) || byte >= 174;
    let mut next = 256;
    let character = |byte: u32| match printed(byte) {
        true => byte,
        false => {
            next += 1;
            next - 1
        }
    };
    (0..256).map(character).map(|code| char::from_u32(code).unwrap().to_string()).collect()
}

fn tokens() -> Vec<String> {
    let mut all = alphabet();
    all.extend(MERGES.map(|(a, b)| format!("{a}{b}")));
    all.extend(SPECIAL.map(str::to_owned));
    all
}

fn tokenizer_json(expression: &str) -> Json {
    let tokens = tokens();
    let ordinary = tokens.len() - SPECIAL.len();
    let vocab: serde_json::Map<String, Json> =
        tokens[..ordinary].iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let added: Vec<Json> = (ordinary..tokens.len())
        .map(|id| json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}))
        .collect();
    let merges: Vec<Json> = MERGES.iter().map(|(a, b)| json!([a, b])).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    })
}

/// The id of a special token.
pub fn special(name: &str) -> usize {
    tokens().iter().position(|token| token == name).unwrap()
}

fn number(value: usize) -> Value {
    Value::U32(u32::try_from(value).unwrap())
}

/// What all families share: a Qwen2.
fn base(architecture: &str) -> Pair {
    let mut model = tiny_qwen2();
    for (key, value) in &mut model.metadata {
        *key = key.replace("qwen2.", &format!("{architecture}."));
        if key == "general.architecture" {
            *value = Value::String(architecture.to_owned());
        }
    }
    let tensors = folder_of(&mut model);
    let config = json!({
        "architectures": ["AForCausalLM"], "model_type": architecture, "hidden_size": MODEL, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_scaling": null,
        "tie_word_embeddings": true, "torch_dtype": "float32", "vocab_size": VOCAB, "hidden_act": "silu",
        "use_cache": true, "bos_token_id": special("<|endoftext|>"), "eos_token_id": special("<|im_end|>"),
    });
    let tokenizer_config = json!({
        "add_bos_token": false, "bos_token": null, "eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": TEMPLATE,
    });
    let generation = json!({
        "do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1,
        "eos_token_id": [special("<|im_end|>"), special("<|endoftext|>")],
    });
    let files = BTreeMap::from([
        ("config.json", config),
        ("tokenizer.json", tokenizer_json(QWEN2)),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ]);
    let mut pair = Pair { model, tensors, files };
    let mut texts = tokens();
    let mut types = vec![1; texts.len() - SPECIAL.len()];
    types.extend([3; SPECIAL.len()]);
    for id in texts.len()..VOCAB {
        texts.push(format!("[PAD{id}]"));
        types.push(5);
    }
    pair.set("tokenizer.ggml.tokens", Value::Array(Array::String(texts)));
    pair.set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    let merges = MERGES.iter().map(|(a, b)| format!("{a} {b}")).collect();
    pair.set("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    pair.set("tokenizer.ggml.eos_token_id", number(special("<|im_end|>")));
    pair.set("tokenizer.ggml.bos_token_id", number(special("<|endoftext|>")));
    pair.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    pair.set("tokenizer.chat_template", Value::String(TEMPLATE.to_owned()));
    pair.set("general.sampling.temp", Value::F32(0.7));
    pair.set("general.sampling.top_k", Value::I32(20));
    pair.set("general.sampling.top_p", Value::F32(0.8));
    pair.set("general.sampling.penalty_repeat", Value::F32(1.1));
    pair
}

/// A right conversion of a family.
pub fn family(name: &str) -> Pair {
    let mut pair = base(name);
    match name {
        "qwen2" => qwen2(&mut pair),
        "llama" => llama(&mut pair),
        "gemma2" => gemma2(&mut pair),
        "qwen3moe" => qwen3moe(&mut pair),
        "granite" => granite(&mut pair),
        "deepseek2" => deepseek2(&mut pair),
        "phi3" => phi3(&mut pair),
        other => panic!("no family {other}"),
    }
    pair
}

/// YaRN, as the long variants of Qwen2.5 have it.
fn qwen2(pair: &mut Pair) {
    pair.json("config.json")["rope_scaling"] =
        json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    pair.json("config.json")["use_sliding_window"] = false.into();
    pair.json("config.json")["sliding_window"] = 128.into();
    pair.set("qwen2.rope.scaling.type", Value::String("yarn".into()));
    pair.set("qwen2.rope.scaling.factor", Value::F32(4.0));
    pair.set("qwen2.rope.scaling.original_context_length", number(64));
}

/// Rows in pairs, divisors of Llama 3, BOS in front, an output matrix of its own.
fn llama(pair: &mut Pair) {
    for layer in 0..LAYERS {
        for (role, rows) in [("attn_q", HEADS * HEAD_WIDTH), ("attn_k", KV_HEADS * HEAD_WIDTH)] {
            for kind in ["weight", "bias"] {
                let name = format!("blk.{layer}.{role}.{kind}");
                let laid = pairs(rows, &values(&mut pair.model, &name));
                change(&mut pair.model, &name, |index, _| laid[index]);
            }
        }
    }
    let head: Vec<f32> = values(&mut pair.model, "token_embd.weight").iter().rev().copied().collect();
    pair.add("output.weight", &[VOCAB, MODEL], &head);
    pair.tensors.insert("lm_head.weight".into(), (vec![VOCAB, MODEL], head));
    let config = pair.json("config.json");
    config["tie_word_embeddings"] = false.into();
    config["rope_theta"] = 500_000.0.into();
    config["head_dim"] = HEAD_WIDTH.into();
    config["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    });
    pair.set("llama.rope.freq_base", Value::F32(500_000.0));
    pair.set("llama.rope.dimension_count", number(HEAD_WIDTH));
    pair.add("rope_freqs.weight", &[HEAD_WIDTH / 2], &llama3_factors(8.0));
    *pair.json("tokenizer.json") = tokenizer_json(LLAMA3);
    pair.json("tokenizer.json")["model"]["ignore_merges"] = true.into();
    let bos = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    pair.json("tokenizer.json")["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [bos, sequence("A")], "pair": [bos, sequence("A"), sequence("B")],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [special("<|endoftext|>")], "tokens": ["<|endoftext|>"]}},
    });
    let said = pair.json("tokenizer_config.json");
    (said["bos_token"], said["tokenizer_class"]) = ("<|endoftext|>".into(), "PreTrainedTokenizerFast".into());
    pair.set("tokenizer.ggml.pre", Value::String("llama-bpe".into()));
    pair.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
}

/// The divisors of Llama 3's scaling for the model above, as its converter computes them in f32.
pub fn llama3_factors(factor: f32) -> Vec<f32> {
    let of = |pair: usize| {
        let wave = 2.0 * std::f32::consts::PI * 500_000f32.powf(2.0 * pair as f32 / HEAD_WIDTH as f32);
        let smooth = (512.0 / wave - 1.0) / 3.0;
        match (wave < 128.0, wave > 512.0) {
            (true, _) => 1.0,
            (_, true) => factor,
            _ => 1.0 / ((1.0 - smooth) / factor + smooth),
        }
    };
    (0..HEAD_WIDTH / 2).map(of).collect()
}

/// 1 + w, soft caps, a window in every other layer, an activation of its own.
fn gemma2(pair: &mut Pair) {
    let norms = (0..LAYERS)
        .flat_map(|layer| ["attn_norm", "ffn_norm"].map(|role| format!("blk.{layer}.{role}.weight")));
    for name in norms.chain(["output_norm.weight".to_owned()]) {
        change(&mut pair.model, &name, |_, w| w + 1.0);
    }
    let config = pair.json("config.json");
    (config["hidden_act"], config["hidden_activation"]) =
        ("gelu_pytorch_tanh".into(), "gelu_pytorch_tanh".into());
    config["query_pre_attn_scalar"] = HEAD_WIDTH.into();
    config["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    pair.both("final_logit_softcapping", 20.0.into(), "gemma2.final_logit_softcapping", Value::F32(20.0));
    pair.both("attn_logit_softcapping", 40.0.into(), "gemma2.attn_logit_softcapping", Value::F32(40.0));
    pair.both("sliding_window", 32.into(), "gemma2.attention.sliding_window", number(32));
    pair.both("head_dim", HEAD_WIDTH.into(), "gemma2.attention.key_length", number(HEAD_WIDTH));
    pair.set("gemma2.attention.value_length", number(HEAD_WIDTH));
}

/// Experts, one by one in the folder.
fn qwen3moe(pair: &mut Pair) {
    let width = FFN / EXPERTS;
    for layer in 0..LAYERS {
        for (role, module, shape) in [
            ("ffn_gate", "gate_proj", [width, MODEL]),
            ("ffn_up", "up_proj", [width, MODEL]),
            ("ffn_down", "down_proj", [MODEL, width]),
        ] {
            let name = format!("blk.{layer}.{role}.weight");
            let all = values(&mut pair.model, &name);
            let stored = tensor(&mut pair.model, &name);
            (stored.0, stored.2) =
                (format!("blk.{layer}.{role}_exps.weight"), vec![EXPERTS, shape[0], shape[1]]);
            pair.tensors.remove(&format!("model.layers.{layer}.mlp.{module}.weight"));
            for (expert, own) in all.chunks_exact(all.len() / EXPERTS).enumerate() {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{module}.weight");
                pair.tensors.insert(name, (shape.to_vec(), own.to_vec()));
            }
        }
    }
    pair.both("num_experts", EXPERTS.into(), "qwen3moe.expert_count", number(EXPERTS));
    pair.both("num_experts_per_tok", 2.into(), "qwen3moe.expert_used_count", number(2));
    pair.both("moe_intermediate_size", width.into(), "qwen3moe.expert_feed_forward_length", number(width));
    pair.json("config.json")["norm_topk_prob"] = true.into();
}

/// Four multipliers.
fn granite(pair: &mut Pair) {
    pair.both("embedding_multiplier", 12.0.into(), "granite.embedding_scale", Value::F32(12.0));
    pair.both("residual_multiplier", 0.22.into(), "granite.residual_scale", Value::F32(0.22));
    pair.both("attention_multiplier", 0.015625.into(), "granite.attention.scale", Value::F32(0.015625));
    pair.both("logits_scaling", 8.0.into(), "granite.logit_scale", Value::F32(8.0));
    // Rows in pairs as llama's.
    pair.json("config.json")["logits_scaling"] = 8.0.into();
}

/// A routing function, groups and a factor.
fn deepseek2(pair: &mut Pair) {
    pair.both("scoring_func", "sigmoid".into(), "deepseek2.expert_gating_func", number(2));
    pair.both("routed_scaling_factor", 2.5.into(), "deepseek2.expert_weights_scale", Value::F32(2.5));
    pair.both("norm_topk_prob", true.into(), "deepseek2.expert_weights_norm", Value::Bool(true));
    pair.both("n_group", 8.into(), "deepseek2.expert_group_count", number(8));
    pair.both("topk_group", 4.into(), "deepseek2.expert_group_used_count", number(4));
    pair.both("first_k_dense_replace", 1.into(), "deepseek2.leading_dense_block_count", number(1));
    pair.both("n_shared_experts", 1.into(), "deepseek2.expert_shared_count", number(1));
    pair.json("config.json")["kv_lora_rank"] = 16.into();
    pair.json("config.json")["rope_scaling"] = json!({
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1,
    });
    pair.set("deepseek2.rope.scaling.type", Value::String("yarn".into()));
    pair.set("deepseek2.rope.scaling.factor", Value::F32(40.0));
    pair.set("deepseek2.rope.scaling.original_context_length", number(64));
    pair.set("deepseek2.rope.scaling.yarn_log_multiplier", Value::F32(0.1));
}

/// Factors for long and short texts, three quarters of a head rotated.
fn phi3(pair: &mut Pair) {
    let (long, short) = ([1.5f32, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0f32, 1.0, 1.25, 1.5, 2.0, 2.5]);
    pair.json("config.json")["rope_scaling"] =
        json!({"type": "longrope", "long_factor": long, "short_factor": short});
    pair.json("config.json")["original_max_position_embeddings"] = 64.into();
    pair.both("partial_rotary_factor", 0.75.into(), "phi3.rope.dimension_count", number(12));
    pair.add("rope_factors_long.weight", &[6], &long);
    pair.add("rope_factors_short.weight", &[6], &short);
    pair.set("phi3.rope.scaling.type", Value::String("longrope".into()));
    pair.set("phi3.rope.scaling.original_context_length", number(64));
    let magnitude = (1.0 + 4f64.ln() / 64f64.ln()).sqrt();
    pair.set("phi3.rope.scaling.attn_factor", Value::F32(magnitude as f32));
}
