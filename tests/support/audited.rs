//! Dumps of our own engine, and of recordings, judged in memory.

use std::path::{Path, PathBuf};

use parity::audit::{AuditRows, Findings, Graphs, How, audit, order};
use parity::checkpoint::Checkpoint;
use parity::gguf::Gguf;
use parity_dump::Dump;
use tempfile::TempDir;

use super::program::answer;

pub const F16: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
pub const Q4: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";
/// A prompt, and its decode steps.
const PROMPT: [u32; 6] = [9, 270, 33, 1200, 45, 6];
const DECODED: &str = "3";

/// A model of the repository.
pub fn model(path: &str) -> Gguf {
    Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// What our own engine computes of these tokens and some decode steps, as a dump in a folder of its own.
pub fn run_of(model: &str, tokens: &[u32], how: &[&str]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    let ids: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    let run = ["run", "-m", model, "--device", "cpu", "--no-audit", "--tokens", &ids.join(",")];
    answer(&[&run[..], &["--dump", dump.to_str().unwrap()], how].concat());
    (folder, dump)
}

/// The same of a prompt and three decode steps.
pub fn run(model: &str, how: &[&str]) -> (TempDir, PathBuf) {
    run_of(model, &PROMPT, &[&["-n", DECODED], how].concat())
}

/// Judges a dump by the graphs that it brings or that are built for it, and names nothing.
pub fn audited(dump: &Path, gguf: &Gguf, rows: AuditRows) -> Findings {
    let dump = Dump::open(dump).unwrap();
    let graphs = Graphs::of_dump(&dump, gguf).unwrap();
    let how = How { rows, wants: &|_| true, diagnose: None, look: None, only: None };
    audit(&graphs.judged(&dump, &dump), &graphs.steps(), gguf, &how).unwrap()
}

/// The same in every row.
pub fn audit_all(dump: &Path, gguf: &Gguf) -> Findings {
    audited(dump, gguf, AuditRows::All)
}

/// The nodes beyond rounding, in order.
pub fn origins(findings: &Findings) -> Vec<String> {
    let wrong = |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(|finding| finding.is_wrong());
    findings.order.iter().filter(wrong).map(ToString::to_string).collect()
}

/// A checkpoint by its name.
pub fn id(text: &str) -> Checkpoint {
    text.parse().unwrap()
}

/// What a recording has of the nodes of its graphs, attention matrices left out.
pub fn recorded(dump: &Path, gguf: &Gguf) -> Vec<Checkpoint> {
    let dump = Dump::open(dump).unwrap();
    let graphs = Graphs::of_dump(&dump, gguf).unwrap();
    let is_there = |id: &Checkpoint| !id.kind().is_optional() && dump.get(*id).is_some();
    order(&graphs.steps(), &|_| true).into_iter().filter(is_there).collect()
}
