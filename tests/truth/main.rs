//! What is said of one recording is the same whatever is asked, and no more than was recorded: by spawned processes.

mod stopped;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

const MODELS: &str = "reference-dumps/models";

/// The program, away from whatever the machine has.
fn parity(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args);
    command.env("PARITY_LLAMA", "none").env("PARITY_CACHE", "/nonexistent");
    command.env_remove("GITHUB_ACTIONS").env_remove("PARITY_MODELS");
    command
}

/// Exit code, and everything that was said.
fn said(args: &[&str]) -> (i32, String) {
    let output = parity(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    (output.status.code().unwrap(), text)
}

/// Exit code and report.
fn report(args: &[&str]) -> (i32, Value) {
    let output = parity(args).args(["--format", "json"]).output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().unwrap(), report)
}

/// A folder of the repository with its files, to be changed.
struct Copied(TempDir);

impl Copied {
    fn of(folder: &str) -> Copied {
        let copy = Copied(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
        }
        copy
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn manifest(&self) -> Value {
        manifest(self.0.path())
    }

    fn change(&self, edit: impl FnOnce(&mut Value)) {
        let mut json = self.manifest();
        edit(&mut json);
        fs::write(self.file("manifest.json"), json.to_string()).unwrap();
    }
}

fn manifest(dump: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dump.join("manifest.json")).unwrap()).unwrap()
}
