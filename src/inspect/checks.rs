//! What looks wrong in a model.

use std::collections::{BTreeMap, BTreeSet};

use super::model::{Dims, Glance, TensorReport, tokens};
use super::{Finding, Level, expected};
use crate::gguf::{Array, Gguf, Value};
use parity_graph::weights::{OUTPUT, TOKEN_EMBD, weight};

/// Weights of a layer whose size leaves the median of their like in other layers by more than this are
/// unusual: four times the widest ratio that the healthy models at hand have (SmolLM2 135M, blk.0.attn_v;
/// Qwen2.5 1.5B has 3.0 at blk.26.attn_v).
const SIZE_RATIO: f64 = 4.0 * 3.8;

/// Everything that looks wrong. `refused` is why parity can build no graph of the model.
pub fn all(
    gguf: &Gguf,
    refused: Option<&str>,
    dims: &Dims,
    glance: &Glance,
    tensors: &[TensorReport],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(embedding(glance));
    findings.extend(vocabulary(gguf, glance));
    findings.extend(tensors.iter().flat_map(values));
    findings.extend(layers(dims, tensors, &expected::in_layer(gguf)));
    findings.extend(sizes(tensors));
    findings.extend(twins(gguf, tensors));
    findings.extend(overlaps(gguf));
    findings.extend(expected::all(gguf, dims, tensors));
    // The graph's builder stops at the first thing: nothing new where something wrong was found already.
    // What is left to it are features of the model that parity has no graph for.
    if let Some(refused) = refused
        && !tensors.is_empty()
        && !findings.iter().any(|finding| finding.level == Level::Wrong)
    {
        let text = format!("cannot be run by parity but on a recording's graph: {refused}");
        findings.push(Finding::unusual("architecture", text));
    }
    findings
}

/// `blk.3.attn_q.weight` -> (3, `attn_q.weight`).
pub fn without_layer(name: &str) -> (Option<usize>, &str) {
    match parity_graph::weights::layer_weight(name) {
        Some((layer, rest)) => (Some(layer as usize), rest),
        None => (None, name),
    }
}

fn embedding(glance: &Glance) -> Option<Finding> {
    let layout = glance.embedding_layout.filter(|layout| layout.is_transposed() == Some(true))?;
    let text = format!(
        "is transposed: read as stored its columns share no mean (spread {:.1}, chance gives 1), read the other way they do ({:.1})",
        layout.as_stored, layout.transposed
    );
    Some(Finding::wrong(weight(TOKEN_EMBD), text))
}

/// The tokenizer against the embedding table.
fn vocabulary(gguf: &Gguf, glance: &Glance) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(count) = tokens(gguf).map(<[String]>::len) else { return findings };
    match glance.vocab_rows {
        Some(rows) if count > rows => findings.push(Finding::wrong(
            weight(TOKEN_EMBD),
            format!("has {rows} rows for {count} tokens: the last {} tokens have none", count - rows),
        )),
        Some(rows) if count < rows => findings.push(Finding::unusual(
            weight(TOKEN_EMBD),
            format!("has {rows} rows for {count} tokens: the last {} rows stand for none", rows - count),
        )),
        _ => {}
    }
    for key in ["tokenizer.ggml.token_type", "tokenizer.ggml.scores"] {
        if let Some(Value::Array(array)) = gguf.get(key)
            && array.len() != count
        {
            findings.push(Finding::wrong(key, format!("has {} entries for {count} tokens", array.len())));
        }
    }
    for (key, value) in gguf.metadata() {
        let is_id = key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id");
        if is_id && value.as_integer().is_some_and(|id| !(0..count as i128).contains(&id)) {
            findings.push(Finding::wrong(key, format!("{value} is no token: there are {count}")));
        }
    }
    if gguf.get("tokenizer.ggml.model") == Some(&Value::String("gpt2".into()))
        && !matches!(gguf.get("tokenizer.ggml.merges"), Some(Value::Array(Array::String(_))))
    {
        findings
            .push(Finding::wrong("tokenizer.ggml.merges", "is missing: the tokenizer is byte-pair encoding"));
    }
    findings
}

/// Values of one tensor.
fn values(tensor: &TensorReport) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(stats) = &tensor.stats else {
        let text =
            format!("has type {}, which parity cannot decode: its values were not looked at", tensor.dtype);
        return vec![Finding::unusual(&tensor.name, text)];
    };
    let rows = if stats.nonfinite_rows == 1 { "row" } else { "rows" };
    if stats.nan + stats.inf > 0 {
        let text = format!(
            "holds {} NaN and {} infinities, in {} {rows}",
            stats.nan, stats.inf, stats.nonfinite_rows
        );
        findings.push(Finding::wrong(&tensor.name, text));
    }
    let is_bias = tensor.name.ends_with(".bias");
    if stats.values == 0 {
        findings.push(Finding::wrong(&tensor.name, "has no values"));
    } else if stats.is_zero() {
        let level = if is_bias { Finding::unusual } else { Finding::wrong };
        findings.push(level(&tensor.name, "is all zero"));
    } else if stats.is_constant() {
        let value = stats.min.unwrap_or_default();
        findings.push(Finding::unusual(&tensor.name, format!("is {value} throughout: was it ever trained?")));
    } else if tensor.shape.len() > 1 && stats.zero_rows + stats.constant_rows > 0 {
        let text = format!("has {} zero rows and {} of one value", stats.zero_rows, stats.constant_rows);
        findings.push(Finding::unusual(&tensor.name, text));
    }
    findings
}

