//! Dumps that leave nodes out: what they have is looked at in every row, whatever it is computed from.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const TOKENS: usize = 40;
/// A row that no sample holds, and the one that stands in its place.
const ROW: usize = 17;

fn parity(args: &[&str]) -> (i32, Value) {
    let done = Command::new(env!("CARGO_BIN_EXE_parity")).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    (done.status.code().unwrap(), serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// A run of our engine with all that it has.
fn made(dump: &Path) {
    let ids: Vec<String> = (0..TOKENS).map(|i| (10 + i * 37 % 3000).to_string()).collect();
    let run = ["run", "-m", MODEL, "--device", "cpu", "--no-audit", "--tokens", &ids.join(",")];
    parity(&[&run[..], &["--dump", dump.to_str().unwrap()]].concat());
}

/// Keeps some tensors, of which one has a row twice and another one not at all.
fn cut(dump: &Path, keeps: &dyn Fn(&str) -> bool, stale: Option<&str>) {
    let path = dump.join("step-0000.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut kept: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, view) in file.iter().filter(|(name, _)| keeps(name)) {
        let mut data = view.data().to_vec();
        if Some(name) == stale {
            let width = data.len() / view.shape()[0];
            data.copy_within((ROW + 1) * width..(ROW + 2) * width, ROW * width);
        }
        kept.insert(name.to_owned(), (view.dtype(), view.shape().to_vec(), data));
    }
    let views = kept.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
}

/// Exit codes and first wrong checkpoints of an audit of what is kept, healthy and with a stale row at `at`.
fn audited(keeps: &dyn Fn(&str) -> bool, at: &str, flags: &[&str]) {
    for stale in [None, Some(at)] {
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        made(&dump);
        cut(&dump, keeps, stale);
        let audit = ["audit", dump.to_str().unwrap(), "-m", MODEL, "--format", "json"];
        let (code, report) = parity(&[&audit[..], flags].concat());
        let first = report["first_divergence"]["checkpoint"].as_str().unwrap_or_default();
        let wanted = if stale.is_some() { (1, at) } else { (0, "") };
        assert_eq!((code, first), wanted, "{flags:?}: {}", report["reason"]);
    }
}

#[test]
fn a_row_behind_a_node_that_was_not_recorded_is_looked_at() {
    let fused = |name: &str| !name.ends_with("ffn_act");
    audited(&fused, "blk.2.ffn_out", &["--allow-missing"]);
    audited(&fused, "blk.2.ffn_out", &["--checkpoint", "blk.2.ffn_out"]);
    audited(&fused, "blk.2.ffn_out", &[]);
}

#[test]
fn so_is_one_behind_keys_that_were_not_recorded() {
    let rotated = |name: &str| !name.ends_with("_rope") && !name.ends_with(".k");
    audited(&rotated, "blk.1.attn_ctx", &["--allow-missing"]);
}

#[test]
fn hidden_states_and_logits_alone_are_looked_at_in_every_row() {
    let states = |name: &str| name == "embed" || name.ends_with(".layer_out");
    audited(&states, "blk.2.layer_out", &["--allow-missing"]);
    audited(&|name| name == "logits", "logits", &["--allow-missing"]);
}
