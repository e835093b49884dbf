//! What a model of an architecture that parity runs has to have: metadata, tensors, shapes.

use super::Finding;
use super::checks::by_suffix;
use super::model::{Dims, TensorReport};
use crate::engine::fused::config::Architecture;
use crate::gguf::Gguf;
use parity_graph::weights::{self, BIAS, Name, WEIGHT};

/// Keys under `{arch}.` without which no engine can compute.
const KEYS: [&str; 5] = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
];
/// Weights outside the layers.
const GLOBAL: [&str; 2] = [weights::TOKEN_EMBD, weights::OUTPUT_NORM];
/// Weights of every layer.
const IN_LAYER: [&str; 9] = [
    weights::ATTN_NORM,
    weights::ATTN_Q,
    weights::ATTN_K,
    weights::ATTN_V,
    weights::ATTN_OUTPUT,
    weights::FFN_NORM,
    weights::FFN_GATE,
    weights::FFN_UP,
    weights::FFN_DOWN,
];
/// Further tensors of every layer.
fn own(architecture: Architecture) -> Vec<String> {
    let all = |name: fn(&str) -> String, parts: &[&str]| parts.iter().map(|part| name(part)).collect();
    match architecture {
        Architecture::Qwen2 => all(weights::bias, &[weights::ATTN_Q, weights::ATTN_K, weights::ATTN_V]),
        Architecture::Llama => Vec::new(),
        Architecture::Qwen3 => all(weights::weight, &[weights::ATTN_Q_NORM, weights::ATTN_K_NORM]),
    }
}

/// The architecture, where it is one that parity runs, and its name.
fn architecture(gguf: &Gguf) -> Option<(Architecture, &'static str)> {
    let architecture = gguf.str("general.architecture").ok().flatten().and_then(Architecture::of)?;
    Some((architecture, architecture.name()))
}

/// Tensors that every layer has, without layer; none where the architecture is another.
pub fn in_layer(gguf: &Gguf) -> Vec<String> {
    let known = architecture(gguf).map(|(architecture, _)| architecture);
    known.map_or(Vec::new(), |architecture| {
        IN_LAYER.into_iter().map(weights::weight).chain(own(architecture)).collect()
    })
}

/// Everything that is not as it has to be, but for tensors that only some layers lack. Silent on other
/// architectures and on files without tensors.
pub fn all(gguf: &Gguf, dims: &Dims, tensors: &[TensorReport]) -> Vec<Finding> {
    let Some((_, name)) = architecture(gguf).filter(|_| !tensors.is_empty()) else { return Vec::new() };
    let mut findings = shapes(dims, tensors);
    let global = GLOBAL.into_iter().map(weights::weight);
    for name in global.filter(|name| !tensors.iter().any(|tensor| tensor.name == *name)) {
        findings.push(Finding::wrong(name, "is missing"));
    }
    let groups = by_suffix(tensors);
    for suffix in in_layer(gguf).into_iter().filter(|suffix| !groups.contains_key(&**suffix)) {
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
fn expected_shape(name: &str, dims: &Dims) -> Option<(&'static str, Vec<usize>)> {
    let (model, width) = (dims.model?, dims.head_width?);
    let queries = dims.heads?.checked_mul(width)?;
    let keys = dims.kv_heads?.checked_mul(width)?;
    let Name { part, kind, .. } = Name::of(name);
    Some(match (part, kind) {
        (weights::TOKEN_EMBD | weights::OUTPUT, WEIGHT) => ("(V, D)", vec![dims.vocab?, model]),
        (weights::OUTPUT_NORM | weights::ATTN_NORM | weights::FFN_NORM, WEIGHT) => ("(D)", vec![model]),
        (weights::ATTN_Q, WEIGHT) => ("(H·E, D)", vec![queries, model]),
        (weights::ATTN_K | weights::ATTN_V, WEIGHT) => ("(K·E, D)", vec![keys, model]),
        (weights::ATTN_Q, BIAS) => ("(H·E)", vec![queries]),
        (weights::ATTN_K | weights::ATTN_V, BIAS) => ("(K·E)", vec![keys]),
        (weights::ATTN_Q_NORM | weights::ATTN_K_NORM, WEIGHT) => ("(E)", vec![width]),
        (weights::ATTN_OUTPUT, WEIGHT) => ("(D, H·E)", vec![model, queries]),
        (weights::FFN_GATE | weights::FFN_UP, WEIGHT) => ("(F, D)", vec![dims.ffn?, model]),
        (weights::FFN_DOWN, WEIGHT) => ("(D, F)", vec![model, dims.ffn?]),
        _ => return None,
    })
}

/// Tensors of a supported architecture whose shapes are not what the metadata says.
fn shapes(dims: &Dims, tensors: &[TensorReport]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for tensor in tensors {
        let Some((letters, expected)) = expected_shape(&tensor.name, dims) else { continue };
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
