//! The engine on a GPU: asking changes no value, comparisons there have the host's numbers, isolation inherits
//! nothing, `auto` takes it, and what does not fit is said. Skipped where there is no GPU.
#![cfg(feature = "cuda")]

mod cards;
#[path = "../support/cxx.rs"]
mod cxx;
mod emulated;
mod held;
mod multiplier;
#[path = "../support/samples.rs"]
mod samples;

use std::path::{Path, PathBuf};

use emulated::{arithmetics, is_emulated};
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::cuda::{CudaEngine, count, supported};
use parity::engine::device::Device;
use parity::engine::fused::Model;
use parity::engine::fused::file::ModelFile;
use parity::engine::fused::graph::Op;
use parity::engine::{Batch, Engine, Probe, Values};
use parity::error::Result;
use parity::jobs::run::{RunOptions, run};
use parity::report::{CheckpointVerdict, Report, Verdict};
use parity::select::Selection;

const NUMERICS: [&str; 3] = ["f32", "f32 kv=f16", "f16"];

/// The repository, also where a built test runs elsewhere.
fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or(PathBuf::from("."), PathBuf::from)
}

fn tiny() -> Model {
    Model::open(&path()).unwrap()
}

fn path() -> PathBuf {
    root().join("reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf")
}

/// Whether there is a GPU; said where not, and an error where `PARITY_REQUIRE_GPU=1`.
fn has_gpu() -> bool {
    if count() == 0 {
        assert!(std::env::var_os("PARITY_REQUIRE_GPU").is_none_or(|value| value != "1"), "no GPU");
        eprintln!("SKIP: no GPU");
    }
    count() > 0
}

/// An engine on the first GPU with an arithmetic that it supports.
fn engine<'m>(model: &'m Model, numerics: &str) -> CudaEngine<'m> {
    let numerics = supported(numerics.parse().unwrap()).unwrap();
    CudaEngine::new(&model.gguf, model.graph.clone(), 0, numerics).unwrap()
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7919 % 3000 + 100).collect()
}

/// Wants nothing, everything but the attention matrices, or everything.
#[derive(Clone, Copy, PartialEq)]
enum Asks {
    Nothing,
    Values,
    Everything,
}

impl Probe for Asks {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        match self {
            Asks::Nothing => false,
            Asks::Values => !checkpoint.kind().is_optional(),
            Asks::Everything => true,
        }
    }

    fn record(&mut self, _: Checkpoint, _: &Batch<'_>, shape: &[usize], values: Values<'_>) -> Result<()> {
        let len = match values {
            Values::F32(values) => values.len(),
            Values::F16(values) => values.len(),
            Values::F64(values) => values.len(),
        };
        assert_eq!(len, shape.iter().product::<usize>());
        Ok(())
    }
}

#[test]
fn asking_changes_nothing() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    for numerics in NUMERICS {
        let mut engine = engine(&model, numerics);
        let tokens = tokens(90);
        // Prefill, short steps, decode steps: launched one by one, then as one graph.
        let bits = [Asks::Nothing, Asks::Values, Asks::Everything, Asks::Nothing].map(|mut asks| {
            engine.reset();
            let mut bits = Vec::new();
            for step in [0..70, 70..71, 71..72, 72..73, 73..78, 78..79, 79..90] {
                let batch = Batch { tokens: &tokens[step.clone()], first: step.start };
                let logits = engine.step(&batch, &mut asks).unwrap().unwrap();
                bits.extend(logits.into_iter().map(f32::to_bits));
            }
            bits
        });
        assert!(
            bits.iter().all(|other| *other == bits[0]),
            "{numerics}: other logits where values are asked for"
        );
    }
}

/// What a probe was shown: checkpoint, positions, tokens and bits.
#[derive(Default, PartialEq, Debug)]
struct Seen {
    /// Of this kind alone, if there is one.
    only: Option<Kind>,
    values: Vec<(Checkpoint, usize, Vec<u32>, Vec<u32>)>,
}

impl Probe for Seen {
    fn wants(&self, checkpoint: Checkpoint) -> bool {
        self.only.map_or(!checkpoint.kind().is_optional(), |kind| checkpoint.kind() == kind)
    }

    fn record(&mut self, c: Checkpoint, batch: &Batch<'_>, _: &[usize], values: Values<'_>) -> Result<()> {
        let bits = match values {
            Values::F32(values) => values.iter().map(|v| v.to_bits()).collect(),
            Values::F16(values) => values.iter().map(|v| u32::from(v.to_bits())).collect(),
            Values::F64(_) => unreachable!("the GPU computes in f32"),
        };
        self.values.push((c, batch.first, batch.tokens.to_vec(), bits));
        Ok(())
    }
}

