//! What a conversion carries beside the weights: config.json, the tokenizer, the chat template, generation defaults.

mod config;
mod facts;
mod generation;
mod rope;
mod setting;
mod table;
mod template;
mod tokens;
mod unread;
mod window;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::error::{Error, Result};
use crate::files::{TEXT_BYTES_MAX, read};
use crate::gguf::Gguf;
use config::{Config, Converted};
pub use template::{COMMAND, render};
pub use tokens::tokenizer;

/// Something that a model file and its original say differently.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// `config.rope_theta`, `tokens.merges`, `template.default`, `generation.temperature`
    pub name: String,
    /// The file and key of the original, and the key of the model file.
    #[serde(rename = "where")]
    pub place: String,
    /// What the original says.
    pub original: String,
    /// What the model file says, or llama.cpp does where it says nothing.
    pub converted: String,
    /// What comes of it, and which of the two llama.cpp uses.
    pub effect: String,
    /// Whether tokens or logits differ by it; otherwise it is a note.
    pub changes_logits: bool,
}

/// What was compared beside the weights.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    /// All that differs, what changes logits first.
    pub differences: Vec<Difference>,
    /// What could not be compared, and why.
    pub not_compared: Vec<String>,
}

impl Carried {
    fn differs(&mut self, name: &str, place: String, (original, converted): (String, String), effect: &str) {
        self.add(name, place, (original, converted), effect, true);
    }

    fn note(&mut self, name: &str, place: String, (original, converted): (String, String), effect: &str) {
        self.add(name, place, (original, converted), effect, false);
    }

    fn add(&mut self, name: &str, place: String, says: (String, String), effect: &str, changes_logits: bool) {
        let (original, converted) = says;
        let (name, effect) = (name.to_owned(), effect.to_owned());
        self.differences.push(Difference { name, place, original, converted, effect, changes_logits });
    }
}

/// Compares everything but the weights. A file that the folder lacks is said in `not_compared`.
///
/// # Errors
/// A file of the folder that is no JSON, or cannot be read.
pub fn compare(gguf: &Gguf, folder: &Path, architecture: &str) -> Result<Carried> {
    let mut out = Carried::default();
    if !folder.is_dir() {
        out.not_compared.push("config.json, tokenizer.json: a file was given, and no folder".to_owned());
        return Ok(out);
    }
    let config = json(folder, "config.json")?;
    match &config {
        Some(config) => {
            let config = Config::of(config);
            let converted = Converted { gguf, architecture };
            facts::compare(&config, &converted, &mut out);
            rope::compare(&config, &converted, &mut out);
            window::compare(&config, &converted, &mut out);
            unread::compare(&config, &mut out);
        }
        None => out.not_compared.push("config.json: not in the folder".to_owned()),
    }
    let said = json(folder, "tokenizer_config.json")?.unwrap_or_default();
    let generation = json(folder, "generation_config.json")?;
    tokens::compare(gguf, folder, (&said, config.as_ref(), generation.as_ref()), &mut out)?;
    template::compare(gguf, folder, &said, &mut out)?;
    if let Some(generation) = &generation {
        generation::compare(gguf, generation, &mut out);
    }
    out.differences.sort_by_key(|difference| !difference.changes_logits);
    Ok(out)
}

/// A JSON file of the folder; nothing where there is none.
fn json(folder: &Path, name: &str) -> Result<Option<Json>> {
    let path = folder.join(name);
    if !path.exists() {
        return Ok(None);
    }
    let text = read(&path, TEXT_BYTES_MAX)?;
    let read = serde_json::from_str(&text).map_err(|e| {
        Error::file(&path, format!("is no JSON: {e}"))
            .hint("the download may be incomplete, or a Git LFS pointer")
    })?;
    Ok(Some(read))
}
