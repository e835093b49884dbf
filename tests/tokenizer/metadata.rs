//! Model files that hold nothing but a small vocabulary.

use std::path::PathBuf;

use parity::error::Result;
use parity::gguf::Gguf;
use parity::tokenizer::Tokenizer;

/// Metadata of a GGUF file: `tokenizer.ggml.KEY` and its type and value as they are stored.
#[derive(Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Vec<u8>)>,
}

/// A byte-level vocabulary with GPT-2's pre-tokenizer and no merges; `kinds` where a token is not a normal one.
pub fn bpe(tokens: &[&str], kinds: &[(usize, i32)]) -> Metadata {
    vocabulary("gpt2", tokens, kinds).with_str("pre", "gpt-2").with_strings("merges", &[])
}

/// A SentencePiece vocabulary.
pub fn spm(tokens: &[&str], kinds: &[(usize, i32)], scores: &[f32]) -> Metadata {
    vocabulary("llama", tokens, kinds).with("scores", array(6, scores, |score| score.to_le_bytes().to_vec()))
}

fn vocabulary(model: &str, tokens: &[&str], kinds: &[(usize, i32)]) -> Metadata {
    let mut types = vec![1; tokens.len()];
    for &(token, kind) in kinds {
        types[token] = kind;
    }
    Metadata::default()
        .with_str("model", model)
        .with_strings("tokens", tokens)
        .with_ints("token_type", &types)
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn array<T>(element_type: u32, items: &[T], bytes: impl Fn(&T) -> Vec<u8>) -> Vec<u8> {
    let mut value = [9u32.to_le_bytes(), element_type.to_le_bytes()].concat();
    value.extend((items.len() as u64).to_le_bytes());
    value.extend(items.iter().flat_map(bytes));
    value
}

fn scalar(value_type: u32, bytes: &[u8]) -> Vec<u8> {
    [&value_type.to_le_bytes(), bytes].concat()
}

impl Metadata {
    fn with(self, key: &str, value: Vec<u8>) -> Metadata {
        let mut changed = self.without(key);
        changed.entries.push((format!("tokenizer.ggml.{key}"), value));
        changed
    }

    pub fn without(mut self, key: &str) -> Metadata {
        self.entries.retain(|(name, _)| *name != format!("tokenizer.ggml.{key}"));
        self
    }

    pub fn with_str(self, key: &str, text: &str) -> Metadata {
        self.with(key, scalar(8, &string(text)))
    }

    pub fn with_u32(self, key: &str, value: u32) -> Metadata {
        self.with(key, scalar(4, &value.to_le_bytes()))
    }

    pub fn with_bool(self, key: &str, value: bool) -> Metadata {
        self.with(key, scalar(7, &[u8::from(value)]))
    }

    pub fn with_strings(self, key: &str, texts: &[&str]) -> Metadata {
        self.with(key, array(8, texts, |text| string(text)))
    }

    pub fn with_ints(self, key: &str, values: &[i32]) -> Metadata {
        self.with(key, array(5, values, |value| value.to_le_bytes().to_vec()))
    }

    pub fn named(mut self, name: &str) -> Metadata {
        self.entries.push(("general.name".into(), scalar(8, &string(name))));
        self
    }

    /// Writes the file and reads its vocabulary.
    pub fn open(&self) -> (PathBuf, Result<Tokenizer>) {
        let mut bytes = [b"GGUF".as_slice(), &3u32.to_le_bytes()].concat();
        for count in [0, self.entries.len() as u64] {
            bytes.extend(count.to_le_bytes());
        }
        for (key, value) in &self.entries {
            bytes.extend(string(key));
            bytes.extend(value);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary.gguf");
        std::fs::write(&path, bytes).unwrap();
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap());
        (path, tokenizer)
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        self.open().1
    }
}
