//! Writes models of Qwen2.5's geometry with random weights: for speed, not for sense. Their tokens are the 256 bytes, a
//! pair of blanks, and as many that stand for nothing as Qwen2.5 has further ones, so that texts are read by bytes.

use std::fs::File;
use std::io::{BufWriter, Write};

use parity::gguf::DType;

/// Widths of a model.
struct Geometry {
    name: &'static str,
    layers: u64,
    d: u64,
    f: u64,
    heads: u64,
    kv_heads: u64,
    head_width: u64,
    /// Quantised as llama.cpp's Q4_K_M, with an output of its own; F16 and tied otherwise.
    quantised: bool,
}

const SMALL: Geometry = Geometry {
    name: "0.5B",
    layers: 24,
    d: 896,
    f: 4864,
    heads: 14,
    kv_heads: 2,
    head_width: 64,
    quantised: false,
};
const LARGE: Geometry = Geometry {
    name: "1.5B",
    layers: 28,
    d: 1536,
    f: 8960,
    heads: 12,
    kv_heads: 2,
    head_width: 128,
    quantised: true,
};
const V: u64 = 151_936;

/// One tensor: shape with the fastest axis first.
struct Tensor {
    name: String,
    shape: Vec<u64>,
    dtype: DType,
}

impl Tensor {
    fn bytes(&self) -> usize {
        let n = self.shape.iter().product::<u64>() as usize;
        (n / self.dtype.block_len() * self.dtype.block_bytes()).next_multiple_of(32)
    }
}

/// GGUF's numbers of the types that are written.
fn number_of(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::Q4_K => 12,
        DType::Q6_K => 14,
        _ => 0,
    }
}

/// Tokens that texts are made of; what follows them is unused.
const NORMAL: u64 = 257;

/// The 256 bytes as GPT-2 writes them, which gives those that cannot be printed letters from U+0100 on; a pair of blanks,
/// the only one that is merged; and unused tokens.
fn tokens() -> Vec<String> {
    let printed = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..256u32).filter(|byte| !printed(byte)).count() as u32;
    let letters = (0..256).filter(printed).chain(0x100..0x100 + hidden).filter_map(char::from_u32);
    let unused = (NORMAL..V).map(|id| format!("<unused {id}>"));
    letters.map(String::from).chain(["ĠĠ".into()]).chain(unused).collect()
}

/// An array of the metadata: type of its elements, their number, the elements.
fn array(kind: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes(), &elements.concat()].concat()
}

impl Geometry {
    /// One value of the metadata: name, type number, bytes.
    fn metadata(&self) -> Vec<(&'static str, u32, Vec<u8>)> {
        let word = |text: &str| [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat();
        let number = |n: u64| (n as u32).to_le_bytes().to_vec();
        let tokens: Vec<_> = tokens().iter().map(|token| word(token)).collect();
        let kinds: Vec<_> = (0..V).map(|id| number(if id < NORMAL { 1 } else { 5 })).collect();
        vec![
            ("general.architecture", 8, word("qwen2")),
            ("general.name", 8, word(&format!("synthetic, geometry of Qwen2.5-{}", self.name))),
            ("qwen2.block_count", 4, number(self.layers)),
            ("qwen2.context_length", 4, number(32_768)),
            ("qwen2.embedding_length", 4, number(self.d)),
            ("qwen2.feed_forward_length", 4, number(self.f)),
            ("qwen2.attention.head_count", 4, number(self.heads)),
            ("qwen2.attention.head_count_kv", 4, number(self.kv_heads)),
            ("qwen2.rope.freq_base", 6, 1e6f32.to_le_bytes().to_vec()),
            ("qwen2.attention.layer_norm_rms_epsilon", 6, 1e-6f32.to_le_bytes().to_vec()),
            ("qwen2.vocab_size", 4, number(V)),
            ("tokenizer.ggml.model", 8, word("gpt2")),
            ("tokenizer.ggml.pre", 8, word("qwen2")),
            ("tokenizer.ggml.tokens", 9, array(8, &tokens)),
            ("tokenizer.ggml.token_type", 9, array(5, &kinds)),
            ("tokenizer.ggml.merges", 9, array(8, &[word("Ġ Ġ")])),
            ("tokenizer.ggml.eos_token_id", 4, number(V - 1)),
        ]
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (d, f, kv) = (self.d, self.f, self.kv_heads * self.head_width);
        let plain = if self.quantised { DType::Q4_K } else { DType::F16 };
        let tensor = |name: String, shape: &[u64], dtype| Tensor { name, shape: shape.to_vec(), dtype };
        let mut list = vec![tensor("token_embd.weight".into(), &[d, V], plain)];
        for layer in 0..self.layers {
            // llama.cpp gives these layers more bits in values and in the way down.
            let eighth = self.layers / 8;
            let more = layer < eighth || layer >= 7 * eighth || (layer - eighth) % 3 == 2;
            let better = if self.quantised && more { DType::Q6_K } else { plain };
            let mut push = |name: &str, shape: &[u64], dtype| {
                list.push(tensor(format!("blk.{layer}.{name}"), shape, dtype));
            };
            push("attn_norm.weight", &[d], DType::F32);
            for (name, rows, dtype) in [("attn_q", d, plain), ("attn_k", kv, plain), ("attn_v", kv, better)] {
                push(&format!("{name}.weight"), &[d, rows], dtype);
                push(&format!("{name}.bias"), &[rows], DType::F32);
            }
            push("attn_output.weight", &[d, d], plain);
            push("ffn_norm.weight", &[d], DType::F32);
            push("ffn_gate.weight", &[d, f], plain);
            push("ffn_up.weight", &[d, f], plain);
            push("ffn_down.weight", &[f, d], better);
        }
        list.push(tensor("output_norm.weight".into(), &[d], DType::F32));
        if self.quantised {
            list.push(tensor("output.weight".into(), &[d, V], DType::Q6_K));
        }
        list
    }
}

/// A linear congruential generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }

