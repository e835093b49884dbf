//! `parity port`: stops at the first thing that explains the rest, and says what it needs.

use std::path::Path;
use std::process::{Command, Output};

use parity::gguf::{DType, Value};
use serde_json::Value as Json;

use super::originals::{Pair, family};
use crate::support::tiny_model::{change, tensor};

/// Runs the command; `flags` beside the two sides.
fn port(pair: &Pair, scratch: &Path, flags: &[&str]) -> Output {
    pair.write(scratch);
    let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
    command.current_dir(scratch).args(["port", "--original", "hf", "--converted", "model.gguf"]);
    command.args(["--program", "no-llama"]).args(flags).output().unwrap()
}

fn report(out: &Output) -> (i32, Json) {
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    (
        out.status.code().unwrap(),
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {said}")),
    )
}

#[test]
fn a_setting_explains_the_rest() {
    let scratch = tempfile::tempdir().unwrap();
    let mut pair = family("qwen2");
    pair.set("qwen2.rope.freq_base", Value::F32(10_000.0));
    let folder = scratch.path().join("report");
    let flags = ["-p", "the well", "--format", "json", "--report", folder.to_str().unwrap()];
    let (code, json) = report(&port(&pair, scratch.path(), &flags));
    assert_eq!(
        (code, &json["verdict"], &json["findings"][0]["name"]),
        (1, &"divergence".into(), &"config.rope_theta".into())
    );
    assert!(
        json["reason"].as_str().unwrap().starts_with("config.rope_theta: 10000, the original says 1000000"),
        "{json:#}"
    );
    for file in ["report.json", "report.html", "summary.md", "junit.xml"] {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        assert!(text.contains("theta") || file == "junit.xml", "{file}: {text}");
    }
    let text = port(&pair, scratch.path(), &["-p", "the well"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("DIVERGES: config.rope_theta: 10000, the original says 1000000"), "{text}");
    assert!(!scratch.path().join("port").exists());
}

#[test]
fn weights_come_behind_settings() {
    let scratch = tempfile::tempdir().unwrap();
    let mut pair = family("llama");
    let plain = pair.tensors["model.layers.1.self_attn.q_proj.weight"].1.clone();
    change(&mut pair.model, "blk.1.attn_q.weight", |index, _| plain[index]);
    let (code, json) = report(&port(&pair, scratch.path(), &["-p", "the well", "--format", "json"]));
    assert_eq!((code, &json["findings"][0]["name"]), (1, &"linear.qk_permuted".into()), "{json:#}");
    assert_eq!(json["findings"][0]["where"], "blk.1.attn_q.weight");
}

#[test]
fn what_it_needs_is_said_before_anything_is_written() {
    let scratch = tempfile::tempdir().unwrap();
    let pair = family("qwen2");
    let said = |flags: &[&str]| {
        let out = port(&pair, scratch.path(), flags);
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, text) = said(&["-p", "the well", "--python", "no-such-python"]);
    assert!(code == Some(2) && text.contains("pip install ./python torch transformers"), "{text}");
    let (code, text) = said(&[]);
    assert!(code == Some(2) && text.contains("-p PROMPT"), "{text}");
    assert!(!scratch.path().join("port").exists());
    // Of a quantised file, what can be compared is.
    let mut quantised = pair.clone();
    let stored = tensor(&mut quantised.model, "blk.0.ffn_up.weight");
    let blocks: Vec<u8> = stored.3.as_chunks::<128>().0.iter().flat_map(q8_0).collect();
    (stored.1, stored.3) = (DType::Q8_0, blocks);
    let (code, json) = report(&port(&quantised, scratch.path(), &["-p", "the well", "--format", "json"]));
    assert_eq!((code, &json["verdict"]), (2, &"undecided".into()), "{json:#}");
    assert!(json["reason"].as_str().unwrap().contains("blk.0.ffn_up.weight (Q8_0)"), "{json:#}");
}

/// 32 numbers of f32 as one block: a scale in f16, and their multiples of it.
fn q8_0(values: &[u8; 128]) -> Vec<u8> {
    let values: Vec<f32> = values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let scale = half::f16::from_f32(values.iter().fold(0.0f32, |most, value| most.max(value.abs())) / 127.0);
    let quants = values.iter().map(|value| (value / scale.to_f32()).round() as i8 as u8);
    scale.to_le_bytes().into_iter().chain(quants).collect()
}
