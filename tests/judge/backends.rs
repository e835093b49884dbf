//! Recordings of llama.cpp on an H200 (CUDA), on llvmpipe (Vulkan) and on an emulated ARM, judged without any: healthy as they are, and
//! wrong where a value is spoiled.

use std::fs;
use std::path::{Path, PathBuf};

use parity_dump::Dump;

use crate::support::program;
use crate::support::samples::sample;

/// What a mistake in a product has to exceed to be seen, as a share of its values: a hundredth of what others have to
/// tolerate in these arithmetics (2e-3 to 2e-2).
const SEEN: f64 = 1e-4;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/backends").join(name)
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models").join(name)
}

/// Products that cuBLAS sums up in f16 are followed as intervals, which may be as wide as half a step of f16.
const HALF_STEP: f64 = 1.0 / 2048.0;

/// Dump, model, and what its answer says of it.
fn recordings() -> [(PathBuf, PathBuf, &'static [&'static str]); 3] {
    let q4 = || shipped("qwen2-tiny-py-Q4_K_M.gguf");
    [
        (data("cuda-Q4_K_M"), q4(), &["matmuls with Q8_1 activations, f32 sums"]),
        (
            data("cuda-F16"),
            data("random-64-8-2.gguf"),
            &[
                "matmuls with f16 operands, f16 sums",
                "attention with f16 queries, weights and sums",
                "attention in f32",
            ],
        ),
        (
            data("vulkan-Q4_K_M"),
            q4(),
            &[
                "matmuls with f16 operands, f16 sums",
                "matmuls in f32",
                "attention with f16 queries, weights and sums",
            ],
        ),
    ]
}

fn audit(dump: &Path, model: &Path) -> (i32, serde_json::Value) {
    let audited = program::audit(dump, model, &["--layer", "0", "--allow-missing"]);
    (audited.code, audited.report)
}

#[test]
fn an_answer_says_what_nobody_tested() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (data("cuda-F16"), folder.path().join("dump"));
    fs::create_dir(&to).unwrap();
    for (name, code) in [("ROCm", 0), ("SYCL", 2)] {
        for entry in fs::read_dir(&from).unwrap().map(Result::unwrap) {
            let bytes = fs::read(entry.path()).unwrap();
            let is_graph = entry.path().extension().is_some_and(|ending| ending == "txt");
            let bytes = match is_graph {
                true => String::from_utf8(bytes).unwrap().replace("CUDA", name).into_bytes(),
                false => bytes,
            };
            fs::write(to.join(entry.file_name()), bytes).unwrap();
        }
        let (found, report) = audit(&to, &data("random-64-8-2.gguf"));
        assert_eq!(found, code, "{name}: {}", report["origins"]);
        let notes = report["notes"].to_string();
        assert!(notes.contains(&format!("was computed on {name}, and judged by")), "{notes}");
        assert!(notes.contains("not tested"), "{notes}");
    }
    let (_, report) = audit(&from, &data("random-64-8-2.gguf"));
    assert!(!report["notes"].to_string().contains("not tested"), "{}", report["notes"]);
}

#[test]
fn devices_are_followed_to_f32_rounding() {
    for (dump, model, says) in recordings() {
        let (code, report) = audit(&dump, &model);
        assert_eq!(code, 0, "{}: {}", dump.display(), report["origins"]);
        let notes = report["notes"].to_string();
        says.iter().for_each(|words| assert!(notes.contains(words), "{}: {notes}", dump.display()));
        let mut products = 0;
        for entry in report["checkpoints"].as_array().unwrap() {
            let id = entry["id"].as_str().unwrap();
            let local = &entry["local"]["candidate"];
            let product = id.ends_with("_proj") || id.ends_with("ffn_up") || id.ends_with("ffn_out");
            if !product || local.is_null() {
                continue;
            }
            products += 1;
            let bound = local["bound_rel_l2"].as_f64().unwrap();
            let limit = if dump.ends_with("cuda-F16") { HALF_STEP } else { SEEN };
            assert!(bound < limit, "{} {id}: blind below {bound:e}", dump.display());
        }
        assert!(products >= 3, "{}: {products} products", dump.display());
    }
}

