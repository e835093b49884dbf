//! What was recorded of a libggml-cpu with mistakes (`RECORD=tests/data/mistakes scripts/ab-mistakes.sh`), four tokens each:
//! each is found again, without a llama.cpp.

use std::path::Path;

use crate::support::program::{self, Audited, answer};

fn audit(name: &str, model: &str) -> Audited {
    let dump = format!("tests/data/mistakes/{name}");
    let model = format!("reference-dumps/models/qwen2-tiny-py-{model}.gguf");
    program::audit(Path::new(&dump), Path::new(&model), &["--allow-missing"])
}

/// That a mistake is found at its node, and named.
fn is_named(audited: &Audited, at: &str, fault: &str) {
    let found = (audited.code, audited.first.as_str(), audited.fault.as_str());
    assert_eq!(found, (1, at, fault), "{:#}", audited.report);
}

#[test]
fn an_epsilon_of_a_fused_norm_is_named_behind_the_norm() {
    is_named(&audit("eps", "F16"), "blk.0.attn_norm", "norm.eps");
}

#[test]
fn the_last_columns_of_one_quantised_matmul_are_named() {
    is_named(&audit("tail", "Q4_K_M"), "blk.2.ffn_out", "linear.truncated_k");
}

#[test]
fn a_row_that_nobody_wrote_is_located() {
    let Audited { code, first, report, .. } = audit("row", "F16");
    assert_eq!((code, first.as_str()), (1, "blk.0.ffn_act"), "{report:#}");
    let text = report["first_divergence"]["residual"].as_str().unwrap();
    assert!(text.contains("1 of 3 rows is wrong (position 2)"), "{text}");
}

#[test]
fn an_input_that_is_overwritten_early_is_what_its_node_is_wrong_by() {
    let Audited { code, first, report, .. } = audit("early-left", "F16");
    assert_eq!((code, first.as_str()), (1, "blk.0.attn_residual"), "{report:#}");
    // Looked at, everything is healthy.
    let Audited { code, report, .. } = audit("early-seen", "F16");
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn two_runs_with_a_race_part_where_it_is() {
    let dumps = ["diff", "tests/data/mistakes/race-2", "tests/data/mistakes/race-1", "--format", "json"];
    let (code, report) = answer(&dumps);
    assert!(report.is_object() && code == 2, "{report:#}");
    let (code, report) = answer(&[&dumps[..], &["--bitwise"]].concat());
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (1, &"blk.2.ffn_out".into()), "{report:#}");
}
