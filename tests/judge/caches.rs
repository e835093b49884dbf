//! Caches of other types are a choice of the run and not of the model file: whatever they are, a healthy recording is at
//! parity, and a mistake in one is not.

use std::path::Path;

use half::bf16;
use parity::model::builders::{Shape, build};
use parity::model::diff::diff;

use parity_graph::Graph;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::support::graphs::record::{record, record_with};
use crate::support::graphs::{fill, head, hollow, recorded};
use crate::support::program::{self, Copied, flat, parity};

/// Graphs of llama.cpp 0.5.0 with `-ctk`, `-ctv` and flash attention: block-quantised caches are rotated.
const CACHES: [(&str, &str); 3] =
    [("qwen2-dense", "-f32-cache"), ("qwen2-dense", "-q8_0-cache"), ("gemma3-dense", "-q4_1-cache")];

fn audit(dump: &Path, model: &Path, code: i32) -> String {
    let done = parity(&["audit", "-m"]).arg(model).arg(dump).assert().code(code);
    flat(&String::from_utf8(done.get_output().stdout.clone()).unwrap())
}

#[test]
fn the_type_of_a_cache_is_no_wiring() {
    for (model, kind) in CACHES {
        let graph = recorded(model, kind);
        let built = build(&hollow(&head(model)), Shape::of(&graph)).unwrap();
        let found = diff(&graph, &built.graph);
        assert!(found.is_equal(), "{model}{kind}\n{found}");
    }
}

#[test]
fn a_rotation_that_is_undone_is_another_form_of_the_same_and_one_of_queries_alone_is_not() {
    let (graph, plain) = (recorded("qwen2-dense", "-q8_0-cache"), recorded("qwen2-dense", ""));
    let found = diff(&graph, &plain);
    assert!(found.is_equal(), "{found}");
    let found = diff(&without_turned_keys(&graph), &plain);
    assert!(!found.is_equal(), "{found}");
}

/// The same graph with the keys of the first layer as they are.
fn without_turned_keys(graph: &Graph) -> Graph {
    let rotated = |id: &usize| graph.get(*id).op == parity_graph::Op::MulMat && graph.get(*id).ne[0] == 128;
    let keys = graph.computed().filter(rotated).nth(1).unwrap();
    let mut edited = graph.clone();
    let from = graph.src(keys, 1).unwrap();
    for slot in edited.tensors.iter_mut().flat_map(|tensor| tensor.srcs.iter_mut().flatten()) {
        if *slot == keys {
            *slot = from;
        }
    }
    edited.tensors[keys].computed = false;
    edited
}

#[test]
fn a_rotation_that_is_left_out_on_one_side_is_named() {
    let graph = recorded("qwen2-dense", "-q8_0-cache");
    let built = build(&hollow(&head("qwen2-dense")), Shape::of(&graph)).unwrap();
    let found = diff(&without_turned_keys(&graph), &built.graph);
    assert!(!found.is_equal() && found.to_string().contains("missing"), "{found}");
}

#[test]
fn a_healthy_recording_with_any_cache_is_at_parity() {
    for (model, kind) in CACHES {
        let folder = tempfile::tempdir().unwrap();
        let (file, dump) = (folder.path().join("model.gguf"), folder.path().join("dump"));
        fill(&head(model), &file);
        record(&file, &recorded(model, kind), &dump);
        let text = audit(&dump, &file, 0);
        assert!(text.contains("PARITY") && text.contains("the wiring is the model file's"), "{kind}: {text}");
    }
}

#[test]
fn a_mistake_in_front_of_a_quantised_cache_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (file, dump) = (folder.path().join("model.gguf"), folder.path().join("dump"));
    fill(&head("qwen2-dense"), &file);
    // Values are passed on as they are, in the order of the cache.
    let graph = recorded("qwen2-dense", "-q8_0-cache");
    record_with(&file, &graph, &dump, &|id, args| {
        (id.to_string() == "blk.1.flash_attn_ext").then(|| {
            let mut values: Vec<f64> =
                args.get(2).unwrap().values().iter().map(|x| f64::from(*x as f32)).collect();
            values.truncate(args.elements());
            values
        })
    });
    assert!(audit(&dump, &file, 1).contains("DIVERGES at blk.1.flash_attn_ext"));
}

/// transformers keeps a prompt in four bits behind its own pass: decode steps alone read that, and in a form that is not followed. What
/// is off by more than four bits is a mistake.
#[test]
fn a_cache_that_decode_steps_alone_read_is_undecided_and_hides_no_more_than_its_bits() {
    let model = "reference-dumps/models/qwen2-tiny-py-F16.gguf".as_ref();
    for (factor, code) in [(1.0, 2), (1.4, 1)] {
        let copy = Copied::of("tests/data/engines/transformers-quanto4");
        for step in 1..5 {
            let path = copy.file(&format!("step-000{step}.safetensors"));
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let scaled = file.iter().map(|(name, view)| {
                let by = if name.ends_with("attn_out") { factor } else { 1.0 };
                let values =
                    view.data().as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
                let bytes: Vec<u8> = values.flat_map(|x| bf16::from_f32(by * x).to_le_bytes()).collect();
                (name.to_owned(), view.shape().to_vec(), bytes)
            });
            let scaled: Vec<_> = scaled.collect();
            let views = scaled.iter().map(|(name, shape, bytes)| {
                (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
            });
            std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
        }
        let audited = program::audit(copy.path().as_ref(), model, &["--allow-missing"]);
        let reason = audited.report["reason"].to_string();
        assert_eq!(audited.code, code, "{factor}: {reason}");
        assert_eq!(reason.contains("a cache of 8 or 4 bits"), code == 2, "{factor}: {reason}");
    }
}
