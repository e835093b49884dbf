//! config.json and the metadata of a model file, each read as llama.cpp and transformers read them.

use serde_json::{Map, Value as Json};

use super::setting::Setting;
use crate::gguf::Gguf;

/// Parts of a config.json of several models that hold the text model's.
const TEXT_PARTS: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// config.json, the text model's part of it at the top.
pub struct Config {
    all: Map<String, Json>,
    /// `rope_parameters`, or `rope_scaling` of older files; that of full attention where layers differ.
    pub rope: Map<String, Json>,
    /// The same of layers with a window.
    pub rope_of_window: Map<String, Json>,
}

impl Config {
    /// Reads it.
    pub fn of(json: &Json) -> Config {
        let mut all = json.as_object().cloned().unwrap_or_default();
        for part in TEXT_PARTS {
            if let Some(Json::Object(text)) = json.get(part) {
                all.extend(text.clone());
            }
        }
        let given = all.get("rope_parameters").filter(|rope| rope.is_object()).or(all.get("rope_scaling"));
        let rope = given.and_then(Json::as_object).cloned().unwrap_or_default();
        let of = |kind: &str| rope.get(kind).and_then(Json::as_object).cloned();
        let rope_of_window = of("sliding_attention").unwrap_or_default();
        let rope = of("full_attention").unwrap_or(rope);
        Config { all, rope, rope_of_window }
    }

    /// The first of these keys that says something, and what.
    pub fn find(&self, keys: &[&'static str]) -> Option<(&'static str, Setting)> {
        let rope = |key: &str| self.rope.get(key).filter(|_| ROPE_KEYS.contains(&key));
        keys.iter().find_map(|key| {
            let value = self.all.get(*key).filter(|value| !value.is_null()).or_else(|| rope(key))?;
            Some((*key, Setting::from_json(value)?))
        })
    }

    /// The number that one of these keys says.
    pub fn number(&self, keys: &[&'static str]) -> Option<f64> {
        self.find(keys)?.1.number()
    }

    /// A value as it is.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.all.get(key)
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.all.keys().map(String::as_str)
    }
}

/// Keys that newer files have among the parameters of RoPE.
const ROPE_KEYS: [&str; 3] = ["rope_theta", "partial_rotary_factor", "mrope_section"];

/// The metadata of the model file.
pub struct Converted<'a> {
    /// The file.
    pub gguf: &'a Gguf,
    /// `general.architecture`
    pub architecture: &'a str,
}

impl Converted<'_> {
    /// A key with the architecture in front.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// What the file says.
    pub fn get(&self, key: &str) -> Option<Setting> {
        self.gguf.get(&self.key(key)).and_then(Setting::from_gguf)
    }

    /// The number that it says.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key)?.number()
    }

    /// Width of a head of queries, as llama.cpp takes it.
    pub fn head_width(&self) -> Option<f64> {
        let heads = self.number("attention.head_count").filter(|heads| *heads > 0.0);
        self.number("attention.key_length").or_else(|| Some(self.number("embedding_length")? / heads?))
    }

    /// Whether the architecture's name begins so.
    pub fn is_a(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.architecture.starts_with(name))
    }
}
