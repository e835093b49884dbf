//! For any dump that passes: with a mistake of the catalogue at any node, it does not pass. What parity itself declares
//! that it cannot see is left out (by `--self-test`, or in the answer: "a mistake that moves … by less than … would not be
//! seen"), and mistakes that change no value.
//!
//! Some of them; more: `PROPERTIES=2000 cargo test --release --test faults property::`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use parity::random::{GAMMA, mixed};
use parity_graph::fault::entries;
use safetensors::SafeTensors;

use crate::support::program::{answer, output};
use crate::support::samples::sample;

/// Mistakes that are tried without PROPERTIES, and so many in a sample.
const PROPERTIES: usize = 120;
const SAMPLE: usize = 21;
/// A model, and the arithmetics that its healthy runs are made in.
const RUNS: [(&str, &[&str]); 2] = [
    (
        "reference-dumps/models/qwen2-tiny-py-F16.gguf",
        &["f32", "llama-cpu", "f16", "f16 storage=f16 kv=f16", "bf16 storage=bf16 kv=bf16"],
    ),
    ("reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf", &["f32", "llama-cpu"]),
];
const TOKENS: &str = "3,76,149,222,5,78,151,224,17,80,153,226,19,92,155,228,21,94,167,230";

/// A healthy run, and what its audit says that it cannot see: by checkpoint the names of mistakes.
struct Healthy {
    model: &'static str,
    numerics: &'static str,
    dump: PathBuf,
    unseen: BTreeMap<String, BTreeSet<String>>,
}

/// Runs the engine; whether it did.
fn run(model: &str, numerics: &str, dump: &Path, inject: Option<&str>) -> bool {
    let dump = dump.to_str().unwrap();
    let mut args = vec!["run", "-m", model, "--device", "cpu", "--tokens", TOKENS, "--dump", dump];
    args.extend(["--numerics", numerics]);
    args.extend(inject.iter().flat_map(|fault| ["--inject", fault]));
    output(&args);
    Path::new(dump).join("manifest.json").exists()
}

fn healthy(folder: &Path, model: &'static str, numerics: &'static str) -> Healthy {
    let name = format!("{}-{}", Path::new(model).file_stem().unwrap().display(), numerics.replace(' ', "-"));
    let dump = folder.join(name);
    assert!(run(model, numerics, &dump, None), "{model} {numerics}");
    let path = dump.to_str().unwrap();
    let (code, text) = output(&["audit", path, "-m", model]);
    assert_eq!(code, 0, "{model} in {numerics} is healthy\n{text}");
    let (_, told) = answer(&["audit", path, "-m", model, "--self-test", "--format", "json"]);
    let mut unseen: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    // What was not recorded is judged as part of what reads it.
    for node in told["nodes"].as_array().unwrap().iter().filter(|node| node["undecided"].is_null()) {
        let names = node["unseen"].as_array().unwrap().iter();
        let names = names.map(|one| one["fault"].as_str().unwrap().split('=').next().unwrap().to_owned());
        unseen.insert(node["id"].as_str().unwrap().to_owned(), names.collect());
    }
    Healthy { model, numerics, dump, unseen }
}

/// Whether an answer says that a mistake of this size at `id` would not be seen: `… a mistake that moves ID by less than
/// 8e-3 would not be seen …`.
fn is_said_to_be_blind(answer: &str, id: &str, healthy: &Path, wrong: &Path) -> bool {
    let said =
        answer.lines().last().and_then(|line| line.split_once(&format!("that moves {id} by less than ")));
    let Some(limit) = said.and_then(|(_, rest)| rest.split_once(' ')?.0.parse::<f64>().ok()) else {
        return false;
    };
    let tensor = |file: &Vec<u8>| -> Vec<f64> {
        let file = SafeTensors::deserialize(file).unwrap();
        let four = file.tensor(id).unwrap();
        assert_eq!(four.dtype(), safetensors::Dtype::F32);
        four.data().chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect()
    };
    let [healthy, wrong] =
        [healthy, wrong].map(|dump| values(dump).iter().flat_map(tensor).collect::<Vec<f64>>());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let moved =
        norm(&mut healthy.iter().zip(&wrong).map(|(a, b)| a - b)) / norm(&mut healthy.iter().copied());
    moved < limit
}

/// Whether a dump declares what a fault does: values in f16 are no mistake of an engine that says it stores them so.
fn is_declared(fault: &str, numerics: &str) -> bool {
    fault == "data.f16_rounded" && numerics.contains("storage=f16")
}

/// The step files of a dump.
fn values(dump: &Path) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dump).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    files.sort();
    files.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

#[test]
fn what_passes_does_not_pass_with_a_mistake() {
    let otherwise = sample("mistakes", SAMPLE, 0..PROPERTIES).len();
    let count = std::env::var("PROPERTIES").map_or(otherwise, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<Healthy> = RUNS
        .iter()
        .flat_map(|(model, arithmetics)| arithmetics.iter().map(|numerics| (*model, *numerics)))
        .map(|(model, numerics)| healthy(folder.path(), model, numerics))
        .collect();
    let faults: Vec<&str> = entries().filter(|entry| !entry.recognised).map(|entry| entry.name).collect();
    let (next, injected) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let mut passed = Vec::new();
        while injected.load(Ordering::Relaxed) < count {
            let number = next.fetch_add(1, Ordering::Relaxed) as u64;
            let draw = |of: usize, salt: u64| {
                (mixed((3 * number + salt + 1).wrapping_mul(GAMMA)) % of as u64) as usize
            };
            // Each arithmetic in turn.
            let run_of = &all[number as usize % all.len()];
            let (id, unseen) = run_of.unseen.iter().nth(draw(run_of.unseen.len(), 0)).unwrap();
            let fault = faults[draw(faults.len(), 1)];
            if unseen.contains(fault) || is_declared(fault, run_of.numerics) {
                continue;
            }
            let (dump, spec) = (folder.path().join(format!("wrong-{number}")), format!("{fault}@{id}"));
            // A mistake that has no place in this node is refused.
            if run(run_of.model, run_of.numerics, &dump, Some(&spec)) {
                if values(&dump) != values(&run_of.dump) {
                    injected.fetch_add(1, Ordering::Relaxed);
                    let (code, answer) = output(&["audit", dump.to_str().unwrap(), "-m", run_of.model]);
                    if code == 0 && !is_said_to_be_blind(&answer, id, &run_of.dump, &dump) {
                        passed.push(format!("{} {} {spec}", run_of.model, run_of.numerics));
                    }
                }
                std::fs::remove_dir_all(&dump).unwrap();
            }
        }
        passed
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let passed: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    println!("{} mistakes, {} specifications", injected.into_inner(), next.into_inner());
    assert!(passed.is_empty(), "{} passed:\n{}", passed.len(), passed.join("\n"));
}
