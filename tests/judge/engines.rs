//! Dumps of real engines as these made them, healthy and wrong: nothing is declared, and nothing is asked of a user.

use std::path::{Path, PathBuf};

use parity::checkpoint::Checkpoint;
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build};

use crate::support::edited::{undeclare, without_graph};
use crate::support::gguf_writer::GgufWriter;
use crate::support::graphs::record::record_some;
use crate::support::graphs::{head, hollow, values};
use crate::support::program::{Audited, Copied, answer, audit};
use crate::support::samples::sample;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("reference-dumps/models/qwen2-tiny-py-F16.gguf")
}

fn audited(name: &str) -> Audited {
    audit(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/engines").join(name), &model(), &[])
}

/// ik_llama.cpp fuses a norm with its weight, and an activation with what it gates.
#[test]
fn ops_that_nobody_knows_are_known_by_what_they_compute() {
    let healthy = audited("ik_llama-ok");
    assert_eq!(healthy.code, 0, "{}", healthy.report["reason"]);
    for said in [
        "FUSED_RMS_NORM is known by what it computes: RMS_NORM and MUL give the recorded values of 9 nodes",
        "FUSED_MUL_UNARY is known by what it computes: SWIGLU gives the recorded values of 4 nodes",
        "the wiring is the model file's",
    ] {
        assert!(healthy.notes.contains(said), "{said}: {}", healthy.notes);
    }
}

/// An op whose values no known ones give stays undecided by its name, whatever the file asks for in its place; a wrong node
/// elsewhere is still found.
#[test]
fn an_op_that_is_not_known_by_its_values_is_undecided_by_name() {
    let copy = Copied::of("tests/data/engines/ik_llama-ok");
    let other_epsilon = |from: &str, to: &str| {
        for step in 0..3 {
            let graph = copy.file(&format!("graph-000{step}.txt"));
            let text = std::fs::read_to_string(&graph).unwrap();
            assert!(text.contains(from));
            std::fs::write(graph, text.replace(from, to)).unwrap();
        }
    };
    // Not the epsilon that was computed with: the values do not show a norm.
    other_epsilon("w0=0x358637bd", "w0=0x3f800000");
    let unknown = audit(Path::new(copy.path()), &model(), &[]);
    assert_eq!(unknown.code, 2, "{}", unknown.report["first_divergence"]);
    assert!(
        unknown.report["reason"].as_str().unwrap().contains("a rule for FUSED_RMS_NORM"),
        "{}",
        unknown.report["reason"]
    );
    assert!(
        unknown.notes.contains("may be within what parity does not know: FUSED_RMS_NORM"),
        "{}",
        unknown.notes
    );
    other_epsilon("freq_base=1000000", "freq_base=10000");
    let wrong = audit(Path::new(copy.path()), &model(), &[]);
    assert_eq!((wrong.code, wrong.first.as_str(), wrong.fault.as_str()), (1, "blk.0.q_rope", "rope.base"));
}

/// tinygrad's `blk.N.attn_q` is what candle calls it before the bias, with the bias.
#[test]
fn names_with_two_meanings_are_settled_by_values() {
    let healthy = audited("tinygrad-ok-module_names.safetensors");
    assert_eq!(healthy.code, 0, "{}", healthy.report["first_divergence"]);
    assert!(healthy.notes.contains("q_proj as q, k_proj as k, v_proj as v"), "{}", healthy.notes);
}

/// A dump of a prefill by a healthy engine without a graph, of a model of this architecture, without some ids and with others
/// renamed; the model's file.
fn renamed(folder: &Path, name: &str, lacks: &[&str], names: &[(&str, &str)]) -> (PathBuf, PathBuf) {
    let (model, dump) = (folder.join("model.gguf"), folder.join("dump"));
    std::fs::write(&model, unscaled(name)).unwrap();
    let graph = build(&Gguf::open(&model).unwrap(), Shape::step(0, 12, 12, true, Cache::F32)).unwrap().graph;
    let is_shown = |id: Checkpoint| !lacks.contains(&id.kind().name());
    record_some(&model, &graph, &dump, &|_, _| None, &is_shown);
    undeclare(&dump);
    without_graph(&dump);
    let file = dump.join("step-0000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    for (from, to) in names {
        // In a header that is as long as before.
        let filled = format!("{to}\"{}", " ".repeat(from.len() - to.len()));
        for before in [".", "\""] {
            let [from, to] = [format!("{before}{from}\""), format!("{before}{filled}")];
            bytes = replaced(&bytes, from.as_bytes(), to.as_bytes());
        }
    }
    std::fs::write(&file, bytes).unwrap();
    (dump, model)
}

/// A hook on gpt-oss' output projection sees the sum with its bias; one that lacks it is called by the same name.
#[test]
fn so_is_any_product_that_a_bias_is_added_to() {
    let (sum, product) = ("attn_out.add", "attn_out");
    for (kept, lacks, noted) in [(sum, product, true), (product, sum, false)] {
        let folder = tempfile::tempdir().unwrap();
        let (dump, model) = renamed(folder.path(), "gpt-oss-moe", &[lacks], &[(sum, product)]);
        let found = audit(&dump, &model, &["--allow-missing"]);
        assert_eq!((found.code, &found.first[..]), (0, ""), "{kept}: {}", found.report["reason"]);
        assert_eq!(found.notes.contains("attn_out as attn_out.add"), noted, "{kept}: {}", found.notes);
    }
}

/// Embeddings are called alike whether a module scales them as it reads them or its caller does.
#[test]
fn so_are_embeddings_with_a_factor() {
    for (lacks, names, noted) in
        [("embed", ("inp_scaled", "embed"), "embed as inp_scaled"), ("inp_scaled", ("embed", "embed"), "")]
    {
        let folder = tempfile::tempdir().unwrap();
        let (dump, model) = renamed(folder.path(), "gemma3-dense", &[lacks], &[names]);
        let found = audit(&dump, &model, &["--allow-missing"]);
        assert_eq!((found.code, &found.first[..]), (0, ""), "{names:?}: {}", found.report["reason"]);
        assert!(found.notes.contains(noted), "{names:?}: {}", found.notes);
    }
}

/// What an id means is there in every architecture, whatever its graph calls the node: a mixture's sum, a norm whose weight is
/// named after attention.
#[test]
fn ids_that_a_graph_has_for_nothing_are_read_as_the_nodes_with_their_values() {
    for (name, names) in [
        ("gpt-oss-moe", &[("attn_post_norm", "ffn_norm"), ("ffn_moe_out", "ffn_out")][..]),
        ("qwen3moe-moe", &[("ffn_moe_out", "ffn_out")]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (dump, model) = renamed(folder.path(), name, &[], names);
        let found = audit(&dump, &model, &[]);
        assert_eq!((found.code, &found.first[..]), (0, ""), "{name}: {}", found.report["reason"]);
        let judged: Vec<String> =
            found.report["checkpoints"].as_array().unwrap().iter().map(|one| one["id"].to_string()).collect();
        for (node, _) in names {
            assert!(judged.contains(&format!("\"blk.1.{node}\"")), "{name}: {judged:?}");
        }
        assert!(found.notes.contains("ffn_out as ffn_moe_out"), "{name}: {}", found.notes);
        assert!(!found.notes.contains("nobody looked"), "{name}: {}", found.notes);
    }
}

/// A model without factors on its products, which engines apply at once.
fn unscaled(name: &str) -> Vec<u8> {
    let layout = hollow(&head(name));
    let mut out = GgufWriter::new();
    out.metadata.extend(layout.metadata().iter().map(|(key, value)| (key.clone(), value.clone())));
    for info in layout.tensors().filter(|info| !info.name.ends_with(".scale")) {
        let bytes = values(&info.name, info.elements());
        out.tensors.push((info.name.clone(), info.dtype, info.shape.clone(), bytes));
    }
    out.bytes()
}

/// Bytes with others in place of some, as many of them.
fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (bytes.to_vec(), 0);
    while at + from.len() <= out.len() {
        if out[at..].starts_with(from) {
            out[at..at + to.len()].copy_from_slice(to);
        }
        at += 1;
    }
    out
}

/// And they are settled wherever the recording is read: as the reference of a run as when it is audited.
#[test]
fn a_reference_is_read_as_an_audit_reads_it() {
    let dump = "tests/data/engines/tinygrad-ok-module_names.safetensors";
    let model = "reference-dumps/models/qwen2-tiny-py-F16.gguf";
    let (code, report) = answer(&["run", "-m", model, "--reference", dump, "--format", "json"]);
    assert_eq!((code, report["verdict"].as_str()), (0, Some("parity")), "{}", report["reason"]);
    let notes = report["notes"].to_string();
    assert!(notes.contains("q_proj as q, k_proj as k, v_proj as v"), "{notes}");
}

/// OpenVINO's reader of GGUF files keeps norm weights, biases and RoPE's frequencies in f16.
#[test]
fn vectors_that_a_loader_rounded_are_one_finding_and_hide_no_other() {
    for name in ["openvino-ok.safetensors", "openvino-theta.safetensors"] {
        let found = audited(name);
        let said = "norm weights and biases of the recording are those of the file rounded to f16";
        assert!(found.notes.contains(said), "{name}: {}", found.notes);
        let fault = if name.contains("theta") { "rope.base" } else { "precision.f16_frequencies" };
        assert_eq!((found.first.as_str(), found.fault.as_str()), ("blk.0.q_rope", fault), "{name}");
    }
}

/// Mistakes in what an engine does not show, where nothing shows in what it computes either.
#[test]
fn mistakes_of_real_engines_are_named() {
    let mistakes = [
        // Module outputs: neither rotated queries and keys nor the context of attention.
        ("mlx-theta", "blk.0.attn_out", "rope.base"),
        ("mlx-gqa", "blk.0.attn_out", "attn.kv_head"),
        // In decode steps alone, over a cache that nobody recorded.
        ("mlx-shift1", "blk.0.attn_out", "rope.position_in_step"),
        ("jax-norm16", "blk.0.attn_norm", "precision.f16_norm"),
        // Behind the embedding as it was recorded.
        ("jax-gemma_scale", "blk.0.attn_norm", "embed.scaled"),
        // Logits alone: the mistake is in all layers.
        ("ct2-theta", "logits", "rope.base"),
    ];
    for (name, first, fault) in sample("mistakes", 3, mistakes) {
        let found = audited(&format!("{name}.safetensors"));
        assert_eq!((found.first.as_str(), found.fault.as_str()), (first, fault), "{name}");
    }
}
