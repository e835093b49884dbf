//! The program as a user runs it: spawned, with its exit code, standard output and standard error.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;

use crate::support::program::{parity, report as json};

/// A prompt that has a shipped reference.
const PROMPT: &str = "def read_lines(path):";

fn run(args: &[&str]) -> Command {
    let mut command = parity(&[]);
    command.args(["run", "--device", "cpu"]).args(args);
    command
}

fn f16() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf")
}

/// Writes the candidate's dump of [`PROMPT`] with two decode steps; without an audit there is no parity.
fn dump(dir: &Path, inject: &[&str]) {
    let mut command = run(&["-p", PROMPT, "-n", "2", "--no-audit", "--dump"]);
    command.arg(dir);
    for fault in inject {
        command.args(["--inject", fault]);
    }
    command.assert().failure();
}

#[test]
fn the_first_command_of_the_readme_finds_parity() {
    run(&["-p", PROMPT, "--layer", "0"])
        .assert()
        .code(0)
        .stdout(contains("PARITY: 19 checkpoints within what rounding explains\n"))
        .stdout(contains("blk.0.q_rope").and(contains("blk.1").not()));
}

#[test]
fn a_whole_run_with_decoding_finds_parity() {
    let report = json(&mut run(&["-p", PROMPT, "-n", "8"]), 0);
    assert_eq!(report["verdict"], "parity");
    assert_eq!(report["coverage"]["checkpoints_missing"], 0);
    assert_eq!(report["coverage"]["rows_compared"], report["coverage"]["rows_expected"]);
    assert_eq!(report["candidate"]["steps"], serde_json::json!([5, 1, 1, 1, 1, 1, 1, 1, 1]));
}

#[test]
fn a_reference_brings_its_own_tokens() {
    let report = json(&mut run(&["--reference", "reference-dumps/qwen2-tiny-py-F16/unicode"]), 0);
    assert_eq!(report["verdict"], "parity");
}

#[test]
fn a_injected_mistake_is_found_named_and_can_be_shown_alone() {
    let report = json(&mut run(&["-p", PROMPT, "--inject", "rope.base=10000@2"]), 1);
    assert_eq!(report["verdict"], "divergence");
    let first = &report["first_divergence"];
    assert_eq!(first["checkpoint"], "blk.2.q_rope");
    assert_eq!(first["diagnosis"][0]["fault"], "rope.base");
    assert!(first["diagnosis"][0]["text"].as_str().unwrap().contains("10000"));
    assert_eq!(report["origins"], serde_json::json!(["blk.2.q_rope", "blk.2.k_rope"]));
    let next = first["reproduce"].as_str().unwrap();
    assert!(
        next.starts_with("parity run") && next.ends_with("--layer 2 --checkpoint blk.2.q_rope"),
        "{next}"
    );
}

#[test]
fn every_format_of_a_report_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("report");
    run(&["-p", PROMPT, "--layer", "0", "--report"]).arg(&folder).assert().code(0);
    let files = ["report.json", "report.csv", "report.html", "report.sarif", "junit.xml", "summary.md"];
    for file in files {
        assert!(fs::metadata(folder.join(file)).unwrap().len() > 100, "{file}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), files.len(), "no temporary file is left");
}

#[test]
fn a_prompt_without_a_reference_runs_and_says_how_to_record_one() {
    run(&["-p", "import zlib"])
        .assert()
        .code(2)
        .stdout(contains("no stored reference").and(contains("parity record -o ref -- llama-completion")));
}

#[test]
fn a_dump_is_at_parity_with_itself_and_a_corrupted_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
    dump(&good, &[]);
    dump(&bad, &["data.nan@blk.1.v"]);
    parity(&[]).arg("diff").args([&good, &good]).assert().code(0).stdout(contains("PARITY"));
    let report = json(parity(&[]).arg("diff").args([&bad, &good]), 1);
    assert_eq!(report["first_divergence"]["checkpoint"], "blk.1.v");
    assert_eq!(report["first_divergence"]["verdict"], "nonfinite");
    parity(&[]).arg("diff").args([&bad, &bad]).assert().code(1);
    parity(&[]).arg("audit").arg(&good).assert().code(0);
    parity(&[]).arg("audit").arg(&bad).assert().code(1).stdout(contains("blk.1.v"));
}

