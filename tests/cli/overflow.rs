//! Values beyond what f16 holds are named first, although every value was rounded to f16 before.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::support::edited::{MODEL, edit, made};
use crate::support::files::{Tensor, safetensors};
use crate::support::gguf_writer::GgufWriter;
use crate::support::program::audit;
use crate::support::tiny_model::{VOCAB, change, tiny_qwen2};

#[test]
fn an_overflow_is_named_before_the_rounding_that_every_node_has() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = scratch.path().join("dump");
    made(&dump, 5, &["--inject", "data.f16_rounded"]);
    edit(&dump, |name, _, values| {
        if name == "blk.1.ffn_out" {
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            values
                .iter_mut()
                .filter(|value| value.abs() > 0.7 * largest)
                .for_each(|value| *value *= f32::INFINITY);
        }
        true
    });
    let found = audit(&dump, Path::new(MODEL), &[]);
    assert_eq!(
        (found.code, found.first.as_str()),
        (1, "blk.1.ffn_out"),
        "{:#}",
        found.report["first_divergence"]
    );
    let named = &found.report["first_divergence"]["diagnosis"][0];
    assert_eq!(named["fault"], "data.f16_overflow", "{named:#}");
    assert!(named["text"].as_str().unwrap().contains("exact arithmetic reaches"), "{named:#}");
    let origins = found.report["origins"].as_array().unwrap();
    assert!(origins.iter().any(|id| id == "blk.1.ffn_out"), "{origins:?}");
}

/// A dump of nothing but logits, all of them NaN.
fn of_nan(model: &GgufWriter) -> Value {
    let scratch = tempfile::tempdir().unwrap();
    let (file, dump) = (scratch.path().join("model.gguf"), scratch.path().join("dump.safetensors"));
    std::fs::write(&file, model.bytes()).unwrap();
    let tokens = [3, 14, 15, 92];
    let logits = Tensor { shape: vec![tokens.len(), VOCAB], values: vec![f32::NAN; tokens.len() * VOCAB] };
    let bytes = safetensors(&BTreeMap::from([("logits".to_owned(), logits)]), &tokens);
    std::fs::write(&dump, bytes).unwrap();
    let found = audit(&dump, &file, &[]);
    assert_eq!((found.code, found.first.as_str()), (1, "logits"), "{:#}", found.report);
    found.report["first_divergence"]["diagnosis"][0].clone()
}

#[test]
fn nan_in_logits_alone_are_traced_to_what_f16_cannot_hold() {
    let mut model = tiny_qwen2();
    assert_eq!(of_nan(&model)["fault"], "data.nan");
    change(&mut model, "blk.1.ffn_down.weight", |_, weight| 1e7 * weight);
    let named = of_nan(&model);
    let text = named["text"].as_str().unwrap();
    assert!(named["fault"] == "data.f16_overflow" && text.contains(" at blk.1.ffn_out, "), "{named}");
}
