//! Mistakes in nodes that an engine does not expose: named where they show, in what reads those nodes.

use parity::audit::{self, AuditRows};
use parity::checkpoint::Checkpoint;
use parity::dump::{Kept, Recording};
use parity::engine::fused::Model;
use parity::faults::inject::inject;

use crate::support::runs::{Random, diagnose_at, model, run_some};

const TINY: &str = "qwen2-tiny-py-F16.gguf";
const PROMPT: usize = 6;
const TOKENS: usize = 9;

/// A run with mistakes, of which whatever ends in one of `hidden` is not kept.
fn kept(model: &Model, specs: &[&str], hidden: &[&str], tokens: &[u32]) -> Kept {
    let mut graph = model.graph.clone();
    let specs: Vec<_> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
    inject(&mut graph, &specs, model).unwrap();
    let shown = |checkpoint: Checkpoint| !hidden.contains(&checkpoint.kind().name());
    run_some(model, &graph, tokens, PROMPT, false, &shown)
}

/// The nodes beyond rounding, each computed across what was not kept.
fn origins(model: &Model, kept: &Kept) -> Vec<String> {
    let positions = AuditRows::All.positions(&kept.manifest().steps);
    let options = audit::Options { positions: &positions, wants: &|_| true, isolated: false };
    let audits = audit::audit(&[kept], &model.gguf, &model.graph, &options).unwrap();
    audits.sides[0].origins().map(|origin| origin.to_string()).collect()
}

#[test]
fn a_mistake_in_a_hidden_node_is_named_where_it_shows() {
    let Some(model) = model(TINY) else { return eprintln!("SKIP: {TINY} is not there") };
    let tokens = Random(8).tokens(TOKENS, model.config.dims.vocab);
    let rope: &[&str] = &["q_rope", "k_rope"];
    let products: &[&str] = &["q_proj", "k_proj", "v_proj"];
    for (specs, hidden, origin, fault, text) in [
        (&["rope.base=500000@1"][..], rope, "blk.1.attn_ctx", "rope.base", "RoPE base is 500000"),
        (&["rope.interleaved@1"], rope, "blk.1.attn_ctx", "rope.interleaved", "RoPE pairs neighbours"),
        (&["rope.sign@2"], rope, "blk.2.attn_ctx", "rope.sign", "backwards"),
        (&["rope.twice@2"], rope, "blk.2.attn_ctx", "rope.twice", "twice"),
        (&["rope.decode_shift=-1@blk.1.q_rope"], rope, "blk.1.attn_ctx", "rope.decode_shift", "position -1"),
        (&["rope.base=10000@blk.1.k_rope"], &["k_rope"], "blk.1.attn_ctx", "rope.base", "RoPE base is 10000"),
        (
            &["linear.wrong_layer=2@blk.1.k_proj", "linear.wrong_layer=2@blk.1.k"],
            products,
            "blk.1.k",
            "linear.wrong_layer",
            "blk.2.attn_k.weight is used in place of blk.1.attn_k.weight; blk.2.attn_k.bias is used",
        ),
        (
            &["linear.wrong_layer=3@blk.1.v_proj"],
            products,
            "blk.1.v",
            "linear.wrong_layer",
            "blk.3.attn_v.weight is used in place of blk.1.attn_v.weight, in blk.1.v_proj, which was not recorded",
        ),
        (
            &["linear.qk_permuted=1@blk.1.q_proj"],
            products,
            "blk.1.q",
            "linear.qk_permuted",
            "are read as halves of pairs",
        ),
    ] {
        let kept = kept(&model, specs, hidden, &tokens);
        let wrong = origins(&model, &kept);
        assert_eq!(wrong.first().map(String::as_str), Some(origin), "{specs:?}");
        let found = diagnose_at(&model, &kept, origin.parse().unwrap());
        let named: Vec<&str> = found.diagnosis.iter().map(|item| item.fault.as_str()).collect();
        // To rotate twice is to rotate by twice the position.
        let alike: &[&str] = if fault == "rope.twice" { &["rope.twice", "rope.scaled"] } else { &[fault] };
        assert_eq!(named, alike, "{specs:?}: {found:?}");
        assert!(found.diagnosis[0].text.contains(text), "{specs:?}: {}", found.diagnosis[0].text);
    }
}

#[test]
fn hidden_nodes_of_a_clean_run_are_silent() {
    let Some(model) = model(TINY) else { return eprintln!("SKIP: {TINY} is not there") };
    let mut random = Random(9);
    for hidden in [&["q_rope", "k_rope"][..], &["q_proj", "k_proj", "v_proj"], &["ffn_norm"]] {
        let tokens = random.tokens(TOKENS, model.config.dims.vocab);
        let kept = kept(&model, &[], hidden, &tokens);
        assert_eq!(origins(&model, &kept), Vec::<String>::new(), "{hidden:?}");
        assert_eq!(diagnose_at(&model, &kept, "blk.1.attn_ctx".parse().unwrap()), Default::default());
    }
}