    /// Between -1 and 1.
    fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

/// Random weights: norms near 1, products of a variance near 1.
fn fill(tensor: &Tensor, random: &mut Random) -> Vec<u8> {
    let n = tensor.shape.iter().product::<u64>() as usize;
    let width = tensor.shape[0] as f32;
    let mut bytes = Vec::with_capacity(tensor.bytes());
    match tensor.dtype {
        DType::F16 => {
            let scale = (3.0 / width).sqrt();
            bytes.extend((0..n).flat_map(|_| half::f16::from_f32(random.value() * scale).to_le_bytes()));
        }
        DType::F32 => {
            let centre = if tensor.name.contains("norm") { 1.0 } else { 0.0 };
            bytes.extend((0..n).flat_map(|_| (centre + 0.1 * random.value()).to_le_bytes()));
        }
        dtype => {
            let len = n / dtype.block_len() * dtype.block_bytes();
            bytes.extend((0..len.div_ceil(4)).flat_map(|_| ((random.bits() >> 32) as u32).to_le_bytes()));
            bytes.truncate(len);
            // Standard deviations of scale·q - 7.5·min and of scale·(q - 32) of random bits.
            let (at, d, low) =
                if dtype == DType::Q4_K { (0, 1.0 / 260.0, 7.5) } else { (208, 1.0 / 1370.0, 0.0) };
            let d = d / width.sqrt();
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(d).to_le_bytes());
                if low > 0.0 {
                    block[2..4].copy_from_slice(&half::f16::from_f32(low * d).to_le_bytes());
                }
            }
        }
    }
    bytes.resize(tensor.bytes(), 0);
    bytes
}

/// Writes a model: `0.5B` in F16 or `1.5B` quantised as Q4_K_M; `-F16` behind a size writes it in F16, for llama.cpp to
/// quantise.
pub fn write(path: &str, size: &str) -> Result<(), Box<dyn std::error::Error>> {
    let (size, float) = size.strip_suffix("-F16").map_or((size, false), |size| (size, true));
    let found = [SMALL, LARGE].into_iter().find(|geometry| geometry.name == size);
    let mut geometry = found.ok_or("a size: 0.5B or 1.5B, as it is or with -F16 behind it")?;
    geometry.quantised &= !float;
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let (metadata, tensors) = (geometry.metadata(), geometry.tensors());
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
    let mut offset = 0u64;
    for tensor in &tensors {
        text(&mut head, &tensor.name);
        head.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().for_each(|n| head.extend(n.to_le_bytes()));
        head.extend(number_of(tensor.dtype).to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += tensor.bytes() as u64;
    }
    head.resize(head.len().next_multiple_of(32), 0);
    out.write_all(&head)?;
    let mut random = Random(1);
    for tensor in &tensors {
        out.write_all(&fill(tensor, &mut random))?;
    }
    out.flush()?;
    Ok(())
}