#[test]
fn tolerances_decide_without_an_audit() {
    let args = ["-p", PROMPT, "--no-audit"];
    run(&args).assert().code(2).stdout(contains("UNDECIDED"));
    run(&args).args(["--nmse", "1e-4"]).assert().code(0);
    run(&args).args(["--nmse", "1e-12"]).assert().code(1);
    run(&args).args(["--atol", "nan"]).assert().code(2).stderr(contains("is no tolerance"));
}

#[test]
fn a_missing_checkpoint_never_passes_unless_it_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, part) = (dir.path().join("whole"), dir.path().join("part"));
    dump(&whole, &[]);
    run(&["-p", PROMPT, "-n", "2", "--no-audit", "--layer", "0", "--dump"]).arg(&part).assert().code(2);
    parity(&[]).arg("diff").args([&part, &whole]).assert().code(2).stdout(contains("missing"));
    parity(&[]).arg("diff").args([&part, &whole]).arg("--allow-missing").assert().code(0);
    parity(&[]).arg("diff").args([&part, &whole]).args(["--layer", "0"]).assert().code(0);
    parity(&[]).arg("diff").args([&part, &whole]).args(["--layer", "3"]).assert().code(2);
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let truncated = dir.path().join("truncated.gguf");
    fs::write(&truncated, &fs::read(f16()).unwrap()[..100_000]).unwrap();
    let text = dir.path().join("notes.gguf");
    fs::write(&text, "not a model at all, but long enough to hold a header").unwrap();
    let cases: [(&[&str], &str); 9] = [
        (&["-p", ""], "nothing to run"),
        (&["--tokens", "4096"], "beyond the vocabulary"),
        (&["-p", PROMPT, "--layer", "9"], "no checkpoint of this model is selected"),
        (&["-p", PROMPT, "--inject", "rope.bse@1"], "rope.base"),
        (&["-p", PROMPT, "--inject", "rope.base@17"], "17"),
        (&["-m", "no-such.gguf", "-p", PROMPT], "no-such.gguf"),
        (&["-m", truncated.to_str().unwrap(), "-p", PROMPT], "truncated.gguf"),
        (&["-m", text.to_str().unwrap(), "-p", PROMPT], "notes.gguf"),
        (&["--reference", "src", "-p", PROMPT], "manifest.json"),
    ];
    for (args, expected) in cases {
        let output = run(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(expected), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_fails_before_the_run() {
    run(&["-p", PROMPT, "--report", "/proc/none"]).assert().code(2).stderr(contains("/proc/none"));
    run(&["-p", PROMPT, "--dump", "/proc/none"]).assert().code(2).stderr(contains("/proc/none"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let script = format!(
        "{} run --device cpu -p '{PROMPT}' --format json | head -c 1",
        assert_cmd::cargo::cargo_bin("parity").display()
    );
    let output = std::process::Command::new("bash")
        .args(["-o", "pipefail", "-c", &script])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn in_isolation_nothing_is_inherited_and_every_fault_is_an_origin() {
    let injected = ["--isolate", "--inject", "rope.base=10000@1", "--inject", "ffn.gelu@2"];
    // A cache in f16 makes attention differ from the reference's more than the reference's rounding does.
    for numerics in ["f32", "f32 kv=f16"] {
        let report = json(run(&["-p", PROMPT, "-n", "2", "--numerics", numerics]).args(injected), 1);
        assert_eq!(report["origins"], serde_json::json!(["blk.1.q_rope", "blk.1.k_rope", "blk.2.ffn_act"]));
        let checkpoints = report["checkpoints"].as_array().unwrap();
        assert!(checkpoints.iter().all(|c| c["verdict"] == "match" || c["verdict"] == "origin"));
    }
    // Without it, what comes after inherits.
    let report = json(run(&["-p", PROMPT, "-n", "2"]).args(&injected[1..]), 1);
    let checkpoints = report["checkpoints"].as_array().unwrap();
    assert!(checkpoints.iter().any(|c| c["verdict"] == "inherited"));
}

#[test]
fn the_inside_of_attention_is_fed_too() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("dump");
    run(&["-p", PROMPT, "-n", "2", "--no-audit", "--checkpoint", "*", "--dump"])
        .arg(&folder)
        .assert()
        .failure();
    // Keys in f16 change the scores: probabilities would inherit that.
    let mut command = run(&["--numerics", "f32 kv=f16", "--isolate", "--checkpoint", "*", "--reference"]);
    let report = json(command.arg(&folder), 0);
    let of = |id: &str| {
        let entries = report["checkpoints"].as_array().unwrap();
        entries.iter().find(|entry| entry["id"] == id).unwrap()["rel_l2"].as_f64().unwrap()
    };
    assert!(of("blk.1.attn_scores") > 0.0);
    assert_eq!(of("blk.1.attn_probs"), 0.0);
}

#[test]
fn an_engine_that_keeps_narrow_values_is_given_narrow_ones() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("dump");
    run(&["-p", PROMPT, "-n", "2", "--no-audit", "--dump"]).arg(&folder).assert().failure();
    for numerics in ["f16 storage=f16 kv=f16", "bf16 storage=bf16 kv=bf16"] {
        let isolated = || {
            let mut command = run(&["--numerics", numerics, "--isolate", "--reference"]);
            command.arg(&folder);
            command
        };
        assert_eq!(json(&mut isolated(), 0)["origins"], serde_json::json!([]), "{numerics}");
        let report = json(isolated().args(["--inject", "ffn.gelu@2"]), 1);
        assert_eq!(report["origins"], serde_json::json!(["blk.2.ffn_act"]), "{numerics}");
    }
}

#[test]
fn isolation_needs_a_reference() {
    let mut command = run(&["--tokens", "9,8,7", "--isolate"]);
    command.assert().code(2).stderr(contains("no inputs to feed").and(contains("parity record")));
}

#[test]
fn what_was_computed_in_isolation_is_no_dump() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("dump");
    let mut command = run(&["-p", PROMPT, "--isolate", "--dump"]);
    command.arg(&folder).assert().code(2).stderr(contains("--dump without --isolate"));
    assert!(!folder.join("manifest.json").exists(), "nothing was written");
}

#[test]
fn the_self_test_foretells_what_an_audit_sees() {
    let dir = tempfile::tempdir().unwrap();
    dump(&dir.path().join("dump"), &[]);
    let mut command = parity(&[]);
    command.arg("audit").arg(dir.path().join("dump")).arg("--self-test");
    let found = json(&mut command, 0);
    assert_eq!(found["schema"], "parity-sensitivity/1");
    let unseen = |id: &str| -> Vec<String> {
        let nodes = found["nodes"].as_array().unwrap();
        let node = nodes.iter().find(|node| node["id"] == id).unwrap();
        assert!(node["injected"].as_u64().unwrap() > 10, "{id}");
        let unseen = node["unseen"].as_array().unwrap().iter();
        unseen.map(|injected| injected["fault"].as_str().unwrap().to_owned()).collect()
    };
    for id in ["blk.1.attn_norm", "blk.3.ffn_norm", "blk.2.q_rope", "blk.0.v", "blk.2.attn_ctx"] {
        let unseen = unseen(id);
        for fault in ["norm.eps", "rope.base", "linear.no_bias", "attn.kv_head", "data.stale_row"] {
            let injected = format!("{fault}@{id}");
            let output = run(&["-p", PROMPT, "-n", "2", "--inject", &injected, "--format", "json"]).output();
            // A mistake that has no place in the node cannot be injected.
            let Ok(report) = serde_json::from_slice::<Value>(&output.unwrap().stdout) else { continue };
            let seen = report["origins"].as_array().unwrap().iter().any(|origin| origin == id);
            let foretold = !unseen.iter().any(|name| name.split('=').next() == Some(fault));
            assert_eq!(
                seen, foretold,
                "{injected}: the audit sees it: {seen}, the self-test says {foretold}"
            );
        }
    }
}

#[test]
fn what_a_dump_lacks_is_one_line_of_its_self_test() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump");
    run(&["-p", PROMPT, "--checkpoint", "logits", "--no-audit", "--dump"]).arg(&path).assert().failure();
    let told = parity(&["audit"]).arg(&path).arg("--self-test").output().unwrap();
    let text = String::from_utf8(told.stdout).unwrap();
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.lines().count() < 6 && flat.starts_with("An audit of logits alone sees "), "{text}");
    assert!(flat.ends_with("83 other nodes could not be judged: record whole layers."), "{text}");
    // What moves all of it is seen, though nothing before it was recorded.
    let unseen = flat.split_once("(not ").map_or("", |(_, rest)| rest.split(')').next().unwrap());
    assert!(!unseen.contains("data.zero") && !unseen.contains("data.scaled"), "{text}");
}

