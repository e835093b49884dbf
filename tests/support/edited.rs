//! Dumps of our own engine with something else in their place: left out, exchanged, or not declared.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;

use super::program::{answer, audit};

/// The model that they are of.
pub const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";

/// A run of so many tokens in one step.
pub fn made(dump: &Path, tokens: usize, how: &[&str]) {
    let ids: Vec<String> = (0..tokens).map(|i| (10 + i * 37 % 3000).to_string()).collect();
    let run = ["run", "-m", MODEL, "--device", "cpu", "--no-audit", "--tokens", &ids.join(",")];
    answer(&[&run[..], &["--dump", dump.to_str().unwrap()], how].concat());
}

/// Exit code, first wrong checkpoint and reason of an audit.
pub fn audited(dump: &Path, flags: &[&str]) -> (i32, String, Value) {
    let audited = audit(dump, Path::new(MODEL), flags);
    (audited.code, audited.first, audited.report["reason"].clone())
}

/// Keeps the tensors of the only step for which `edit` says so, with what it makes of their values (T, …).
pub fn edit(dump: &Path, edit: impl Fn(&str, &[usize], &mut Vec<f32>) -> bool) {
    let path = dump.join("step-0000.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut kept: HashMap<String, (Vec<usize>, Vec<u8>)> = HashMap::new();
    for (name, view) in file.iter() {
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        let mut values: Vec<f32> =
            view.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if edit(name, view.shape(), &mut values) {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            kept.insert(name.to_owned(), (view.shape().to_vec(), bytes));
        }
    }
    let views = kept.iter().map(|(name, (shape, bytes))| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
}

/// Keeps the tensors of a step's file whose names `keeps` accepts.
pub fn keep(path: &Path, keeps: impl Fn(&str) -> bool) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept = file.iter().filter(|(name, _)| keeps(name));
    let bytes = serialize(kept, None).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Keeps the last row of a tensor (T, …) of a step's file.
pub fn keep_last_row(path: &Path, tensor: &str) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept = file.iter().map(|(name, view)| {
        let (mut shape, mut data) = (view.shape().to_vec(), view.data());
        if name == tensor {
            data = &data[data.len() - data.len() / shape[0]..];
            shape[0] = 1;
        }
        (name, TensorView::new(view.dtype(), shape, data).unwrap())
    });
    let bytes = serialize(kept, None).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// Takes away what a dump says of its arithmetic.
pub fn undeclare(dump: &Path) {
    let path = dump.join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    manifest["producer"]["numerics"] = Value::Null;
    std::fs::write(&path, manifest.to_string()).unwrap();
}

/// Takes the graphs out of a dump, which engines other than llama.cpp do not bring.
pub fn without_graph(dump: &Path) {
    let path = dump.join("manifest.json");
    let mut all: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    all.as_object_mut().unwrap().remove("graphs");
    for step in all["steps"].as_array_mut().unwrap() {
        step.as_object_mut().unwrap().remove("graph");
    }
    std::fs::write(path, all.to_string()).unwrap();
}
