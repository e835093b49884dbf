//! Dumps of other weights than the file's, and of rows in another order: one answer each, and none of a single bug.

use std::path::{Path, PathBuf};
use std::process::Command;

use parity::checkpoint::Kind;
use parity::gguf::{DType, Gguf, Value};
use parity::numerics::Storage;
use parity_dump::{Dump, Producer, Writer};
use serde_json::Value as Json;
use tempfile::TempDir;

use crate::support::audited::run_of;
use crate::support::edited;
use crate::support::gguf_writer::GgufWriter;
use crate::support::program;
use crate::support::runs::Random;
use crate::support::samples::sample;
use crate::support::tiny_model;
use crate::support::tiny_model::{HEAD_WIDTH, VOCAB, change, tiny_qwen2};

const PROMPT: usize = 20;
const DECODED: &str = "4";
/// Words of the shipped model.
const VOCAB_TINY: usize = 4096;
const SAID: &str = "these are not this file's weights";

/// What our own engine computes of a prompt and some decode steps.
fn kept(model: &Path, vocab: usize, seed: u64, how: &[&str]) -> (TempDir, PathBuf) {
    let tokens = Random(seed).tokens(PROMPT, vocab);
    let (folder, path) = run_of(model.to_str().unwrap(), &tokens, &[&["-n", DECODED], how].concat());
    assert!(path.join("manifest.json").exists(), "{how:?}");
    (folder, path)
}

/// Writes what was kept as a foreign engine would: nothing is declared, rows of heads may be in halves.
fn write(kept: &Path, folder: &Path, halves: bool) {
    let kept = Dump::open(kept).unwrap();
    let producer = Producer { name: "engine".into(), ..Producer::default() };
    let mut writer = Writer::create(folder, producer, Default::default()).unwrap();
    for (number, step) in kept.manifest().steps.iter().enumerate() {
        let tokens: Vec<u32> = step.positions.iter().map(|p| kept.tokens()[*p as usize]).collect();
        writer.begin_step(&tokens, &step.positions, kept.checkpoints().count()).unwrap();
        for checkpoint in kept.checkpoints() {
            let (shape, _, mut values) = kept.in_step(number, checkpoint).unwrap();
            let kinds = [Kind::QProj, Kind::KProj, Kind::Q, Kind::K, Kind::QRope, Kind::KRope];
            if halves && kinds.contains(&checkpoint.kind()) {
                for head in values.chunks_exact_mut(HEAD_WIDTH) {
                    let pairs = head.to_vec();
                    let from = |at: usize| pairs[at % (HEAD_WIDTH / 2) * 2 + at / (HEAD_WIDTH / 2)];
                    head.iter_mut().enumerate().for_each(|(at, value)| *value = from(at));
                }
            }
            writer.tensor_f32(checkpoint, &shape, &values).unwrap();
        }
        writer.end_step().unwrap();
    }
    writer.finish().unwrap();
}

/// Exit code and report of an audit.
fn audit(kept: &Path, halves: bool, model: &Path) -> (i32, Json) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    write(kept, &dump, halves);
    let audited = program::audit(&dump, model, &[]);
    (audited.code, audited.report)
}

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf")
}