#[test]
fn rows_that_the_candidate_lacks_are_no_parity_unless_they_are_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, short) = (dir.path().join("whole"), dir.path().join("short"));
    run(&["-p", PROMPT, "-n", "2", "--no-audit", "--dump"]).arg(&whole).assert().failure();
    run(&["-p", PROMPT, "--no-audit", "--dump"]).arg(&short).assert().failure();
    // The short one has fewer tokens: what it has agrees, and of the others nothing is known.
    let diff = |more: &[&str], code| {
        let said = contains("5 tokens and the reference 7");
        parity(&[]).arg("diff").args([&short, &whole]).args(more).assert().code(code).stdout(said);
    };
    diff(&[], 2);
    diff(&["--allow-missing"], 0);
    // A manifest that says it has them all, but rows that are not there, is another matter.
    let manifest = |dir: &Path| dir.join("manifest.json");
    let text = fs::read_to_string(manifest(&whole)).unwrap();
    let mut whole_manifest: Value = serde_json::from_str(&text).unwrap();
    whole_manifest["steps"].as_array_mut().unwrap().truncate(1);
    fs::write(manifest(&short), whole_manifest.to_string()).unwrap();
    let diff = || {
        let mut command = parity(&[]);
        command.arg("diff").args([&short, &whole]);
        command
    };
    let report = json(&mut diff(), 2);
    assert!(report["reason"].as_str().unwrap().contains("rows at 5 of its 7 tokens"), "{report}");
    diff().arg("--allow-missing").assert().code(0);
}

