//! Files that do not mean well, and options without limits: refused, or shown so that they can only be read.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

const PROMPT: &str = "def read_lines(path):";

fn parity(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("parity").unwrap();
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args);
    command.env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent").env_remove("GITHUB_ACTIONS");
    command.timeout(std::time::Duration::from_secs(120));
    command
}

/// A dump whose manifest says what its maker chose: escapes, bells, ends of lines, commands to a CI runner.
fn obscene() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump").to_str().unwrap().to_owned();
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "--no-audit", "--dump", &path];
    parity(&run).assert().failure();
    let manifest = Path::new(&path).join("manifest.json");
    let mut value: serde_json::Value = serde_json::from_str(&fs::read_to_string(&manifest).unwrap()).unwrap();
    let evil = "x\u{1b}[2J\u{7}\u{9b}31m\n::error::owned\n##[set-env name=A]b\u{202e}";
    value["producer"]["name"] = evil.into();
    value["producer"]["version"] = evil.into();
    value["model"]["name"] = evil.into();
    value["model"]["file"] = evil.into();
    value["model"]["architecture"] = evil.into();
    fs::write(&manifest, value.to_string()).unwrap();
    (dir, path)
}

/// Whether nothing in an output is obeyed by a terminal or a CI runner.
fn harmless(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let hidden = |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c);
    let ours = ["::error title=parity::", "::notice title=parity::", "::warning title=parity::"];
    let command = |line: &str| {
        let line = line.trim_start();
        (line.starts_with("::") && !ours.iter().any(|own| line.starts_with(own))) || line.starts_with("##[")
    };
    !text.contains(hidden) && !text.lines().any(command)
}

#[test]
fn what_a_dump_says_of_itself_is_only_read() {
    let (_dir, dump) = obscene();
    for format in ["table", "markdown"] {
        for runner in [None, Some("true")] {
            let mut command = parity(&["diff", &dump, &dump, "--format", format]);
            runner.map(|value| command.env("GITHUB_ACTIONS", value));
            let output = command.output().unwrap();
            assert!(!output.stdout.is_empty());
            assert!(harmless(&output.stdout), "{}", String::from_utf8_lossy(&output.stdout).escape_debug());
            assert!(harmless(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr).escape_debug());
        }
    }
}

#[test]
fn an_error_shows_a_file_name_and_does_not_obey_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a\u{1b}[31m\n::error::b");
    fs::write(&path, "no dump").unwrap();
    let output = parity(&["inspect", path.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(harmless(&output.stderr), "{}", String::from_utf8_lossy(&output.stderr).escape_debug());
}

#[test]
fn texts_are_regular_files_of_bounded_size() {
    let refused = || contains("a regular file").and(contains("/dev/zero"));
    parity(&["run", "--device", "cpu", "-f", "/dev/zero"]).assert().code(2).stderr(refused());
    parity(&["gate", "/dev/zero"]).assert().code(2).stderr(refused());
}

#[test]
fn threads_and_retries_have_limits() {
    let run = ["run", "--device", "cpu", "-p", PROMPT, "--layer", "0", "-t", "1000000"];
    parity(&run).assert().code(2).stderr(contains("--threads").and(contains("at most")));
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.toml");
    fs::write(&suite, "name = \"x\"\n[[case]]\nid = \"a\"\nprompt = \"b\"\nretries = 1000000000\n").unwrap();
    parity(&["gate", suite.to_str().unwrap()]).assert().code(2).stderr(contains("retries"));
}
