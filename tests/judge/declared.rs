//! What a dump declares of its arithmetic, and what it was computed in all the same.

use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::edited::{edit, undeclare};
use crate::support::program::answer;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";

/// A dump of an engine that computes in f32 and declares something else.
fn declaring(words: &str, how: &[&str]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    let run = ["run", "-m", MODEL, "--device", "cpu", "--tokens", "312,863,2039,1444,1518"];
    let plain = ["--no-audit", "--numerics", "f32", "--dump", dump.to_str().unwrap()];
    answer(&[&run[..], &plain[..], how].concat());
    let manifest = dump.join("manifest.json");
    let mut content: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    content["producer"] = json!({ "name": "llama.cpp", "numerics": words });
    std::fs::write(&manifest, content.to_string()).unwrap();
    (folder, dump)
}

fn judged(how: &[&str], dump: &Path) -> (i32, Value) {
    answer(&[how, &[dump.to_str().unwrap(), "-m", MODEL, "--format", "json"]].concat())
}

/// llama.cpp's library for Sapphire Rapids multiplies weights in f16 with activations in f32, where those for other
/// processors round these; recordings declare the same of both.
#[test]
fn activations_may_be_multiplied_as_they_are() {
    let (_folder, healthy) = declaring("llama-cpu", &["-n", "2"]);
    for how in [&["run", "--reference"][..], &["audit"]] {
        let (code, report) = judged(how, &healthy);
        assert_eq!((code, &report["verdict"]), (0, &json!("parity")), "{how:?}: {}", report["reason"]);
    }
    let (_folder, wrong) = declaring("llama-cpu", &["-n", "2", "--inject", "linear.no_bias@1"]);
    let (code, report) = judged(&["run", "--reference"], &wrong);
    let reason = report["reason"].as_str().unwrap_or_default();
    assert!(code == 2 && reason.starts_with("the reference itself is wrong at blk.1."), "{code}: {reason}");
}

#[test]
fn an_arithmetic_that_is_not_understood_is_said() {
    let (_folder, dump) = declaring("fp32", &["-n", "2"]);
    for (how, side) in [(&["audit"][..], "dump"), (&["run", "--reference"], "reference")] {
        let (code, report) = judged(how, &dump);
        let notes = report["notes"].to_string();
        let said = format!("the {side} declares `fp32`, which is no arithmetic that parity knows");
        assert!(code == 0 && notes.contains(&said), "{how:?}: {code}, {notes}");
    }
}

/// Logits that an engine of f32 rounds to bf16 are a divergence where it says that it computes in f32, and told where it says nothing.
#[test]
fn logits_in_a_narrower_type_than_was_declared_diverge() {
    let (_folder, dump) = declaring("f32", &[]);
    edit(&dump, |name, _, values| {
        let is_it = name == "logits";
        values.iter_mut().filter(|_| is_it).for_each(|x| *x = bf16::from_f32(*x).to_f32());
        true
    });
    for (code, declares) in [(1, true), (0, false)] {
        if !declares {
            undeclare(&dump);
        }
        let (found, report) = judged(&["audit"], &dump);
        let nodes = report["checkpoints"].as_array().unwrap();
        let logits = nodes.iter().find(|node| node["id"] == "logits").unwrap();
        assert_eq!(
            (found, &logits["verdict"]),
            (code, &json!("precision")),
            "{declares}: {}",
            report["reason"]
        );
    }
}

/// The same of a prompt alone, and of the last norm, which is no mistake of what reads it.
#[test]
fn a_prompt_in_a_narrower_type_than_was_declared_diverges() {
    for (id, verdict) in [("logits", "precision"), ("final_norm", "origin")] {
        let (_folder, dump) = declaring("f32", &["-n", "2"]);
        edit(&dump, |name, shape, values| {
            let is_it = name == id && shape[0] > 1;
            values.iter_mut().filter(|_| is_it).for_each(|x| *x = bf16::from_f32(*x).to_f32());
            true
        });
        let (code, report) = judged(&["audit"], &dump);
        let nodes = report["checkpoints"].as_array().unwrap();
        let wrong: Vec<_> = nodes
            .iter()
            .filter(|node| node["verdict"] != "match")
            .map(|node| (&node["id"], &node["verdict"]))
            .collect();
        assert_eq!((code, wrong), (1, vec![(&json!(id), &json!(verdict))]), "{}", report["reason"]);
    }
}