/// Tensors by name without layer, then by layer.
pub fn by_suffix(tensors: &[TensorReport]) -> BTreeMap<&str, BTreeMap<usize, &TensorReport>> {
    let mut groups: BTreeMap<&str, BTreeMap<usize, &TensorReport>> = BTreeMap::new();
    for tensor in tensors {
        if let (Some(layer), suffix) = without_layer(&tensor.name) {
            groups.entry(suffix).or_default().insert(layer, tensor);
        }
    }
    groups
}

/// Whether all layers are there and alike; `needed` are tensors that none may lack.
fn layers(dims: &Dims, tensors: &[TensorReport], needed: &[String]) -> Vec<Finding> {
    let groups = by_suffix(tensors);
    let present: BTreeSet<usize> = groups.values().flat_map(|group| group.keys().copied()).collect();
    let mut findings = Vec::new();
    if let (Some(count), false) = (dims.layers, present.is_empty()) {
        // A count may come from a hostile file: only what is present is enumerated.
        let beyond = present.range(count..).count();
        let missing = count - (present.len() - beyond);
        if missing > 0 {
            let text = format!("says {count} layers, tensors of {missing} of them are missing");
            findings.push(Finding::wrong("block_count", text));
        }
        if beyond > 0 {
            findings.push(Finding::unusual(
                "block_count",
                format!("says {count} layers, the file has {beyond} more"),
            ));
        }
    }
    for (suffix, group) in groups {
        let absent: Vec<String> =
            present.iter().filter(|layer| !group.contains_key(layer)).map(usize::to_string).collect();
        let text = format!("is missing in layer {}, {} layers have it", absent.join(", "), group.len());
        if !absent.is_empty() && needed.iter().any(|needed| needed == suffix) {
            findings.push(Finding::wrong(format!("blk.*.{suffix}"), text));
        } else if !absent.is_empty() && absent.len() < group.len() {
            // Where most layers lack a tensor, the architecture alternates.
            findings.push(Finding::unusual(format!("blk.*.{suffix}"), text));
        }
    }
    findings
}

/// Weights much larger or smaller than their like in the other layers.
fn sizes(tensors: &[TensorReport]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for group in by_suffix(tensors).values() {
        let rms = |tensor: &TensorReport| tensor.stats.and_then(|s| s.rms).filter(|rms| *rms > 0.0);
        let matrices = || group.values().filter(|t| t.shape.len() > 1 && t.name.ends_with(".weight"));
        let mut sizes: Vec<f64> = matrices().filter_map(|t| rms(t)).collect();
        sizes.sort_by(f64::total_cmp);
        let Some(median) = sizes.get(sizes.len() / 2).copied() else { continue };
        for tensor in matrices() {
            let Some(ratio) = rms(tensor).map(|rms| rms / median) else { continue };
            if !(1.0 / SIZE_RATIO..=SIZE_RATIO).contains(&ratio) {
                let text =
                    format!("is {ratio:.3} times as large as its like in other layers (root mean square)");
                findings.push(Finding::unusual(&tensor.name, text));
            }
        }
    }
    findings
}

/// Different tensors with the same bytes.
fn twins(gguf: &Gguf, tensors: &[TensorReport]) -> Vec<Finding> {
    let mut seen: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    let mut findings = Vec::new();
    let (table, head) = (weight(TOKEN_EMBD), weight(OUTPUT));
    for tensor in tensors {
        let Some(stats) = tensor.stats.filter(|stats| !stats.is_constant()) else { continue };
        let Some(rms) = stats.rms else { continue };
        // Equal bytes have an equal size; only then are the bytes compared.
        let twins = seen.entry((tensor.dtype, &tensor.shape, rms.to_bits())).or_default();
        let bytes = |name: &str| gguf.tensor(name).map(|t| t.bytes);
        if let Some(twin) = twins.iter().find(|twin| bytes(twin) == bytes(&tensor.name)) {
            let pair = [twin, tensor.name.as_str()];
            findings.push(if pair.contains(&&*table) && pair.contains(&&*head) {
                Finding::unusual(&head, format!("is {table} once more: the model is tied and stores both"))
            } else {
                Finding::wrong(&tensor.name, format!("holds the bytes of {twin}"))
            });
        }
        twins.push(&tensor.name);
    }
    findings
}

/// Tensors that share bytes of the file.
fn overlaps(gguf: &Gguf) -> Vec<Finding> {
    let mut spans: Vec<_> = gguf.tensors().filter(|info| info.byte_len > 0).collect();
    spans.sort_by_key(|info| (info.shard, info.offset));
    let overlapping = spans
        .windows(2)
        .filter(|pair| pair[0].shard == pair[1].shard && pair[1].offset < pair[0].offset + pair[0].byte_len);
    overlapping
        .map(|pair| Finding::wrong(&pair[1].name, format!("starts inside the bytes of {}", pair[0].name)))
        .collect()
}
