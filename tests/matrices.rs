//! Attention matrices that a dump holds are judged in every row, whatever else it lacks: what follows is computed from them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
const TOKENS: usize = 20;

fn parity(args: &[&str]) -> (i32, Value) {
    let done = Command::new(env!("CARGO_BIN_EXE_parity")).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    (done.status.code().unwrap(), serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// What is done to a row.
type Change = fn(&mut [f32]);

/// A run of our engine with its matrices.
fn made(dump: &Path, how: &[&str]) {
    let ids: Vec<String> = (0..TOKENS).map(|i| (10 + i * 37 % 3000).to_string()).collect();
    let run = ["run", "-m", MODEL, "--device", "cpu", "--no-audit", "--checkpoint", "*"];
    parity(&[&run[..], &["--tokens", &ids.join(","), "--dump", dump.to_str().unwrap()], how].concat());
}

/// Leaves nodes of a kind out, and changes one row of the weights of a layer in every head.
fn edit(dump: &Path, left_out: &str, row: usize, change: Change) {
    let path = dump.join("step-0000.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut kept: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, view) in file.iter().filter(|(name, _)| !name.ends_with(left_out)) {
        let values = view.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
        let mut values: Vec<f32> = values.collect();
        if name == "blk.2.attn_probs" {
            values
                .chunks_exact_mut(TOKENS * TOKENS)
                .for_each(|head| change(&mut head[row * TOKENS..][..TOKENS]));
        }
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        kept.insert(name.to_owned(), (view.shape().to_vec(), bytes));
    }
    let views = kept.iter().map(|(name, (shape, bytes))| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
}

#[test]
fn a_wrong_row_of_weights_is_found_where_scores_were_not_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&str, Change); 4] = [
        ("healthy", |_| {}),
        ("zero", |row| row.fill(0.0)),
        ("reversed", |row| row.reverse()),
        ("threefold", |row| row.iter_mut().for_each(|p| *p *= 3.0)),
    ];
    for (name, change) in cases {
        // Rows that no sample holds.
        for row in [7, 10, 13] {
            let dump = folder.path().join(format!("{name}-{row}"));
            made(&dump, &[]);
            edit(&dump, "attn_scores", row, change);
            let (code, report) = parity(&["audit", dump.to_str().unwrap(), "-m", MODEL, "--format", "json"]);
            let first = report["first_divergence"]["checkpoint"].as_str().unwrap_or_default();
            let wanted = if name == "healthy" { (0, "") } else { (1, "blk.2.attn_probs") };
            assert_eq!((code, first), wanted, "{name}, row {row}");
        }
    }
}

/// Takes away what a dump says of its arithmetic.
fn undeclare(dump: &Path) {
    let path = dump.join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    manifest["producer"]["numerics"] = Value::Null;
    std::fs::write(&path, manifest.to_string()).unwrap();
}

#[test]
fn a_cache_in_f16_is_found_where_matrices_were_recorded_and_what_they_lead_to_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = "attn.wrong_kv_head@blk.1.attn_ctx";
    for (name, fault, wanted) in
        [("healthy", None, (0, "")), ("wrong", Some(wrong), (1, "blk.1.attn_scores"))]
    {
        let dump = folder.path().join(name);
        let fault = fault.map(|fault| ["--inject", fault]);
        made(
            &dump,
            &[&["--numerics", "f32 kv=f16"][..], fault.as_ref().map_or(&[], |fault| &fault[..])].concat(),
        );
        edit(&dump, "attn_ctx", 0, |_| {});
        undeclare(&dump);
        let audit = ["audit", dump.to_str().unwrap(), "-m", MODEL, "--allow-missing", "--format", "json"];
        let (code, report) = parity(&audit);
        let first = report["first_divergence"]["checkpoint"].as_str().unwrap_or_default();
        assert_eq!((code, first), wanted, "{name}: {}", report["reason"]);
    }
}

#[test]
fn all_checkpoints_of_an_engine_without_a_graph_are_those_that_have_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    made(&dump, &["--numerics", "f32 kv=f16"]);
    undeclare(&dump);
    let all = ["audit", dump.to_str().unwrap(), "-m", MODEL, "--checkpoint", "*", "--format", "json"];
    let (code, report) = parity(&all);
    assert_eq!(code, 0, "{}", report["reason"]);
}
