//! Writes a model of Qwen2.5-0.5B's geometry with random F16 weights: for speed, not for sense.

use std::fs::File;
use std::io::{BufWriter, Write};

const LAYERS: u64 = 24;
const D: u64 = 896;
const F: u64 = 4864;
const V: u64 = 151_936;
const KV: u64 = 128;

/// One value of the metadata: name, type number, bytes.
fn metadata() -> Vec<(&'static str, u32, Vec<u8>)> {
    let word = |text: &str| [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat();
    let number = |n: u32| n.to_le_bytes().to_vec();
    vec![
        ("general.architecture", 8, word("qwen2")),
        ("general.name", 8, word("synthetic, geometry of Qwen2.5-0.5B")),
        ("qwen2.block_count", 4, number(LAYERS as u32)),
        ("qwen2.context_length", 4, number(32_768)),
        ("qwen2.embedding_length", 4, number(D as u32)),
        ("qwen2.feed_forward_length", 4, number(F as u32)),
        ("qwen2.attention.head_count", 4, number(14)),
        ("qwen2.attention.head_count_kv", 4, number(2)),
        ("qwen2.rope.freq_base", 6, 1e6f32.to_le_bytes().to_vec()),
        ("qwen2.attention.layer_norm_rms_epsilon", 6, 1e-6f32.to_le_bytes().to_vec()),
        ("qwen2.vocab_size", 4, number(V as u32)),
        ("tokenizer.ggml.model", 8, word("no_vocab")),
    ]
}

/// Name, shape with the fastest axis first, whether F16 (else F32).
fn tensors() -> Vec<(String, Vec<u64>, bool)> {
    let mut list = vec![("token_embd.weight".to_owned(), vec![D, V], true)];
    for layer in 0..LAYERS {
        let mut push = |name: &str, shape: &[u64]| {
            list.push((format!("blk.{layer}.{name}"), shape.to_vec(), shape.len() == 2));
        };
        push("attn_norm.weight", &[D]);
        for (name, rows) in [("attn_q", D), ("attn_k", KV), ("attn_v", KV)] {
            push(&format!("{name}.weight"), &[D, rows]);
            push(&format!("{name}.bias"), &[rows]);
        }
        push("attn_output.weight", &[D, D]);
        push("ffn_norm.weight", &[D]);
        push("ffn_gate.weight", &[D, F]);
        push("ffn_up.weight", &[D, F]);
        push("ffn_down.weight", &[F, D]);
    }
    list.push(("output_norm.weight".to_owned(), vec![D], false));
    list
}

/// Writes the model.
pub fn write(path: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let (metadata, tensors) = (metadata(), tensors());
    let mut head: Vec<u8> = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    let text = |head: &mut Vec<u8>, text: &str| {
        head.extend((text.len() as u64).to_le_bytes());
        head.extend(text.as_bytes());
    };
    for (key, kind, value) in &metadata {
        text(&mut head, key);
        head.extend(kind.to_le_bytes());
        head.extend(value);
    }
    let size = |shape: &[u64], is_f16: bool| {
        (shape.iter().product::<u64>() * if is_f16 { 2 } else { 4 }).next_multiple_of(32)
    };
    let mut offset = 0u64;
    for (name, shape, is_f16) in &tensors {
        text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|n| head.extend(n.to_le_bytes()));
        head.extend(u32::from(*is_f16).to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += size(shape, *is_f16);
    }
    head.resize(head.len().next_multiple_of(32), 0);
    out.write_all(&head)?;
    let mut state = 1u64;
    for (name, shape, is_f16) in &tensors {
        let n = shape.iter().product::<u64>();
        let mut bytes = Vec::with_capacity(size(shape, *is_f16) as usize);
        for _ in 0..n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Between -1 and 1; norms near 1, products of unit variance.
            let value = (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
            if *is_f16 {
                let scale = (3.0 / shape[0] as f32).sqrt();
                bytes.extend(half::f16::from_f32(value * scale).to_le_bytes());
            } else {
                let centre = if name.contains("norm") { 1.0 } else { 0.0 };
                bytes.extend((centre + 0.1 * value).to_le_bytes());
            }
        }
        bytes.resize(size(shape, *is_f16) as usize, 0);
        out.write_all(&bytes)?;
    }
    out.flush()?;
    Ok(())
}
