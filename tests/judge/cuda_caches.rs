//! Recordings of llama.cpp on an H100 with keys and values in blocks, judged with no GPU: healthy as they are, and wrong
//! where a scale, a head, a mask or a value is another one. Heads of 64, eight over two of keys; 20 tokens at once (one
//! recording has 300), then 2, then 3 one by one. Of the first pass most have only what is cached.

use std::fs;
use std::path::{Path, PathBuf};

use parity_dump::Dump;

use crate::support::program;
use crate::support::samples::sample;

/// Dump, the node that attends, and what the answer says of its arithmetic: keys of two types without flash attention or
/// with it, in kernels on integers or converted, within 256 positions and beyond.
const RECORDINGS: [(&str, &str, &[&str]); 4] = [
    (
        "cuda-cache-q4_0",
        FLASH,
        &["attention with Q8_1 queries, f32 sums", "attention with f16 queries, weights and sums"],
    ),
    ("cuda-cache-q8_0-q4_0", FLASH, &["attention in f32 over a cache converted to f16"]),
    ("cuda-cache-q8_0-long", FLASH, &["attention with Q8_1 queries, f32 sums"]),
    ("cuda-cache-q4_0-plain", "blk.0.attn_ctx", &["matmuls with f16 operands, f16 sums"]),
];
const FLASH: &str = "blk.0.flash_attn_ext";
/// What a mistake has to exceed to be seen, as a share of the node's values: ties of a cache, which are rounded to one
/// quant or to the next, are in it.
const SEEN: f64 = 2e-3;
/// A pass of two tokens, and one of a single token.
const PASSES: [usize; 2] = [1, 4];
/// Channels of a head.
const HEAD: usize = 64;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/backends").join(name)
}

fn audit(dump: &Path, node: &str) -> (Option<i32>, serde_json::Value) {
    let more = ["--checkpoint", node, "--allow-missing", "--audit-rows", "all"];
    let audited = program::audit(dump, &data("random-64-8-2.gguf"), &more);
    (Some(audited.code), audited.report)
}

/// A copy of a dump.
fn copied(from: &Path, into: &Path) {
    fs::create_dir_all(into).unwrap();
    for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), into.join(file.file_name())).unwrap();
    }
}

/// Changes the bytes of one tensor of a step.
fn changed(dump: &Path, step: usize, name: &str, change: impl Fn(&mut [u8])) {
    let path = dump.join(&Dump::open(dump).unwrap().manifest().steps[step].file);
    let mut bytes = fs::read(&path).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let at = |i: usize| 8 + size + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    change(&mut bytes[at(0)..at(1)]);
    fs::write(path, bytes).unwrap();
}

type Change = fn(&mut [u8]);

/// The heads change places, each with its neighbour, or one value is moved by a share of the norm of all.
fn heads_exchanged(bytes: &mut [u8]) {
    let bytes_of_head = HEAD * size_of::<f32>();
    for pair in bytes.chunks_exact_mut(2 * bytes_of_head) {
        let (one, other) = pair.split_at_mut(bytes_of_head);
        one.swap_with_slice(other);
    }
}

fn value_moved(bytes: &mut [u8]) {
    let of = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let norm = bytes.chunks_exact(4).map(|value| f64::from(of(value)).powi(2)).sum::<f64>().sqrt();
    let place = bytes.len() / 8 * 4;
    let moved = of(&bytes[place..place + 4]) + (SEEN * norm) as f32;
    bytes[place..place + 4].copy_from_slice(&moved.to_le_bytes());
}

#[test]
fn attention_over_blocks_is_followed() {
    for (name, node, says) in RECORDINGS {
        let (code, report) = audit(&data(name), node);
        assert_eq!(code, Some(0), "{name}: {} {}", report["origins"], report["notes"]);
        let notes = report["notes"].to_string();
        says.iter().for_each(|words| assert!(notes.contains(words), "{name}: {notes}"));
        let entries = report["checkpoints"].as_array().unwrap();
        let local = &entries.iter().find(|entry| entry["id"] == node).unwrap()["local"]["candidate"];
        let [bound, error] = ["bound_rel_l2", "rel_l2"].map(|key| local[key].as_f64().unwrap());
        assert!(bound < SEEN && error < SEEN / 10.0, "{name}: {error:e}, blind below {bound:e}");
    }
}

