//! What a GGUF model holds.

use std::path::Path;

use indexmap::IndexMap;
use serde::Serialize;

use super::Finding;
use super::checks;
use super::layout::{self, Spread};
use super::stats::{self, Stats};
use crate::engine::fused::file::ModelFile;
use crate::engine::fused::graph::Pairing;
use crate::error::Result;
use crate::gguf::{Array, DType, Gguf, Value};
use crate::model::builders::{self, Cache, Shape};
use parity_graph::weights;

/// What a GGUF model holds.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInspection {
    /// The file that was given.
    pub file: String,
    /// GGUF version.
    pub gguf_version: u32,
    /// Files of the model: more than 1 where it is split.
    pub files: usize,
    /// `general.name`
    pub name: Option<String>,
    /// `general.architecture`
    pub architecture: Option<String>,
    /// What looks wrong, the worst first.
    pub findings: Vec<Finding>,
    /// The questions that are asked first.
    pub glance: Glance,
    /// Widths of the axes and other numbers of the architecture.
    pub dims: Dims,
    /// Types and sizes.
    pub quantisation: Quantisation,
    /// In the order of the file.
    pub tensors: Vec<TensorReport>,
    /// Everything the file says about itself. Of arrays only type, length and first elements, as text.
    pub metadata: IndexMap<String, serde_json::Value>,
    /// Token ids of the text that was given with `-p`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
}

/// The questions that are asked first.
#[derive(Clone, Debug, Serialize)]
pub struct Glance {
    /// Whether the rows of the embedding table are not tokens; `None` where neither shape nor values say.
    pub embedding_transposed: Option<bool>,
    /// What the values say about it.
    pub embedding_layout: Option<Spread>,
    /// Whether the logits use the embedding table.
    pub tied: Option<bool>,
    /// Tensors with a bias, without layer, e.g. `attn_q`.
    pub biases: Vec<String>,
    /// Why parity can build no graph of the model; `None` where it can.
    pub refused: Option<String>,
    /// Which columns of a head RoPE turns together: `half` or `interleaved`; `None` where unknown.
    pub rope_pairing: Option<&'static str>,
    /// Rows of the embedding table.
    pub vocab_rows: Option<usize>,
    /// Tokens of the tokenizer, padding included.
    pub vocab_tokens: Option<usize>,
    /// Rows that stand for no token: beyond the tokenizer, or marked unused in it.
    pub vocab_padding: Option<usize>,
}

/// Numbers of the architecture as the metadata states them; `None` where absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Dims {
    /// L
    pub layers: Option<usize>,
    /// D
    pub model: Option<usize>,
    /// H
    pub heads: Option<usize>,
    /// K
    pub kv_heads: Option<usize>,
    /// E
    pub head_width: Option<usize>,
    /// F
    pub ffn: Option<usize>,
    /// V, of the embedding table or else the tokenizer.
    pub vocab: Option<usize>,
    /// Positions that the model was trained for.
    pub context: Option<usize>,
    /// Columns of a head that RoPE turns.
    pub rope_dims: Option<usize>,
    /// Base of RoPE's angles.
    pub rope_base: Option<f32>,
    /// Epsilon of the norms.
    pub norm_eps: Option<f32>,
}

/// Types and sizes.
#[derive(Clone, Debug, Serialize)]
pub struct Quantisation {
    /// Values of all tensors.
    pub values: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Bits that one value takes on average.
    pub bits_per_weight: Option<f64>,
    /// By type, the most values first.
    pub types: Vec<TypeShare>,
}

/// Tensors of one type.
#[derive(Clone, Debug, Serialize)]
pub struct TypeShare {
    /// Name in ggml.
    pub dtype: &'static str,
    /// Number of tensors.
    pub tensors: usize,
    /// Their values.
    pub values: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bits that one value takes, scales included.
    pub bits_per_weight: f64,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Name in the file.
    pub name: String,
    /// Name of the type in ggml.
    pub dtype: &'static str,
    /// Slowest axis first.
    pub shape: Vec<usize>,
    /// As GGUF has it: fastest axis first.
    pub gguf_ne: Vec<usize>,
    /// Bytes.
    pub bytes: u64,
    /// `None` where the type is not decodable.
    pub stats: Option<Stats>,
}

/// Opens a model and reads everything, every value included.
pub fn inspect(path: &Path) -> Result<ModelInspection> {
    let file = ModelFile::open(path)?;
    // What the engines have no nodes for may still be executed op by op, on a graph that is built.
    let built = || builders::build(file.gguf(), Shape::step(0, 1, 1, true, Cache::F32));
    let refused = file.nodes().err().filter(|_| built().is_err()).map(|error| error.to_string());
    Ok(report(file.gguf(), refused))
}

fn report(gguf: &Gguf, refused: Option<String>) -> ModelInspection {
    let text = |key: &str| gguf.str(key).ok().flatten().map(str::to_owned);
    let architecture = text("general.architecture");
    let dims = dims(gguf, architecture.as_deref().unwrap_or_default());
    let tensors: Vec<TensorReport> =
        gguf.tensors().filter_map(|info| tensor_report(gguf, &info.name)).collect();
    let glance = glance(gguf, architecture.as_deref().unwrap_or_default(), &dims, refused);
    let mut findings = checks::all(gguf, glance.refused.as_deref(), &dims, &glance, &tensors);
    findings.sort_by_key(|finding| finding.level);
    ModelInspection {
        file: gguf.path().display().to_string(),
        gguf_version: gguf.version(),
        files: gguf.tensors().map(|info| info.shard).max().unwrap_or(0) + 1,
        name: text("general.name"),
        architecture,
        findings,
        glance,
        dims,
        quantisation: quantisation(gguf),
        tensors,
        metadata: gguf.metadata().iter().map(|(key, value)| (key.clone(), json(value))).collect(),
        tokens: None,
    }
}