/// Tokens that the GPU chooses itself are those that the host would choose, and every value has the same bits.
#[test]
fn the_gpu_chooses_the_tokens() {
    if !has_gpu() {
        return;
    }
    let rounds = if is_emulated() { 5 } else { 9 };
    let (model, steps) = (tiny(), samples::sample("decode steps", 3, 0..rounds).len());
    for &numerics in arithmetics() {
        let mut engine = engine(&model, numerics);
        let prompt = tokens(6);
        engine.step(&Batch { tokens: &prompt, first: 0 }, &mut Asks::Nothing).unwrap();
        let (mut token, mut expected, mut by_host) = (prompt[0], Vec::new(), Seen::default());
        for step in 0..steps {
            let batch = Batch { tokens: &[token], first: prompt.len() + step };
            let logits = engine.step(&batch, &mut by_host).unwrap().unwrap();
            token = parity::compare::argmax(&logits).unwrap();
            expected.push(token);
        }
        engine.reset();
        engine.step(&Batch { tokens: &prompt, first: 0 }, &mut Asks::Nothing).unwrap();
        let mut by_gpu = Seen::default();
        assert_eq!(engine.greedy(prompt[0], steps, &mut by_gpu).unwrap(), expected, "{numerics}");
        by_host.values.sort_by_key(|seen| (seen.1, seen.0.to_string()));
        by_gpu.values.sort_by_key(|seen| (seen.1, seen.0.to_string()));
        assert!(by_host == by_gpu, "{numerics}: every value of every step");
        // Fewer values, in the memory that those had.
        engine.reset();
        engine.step(&Batch { tokens: &prompt, first: 0 }, &mut Asks::Nothing).unwrap();
        let mut fewer = Seen { only: Some(Kind::FfnUp), ..Seen::default() };
        assert_eq!(engine.greedy(prompt[0], steps, &mut fewer).unwrap(), expected, "{numerics}, fewer");
        fewer.values.sort_by_key(|seen| (seen.1, seen.0.to_string()));
        by_host.values.retain(|seen| seen.0.kind() == Kind::FfnUp);
        assert!(by_host.values == fewer.values && !fewer.values.is_empty(), "{numerics}, fewer");
        engine.reset();
        engine.step(&Batch { tokens: &prompt, first: 0 }, &mut Asks::Nothing).unwrap();
        assert_eq!(
            engine.greedy(prompt[0], steps, &mut Asks::Nothing).unwrap(),
            expected,
            "{numerics}, unseen"
        );
    }
}

fn judged(options: &RunOptions) -> Report {
    run(&ModelFile::open(&path()).unwrap(), options, &|_, _| ()).unwrap()
}

#[test]
fn a_run_on_the_gpu_is_at_parity_with_the_cpus_and_says_the_same_twice() {
    if !has_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference");
    let of_cpu = RunOptions {
        tokens: tokens(80),
        dump: Some(reference.clone()),
        device: Device::Cpu,
        ..RunOptions::default()
    };
    judged(&of_cpu);
    for numerics in NUMERICS {
        let options = RunOptions {
            reference: Some(reference.clone()),
            device: Device::Cuda(vec![0]),
            numerics: numerics.parse().unwrap(),
            audit: Some(Default::default()),
            ..RunOptions::default()
        };
        let (first, again) = (judged(&options), judged(&options));
        assert_eq!(first.verdict, Verdict::Parity, "{numerics}");
        assert_eq!(first.coverage, again.coverage);
        assert_eq!(first.checkpoints, again.checkpoints);
    }
}

fn isolated(options: &RunOptions) -> Report {
    judged(&RunOptions { isolated: true, ..options.clone() })
}

/// The CPU's values of a prompt and three decode steps, attention matrices included, in a folder.
fn of_cpu(folder: &Path) -> RunOptions {
    let options = RunOptions {
        tokens: tokens(40),
        n_predict: Some(3),
        dump: Some(folder.to_owned()),
        device: Device::Cpu,
        selection: Selection::new(None, &["*".to_owned()]).unwrap(),
        ..RunOptions::default()
    };
    judged(&options);
    RunOptions {
        reference: Some(folder.to_owned()),
        device: Device::Cuda(vec![0]),
        audit: Some(Default::default()),
        ..RunOptions::default()
    }
}

