//! Dumps of other engines that are judged by the graph of the recording beside them, since nobody has a builder for the
//! architecture: whatever their cache is in, and that of the graph.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::graphs::record::record;
use crate::support::graphs::{fill, head, recorded, renamed};
use crate::support::program::answer;

const MODEL: &str = "qwen3moe-moe";
/// Those of tests/support/graphs/record.rs.
const TOKENS: &str = "1,17,33,42,5,99,101,7,64,12,88,3";

fn parity(args: &[&str]) -> (i32, Value) {
    answer(&[args, &["--format", "json"]].concat())
}

/// Makes a dump one that brings no graph and declares nothing.
fn as_of_another_engine(dump: &Path) {
    let manifest = dump.join("manifest.json");
    let mut content: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    content["producer"] = json!({ "name": "mine" });
    content.as_object_mut().unwrap().retain(|key, _| !["graphs", "model"].contains(&key.as_str()));
    std::fs::write(&manifest, content.to_string()).unwrap();
}

#[test]
fn another_engines_cache_may_be_that_of_the_recording_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let (known, unknown, own) = (path("known.gguf"), path("model.gguf"), path("own"));
    fill(&head(MODEL), &known);
    fill(&renamed(head(MODEL), "qwen3moe", "qwen9moe"), &unknown);
    // Keys and values in f16.
    record(&known, &recorded(MODEL, ""), &own);
    let copy = path("copy");
    record(&known, &recorded(MODEL, ""), &copy);
    as_of_another_engine(&copy);
    // Keys and values in f32. (Of the last layer the recording has one row alone.)
    let run = |name: &str, more: &[&str]| {
        let dump = path(name);
        let args = ["run", "-m", known.to_str().unwrap(), "--tokens", TOKENS, "--numerics", "f32", "--dump"];
        parity(&[&args[..], &[dump.to_str().unwrap()], more].concat());
        as_of_another_engine(&dump);
    };
    run("mine", &[]);
    let mistake = "attn.no_scale@blk.0.attn_ctx";
    run("wrong", &["--inject", mistake]);

    let diff = |name: &str, more: &[&str]| {
        let dump = path(name);
        let args = ["diff", dump.to_str().unwrap(), own.to_str().unwrap(), "-m", unknown.to_str().unwrap()];
        parity(&[&args[..], more].concat())
    };
    for (name, more) in [("copy", &[][..]), ("mine", &["--layer", "0"])] {
        let (code, report) = diff(name, more);
        assert_eq!((code, &report["verdict"]), (0, &json!("parity")), "{name}: {}", report["reason"]);
    }
    let (code, report) = diff("wrong", &["--layer", "0"]);
    let first = &report["first_divergence"];
    let named = format!("{}@{}", first["diagnosis"][0]["fault"], first["checkpoint"]).replace('"', "");
    assert_eq!((code, named.as_str()), (1, mistake));
}