#[test]
fn another_head_and_another_value_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let changes = [("head", heads_exchanged as Change), ("value", value_moved)];
    for (name, node, _) in RECORDINGS {
        let cases = changes.into_iter().flat_map(|one| PASSES.map(|step| (one, step)));
        for ((what, change), step) in sample("changes", 2, cases) {
            let into = folder.path().join(format!("{name}-{what}-{step}"));
            copied(&data(name), &into);
            changed(&into, step, node, change);
            let (code, report) = audit(&into, node);
            let found = code == Some(1) && report["origins"].to_string().contains(node);
            assert!(found, "{what} of {name}, pass {step}: {code:?} {}", report["origins"]);
        }
    }
}

#[test]
fn another_scale_and_another_mask_are_found() {
    let folder = tempfile::tempdir().unwrap();
    for (name, node, _) in RECORDINGS {
        // The graph says the scale that llama.cpp was asked for: it computed with another one then.
        let into = folder.path().join(format!("{name}-scale"));
        copied(&data(name), &into);
        for file in fs::read_dir(&into).unwrap().map(|file| file.unwrap().path()) {
            if file.extension().is_some_and(|ending| ending == "txt") {
                let text = fs::read_to_string(&file).unwrap();
                assert!(text.contains("scale=0.125"));
                fs::write(&file, text.replace("scale=0.125", "scale=0.18")).unwrap();
            }
        }
        let (code, report) = audit(&into, node);
        assert!(code == Some(1) && report["origins"].to_string().contains(node), "scale of {name}: {code:?}");
        // The first position is masked, which the kernel saw.
        let into = folder.path().join(format!("{name}-mask"));
        copied(&data(name), &into);
        changed(&into, PASSES[1], "leaf.attn_inp_kq_mask", |bytes| {
            let infinite =
                if node == FLASH { vec![0x00, 0xfc] } else { f32::NEG_INFINITY.to_le_bytes().to_vec() };
            bytes[..infinite.len()].copy_from_slice(&infinite);
        });
        let (code, report) = audit(&into, node);
        assert!(code == Some(1) && report["origins"].to_string().contains(node), "mask of {name}: {code:?}");
    }
}

#[test]
fn attention_that_was_not_recorded_is_allowed_for_in_every_kernel() {
    // This llama.cpp was built with kernels for Q4_1, which the default leaves out: two tokens met keys as integers.
    let (code, report) = audit(&data("cuda-cache-q4_1-across"), "blk.0.attn_ctx");
    assert_eq!(code, Some(0), "{}", report["origins"]);
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("head");
    copied(&data("cuda-cache-q4_1-across"), &into);
    changed(&into, PASSES[0], "blk.0.attn_ctx", heads_exchanged);
    let (code, _) = audit(&into, "blk.0.attn_ctx");
    assert_eq!(code, Some(1), "another head is more than any kernel rounds");
}

#[test]
fn many_queries_on_a_card_whose_kernels_are_not_followed_are_undecided() {
    // What few queries met is the same kernel on every card, and says nothing of the other one.
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("card");
    copied(&data("cuda-cache-q4_0"), &into);
    changed(&into, 0, FLASH, |bytes| {
        for (i, value) in bytes.chunks_exact_mut(4).enumerate() {
            let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
            let own = f32::from_le_bytes(value.try_into().unwrap());
            value.copy_from_slice(&(own * (1.0 + sign / 2048.0)).to_le_bytes());
        }
    });
    let (code, report) = audit(&into, FLASH);
    assert_eq!(code, Some(2), "{}", report["origins"]);
    // A head too many is no rounding of any card.
    changed(&into, 0, FLASH, heads_exchanged);
    assert_eq!(audit(&into, FLASH).0, Some(1));
}
