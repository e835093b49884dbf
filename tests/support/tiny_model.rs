//! A small Qwen2 with random weights, right in every respect, for tests that spoil it.

use parity::gguf::{Array, DType, Value};
use parity::random;

use super::gguf_writer::GgufWriter;

pub const LAYERS: usize = 3;
pub const MODEL: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_WIDTH: usize = 16;
pub const FFN: usize = 96;
pub const VOCAB: usize = 700;
pub const TOKENS: usize = 690;

/// Numbers that look random, the same ones for the same seed, in [-1, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(random::GAMMA);
        ((random::mixed(self.0) >> 40) as f32) / (1u64 << 23) as f32 - 1.0
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The model. Tensors are F32.
pub fn tiny_qwen2() -> GgufWriter {
    let number = |value: usize| Value::U32(value as u32);
    let tokens = (0..VOCAB).map(|i| if i < TOKENS { format!("t{i}") } else { format!("[PAD{i}]") }).collect();
    let types = (0..VOCAB).map(|i| if i < TOKENS { 1 } else { 5 }).collect();
    let mut model = GgufWriter::new()
        .with("general.architecture", Value::String("qwen2".into()))
        .with("general.name", Value::String("tiny".into()))
        .with("qwen2.block_count", number(LAYERS))
        .with("qwen2.context_length", number(256))
        .with("qwen2.embedding_length", number(MODEL))
        .with("qwen2.feed_forward_length", number(FFN))
        .with("qwen2.attention.head_count", number(HEADS))
        .with("qwen2.attention.head_count_kv", number(KV_HEADS))
        .with("qwen2.attention.layer_norm_rms_epsilon", Value::F32(1e-6))
        .with("qwen2.rope.freq_base", Value::F32(1e6))
        .with("tokenizer.ggml.model", Value::String("gpt2".into()))
        .with("tokenizer.ggml.pre", Value::String("qwen2".into()))
        .with("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .with("tokenizer.ggml.token_type", Value::Array(Array::I32(types)))
        .with("tokenizer.ggml.merges", Value::Array(Array::String(vec!["t 1".into()])))
        .with("tokenizer.ggml.eos_token_id", number(TOKENS - 1));
    let (queries, keys) = (HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH);
    let mut random = Random(1);
    let mut add = |name: String, shape: &[usize], mean: f32| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| mean + 0.1 * random.next()).collect();
        model.tensors.push((name, DType::F32, shape.to_vec(), bytes(&values)));
    };
    add("token_embd.weight".into(), &[VOCAB, MODEL], 0.0);
    add("output_norm.weight".into(), &[MODEL], 1.0);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}");
        add(name("attn_norm.weight"), &[MODEL], 1.0);
        add(name("attn_q.weight"), &[queries, MODEL], 0.0);
        add(name("attn_q.bias"), &[queries], 0.0);
        add(name("attn_k.weight"), &[keys, MODEL], 0.0);
        add(name("attn_k.bias"), &[keys], 0.0);
        add(name("attn_v.weight"), &[keys, MODEL], 0.0);
        add(name("attn_v.bias"), &[keys], 0.0);
        add(name("attn_output.weight"), &[MODEL, queries], 0.0);
        add(name("ffn_norm.weight"), &[MODEL], 1.0);
        add(name("ffn_gate.weight"), &[FFN, MODEL], 0.0);
        add(name("ffn_up.weight"), &[FFN, MODEL], 0.0);
        add(name("ffn_down.weight"), &[MODEL, FFN], 0.0);
    }
    // What trained embeddings have: a mean vector that all tokens share.
    let mean: Vec<f32> = (0..MODEL).map(|_| 0.03 * random.next()).collect();
    change(&mut model, "token_embd.weight", |index, value| value + mean[index % MODEL]);
    model
}

/// The stored type, shape and bytes of a tensor.
pub fn tensor<'a>(model: &'a mut GgufWriter, name: &str) -> &'a mut (String, DType, Vec<usize>, Vec<u8>) {
    model
        .tensors
        .iter_mut()
        .find(|tensor| tensor.0 == name)
        .unwrap_or_else(|| panic!("the model has no {name}"))
}

/// The values of an F32 tensor.
pub fn values(model: &mut GgufWriter, name: &str) -> Vec<f32> {
    tensor(model, name).3.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Replaces every value of an F32 tensor by a function of its index and itself.
pub fn change(model: &mut GgufWriter, name: &str, new: impl Fn(usize, f32) -> f32) {
    let values: Vec<f32> = values(model, name).into_iter().enumerate().map(|(i, v)| new(i, v)).collect();
    tensor(model, name).3 = bytes(&values);
}

/// Replaces a metadata value.
pub fn set(model: &mut GgufWriter, key: &str, value: Value) {
    let entry = model.metadata.iter_mut().find(|(known, _)| known == key);
    entry.unwrap_or_else(|| panic!("the model has no {key}")).1 = value;
}
