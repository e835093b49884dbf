//! Dumps whose tensors were overwritten in place before they were copied: told as that, and what reads them is healthy.

use std::collections::HashMap;

use crate::support::edited::{self, MODEL};
use crate::support::program;

/// What modules do not show.
const UNSEEN: [&str; 8] =
    ["q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "attn_ctx", "ffn_act", "attn_residual"];
const TOKENS: usize = 24;
const LAYERS: usize = 4;
/// Begins the kind of a tensor of the next layer.
const NEXT: &str = "next.";

/// A layer's tensors, by their kind.
type Layer<'a> = &'a dyn Fn(&str) -> Vec<f32>;

/// Origins, and the evidence of the first, where in all layers `kind` holds what `value` makes of a layer's tensors by their kind.
fn judged(
    numerics: &[&str],
    kind: &str,
    value: &dyn Fn(Layer<'_>) -> Vec<f32>,
) -> (i32, Vec<String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    edited::made(&dump, TOKENS, numerics);
    let mut all: HashMap<String, Vec<f32>> = HashMap::new();
    let collected = std::cell::RefCell::new(&mut all);
    edited::edit(&dump, |name, _, values| {
        collected.borrow_mut().insert(name.to_owned(), values.clone());
        true
    });
    edited::edit(&dump, |name, _, values| {
        if let Some((layer, _)) = name.rsplit_once('.').filter(|(_, own)| *own == kind) {
            *values = value(&|kind| all[&place(layer, kind)].clone());
        }
        !UNSEEN.iter().any(|kind| name.ends_with(kind))
    });
    if !numerics.contains(&"--numerics") {
        edited::undeclare(&dump);
    }
    let audited = program::audit(&dump, MODEL.as_ref(), &["--allow-missing"]);
    let origins = audited.report["origins"].as_array().unwrap().clone();
    let nodes = audited.report["checkpoints"].as_array().unwrap();
    let first = nodes.iter().find(|node| node["verdict"] == "origin").unwrap();
    let origins = origins.iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    (audited.code, origins, first["evidence"].as_str().unwrap().to_owned())
}

/// The tensor of a kind of a layer, or of the next one where that is asked for: behind the last layer is the last norm.
fn place(layer: &str, kind: &str) -> String {
    let Some(kind) = kind.strip_prefix(NEXT) else { return format!("{layer}.{kind}") };
    let next = 1 + layer.strip_prefix("blk.").unwrap().parse::<usize>().unwrap();
    if next < LAYERS { format!("blk.{next}.{kind}") } else { "final_norm".to_owned() }
}

/// Engines that add and normalise in one kernel write the norm where the layer before left its output: each layer's is wrong, and none
/// of what was computed from them, be it sums or norms of the layers behind.
#[test]
fn outputs_of_layers_under_the_next_norm_are_told_in_all_layers() {
    for numerics in [&[][..], &["--numerics", "f16"]] {
        let (code, origins, evidence) = judged(numerics, "layer_out", &|of| of(&format!("{NEXT}attn_norm")));
        let wanted: Vec<String> = (0..LAYERS).map(|layer| format!("blk.{layer}.layer_out")).collect();
        assert_eq!((code, &origins), (1, &wanted), "{numerics:?}: {evidence}");
        let said = "the engine is not (it holds blk.1.attn_norm, which was written in its place";
        assert!(evidence.contains(said), "{numerics:?}: {evidence}");
    }
}

#[test]
fn what_was_overwritten_in_place_is_told_and_its_readers_are_healthy() {
    for numerics in [&[][..], &["--numerics", "f16"]] {
        for (kind, holds) in [
            ("ffn_gate", "ffn_act"),
            ("q", "q_rope"),
            ("attn_out", "attn_residual"),
            ("ffn_out", "layer_out"),
        ] {
            let (code, origins, evidence) = judged(numerics, kind, &|of| of(holds));
            let wanted: Vec<String> = (0..LAYERS).map(|layer| format!("blk.{layer}.{kind}")).collect();
            assert_eq!((code, &origins), (1, &wanted), "{numerics:?} {kind}: {evidence}");
            let said = format!("the engine is not (it holds blk.0.{holds}, which was written in its place");
            assert!(evidence.contains(&said), "{numerics:?} {kind}: {evidence}");
        }
    }
}

/// Hooks of transformers in bf16 that copy nothing, and code that activates and adds in place: what reads one such tensor is another.
#[test]
fn what_was_computed_from_an_overwritten_tensor_and_overwritten_too_is_told() {
    let dump = "tests/data/engines/transformers-in-place.safetensors";
    let audited = program::audit(dump.as_ref(), MODEL.as_ref(), &["--allow-missing"]);
    let nodes = audited.report["checkpoints"].as_array().unwrap();
    let wrong: Vec<_> = nodes.iter().filter(|node| node["verdict"] == "origin").collect();
    assert_eq!((audited.code, wrong.len()), (1, 3 * LAYERS), "{}", audited.report["origins"]);
    for (node, holds) in wrong.iter().zip(["attn_residual", "ffn_act before blk.0.ffn_up", "layer_out"]) {
        let evidence = node["evidence"].as_str().unwrap();
        assert!(evidence.contains(&format!("(it holds blk.0.{holds}")), "{evidence}");
    }
    for node in wrong {
        let evidence = node["evidence"].as_str().unwrap();
        assert!(evidence.contains("the dump is wrong here, the engine is not"), "{evidence}");
        assert!(!evidence.contains("by itself"), "{evidence}");
    }
}

#[test]
fn an_activation_in_place_is_told_before_it_is_multiplied() {
    let silu = |x: &f32| x / (1.0 + (-x).exp());
    let (code, origins, evidence) = judged(&[], "ffn_gate", &|of| of("ffn_gate").iter().map(silu).collect());
    assert_eq!((code, origins.len()), (1, LAYERS), "{origins:?}");
    assert!(
        evidence.contains("it holds blk.0.ffn_act before blk.0.ffn_up is multiplied with it"),
        "{evidence}"
    );
}

/// An engine that is wrong too is not called right: what reads such a tensor is wrong where rounding does not explain it.
#[test]
fn a_mistake_beside_an_overwritten_tensor_is_a_mistake() {
    let inject = ["--inject", "ffn.gelu@2"];
    let (code, origins, evidence) = judged(&inject, "ffn_gate", &|of| of("ffn_act"));
    assert!(code == 1 && origins.iter().any(|id| id == "blk.2.ffn_out"), "{origins:?}");
    assert!(
        evidence.contains("; blk.2.ffn_out is wrong by itself, whatever was recorded here"),
        "{evidence}"
    );
}

/// What reads such a tensor is computed from what it should be in f32: one of several that is off is wrong itself, all of them are not
/// judged, and that is said.
#[test]
fn a_mistake_in_what_reads_an_overwritten_tensor_is_told() {
    for (inject, wrong) in [
        ("data.scaled=1.05@blk.2.attn_out", Some("; blk.2.attn_out is wrong by itself")),
        ("attn.scale=0.212", None),
    ] {
        let (code, origins, evidence) = judged(&["--inject", inject], "q", &|of| of("q_rope"));
        assert_eq!(code, 1, "{origins:?}");
        let said = wrong.unwrap_or("; blk.0.attn_out, which reads it, is not judged");
        assert!(evidence.contains(said), "{inject}: {evidence}");
        assert_eq!(origins.iter().any(|id| id == "blk.2.attn_out"), wrong.is_some(), "{inject}: {origins:?}");
    }
}

/// What an engine computes wrongly is read as it is by what follows: no recording is blamed for it.
#[test]
fn a_mistake_that_is_read_is_none_of_the_recording() {
    let (code, origins, evidence) = judged(&["--inject", "linear.no_bias@1"], "none", &|of| of("none"));
    assert_eq!(code, 1, "{origins:?}");
    assert!(!evidence.contains("the dump is wrong here"), "{evidence}");
}
