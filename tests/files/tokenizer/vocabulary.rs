//! Model files that hold nothing but a small vocabulary.

use std::path::PathBuf;

use parity::error::Result;
use parity::gguf::{Array, Gguf, Value};
use parity::tokenizer::Tokenizer;

use crate::support::gguf_writer::GgufWriter;

/// Metadata of a model file, to be spoilt.
pub struct Vocabulary(GgufWriter);

/// A byte-level vocabulary with GPT-2's pre-tokenizer and no merges; `kinds` are (token, type) where it is
/// not a normal one.
pub fn bpe(tokens: &[&str], kinds: &[(usize, i32)]) -> Vocabulary {
    vocabulary("gpt2", tokens, kinds).with_str("pre", "gpt-2").with_strings("merges", &[])
}

/// A SentencePiece vocabulary.
pub fn spm(tokens: &[&str], kinds: &[(usize, i32)], scores: &[f32]) -> Vocabulary {
    vocabulary("llama", tokens, kinds).with("scores", Value::Array(Array::F32(scores.to_vec())))
}

fn vocabulary(model: &str, tokens: &[&str], kinds: &[(usize, i32)]) -> Vocabulary {
    let mut types = vec![1; tokens.len()];
    for &(token, kind) in kinds {
        types[token] = kind;
    }
    Vocabulary(GgufWriter::new())
        .with_str("model", model)
        .with_strings("tokens", tokens)
        .with_ints("token_type", &types)
}

impl Vocabulary {
    /// Sets `tokenizer.ggml.KEY`.
    pub fn with(self, key: &str, value: Value) -> Vocabulary {
        Vocabulary(self.without(key).0.with(&format!("tokenizer.ggml.{key}"), value))
    }

    pub fn without(mut self, key: &str) -> Vocabulary {
        self.0.metadata.retain(|(name, _)| *name != format!("tokenizer.ggml.{key}"));
        self
    }

    pub fn with_str(self, key: &str, text: &str) -> Vocabulary {
        self.with(key, Value::String(text.into()))
    }

    pub fn with_strings(self, key: &str, texts: &[&str]) -> Vocabulary {
        self.with(key, Value::Array(Array::String(texts.iter().map(ToString::to_string).collect())))
    }

    pub fn with_ints(self, key: &str, values: &[i32]) -> Vocabulary {
        self.with(key, Value::Array(Array::I32(values.to_vec())))
    }

    pub fn named(self, name: &str) -> Vocabulary {
        Vocabulary(self.0.with("general.name", Value::String(name.into())))
    }

    /// Writes the file and reads its vocabulary.
    pub fn open(&self) -> (PathBuf, Result<Tokenizer>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary.gguf");
        std::fs::write(&path, self.0.bytes()).unwrap();
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap());
        (path, tokenizer)
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        self.open().1
    }
}