/// Copies a dump with one value of a checkpoint of a step moved by a share of the rows' norm.
fn spoiled(dump: &Path, into: &Path, (step, id): (usize, &str), share: f64) {
    fs::create_dir_all(into).unwrap();
    for file in fs::read_dir(dump).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), into.join(file.file_name())).unwrap();
    }
    let step = Dump::open(dump).unwrap().manifest().steps[step].file.clone();
    let mut bytes = fs::read(dump.join(&step)).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let offsets = &header[id]["data_offsets"];
    let at = |i: usize| 8 + size + offsets[i].as_u64().unwrap() as usize;
    let values = bytes[at(0)..at(1)].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    let norm = values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    // In the middle, so that it is in no corner.
    let place = at(0) + (at(1) - at(0)) / 8 * 4;
    let old = f32::from_le_bytes(bytes[place..place + 4].try_into().unwrap());
    bytes[place..place + 4].copy_from_slice(&(old + (share * norm) as f32).to_le_bytes());
    fs::write(into.join(&step), bytes).unwrap();
}

#[test]
fn a_spoiled_value_is_found_at_its_node() {
    let folder = tempfile::tempdir().unwrap();
    for (dump, model, _) in recordings() {
        for id in sample("nodes", 1, ["blk.0.attn_ctx", "blk.0.q_proj", "blk.0.v_proj"]) {
            let name = format!("{}-{id}", dump.file_name().unwrap().to_string_lossy());
            let into = folder.path().join(name);
            spoiled(&dump, &into, (0, id), SEEN);
            let (code, report) = audit(&into, &model);
            // What reads it was computed from other values than were recorded, and is accused as well, which is right.
            let origins = report["origins"].to_string();
            assert!(code == 1 && origins.contains(id), "{id} of {}: {origins}", dump.display());
        }
    }
}

/// What ARM's attention has to exceed to be seen: all of it is in f16.
const SEEN_IN_F16: f64 = 0.2;

/// ARM multiplies and adds in f16, which no other CPU of llama.cpp's does: on one of these it would be wrong.
#[test]
fn attention_of_arm_is_in_f16() {
    let (dump, model) = (data("arm-Q4_K_M"), shipped("qwen2-tiny-py-Q4_K_M.gguf"));
    let (code, report) = audit(&dump, &model);
    assert_eq!(code, 0, "{}", report["origins"]);
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("spoiled");
    spoiled(&dump, &into, (0, "blk.0.attn_ctx"), SEEN_IN_F16);
    let (code, report) = audit(&into, &model);
    assert!(code == 1 && report["origins"].to_string().contains("blk.0.attn_ctx"), "{}", report["origins"]);
    let other = folder.path().join("other");
    spoiled(&dump, &other, (0, "blk.0.attn_ctx"), 0.0);
    for entry in fs::read_dir(&other).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|ending| ending == "txt") {
            let text = fs::read_to_string(entry.path()).unwrap();
            assert!(text.contains("on=CPU-ARM"));
            fs::write(entry.path(), text.replace("CPU-ARM", "CPU")).unwrap();
        }
    }
    let (code, report) = audit(&other, &model);
    assert!(code == 1 && report["origins"].to_string().contains("blk.0.attn_ctx"), "{}", report["origins"]);
}

/// Takes the graphs out of a dump, and has it declare so much.
fn without_graphs(dump: &Path, words: Option<&str>) {
    let path = dump.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("graphs");
    manifest["producer"]["numerics"] = words.into();
    fs::write(path, manifest.to_string()).unwrap();
}