#[test]
fn an_audit_beside_a_reference_that_shares_no_token_compares_nothing() {
    let reference = "reference-dumps/qwen2-tiny-py-F16/read_lines";
    let mut command = run(&["--tokens", "9,9", "--reference", reference, "--allow-missing"]);
    command.assert().code(2).stdout(contains("the tokens differ: from position 0 on"));
}

#[test]
fn bench_measures_what_it_is_asked_for_and_draws_it() {
    let folder = tempfile::tempdir().unwrap();
    let bench = |more: &[&str]| {
        let mut command = parity(&[]);
        command.args(["bench", "--device", "cpu", "--prefill", "3,5", "--context", "4", "--repeats", "1"]);
        command.args(more);
        command
    };
    let found = json(bench(&["--report"]).arg(folder.path()), 0);
    assert_eq!(found["schema"], "parity-bench/1");
    let rows = found["rows"].as_array().unwrap();
    let tests: Vec<_> = rows.iter().map(|row| (row["what"].as_str(), row["tokens"].as_u64())).collect();
    assert_eq!(tests, [(Some("prefill"), Some(3)), (Some("prefill"), Some(5)), (Some("decode"), Some(4))]);
    for row in rows {
        assert!(row["untraced"]["median"].as_f64() > Some(0.0), "{row}");
        assert!(row["traced"]["median"].as_f64() > Some(0.0), "{row}");
        assert!(row["llama"].is_null(), "nothing was measured beside");
    }
    assert!(found["bandwidth"].as_f64() > Some(0.0));
    assert!(found["memory"].is_null(), "there is no GPU's memory to measure");
    assert!(folder.path().join("bench.json").is_file());
    let svg = fs::read_to_string(folder.path().join("bench.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<polyline").count(), 2, "what was not measured has no line: {svg}");
    bench(&["--llama", "/nonexistent"]).assert().code(2).stderr(contains("/nonexistent"));
}
