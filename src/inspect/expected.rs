//! What a model of an architecture that parity runs has to have: metadata, tensors, shapes.

use super::Finding;
use super::checks::{by_suffix, without_layer};
use super::model::{Dims, EMBEDDING, TensorReport};
use crate::gguf::Gguf;
use crate::model::config::Architecture;

/// Keys under `{arch}.` without which no engine can compute.
const KEYS: [&str; 5] = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
];
/// Tensors outside the layers.
const GLOBAL: [&str; 2] = [EMBEDDING, "output_norm.weight"];
/// Tensors of every layer.
const IN_LAYER: [&str; 9] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];
/// Further tensors of every layer.
const fn own(architecture: Architecture) -> &'static [&'static str] {
    match architecture {
        Architecture::Qwen2 => &["attn_q.bias", "attn_k.bias", "attn_v.bias"],
        Architecture::Llama => &[],
        Architecture::Qwen3 => &["attn_q_norm.weight", "attn_k_norm.weight"],
    }
}

/// The architecture, where it is one that parity runs, and its name.
fn architecture(gguf: &Gguf) -> Option<(Architecture, &'static str)> {
    let architecture = gguf.str("general.architecture").ok().flatten().and_then(Architecture::of)?;
    Some((architecture, architecture.name()))
}

/// Tensors that every layer has, without layer; none where the architecture is another.
pub fn in_layer(gguf: &Gguf) -> Vec<&'static str> {
    let known = architecture(gguf).map(|(architecture, _)| architecture);
    known.map_or(Vec::new(), |architecture| [&IN_LAYER, own(architecture)].concat())
}

/// Everything that is not as it has to be, but for tensors that only some layers lack. Silent on other
/// architectures and on files without tensors.
pub fn all(gguf: &Gguf, dims: &Dims, tensors: &[TensorReport]) -> Vec<Finding> {
    let Some((_, name)) = architecture(gguf).filter(|_| !tensors.is_empty()) else { return Vec::new() };
    let mut findings = shapes(dims, tensors);
    for name in GLOBAL.into_iter().filter(|name| !tensors.iter().any(|tensor| tensor.name == *name)) {
        findings.push(Finding::wrong(name, "is missing"));
    }
    let groups = by_suffix(tensors);
    for suffix in in_layer(gguf).into_iter().filter(|suffix| !groups.contains_key(suffix)) {
        findings.push(Finding::wrong(format!("blk.*.{suffix}"), "is missing in all layers"));
    }
    for key in KEYS.map(|key| format!("{name}.{key}")).into_iter().filter(|key| gguf.get(key).is_none()) {
        findings.push(Finding::wrong(key, "is missing"));
    }
    if dims.rope_base.is_none() {
        let text = "is missing: engines take 10000, whatever the model was trained with";
        findings.push(Finding::unusual(format!("{name}.rope.freq_base"), text));
    }
    findings
}

/// The shape that a tensor of a supported architecture has, slowest axis first, with the letters of its axes.
fn expected_shape(suffix: &str, dims: &Dims) -> Option<(&'static str, Vec<usize>)> {
    let (model, width) = (dims.model?, dims.head_width?);
    let queries = dims.heads?.checked_mul(width)?;
    let keys = dims.kv_heads?.checked_mul(width)?;
    Some(match suffix {
        "token_embd.weight" | "output.weight" => ("(V, D)", vec![dims.vocab?, model]),
        "output_norm.weight" | "attn_norm.weight" | "ffn_norm.weight" => ("(D)", vec![model]),
        "attn_q.weight" => ("(H·E, D)", vec![queries, model]),
        "attn_k.weight" | "attn_v.weight" => ("(K·E, D)", vec![keys, model]),
        "attn_q.bias" => ("(H·E)", vec![queries]),
        "attn_k.bias" | "attn_v.bias" => ("(K·E)", vec![keys]),
        "attn_q_norm.weight" | "attn_k_norm.weight" => ("(E)", vec![width]),
        "attn_output.weight" => ("(D, H·E)", vec![model, queries]),
        "ffn_gate.weight" | "ffn_up.weight" => ("(F, D)", vec![dims.ffn?, model]),
        "ffn_down.weight" => ("(D, F)", vec![model, dims.ffn?]),
        _ => return None,
    })
}

/// Tensors of a supported architecture whose shapes are not what the metadata says.
fn shapes(dims: &Dims, tensors: &[TensorReport]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for tensor in tensors {
        let Some((letters, expected)) = expected_shape(without_layer(&tensor.name).1, dims) else { continue };
        if tensor.shape == expected {
            continue;
        }
        let turned = tensor.gguf_ne == expected;
        let what = if turned { "is transposed" } else { "has another shape than the metadata says" };
        let text = format!("{what}: expected {letters} = {expected:?}, found {:?}", tensor.shape);
        findings.push(Finding::wrong(&tensor.name, text));
    }
    findings
}
