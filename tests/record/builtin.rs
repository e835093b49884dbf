//! The built-in llama.cpp (cargo feature `llama-cpp`): its recordings are those of the tap.

#![cfg(feature = "llama-cpp")]

use std::path::Path;

use assert_cmd::Command;
use parity_dump::{Checkpoint, Dump, Kind};
use predicates::str::contains;

const PROMPT: &str = "def read_lines(path):";

fn parity(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("parity").unwrap();
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PARITY_LLAMA", "none").args(args);
    command
}

fn model(quant: &str) -> String {
    format!("reference-dumps/models/qwen2-tiny-py-{quant}.gguf")
}

fn shipped(quant: &str) -> String {
    format!("reference-dumps/qwen2-tiny-py-{quant}/read_lines")
}

/// Largest distance of a checkpoint's row, relative to the row.
fn distance(a: &Dump, b: &Dump, checkpoint: Checkpoint) -> f64 {
    let row = |dump: &Dump, position| dump.gather(checkpoint, &[position]).expect("a recorded row");
    let one = |position: u32| {
        let (a, b) = (row(a, position), row(b, position));
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let apart = square(&mut a.iter().zip(&b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        (apart / square(&mut b.iter().map(|b| f64::from(*b)))).sqrt()
    };
    (0..b.tokens().len() as u32).map(one).fold(0.0, f64::max)
}

fn record(dir: &Path, quant: &str, more: &[&str]) -> Dump {
    let model = model(quant);
    parity(&["record", "-m", &model, "-o"]).arg(dir).args(more).assert().code(0);
    Dump::open(dir).unwrap()
}

#[test]
fn recordings_are_those_that_ship_to_rounding() {
    for quant in ["F16", "Q4_K_M"] {
        let dir = tempfile::tempdir().unwrap();
        let ours = record(dir.path(), quant, &["-p", PROMPT, "-n", "8", "--verify"]);
        let theirs = Dump::open(Path::new(&shipped(quant))).unwrap();
        assert_eq!(ours.tokens(), theirs.tokens());
        assert!(ours.manifest().complete && ours.manifest().unmapped.is_empty());
        assert_eq!(ours.checkpoints().collect::<Vec<_>>(), theirs.checkpoints().collect::<Vec<_>>());
        assert_eq!(ours.manifest().producer.numerics, theirs.manifest().producer.numerics);
        // Nothing is multiplied before these: any llama.cpp has the same bits.
        for kind in [Checkpoint::global(Kind::Embed), Checkpoint::layer(Kind::AttnNorm, 0)] {
            assert_eq!(distance(&ours, &theirs, kind), 0.0, "{kind}");
        }
        // One product of at most 256 terms in f32, whatever the order of its sum: sqrt(n)·u, four times over.
        let one_product = 4.0 * 16.0 / f64::from(1 << 24);
        for kind in [Kind::QProj, Kind::VProj, Kind::KRope] {
            let apart = distance(&ours, &theirs, Checkpoint::layer(kind, 0));
            assert!(apart <= one_product, "{quant} {kind:?}: {apart:e}");
        }
        let model = model(quant);
        parity(&["diff", "-m", &model]).arg(dir.path()).arg(shipped(quant)).assert().code(0);
    }
}

#[test]
fn given_tokens_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = ["--tokens", "312,863,2039,7,9", "-n", "2"];
    let dump = record(dir.path(), "F16", &tokens);
    assert_eq!(dump.tokens(), [312, 863, 2039, 7, 9]);
    let steps: Vec<usize> = dump.manifest().steps.iter().map(|step| step.positions.len()).collect();
    assert_eq!(steps, [3, 1, 1]);
    let layer = tempfile::tempdir().unwrap();
    let filtered = record(layer.path(), "F16", &[&tokens[..], &["--layer", "1"]].concat());
    assert!(filtered.checkpoints().all(|checkpoint| checkpoint.layer_index() == Some(1)));
    let q = Checkpoint::layer(Kind::QRope, 1);
    assert_eq!(distance(&filtered, &dump, q), 0.0, "a filter changes no value, and a repeated run none");
}

#[test]
fn attention_matrices_flash_attention_and_the_cache_are_choices() {
    let dir = tempfile::tempdir().unwrap();
    let dump = record(dir.path(), "F16", &["-p", PROMPT, "--checkpoint", "blk.*.attn_probs"]);
    assert_eq!(dump.checkpoints().count(), 4);
    let dir = tempfile::tempdir().unwrap();
    let dump = record(dir.path(), "F16", &["-p", PROMPT, "--flash-attn", "--cache-type", "f16"]);
    assert_eq!(dump.manifest().producer.numerics.as_deref(), Some("llama-cpu kv=f16 flash=on"));
}

#[test]
fn what_llama_cpp_rejects_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.gguf");
    std::fs::write(&bad, "no model").unwrap();
    let out = dir.path().join("dump");
    parity(&["record", "-p", "x", "-m"])
        .arg(&bad)
        .arg("-o")
        .arg(&out)
        .assert()
        .code(2)
        .stderr(contains("rejects"));
    let model = model("F16");
    for wrong in
        [&["--tokens", "99999"][..], &["--tokens", "1", "-n", "1"], &["-p", "x", "--cache-type", "q9"]]
    {
        parity(&["record", "-m", &model, "-o"])
            .arg(&out)
            .args(wrong)
            .assert()
            .code(2)
            .stderr(contains("expected"));
    }
}