fn json(value: &Value) -> serde_json::Value {
    match value {
        Value::String(text) => text.as_str().into(),
        Value::Bool(value) => (*value).into(),
        Value::U64(value) => (*value).into(),
        Value::Array(_) => value.to_string().into(),
        number => match number.as_integer().and_then(|integer| i64::try_from(integer).ok()) {
            Some(integer) => integer.into(),
            None => number.as_float().into(),
        },
    }
}

fn tensor_report(gguf: &Gguf, name: &str) -> Option<TensorReport> {
    let tensor = gguf.tensor(name)?;
    let info = tensor.info;
    Some(TensorReport {
        name: info.name.clone(),
        dtype: info.dtype.name(),
        shape: info.shape.clone(),
        gguf_ne: info.shape.iter().rev().copied().collect(),
        bytes: info.byte_len as u64,
        stats: stats::of_tensor(tensor),
    })
}

fn dims(gguf: &Gguf, architecture: &str) -> Dims {
    // A value of another type is the graph builder's to refuse; here it is as good as absent.
    let number = |key: &str| gguf.u32(&format!("{architecture}.{key}")).ok().flatten().map(|v| v as usize);
    let float = |key: &str| gguf.f32(&format!("{architecture}.{key}")).ok().flatten();
    let (model, heads) = (number("embedding_length"), number("attention.head_count"));
    // Taken from the side that the metadata do not name, so that a transposed table is seen as one.
    let vocab = gguf.tensor(&weights::weight(weights::TOKEN_EMBD)).map(|table| match model {
        Some(model) if table.rows() == model => table.cols(),
        _ => table.rows(),
    });
    let even = model.zip(heads).and_then(|(model, heads)| model.checked_div(heads));
    let head_width = number("attention.key_length").or(even);
    Dims {
        layers: number("block_count"),
        model,
        heads,
        kv_heads: number("attention.head_count_kv").or(heads),
        head_width,
        ffn: number("feed_forward_length"),
        vocab: vocab.or_else(|| tokens(gguf).map(<[String]>::len)),
        context: number("context_length"),
        rope_dims: number("rope.dimension_count").or(head_width),
        rope_base: float("rope.freq_base"),
        norm_eps: float("attention.layer_norm_rms_epsilon").or_else(|| float("attention.layer_norm_epsilon")),
    }
}

/// Types of the tokenizer's tokens, as numbers.
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
/// `LLAMA_TOKEN_TYPE_UNUSED`: how converters mark padding.
const UNUSED: i128 = 5;

/// The tokenizer's tokens.
pub fn tokens(gguf: &Gguf) -> Option<&[String]> {
    gguf.strings("tokenizer.ggml.tokens").ok().flatten()
}

fn glance(gguf: &Gguf, architecture: &str, dims: &Dims, refused: Option<String>) -> Glance {
    let table = gguf.tensor(&weights::weight(weights::TOKEN_EMBD));
    let embedding_layout = table.filter(|t| t.info.dtype.is_decodable()).and_then(layout::measure);
    let vocab_rows = dims.vocab.filter(|_| table.is_some());
    let vocab_tokens = tokens(gguf).map(<[String]>::len);
    let unused = match gguf.get(TOKEN_TYPES) {
        Some(Value::Array(types)) => count_unused(types),
        _ => 0,
    };
    let mut biases: Vec<String> = gguf
        .tensors()
        .filter_map(|info| info.name.strip_suffix(".bias"))
        .map(|name| checks::without_layer(name).1.to_owned())
        .collect();
    biases.sort();
    biases.dedup();
    Glance {
        embedding_transposed: embedding_layout.and_then(|layout| layout.is_transposed()),
        embedding_layout,
        tied: table.map(|_| gguf.tensor(&weights::weight(weights::OUTPUT)).is_none()),
        biases,
        refused,
        rope_pairing: builders::pairing(architecture).map(|pairing| match pairing {
            Pairing::Half => "half",
            Pairing::Interleaved => "interleaved",
        }),
        vocab_rows,
        vocab_tokens,
        vocab_padding: vocab_rows
            .zip(vocab_tokens)
            .map(|(rows, tokens)| rows.saturating_sub(tokens) + unused),
    }
}

fn count_unused(types: &Array) -> usize {
    types.values().filter(|kind| kind.as_integer() == Some(UNUSED)).count()
}

fn quantisation(gguf: &Gguf) -> Quantisation {
    let mut types: Vec<TypeShare> = DType::all()
        .map(|dtype| {
            let of_type = || gguf.tensors().filter(move |info| info.dtype == dtype);
            TypeShare {
                dtype: dtype.name(),
                tensors: of_type().count(),
                values: of_type().map(|info| info.elements() as u64).sum(),
                bytes: of_type().map(|info| info.byte_len as u64).sum(),
                bits_per_weight: dtype.bits_per_value(),
            }
        })
        .filter(|share| share.tensors > 0)
        .collect();
    types.sort_by_key(|share| std::cmp::Reverse(share.values));
    let values = types.iter().map(|share| share.values).sum();
    let bytes = types.iter().map(|share| share.bytes).sum();
    let bits_per_weight = (values > 0).then(|| 8.0 * bytes as f64 / values as f64);
    Quantisation { values, bytes, bits_per_weight, types }
}
