//! How text is generated where a caller says nothing: notes, because no logit differs by it.

use serde_json::Value as Json;

use super::Carried;
use super::setting::{Setting, plain};
use crate::gguf::Gguf;

/// Key of generation_config.json, key of the file, llama.cpp's own value (common/common.h).
const KEYS: [(&str, &str, &str, f64); 5] = [
    ("generation.temperature", "temperature", "general.sampling.temp", 0.8),
    ("generation.top_k", "top_k", "general.sampling.top_k", 40.0),
    ("generation.top_p", "top_p", "general.sampling.top_p", 0.95),
    ("generation.min_p", "min_p", "general.sampling.min_p", 0.05),
    ("generation.repetition_penalty", "repetition_penalty", "general.sampling.penalty_repeat", 1.0),
];

/// Compares the defaults of generation.
pub fn compare(gguf: &Gguf, generation: &Json, out: &mut Carried) {
    if generation.get("do_sample") == Some(&Json::Bool(false)) {
        return;
    }
    for (name, theirs, key, default) in KEYS {
        let Some(original) = generation.get(theirs).and_then(Setting::from_json) else { continue };
        let own = gguf.get(key).and_then(Setting::from_gguf);
        let said = match &own {
            Some(own) => own.to_string(),
            None => format!("{}, llama.cpp's own: the file has no {key}", plain(default)),
        };
        if !own.unwrap_or(Setting::Number(default)).is(&original) {
            let place = format!("generation_config.json {theirs}, {key}");
            out.note(
                name,
                place,
                (original.to_string(), said),
                "text is sampled otherwise unless flags say how",
            );
        }
    }
}
