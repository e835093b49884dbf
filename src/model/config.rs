//! The numbers that fix a model's arithmetic, read from GGUF metadata.
//!
//! Whatever could change the arithmetic and is not understood is refused by name, never ignored.

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};
use crate::model::graph::{Dims, Pairing};

/// An architecture that a graph can be built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Qwen2 and Qwen2.5: Q/K/V biases, halves rotated.
    Qwen2,
    /// Llama, SmolLM2, TinyLlama, Mistral without sliding window: neighbours rotated.
    Llama,
    /// Qwen3: per-head q/k norms, halves rotated.
    Qwen3,
}

impl Architecture {
    /// All, with the name that `general.architecture` has for it.
    pub const ALL: [(Architecture, &'static str); 3] =
        [(Architecture::Qwen2, "qwen2"), (Architecture::Llama, "llama"), (Architecture::Qwen3, "qwen3")];

    /// The GGUF name.
    pub fn name(self) -> &'static str {
        Architecture::ALL.iter().find(|(a, _)| *a == self).map_or("", |(_, name)| name)
    }

    /// Which columns of a head rotary embedding pairs (llama.cpp: `llama_model_rope_type`).
    pub fn pairing(self) -> Pairing {
        match self {
            Architecture::Llama => Pairing::Interleaved,
            Architecture::Qwen2 | Architecture::Qwen3 => Pairing::Half,
        }
    }
}

/// A model's hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `general.architecture`
    pub architecture: Architecture,
    /// Widths of the axes.
    pub dims: Dims,
    /// `{arch}.attention.layer_norm_rms_epsilon`
    pub norm_eps: f64,
    /// `{arch}.rope.freq_base`
    pub rope_base: f64,
    /// `{arch}.rope.dimension_count`: leading columns of a head that turn.
    pub rope_dims: usize,
    /// `{arch}.context_length`: positions the model was trained for.
    pub context: usize,
    /// Whether the output product uses the embedding table.
    pub tied: bool,
}

/// Keys under `{arch}.` that are read here or do not touch the arithmetic.
const UNDERSTOOD: [&str; 13] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
    "rope.scaling.original_context_length",
];

/// Keys under `{arch}.` that change the arithmetic unless they have a neutral value: a number, or a word.
const NEUTRAL: [(&str, f64, &str); 9] = [
    ("expert_count", 0.0, ""),
    ("expert_used_count", 0.0, ""),
    ("rope.scaling.type", f64::NAN, "none"),
    ("rope.scaling.factor", 1.0, ""),
    ("rope.scaling.finetuned", 0.0, ""),
    ("attention.sliding_window", 0.0, ""),
    ("attention.causal", 1.0, ""),
    ("attention.max_alibi_bias", 0.0, ""),
    ("use_parallel_residual", 0.0, ""),
];

