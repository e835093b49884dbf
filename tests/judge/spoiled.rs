//! Healthy dumps that are spoilt at random are never at parity: rows exchanged, zeroed, stale, scaled by 1.01, one value
//! doubled, columns exchanged, a NaN; in any recorded tensor and row, in f32, f16 and bf16, 20 and 200 tokens long.
//!
//! Rows of bf16 that are scaled by 1.01 behind attention are counted and not required: that is two and a half steps
//! of bf16, and what such an engine rounds inside of it has as much in common over a row (docs/verdicts.md).
//!
//! Some of them; all: `SPOILINGS=1000 cargo test --release --test judge spoiled::`, or some of them,
//! `SPOILINGS=200..400`; with the dumps of other engines of the same model in `SPOILED_DUMPS=FOLDER:FOLDER`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use parity::random::{GAMMA, mixed};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;

use crate::support::program::output;
use crate::support::samples::sample;

const MODEL: &str = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
/// Spoilings without SPOILINGS, and so many of them in a sample.
const SPOILINGS: usize = 84;
const SAMPLE: usize = 6;
/// Share of them that must be found.
const FOUND_MIN: f64 = 0.999;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mixed(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One tensor of a step file.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn read(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let value = |dtype: Dtype, bytes: &[u8]| match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
        _ => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    };
    let number = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
    let tensors = file.iter().filter(|(name, view)| !name.starts_with("leaf.") && number(view.dtype()));
    let read = tensors.map(|(name, view)| {
        let size = if view.dtype() == Dtype::F32 { 4 } else { 2 };
        let values = view.data().chunks_exact(size).map(|bytes| value(view.dtype(), bytes)).collect();
        (name.to_owned(), Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), values })
    });
    read.collect()
}