#[test]
fn in_isolation_nothing_is_inherited_on_the_gpu() {
    if !has_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let on_gpu = of_cpu(&folder.path().join("reference"));
    // The first is computed by the host, the second by a kernel on other angles.
    for (fault, wrong) in
        [("ffn.gelu@0", vec!["blk.0.ffn_act"]), ("rope.base=10000@blk.0.k_rope", vec!["blk.0.k_rope"])]
    {
        for numerics in NUMERICS {
            let options = RunOptions { numerics: numerics.parse().unwrap(), ..on_gpu.clone() };
            let mistaken = RunOptions { inject: vec![fault.parse().unwrap()], ..options.clone() };
            let healthy = isolated(&options);
            let origins = &healthy.origins;
            assert_eq!(healthy.verdict, Verdict::Parity, "{numerics}: {origins:?} {:?}", healthy.reason);
            let injected = isolated(&mistaken);
            let ids = |ids: &[Checkpoint]| -> Vec<String> { ids.iter().map(ToString::to_string).collect() };
            assert_eq!(ids(&injected.origins), wrong, "{fault} in {numerics}");
            for (a, b) in injected.checkpoints.iter().zip(&healthy.checkpoints) {
                if injected.origins.contains(&a.id) {
                    continue;
                }
                assert_eq!(a.verdict, CheckpointVerdict::Match, "{} after {fault} in {numerics}", a.id);
                let (a_numbers, b_numbers) = (a.numbers.as_ref().unwrap(), b.numbers.as_ref().unwrap());
                assert_eq!(a_numbers.rel_l2, b_numbers.rel_l2, "{} inherits {fault} in {numerics}", a.id);
                assert_eq!(a_numbers.abs_err_max, b_numbers.abs_err_max, "{}", a.id);
            }
            // Without it, what comes after inherits.
            let whole = judged(&mistaken);
            assert!(whole.checkpoints.iter().any(|entry| entry.verdict == CheckpointVerdict::Inherited));
        }
    }
}

/// A sum of two given numbers has one result in f32; a product has one on each device, and what rounding explains
/// lies between them.
#[test]
fn an_isolated_gpu_computes_what_the_isolated_cpu_does() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let folder = tempfile::tempdir().unwrap();
    let on_gpu = of_cpu(&folder.path().join("reference"));
    let on_cpu = RunOptions { device: Device::Cpu, ..on_gpu.clone() };
    let own = isolated(&on_cpu);
    assert!(own.checkpoints.iter().all(|entry| entry.numbers.as_ref().unwrap().abs_err_max == 0.0));
    let theirs = isolated(&on_gpu);
    let mut sums = 0;
    for entry in &theirs.checkpoints {
        let numbers = entry.numbers.as_ref().unwrap();
        let node = model.graph.node(entry.id).unwrap();
        if matches!(node.op, Op::Bias { .. } | Op::Add { .. }) {
            assert_eq!(numbers.abs_err_max, 0.0, "{}", entry.id);
            sums += 1;
        }
    }
    assert!(sums > 0 && theirs.verdict == Verdict::Parity);
    // The inside of attention is fed too, where it is looked at.
    let inside = RunOptions { selection: Selection::new(None, &["*".to_owned()]).unwrap(), ..on_gpu };
    let inside = isolated(&inside);
    assert_eq!(inside.verdict, Verdict::Parity);
    assert!(inside.checkpoints.iter().any(|entry| entry.id.kind() == Kind::AttnProbs));
    assert!(inside.notes.iter().any(|note| note.contains("the host computed")), "{:?}", inside.notes);
}

#[test]
fn auto_takes_the_gpu() {
    if !has_gpu() {
        return;
    }
    let report = judged(&RunOptions { tokens: tokens(5), ..RunOptions::default() });
    assert_eq!(report.candidate.producer.backend.as_deref(), Some("cuda"));
    assert!(report.candidate.producer.device.is_some_and(|device| !device.is_empty()));
}

/// Terabytes of values: no GPU has them.
#[test]
fn what_does_not_fit_is_said() {
    if !has_gpu() {
        return;
    }
    let model = tiny();
    let numerics = Default::default();
    let numerics = supported(numerics).unwrap();
    let mut engine = CudaEngine::new(&model.gguf, model.graph.clone(), 0, numerics).unwrap();
    let tokens = vec![1; 16 << 20];
    let error = engine.step(&Batch { tokens: &tokens, first: 0 }, &mut Asks::Values).unwrap_err().to_string();
    assert!(error.contains("out of memory for the") && error.contains("MiB free"), "{error}");
    // The engine goes on with what fits.
    let batch = Batch { tokens: &tokens[..5], first: 0 };
    assert!(engine.step(&batch, &mut Asks::Values).unwrap().is_some());
}
