//! What a new user meets first: what is here, settings, completions, and a report in sentences.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;

use crate::support::program;

pub const PROMPT: &str = "def read_lines(path):";

/// The program with nothing of this machine's settings.
pub fn parity(args: &[&str]) -> Command {
    let mut command = program::parity(args);
    command.env("HOME", "/nonexistent");
    for variable in ["PARITY_CONFIG", "XDG_CONFIG_HOME", "PARITY_MEMORY"] {
        command.env_remove(variable);
    }
    command.timeout(std::time::Duration::from_secs(120));
    command
}

pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models")
}

#[test]
fn the_doctor_says_which_way_of_recording_fits_a_program() {
    let windows = "crates/parity-imports/tests/data/pe-x86_64.dll";
    let text = parity(&["doctor", windows]).output().unwrap();
    let said = String::from_utf8(text.stdout).unwrap();
    for line in ["-- preloaded", "-- loaded by ggml", "-- through ggml's RPC", "ok otherwise"] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let shell = parity(&["doctor", "sh", "--format", "json"]).output().unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&shell.stdout).unwrap();
    assert!(findings[2]["found"].as_str().unwrap().starts_with("if it can add"), "{findings}");
    parity(&["doctor", "no-such-program"]).assert().code(2).stderr(contains("no such program on the PATH"));
}

#[test]
fn the_doctor_says_what_is_here_and_what_to_install() {
    let text = parity(&["doctor"]).assert().code(0).stdout(contains("ok shipped model and dumps"));
    text.stdout(contains("-- llama.cpp to record with").and(contains("PARITY_LLAMA")));
    let output = parity(&["doctor", "--format", "json"]).env("PARITY_MODELS", models()).output().unwrap();
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let of =
        |what: &str| findings.as_array().unwrap().iter().find(|finding| finding["what"] == what).unwrap();
    assert_eq!(of("folder of models")["here"], true);
    assert!(of("folder of models")["found"].as_str().unwrap().starts_with("2 GGUF files"));
    assert_eq!(
        (&of("llama.cpp to record with")["here"], of("memory")["here"].as_bool()),
        (&false.into(), Some(true))
    );
    let script = parity(&["doctor"]).env("PARITY_LLAMA", "/etc/passwd").output().unwrap();
    assert!(String::from_utf8_lossy(&script.stdout).contains("-- llama.cpp to record with"));
}

#[test]
fn a_file_of_settings_stands_in_for_variables() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    fs::write(&file, format!("models = {:?}\nmemory = \"1K\"\n", models())).unwrap();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0"];
    parity(&run).env("PARITY_CONFIG", &file).assert().code(2).stderr(contains("PARITY_MEMORY"));
    // A variable goes before the file.
    parity(&run).env("PARITY_CONFIG", &file).env("PARITY_MEMORY", "8G").assert().code(0);
    parity(&["doctor"]).env("PARITY_CONFIG", &file).assert().code(0).stdout(contains("2 GGUF files"));
    parity(&run).env("PARITY_CONFIG", "/nonexistent").assert().code(2);
    fs::write(&file, "colour = \"red\"\n").unwrap();
    parity(&run).env("PARITY_CONFIG", &file).assert().code(2).stderr(contains("`colour`"));
    // The file that is found without being named.
    let folder = dir.path().join("parity");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.toml"), "memory = \"1K\"\n").unwrap();
    parity(&run).env("XDG_CONFIG_HOME", dir.path()).assert().code(2).stderr(contains("PARITY_MEMORY"));
}

#[test]
fn completions_and_man_pages_are_made() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        parity(&["completions", shell]).assert().code(0).stdout(contains("hf-repo"));
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man1");
    parity(&["man", folder.to_str().unwrap()]).assert().code(0);
    let page = fs::read_to_string(folder.join("parity-run.1")).unwrap();
    assert!(page.starts_with(".ie") || page.contains(".TH"), "{page}");
    assert!(page.contains("hf\\-repo") && folder.join("parity.1").is_file());
}

#[test]
fn a_report_is_explained_in_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().to_str().unwrap();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--inject", "rope.base=10000@2", "--report", report];
    parity(&run).assert().code(1);
    let first = contains("blk.2.q_rope is a node of layer 2")
        .and(contains("RoPE base is 10000"))
        .and(contains("rope.cu"));
    parity(&["explain", "--in", report]).assert().code(0).stdout(first.and(contains("It reads blk.2.q.")));
    let later =
        contains("the error came from before, first at blk.2.q_rope").and(contains("the node is healthy"));
    parity(&["explain", "blk.3.attn_ctx", "--in", report]).assert().code(0).stdout(later);
    parity(&["explain", "blk.9.q", "--in", report]).assert().code(2).stderr(contains("no such checkpoint"));
    let meant = |typed| parity(&["explain", typed, "--in", report]).assert().code(2);
    meant("blk.2.qrope").stderr(contains("parity explain blk.2.q_rope"));
    meant("q_rope").stderr(contains("parity explain blk.0.q_rope"));
    parity(&["explain", "--in", "/nonexistent"]).assert().code(2);
}

#[test]
fn a_node_is_explained_without_a_report() {
    let rope = contains("blk.2.q_rope is a node of layer 2")
        .and(contains("y0 = x0·cos a"))
        .and(contains("Rounding explains 8·u"))
        .and(contains("It reads blk.2.q."))
        .and(contains("freq_base 1000000"))
        .and(contains("rope.base (RoPE base is 10000"))
        .and(contains("--inject"));
    parity(&["explain", "blk.2.q_rope"]).assert().code(0).stdout(rope);
    let inside = contains("softmax").and(contains("scale"));
    parity(&["explain", "blk.0.attn_probs"]).assert().code(0).stdout(inside);
    let recorded = ["explain", "blk.0.attn_out", "--of", "tests/data/backends/cuda-Q4_K_M"];
    parity(&recorded).assert().code(0).stdout(contains("blk.0.attn_output.weight").and(contains("4·√n·u")));
    parity(&["explain", "blk.2.qrope"]).assert().code(2).stderr(contains("parity explain blk.2.q_rope"));
}
