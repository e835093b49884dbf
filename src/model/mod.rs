//! What is to be computed: the graph of a model file, as data, and which file it is.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use parity_dump::manifest::ModelInfo;

pub mod builders;
pub mod diff;

/// What a dump says of the model file that it was made with.
pub fn info(gguf: &Gguf) -> ModelInfo {
    let text = |key: &str| gguf.str(key).ok().flatten().map(str::to_owned);
    ModelInfo {
        file: gguf.path().file_name().map(|name| name.to_string_lossy().into_owned()),
        fingerprint: Some(fingerprint(gguf)),
        architecture: text("general.architecture"),
        name: text("general.name"),
    }
}

/// Refuses a dump that was made with another model file, where its fingerprint is known.
///
/// # Errors
/// Names the dump and both models.
pub fn refuse_other(gguf: &Gguf, dump: &Path, made_with: &ModelInfo) -> Result<()> {
    let own = ModelInfo {
        file: gguf.path().file_name().map(|name| name.to_string_lossy().into_owned()),
        fingerprint: Some(fingerprint(gguf)),
        ..ModelInfo::default()
    };
    if own.fingerprint == made_with.fingerprint || made_with.fingerprint.is_none() {
        return Ok(());
    }
    Err(Error::file(dump, "is a dump of another model")
        .expected(spelt(&own))
        .found(spelt(made_with))
        .hint("name the model that it was made with: -m MODEL; `parity diff` without -m compares dumps of two models"))
}

/// `model.gguf (fingerprint 1f2e3d4c…)`
pub fn spelt(info: &ModelInfo) -> String {
    let name = info.file.as_deref().or(info.name.as_deref()).unwrap_or("an unnamed model");
    let digits: String = info.fingerprint.iter().flat_map(|print| print.chars()).take(SHOWN).collect();
    if digits.is_empty() { name.to_owned() } else { format!("{name} (fingerprint {digits}…)") }
}

/// Digits of a fingerprint that are shown: enough to tell two models apart.
const SHOWN: usize = 12;

/// Bytes at both ends of every tensor that enter the fingerprint.
const FINGERPRINT_SAMPLE: usize = 4096;

/// Tells one set of weights from another without reading all of it: the SHA-256 over every tensor's name,
/// type, shape and both ends of its data, as hex.
pub fn fingerprint(gguf: &Gguf) -> String {
    let mut hash = Sha256::new();
    for info in gguf.tensors() {
        hash.update(format!("{} {} {:?}\n", info.name, info.dtype.name(), info.shape));
        if let Some(tensor) = gguf.tensor(&info.name) {
            let bytes = tensor.bytes;
            hash.update(&bytes[..bytes.len().min(FINGERPRINT_SAMPLE)]);
            hash.update(&bytes[bytes.len().saturating_sub(FINGERPRINT_SAMPLE)..]);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