/// A copy of the shipped model in which `spoil` changes matrices: name, columns, values.
fn other(folder: &Path, spoil: impl Fn(&str, usize, &mut [f32])) -> PathBuf {
    let gguf = Gguf::open(&tiny()).unwrap();
    let mut bytes = std::fs::read(tiny()).unwrap();
    for info in gguf.tensors() {
        let mut values: Vec<f32> = gguf.tensor(&info.name).unwrap().decode();
        spoil(&info.name, info.cols(), &mut values);
        let stored: Vec<u8> = match info.dtype {
            DType::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
            DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            dtype => panic!("{dtype}"),
        };
        bytes[info.offset..info.offset + info.byte_len].copy_from_slice(&stored);
    }
    let path = folder.join("other.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The same in a file whose matrices are of f32.
fn wide(folder: &Path, spoil: impl Fn(&str, usize, &mut [f32])) -> PathBuf {
    let gguf = Gguf::open(&tiny()).unwrap();
    let mut out = GgufWriter::new();
    out.metadata.extend(gguf.metadata().iter().map(|(key, value)| (key.clone(), value.clone())));
    for info in gguf.tensors() {
        let mut values: Vec<f32> = gguf.tensor(&info.name).unwrap().decode();
        spoil(&info.name, info.cols(), &mut values);
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        out.tensors.push((info.name.clone(), DType::F32, info.shape.clone(), bytes));
    }
    let path = folder.join("wide.gguf");
    std::fs::write(&path, out.bytes()).unwrap();
    path
}

fn is_product(name: &str) -> bool {
    name.starts_with("blk.") && name.ends_with(".weight") && !name.contains("norm")
}

#[track_caller]
fn says(spoil: impl Fn(&str, usize, &mut [f32]), parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let model = other(folder.path(), spoil);
    let (_folder, dump) = kept(&model, VOCAB_TINY, 11, &[]);
    let (code, report) = audit(&dump, false, &tiny());
    let reason = report["reason"].as_str().unwrap_or_default();
    assert_eq!(code, 1);
    for part in parts {
        assert!(reason.contains(part), "{reason:?} has not {part:?}; {:?}", report["first_divergence"]);
    }
    assert_eq!(
        (&report["first_divergence"], report["origins"].as_array().map(Vec::len)),
        (&Json::Null, Some(0))
    );
}

#[test]
fn another_models_weights_are_one_answer() {
    // The same numbers in another order: as large, and nobody's.
    says(
        |_, _, values| values.reverse(),
        &[SAID, "29 of 29 weight matmuls differ", "embed and the norms too"],
    );
}

fn in_int8(name: &str, cols: usize, values: &mut [f32]) {
    if is_product(name) {
        for row in values.chunks_exact_mut(cols) {
            let step = row.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
            row.iter_mut().for_each(|x| *x = (*x / step).round() * step);
        }
    }
}

#[test]
fn weights_in_int8_are_one_answer() {
    // The output matrix is the table of embeddings: most is enough.
    says(in_int8, &[SAID, "as it stores them", "28 of 29", "in no direction more than in another", "int8"]);
}

/// Of modules alone a coarser arithmetic would explain what lies behind activations, attention and biases: what hides such errors
/// says nothing of them.
#[test]
fn weights_in_int8_are_one_answer_of_modules_too() {
    let folder = tempfile::tempdir().unwrap();
    let (_folder, dump) = kept(&other(folder.path(), in_int8), VOCAB_TINY, 11, &[]);
    let into = folder.path().join("dump");
    write(&dump, &into, false);
    let unseen = ["q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "attn_ctx", "ffn_act", "attn_residual"];
    for step in Dump::open(&into).unwrap().manifest().steps.iter() {
        edited::keep(&into.join(&step.file), |name| !unseen.iter().any(|kind| name.ends_with(kind)));
    }
    let audited = program::audit(&into, &tiny(), &["--allow-missing"]);
    let reason = audited.reason();
    assert!(audited.code == 1 && reason.contains("as it stores them"), "{reason}");
}

#[test]
fn an_adapter_in_the_weights_is_one_answer() {
    const RANK: usize = 3;
    let adapter = |name: &str, cols: usize, values: &mut [f32]| {
        if is_product(name) {
            let size = (values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32).sqrt();
            let mut random = Random(name.len() as u64 + cols as u64);
            let mut number = || random.below(2001) as f32 / 1000.0 - 1.0;
            let rows = values.len() / cols;
            for _ in 0..RANK {
                let (a, b): (Vec<f32>, Vec<f32>) =
                    ((0..rows).map(|_| number()).collect(), (0..cols).map(|_| number()).collect());
                for (row, a) in values.chunks_exact_mut(cols).zip(&a) {
                    row.iter_mut().zip(&b).for_each(|(x, b)| *x += 0.1 * size * a * b);
                }
            }
        }
    };
    says(adapter, &[SAID, "as it stores them", "28 of 29", "of rank", "LoRA"]);
}

#[test]
fn a_loader_that_rounds_shows_in_those_matrices_alone_that_an_adapter_was_merged_into() {
    let folder = tempfile::tempdir().unwrap();
    let merged = |name: &str, _: usize, values: &mut [f32]| {
        if name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight") {
            values.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + 1e-3 * (i % 7) as f32);
        }
    };
    let (loaded, filed) = (other(folder.path(), merged), wide(folder.path(), merged));
    for (mistake, wanted) in
        [(&[][..], (0, "null")), (&["--inject", "data.scaled=1.01@blk.1.ffn_out"], (1, "\"blk.1.ffn_out\""))]
    {
        let (_kept, dump) = kept(&loaded, VOCAB_TINY, 15, &[&["--numerics", "f32"], mistake].concat());
        let (code, report) = audit(&dump, false, &filed);
        let first = report["first_divergence"]["checkpoint"].to_string();
        assert_eq!((code, &first[..]), wanted, "{}", report["reason"]);
        assert!(
            report["notes"].to_string().contains("those of the file rounded to f16"),
            "{}",
            report["notes"]
        );
    }
}

/// What a loader rounds shows in no vector of its own where logits or layer outputs alone were recorded.
#[test]
fn a_loader_that_rounds_is_told_from_what_lies_behind_it_alone() {
    let folder = tempfile::tempdir().unwrap();
    for (storage, all, keeps, mistakes) in [
        (Storage::F16, false, "logits", &[&[][..], &["--inject", "norm.eps=1e-5"]][..]),
        (Storage::Bf16, true, "layer_out", &[&[]]),
    ] {
        let rounded = |_: &str, cols: usize, values: &mut [f32]| {
            if all || cols == values.len() {
                storage.store(values);
            }
        };
        let loaded = other(folder.path(), rounded);
        for &mistake in mistakes {
            let (_kept, run) = kept(&loaded, VOCAB_TINY, 15, &[&["--numerics", "f32"], mistake].concat());
            let dump = tempfile::tempdir().unwrap();
            let dump = dump.path().join("dump");
            write(&run, &dump, false);
            for step in std::fs::read_dir(&dump).unwrap().map(|file| file.unwrap().path()) {
                if step.extension().is_some_and(|kind| kind == "safetensors") {
                    edited::keep(&step, |name| name.ends_with(keeps));
                }
            }
            let audited = program::audit(&dump, &tiny(), &["--allow-missing"]);
            let told = audited.report["notes"].to_string().contains("those of the file rounded to");
            let (told, reason) = ((audited.code == 0, told), &audited.report["reason"]);
            let wanted = (mistake.is_empty(), mistake.is_empty());
            assert_eq!(told, wanted, "{storage:?} {keeps} {mistake:?}: {reason}");
        }
    }
}

#[test]
fn a_single_bug_is_never_taken_for_other_weights() {
    let bugs = [
        "linear.transposed",
        "linear.wrong_layer",
        "linear.no_bias",
        "linear.bf16_input@0..3",
        "norm.no_weight",
        "norm.wrong_layer",
        "embed.row_shift",
        "rope.base",
        "attn.no_scale",
        "ffn.gelu",
        "data.scaled=1.01@blk.1.ffn_out",
        "residual.twice",
        "logits.untied",
    ];
    for spec in sample("mistakes", 4, bugs) {
        let (_folder, dump) = kept(&tiny(), VOCAB_TINY, 12, &["--inject", spec]);
        let (code, report) = audit(&dump, false, &tiny());
        // All layers alike is an arithmetic, and told as one.
        let is_arithmetic = spec == "linear.bf16_input@0..3";
        let notes = report["notes"].to_string();
        assert_eq!(code, i32::from(!is_arithmetic), "{spec}: {notes}");
        assert!(!is_arithmetic || notes.contains("matmuls with activations in bf16"), "{spec}: {notes}");
        assert!(
            !report["reason"].as_str().unwrap_or_default().contains(SAID),
            "{spec}: {}",
            report["reason"]
        );
        assert_eq!(report["first_divergence"]["checkpoint"].is_string(), !is_arithmetic, "{spec}");
    }
}

/// A llama model in a file.
fn llama(folder: &Path) -> PathBuf {
    let mut file: GgufWriter = tiny_qwen2();
    for (key, value) in &mut file.metadata {
        *key = key.replace("qwen2.", "llama.");
        if key == "general.architecture" {
            *value = Value::String("llama".into());
        }
    }
    file.tensors.retain(|(name, ..)| !name.ends_with(".bias"));
    // Scores of some size, so that attention is no mean of all rows.
    for layer in 0..tiny_model::LAYERS {
        change(&mut file, &format!("blk.{layer}.attn_q.weight"), |_, w| 8.0 * w);
    }
    let path = folder.join("llama.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

#[test]
fn rows_in_hugging_faces_order_are_no_bug_and_hide_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = llama(folder.path());
    let kept = |how: &[&str]| kept(&path, VOCAB, 13, how);
    let noted = |report: &Json| {
        let notes = report["notes"].as_array().cloned().unwrap_or_default();
        notes.iter().any(|note| {
            note.as_str().unwrap_or_default().contains("Hugging Face order: compared after reordering")
        })
    };
    let (_healthy, healthy) = kept(&[]);
    for halves in [false, true] {
        let (code, report) = audit(&healthy, halves, &path);
        assert_eq!((code, noted(&report)), (0, halves), "{}", report["reason"]);
    }
    // Beneath it: RoPE with another base, and turned in pairs as if the rows were the file's.
    for (spec, name) in [("rope.base=500000", "rope.base"), ("rope.interleaved=halves", "rope.interleaved")] {
        let (_faulty, faulty) = kept(&["--inject", spec]);
        let (code, report) = audit(&faulty, true, &path);
        let first = &report["first_divergence"];
        assert_eq!((code, noted(&report)), (1, true));
        assert_eq!(first["checkpoint"], "blk.0.q_rope", "{name}");
        assert_eq!(first["diagnosis"][0]["fault"], name, "{first}");
    }
    // Of one layer it is a bug: its weights are not permuted.
    let (_one, one) = kept(&["--inject", "linear.qk_permuted=-1@1"]);
    let (code, report) = audit(&one, false, &path);
    assert_eq!((code, noted(&report)), (1, false));
    assert_eq!(report["first_divergence"]["diagnosis"][0]["fault"], "linear.qk_permuted");
}

/// One file with the rows of all steps, whose metadata may say where they begin.
fn single(kept: &Path, path: &Path, steps: bool) {
    use safetensors::tensor::{Dtype, TensorView};
    let kept = Dump::open(kept).unwrap();
    let positions: Vec<u32> = (0..kept.tokens().len() as u32).collect();
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for checkpoint in kept.checkpoints() {
        let mut shape = vec![positions.len()];
        shape.extend(kept.get(checkpoint).unwrap().row_shape());
        let values = bytes(&kept.gather(checkpoint, &positions).unwrap());
        tensors.push((checkpoint.to_string(), Dtype::F32, shape, values));
    }
    let tokens: Vec<u8> = kept.tokens().iter().flat_map(|token| token.to_le_bytes()).collect();
    tensors.push(("tokens".into(), Dtype::U32, vec![positions.len()], tokens));
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let counts: Vec<usize> = kept.manifest().steps.iter().map(|step| step.positions.len()).collect();
    let metadata = steps.then(|| [("steps".to_owned(), format!("{counts:?}"))].into_iter().collect());
    std::fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

#[test]
fn mistakes_of_decoding_are_named_in_a_single_file_that_says_its_steps() {
    let folder = tempfile::tempdir().unwrap();
    for (spec, place, name) in [
        ("attn.stale_cache=unread@1", "blk.1.attn_ctx", "attn.stale_cache"),
        ("attn.self_only@2", "blk.2.attn_ctx", "attn.self_only"),
        ("rope.position_in_step@1", "blk.1.q_rope", "rope.position_in_step"),
    ] {
        let (_kept, kept) = kept(&tiny(), VOCAB_TINY, 14, &["--inject", spec]);
        for steps in [true, false] {
            let path = folder.path().join("one.safetensors");
            single(&kept, &path, steps);
            let mut command = Command::new(env!("CARGO_BIN_EXE_parity"));
            let output =
                command.arg("audit").arg(&path).arg("-m").arg(tiny()).args(["--format", "json"]).output();
            let report: Json = serde_json::from_slice(&output.unwrap().stdout).unwrap();
            let first = &report["first_divergence"];
            assert_eq!(first["checkpoint"], place, "{spec}");
            assert_eq!(first["diagnosis"][0]["fault"] == name, steps, "{spec}, steps {steps}: {first}");
        }
    }
}