/// Puts tensors in place of those of a step file.
fn write(path: &Path, changed: &BTreeMap<String, Tensor>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own: BTreeMap<&str, Vec<u8>> = changed
        .iter()
        .map(|(name, tensor)| {
            let bytes = tensor.values.iter().flat_map(|&x| match tensor.dtype {
                Dtype::F32 => x.to_le_bytes().to_vec(),
                Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                _ => bf16::from_f32(x).to_le_bytes().to_vec(),
            });
            (name.as_str(), bytes.collect())
        })
        .collect();
    let views = file.iter().map(|(name, view)| match (own.get(name), changed.get(name)) {
        (Some(bytes), Some(tensor)) => {
            (name.to_owned(), TensorView::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap())
        }
        _ => (name.to_owned(), TensorView::new(view.dtype(), view.shape().to_vec(), view.data()).unwrap()),
    });
    std::fs::write(path, serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The step files of a dump.
fn steps(dump: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string(dump.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let files = manifest["steps"].as_array().unwrap().iter();
    files.map(|step| dump.join(step["file"].as_str().unwrap())).collect()
}

/// A run of our engine over so many tokens, in f32 or rounded to another type when it was recorded.
fn made(folder: &Path, tokens: usize, dtype: Dtype) -> PathBuf {
    let dump = folder.join(format!("{tokens}-{dtype:?}"));
    let ids: Vec<String> = (1..=tokens).map(|i| (3 + (i * 73 + i / 7 * 11) % 290).to_string()).collect();
    let (code, text) = output(&[
        "run",
        "-m",
        MODEL,
        "--device",
        "cpu",
        "--tokens",
        &ids.join(","),
        "--dump",
        dump.to_str().unwrap(),
    ]);
    assert!(code == 0 || code == 2, "{text}");
    if dtype != Dtype::F32 {
        for step in steps(&dump) {
            let mut tensors = read(&step);
            tensors.values_mut().for_each(|tensor| tensor.dtype = dtype);
            write(&step, &tensors);
        }
        // What it declares is the arithmetic before that.
        let path = dump.join("manifest.json");
        let mut manifest: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        manifest["producer"]["numerics"] = Value::Null;
        std::fs::write(&path, manifest.to_string()).unwrap();
    }
    dump
}

const KINDS: [&str; 7] = ["exchanged", "zeroed", "stale", "scaled", "doubled", "columns", "nan"];

/// Spoils one tensor of one step; `None` where that changes nothing.
fn spoil(random: &mut Random, kind: &str, tensor: &mut Tensor) -> Option<String> {
    let rows = tensor.shape[0];
    let width = tensor.values.len() / rows;
    let (row, other, column) = (random.below(rows), random.below(rows), random.below(width));
    let second = random.below(width);
    let before = tensor.values.clone();
    let start = row * width;
    match kind {
        "exchanged" => (0..width).for_each(|i| tensor.values.swap(start + i, other * width + i)),
        "zeroed" => tensor.values[start..start + width].fill(0.0),
        "stale" => tensor
            .values
            .copy_within(row.saturating_sub(1) * width..row.saturating_sub(1) * width + width, start),
        "scaled" => tensor.values[start..start + width].iter_mut().for_each(|x| *x *= 1.01),
        "doubled" => tensor.values[start + column] *= 2.0,
        "columns" => tensor.values.swap(start + column, start + second),
        _ => tensor.values[start + column] = f32::NAN,
    }
    let changed = before.iter().zip(&tensor.values).any(|(a, b)| a != b);
    changed.then(|| format!("row {row} of {rows}, column {column} of {width}"))
}

/// Which spoilings are tried, each by its number.
fn numbers() -> Vec<usize> {
    let Ok(text) = std::env::var("SPOILINGS") else { return sample("spoilings", SAMPLE, 0..SPOILINGS) };
    let (first, end) = text.split_once("..").unwrap_or(("0", &text));
    (first.parse().unwrap()..end.parse().unwrap()).collect()
}

#[test]
fn what_is_spoilt_is_never_at_parity() {
    let numbers = numbers();
    let count = numbers.len();
    let folder = tempfile::tempdir().unwrap();
    let mut dumps: Vec<PathBuf> = [20, 200]
        .iter()
        .flat_map(|tokens| [Dtype::F32, Dtype::F16, Dtype::BF16].map(|dtype| (*tokens, dtype)))
        .map(|(tokens, dtype)| made(folder.path(), tokens, dtype))
        .collect();
    dumps.push("reference-dumps/qwen2-tiny-py-F16/read_lines".into());
    let others = std::env::var("SPOILED_DUMPS").unwrap_or_default();
    dumps.extend(others.split(':').filter(|path| !path.is_empty()).map(PathBuf::from));
    let audit = |dump: &Path| {
        output(&["audit", dump.to_str().unwrap(), "-m", MODEL, "--allow-missing", "--threads", "1"])
    };
    for dump in &dumps {
        let (code, text) = audit(dump);
        assert_eq!(code, 0, "{} is healthy\n{text}", dump.display());
    }
    let (next, not_required) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let missed: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut missed = Vec::new();
            loop {
                let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) else { return missed };
                // Each dump with each kind in turn.
                let (dump, kind) = (&dumps[number % dumps.len()], KINDS[number / dumps.len() % KINDS.len()]);
                let mut random = Random(number as u64);
                let to = folder.path().join(format!("spoilt-{number}"));
                copy(dump, &to);
                let files = steps(&to);
                let (name, said) = loop {
                    let file = &files[random.below(files.len())];
                    let tensors = read(file);
                    let names: Vec<&String> = tensors.keys().collect();
                    let name = names[random.below(names.len())].clone();
                    let mut tensor = tensors[&name].clone();
                    if let Some(what) = spoil(&mut random, kind, &mut tensor) {
                        write(file, &BTreeMap::from([(name.clone(), tensor)]));
                        break (name.clone(), format!("{number}: {} {kind} {name} {what}", dump.display()));
                    }
                };
                let (code, text) = audit(&to);
                let in_brain = dump.to_string_lossy().to_lowercase().contains("bf16");
                if code == 0 && kind == "scaled" && in_brain && name.ends_with("attn_ctx") {
                    println!("not found, and not required: {said}");
                    not_required.fetch_add(1, Ordering::Relaxed);
                } else if code == 0 {
                    println!("not found: {said}");
                    missed.push(said);
                } else {
                    assert!(code == 1 || code == 2, "{said}\n{text}");
                }
                std::fs::remove_dir_all(&to).unwrap();
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let open = not_required.load(Ordering::Relaxed);
    println!(
        "{} of {count} spoilings were found, {open} of the others are not required",
        count - missed.len() - open
    );
    let found = (count - missed.len()) as f64 / count as f64;
    assert!(found >= FOUND_MIN, "{} of {count} were not found:\n{}", missed.len(), missed.join("\n"));
}