impl Config {
    /// Reads and checks the metadata of a model.
    pub fn from_gguf(gguf: &Gguf) -> Result<Config> {
        let architecture = architecture(gguf)?;
        let arch = architecture.name();
        refuse_unknown(gguf, arch)?;
        let key = |name: &str| format!("{arch}.{name}");
        let size =
            |name: &str| -> Result<usize> { positive(gguf, &key(name), gguf.require_u32(&key(name))?) };
        let optional = |name: &str, default: usize| -> Result<usize> {
            gguf.u32(&key(name))?.map_or(Ok(default), |value| positive(gguf, &key(name), value))
        };

        let (model, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let head_width = optional("attention.key_length", model / heads)?;
        if head_width == 0 {
            return Err(unsupported(gguf, &key("attention.head_count"), format!("up to {model}"), heads));
        }
        let value_width = optional("attention.value_length", head_width)?;
        if value_width != head_width {
            return Err(unsupported(gguf, &key("attention.value_length"), head_width, value_width));
        }
        let kv_heads = optional("attention.head_count_kv", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(unsupported(
                gguf,
                &key("attention.head_count_kv"),
                format!("a divisor of {heads}"),
                kv_heads,
            ));
        }
        let rope_dims = optional("rope.dimension_count", head_width)?;
        if rope_dims > head_width || !rope_dims.is_multiple_of(2) {
            let expected = format!("an even number up to {head_width}");
            return Err(unsupported(gguf, &key("rope.dimension_count"), expected, rope_dims));
        }
        let table = gguf.tensor("token_embd.weight").ok_or_else(|| no_embedding(gguf))?;
        let dims = Dims {
            layers: size("block_count")?,
            model,
            heads,
            kv_heads,
            head_width,
            ffn: size("feed_forward_length")?,
            vocab: table.rows(),
        };
        Ok(Config {
            architecture,
            dims,
            norm_eps: finite(gguf, &key("attention.layer_norm_rms_epsilon"), None)?,
            rope_base: finite(gguf, &key("rope.freq_base"), Some(DEFAULT_ROPE_BASE))?,
            rope_dims,
            context: size("context_length")?,
            tied: gguf.tensor("output.weight").is_none(),
        })
    }
}

/// What llama.cpp assumes where a file does not name a base (llama-model.cpp, `rope_freq_base_train`).
const DEFAULT_ROPE_BASE: f64 = 10_000.0;

/// No axis of a real model is longer; a hostile file must not overflow a product of two.
const LONGEST_AXIS: u32 = 1 << 24;

fn architecture(gguf: &Gguf) -> Result<Architecture> {
    let name = gguf.require_str("general.architecture")?;
    let known = Architecture::ALL.iter().find(|(_, known)| *known == name);
    known.map(|(architecture, _)| *architecture).ok_or_else(|| {
        let names: Vec<&str> = Architecture::ALL.iter().map(|(_, name)| *name).collect();
        Error::file(gguf.path(), "an architecture that parity has no graph for")
            .expected(names.join(", "))
            .found(name)
            .hint("two dumps of such a model can still be compared: parity diff CANDIDATE REFERENCE")
    })
}

fn refuse_unknown(gguf: &Gguf, arch: &str) -> Result<()> {
    for (key, value) in gguf.metadata() {
        let Some(name) = key.strip_prefix(arch).and_then(|rest| rest.strip_prefix('.')) else { continue };
        if UNDERSTOOD.contains(&name) {
            continue;
        }
        let neutral = NEUTRAL.iter().find(|(known, ..)| *known == name);
        let is_neutral = neutral.is_some_and(|&(_, number, word)| match value {
            Value::String(text) => text == word,
            Value::Bool(flag) => f64::from(u8::from(*flag)) == number,
            _ => value.as_float().or(value.as_integer().map(|i| i as f64)) == Some(number),
        });
        if !is_neutral {
            return Err(Error::file(
                gguf.path(),
                format!("{key} may change the arithmetic and is not supported"),
            )
            .expected(match neutral {
                Some((_, _, word)) if !word.is_empty() => format!("none, or `{word}`"),
                Some((_, number, _)) => format!("none, or {number}"),
                None => "no such key".to_owned(),
            })
            .found(format!("{value:?}"))
            .hint("two dumps of such a model can still be compared: parity diff CANDIDATE REFERENCE"));
        }
    }
    Ok(())
}

fn positive(gguf: &Gguf, key: &str, value: u32) -> Result<usize> {
    if (1..=LONGEST_AXIS).contains(&value) {
        return Ok(value as usize);
    }
    Err(unsupported(gguf, key, format!("1 to {LONGEST_AXIS}"), value))
}

fn finite(gguf: &Gguf, key: &str, default: Option<f64>) -> Result<f64> {
    let value = match (gguf.f32(key)?, default) {
        (Some(value), _) => f64::from(value),
        (None, Some(default)) => default,
        (None, None) => f64::from(gguf.require_f32(key)?),
    };
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(unsupported(gguf, key, "a positive number", value))
}

fn unsupported(gguf: &Gguf, key: &str, expected: impl ToString, found: impl ToString) -> Error {
    Error::file(gguf.path(), format!("{key} has a value that parity has no graph for"))
        .expected(expected.to_string())
        .found(found.to_string())
}

fn no_embedding(gguf: &Gguf) -> Error {
    Error::file(gguf.path(), "the file holds no model")
        .expected("a tensor token_embd.weight")
        .found(format!("{} tensors, none of that name", gguf.tensors().len()))
        .hint("a vocabulary-only or projector file cannot be run")
}