/// An H100 multiplies few rows by quantised weights with packed integer dot products, and many on matrix units.
#[test]
fn integer_dot_products_of_vulkan_are_followed() {
    let (dump, model) = (data("vulkan-h100-Q4_K_M"), shipped("qwen2-tiny-py-Q4_K_M.gguf"));
    let products = ["blk.1.attn_out", "blk.1.ffn_gate", "blk.1.ffn_up"];
    let chosen = products.iter().flat_map(|id| ["--checkpoint", id]).chain(["--allow-missing"]);
    let chosen: Vec<&str> = chosen.collect();
    let healthy = program::audit(&dump, &model, &chosen);
    assert_eq!(healthy.code, 0, "{}", healthy.report["origins"]);
    let notes = healthy.report["notes"].to_string();
    assert!(notes.contains("matmuls with Q8_1 activations, f32 sums (3 nodes"), "{notes}");
    let folder = tempfile::tempdir().unwrap();
    for id in products {
        // In the last step, of one row.
        let into = folder.path().join(id);
        spoiled(&dump, &into, (4, id), SEEN);
        let found = program::audit(&into, &model, &chosen);
        let origins = found.report["origins"].to_string();
        assert!(found.code == 1 && origins.contains(id), "{id}: {origins}");
    }
}

/// What a dump leaves out, or leaves to a default, is known by its values.
#[test]
fn without_a_graph_attention_is_known_by_its_values() {
    let folder = tempfile::tempdir().unwrap();
    for (dump, model, _) in recordings() {
        let name = dump.file_name().unwrap().to_str().unwrap();
        let bare = format!("llama-{}", name.split('-').next().unwrap());
        let whole = format!("{bare} kv=f16 flash=on");
        let healthy = [None, Some(&*bare), Some(&*whole)].map(|words| (words, 0.0, 0));
        for (number, (words, share, wanted)) in
            healthy.into_iter().chain([(Some(&*bare), SEEN, 1)]).enumerate()
        {
            let into = folder.path().join(format!("{name}-{number}"));
            spoiled(&dump, &into, (0, "blk.0.attn_ctx"), share);
            without_graphs(&into, words);
            let (code, report) = audit(&into, &model);
            let origins = report["origins"].to_string();
            assert_eq!(code, wanted, "{name}, {words:?}: {origins}, {}", report["reason"]);
            assert!(wanted == 0 || origins.contains("blk.0.attn_ctx"), "{name}, {words:?}: {origins}");
        }
    }
}

/// Another engine may declare a backend's arithmetic and sum as it likes: parity's own does on the CPU.
#[test]
fn an_engine_that_rounds_as_a_backend_need_not_have_its_kernels() {
    let (folder, model) = (tempfile::tempdir().unwrap(), shipped("qwen2-tiny-py-F16.gguf"));
    for (name, backend, more) in [
        ("cuda", "llama-cuda kv=f16 flash=on", None),
        ("vulkan", "llama-vulkan kv=f16 flash=on", None),
        ("wrong", "llama-cuda kv=f16 flash=on", Some("attn.scale=0.2@1")),
    ] {
        let dump = folder.path().join(name);
        let tokens: Vec<String> = (0..19).map(|i| (i * 37 % 250 + 1).to_string()).collect();
        let tokens = tokens.join(",");
        let flags = ["run", "--device", "cpu", "--no-audit", "-n", "3", "--tokens", &tokens];
        let mut run = program::parity(&flags);
        run.arg("-m").arg(&model).args(["--numerics", backend, "--dump"]).arg(&dump);
        run.args(more.into_iter().flat_map(|fault| ["--inject", fault])).output().unwrap();
        let audited = program::audit(&dump, &model, &["--allow-missing"]);
        let notes = audited.report["notes"].to_string();
        match more {
            None => assert_eq!((audited.code, &*audited.first), (0, ""), "{name}: {notes}"),
            Some(_) => assert_eq!((audited.code, &*audited.first), (1, "blk.1.attn_ctx"), "{name}: {notes}"),
        }
    }
}

