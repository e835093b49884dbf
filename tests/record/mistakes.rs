//! What was recorded of a libggml-cpu with mistakes (`RECORD=tests/data/mistakes scripts/ab-mistakes.sh`), four tokens each:
//! each is found again, without a llama.cpp.

use std::process::Command;

use serde_json::Value;

/// Exit code and standard output of the command as JSON.
fn json(args: &[&str]) -> (i32, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PARITY_CACHE", "/nonexistent");
    let done = command.env_remove("GITHUB_ACTIONS").args(args).args(["--format", "json"]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    let report = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    (done.status.code().unwrap(), report)
}

fn audit(name: &str, model: &str) -> (i32, Value) {
    let dump = format!("tests/data/mistakes/{name}");
    let model = format!("reference-dumps/models/qwen2-tiny-py-{model}.gguf");
    json(&["audit", &dump, "-m", &model, "--allow-missing"])
}

#[test]
fn an_epsilon_of_a_fused_norm_is_named_behind_the_norm() {
    let (code, report) = audit("eps", "F16");
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.0.attn_norm".into()), "{report:#}");
    assert_eq!(first["diagnosis"][0]["fault"], "norm.eps", "{first:#}");
}

#[test]
fn the_last_columns_of_one_quantised_matmul_are_named() {
    let (code, report) = audit("tail", "Q4_K_M");
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.2.ffn_out".into()), "{report:#}");
    assert_eq!(first["diagnosis"][0]["fault"], "linear.truncated_k", "{first:#}");
}

#[test]
fn a_row_that_nobody_wrote_is_located() {
    let (code, report) = audit("row", "F16");
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.0.ffn_act".into()), "{report:#}");
    let text = first["residual"].as_str().unwrap();
    assert!(text.contains("1 of 3 rows are wrong (positions 2)"), "{text}");
}

#[test]
fn an_input_that_is_overwritten_early_is_what_its_node_is_wrong_by() {
    let (code, report) = audit("early-left", "F16");
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.0.attn_residual".into()), "{report:#}");
    // Looked at, everything is healthy.
    let (code, report) = audit("early-seen", "F16");
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn two_runs_with_a_race_part_where_it_is() {
    let dumps = ["diff", "tests/data/mistakes/race-2", "tests/data/mistakes/race-1"];
    let (code, report) = json(&dumps);
    assert_eq!(code, 2, "{report:#}");
    let (code, report) = json(&[&dumps[..], &["--bitwise"]].concat());
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.2.ffn_out".into()), "{report:#}");
}
