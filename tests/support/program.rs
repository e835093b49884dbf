//! The program, spawned in the repository, with nothing of this machine's to answer for it.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::TempDir;

/// With these arguments: no stored recording, no llama.cpp, and no CI.
pub fn parity(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("parity").unwrap();
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args);
    command.env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent");
    command.env_remove("GITHUB_ACTIONS").env_remove("PARITY_MODELS");
    command
}

/// Its exit code and its report; `null` where standard output is no JSON document.
pub fn answer(args: &[&str]) -> (i32, Value) {
    let done = parity(args).output().unwrap();
    (done.status.code().unwrap(), serde_json::from_slice(&done.stdout).unwrap_or(Value::Null))
}

/// Its exit code and all that it writes.
pub fn output(args: &[&str]) -> (i32, String) {
    let done = parity(args).output().unwrap();
    (done.status.code().unwrap(), String::from_utf8([&done.stdout[..], &done.stderr[..]].concat()).unwrap())
}

/// The report of a command, which ends with this exit code.
pub fn report(command: &mut Command, code: i32) -> Value {
    let output = command.args(["--format", "json"]).assert().code(code).get_output().stdout.clone();
    serde_json::from_slice(&output).expect("standard output is one JSON document")
}

/// Text without the breaks of a terminal's lines.
pub fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What an audit says.
pub struct Audited {
    pub code: i32,
    /// The first wrong checkpoint, empty where there is none.
    pub first: String,
    /// What its diagnosis names first, empty likewise.
    pub fault: String,
    /// One a line.
    pub notes: String,
    pub report: Value,
}

impl Audited {
    /// Why nothing else can be said; empty where something is.
    pub fn reason(&self) -> &str {
        self.report["reason"].as_str().unwrap_or_default()
    }
}

/// Audits a dump.
pub fn audit(dump: &Path, model: &Path, more: &[&str]) -> Audited {
    let done = parity(&["audit", "--format", "json", "-m"]).arg(model).arg(dump).args(more).output().unwrap();
    let code = done.status.code().unwrap();
    let report: Value = serde_json::from_slice(&done.stdout).unwrap_or(Value::Null);
    assert!(!report.is_null() || code == 2, "{}", String::from_utf8_lossy(&done.stderr));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let first = &report["first_divergence"];
    let notes = report["notes"].as_array().into_iter().flatten().filter_map(Value::as_str);
    Audited {
        code,
        first: text(&first["checkpoint"]),
        fault: text(&first["diagnosis"][0]["fault"]),
        notes: notes.collect::<Vec<_>>().join("\n"),
        report,
    }
}

/// A folder of the repository with its files, to be changed.
pub struct Copied(TempDir);

impl Copied {
    /// Copies one.
    pub fn of(folder: &str) -> Copied {
        let copy = Copied(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
        }
        copy
    }

    /// Where it lies.
    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Its manifest.
    pub fn manifest(&self) -> Value {
        manifest(self.0.path())
    }

    /// Changes its manifest.
    pub fn change(&self, edit: impl FnOnce(&mut Value)) {
        let mut json = self.manifest();
        edit(&mut json);
        fs::write(self.file("manifest.json"), json.to_string()).unwrap();
    }
}

/// The manifest of a dump.
pub fn manifest(dump: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dump.join("manifest.json")).unwrap()).unwrap()
}