/// A dump that says nothing of its cache: keys in q4_0, values in q8_0, which shows in attention alone; mistakes show beside
/// it. Where heads are rotated before they are quantised, so much lies between what was recorded that rounding might be all of it: what is
/// recorded is as near as f32 is all the same, and hides no more than that.
#[test]
fn without_a_graph_a_cache_in_blocks_is_known_by_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let (dump, model) = (data("cpu-cache-q4_0-q8_0"), shipped("qwen2-tiny-py-F16.gguf"));
    let judged = |name: &str, id: &str, share: f64| {
        let into = folder.path().join(name);
        spoiled(&dump, &into, (0, id), share);
        let audited = program::audit(&into, &model, &["--allow-missing"]);
        (audited.code, audited.first.clone(), audited.report["notes"].to_string())
    };
    let (code, _, notes) = judged("healthy", "blk.0.attn_ctx", 0.0);
    assert!(code == 0 && notes.contains("keys in q4_0, values in q8_0"), "{code}: {notes}");
    for id in ["blk.0.attn_ctx", "blk.0.v"] {
        let (code, first, _) = judged(id, id, SEEN);
        assert_eq!((code, &*first), (1, id));
    }
    let rotated = data("cpu-cache-q8_0-q4_0-rotated");
    for (share, wanted) in [(0.0, 0), (0.1, 2)] {
        let into = folder.path().join(format!("rotated-{share}"));
        spoiled(&rotated, &into, (0, "blk.0.attn_ctx"), share);
        let audited = program::audit(&into, &data("random-64-8-2.gguf"), &["--allow-missing"]);
        let reason = &audited.report["reason"];
        assert_eq!((audited.code, audited.first.as_str()), (wanted, ""), "{share}: {reason}");
    }
}

/// What was recorded in some steps alone is judged there all the same: what nobody could see is no parity.
#[test]
fn a_node_that_nobody_could_see_is_undecided_where_other_steps_lack_it() {
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("dump");
    let from = data("cuda-cache-q4_0-plain");
    fs::create_dir_all(&into).unwrap();
    for file in fs::read_dir(&from).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), into.join(file.file_name())).unwrap();
    }
    without_graphs(&into, None);
    let audited = program::audit(&into, &data("random-64-8-2.gguf"), &["--allow-missing"]);
    let reason = audited.report["reason"].to_string();
    assert!(audited.code == 2 && reason.contains("record blk.0.k_rope as well"), "{reason}");
}

/// Half of the layers on the CPU: in a prompt of 32 rows and more their attention alone, in a decode step all of them.
#[test]
fn a_dump_without_a_graph_may_be_of_two_devices() {
    let (dump, model) = (data("half-cuda-Q4_K_M"), shipped("qwen2-tiny-py-Q4_K_M.gguf"));
    let audited = program::audit(&dump, &model, &["--allow-missing"]);
    assert_eq!(audited.report["origins"].to_string(), "[]", "{}", audited.reason());
    assert!(audited.notes.contains("2 of 4 layers on the CPU"), "{}", audited.notes);
    let all = audited.report["checkpoints"].as_array().unwrap();
    let tells = |entry: &&serde_json::Value| {
        let id = entry["id"].as_str().unwrap();
        ["k_proj", "v_proj", "attn_ctx"].iter().any(|kind| id.ends_with(kind))
    };
    let judged: Vec<_> = all.iter().filter(tells).collect();
    assert_eq!(judged.len(), 12);
    for entry in judged {
        assert_eq!(entry["verdict"], "match", "{}", entry["id"]);
    }
    for id in ["blk.0.v_proj", "blk.1.attn_ctx", "blk.3.attn_ctx"] {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("dump");
        spoiled(&dump, &copy, (0, id), 0.05);
        let audited = program::audit(&copy, &model, &["--allow-missing"]);
        assert_eq!((audited.code, &audited.first[..]), (1, id), "{}", audited.reason());
    }
}
