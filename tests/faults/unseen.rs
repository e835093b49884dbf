//! Mistakes in nodes that an engine does not expose: named where they show, in what reads those nodes.

use parity::audit::Findings;
use parity::checkpoint::Checkpoint;

use crate::support::injected::{Made, Ran, run_with, specs};
use crate::support::runs::{Random, gguf};

const TINY: &str = "qwen2-tiny-py-F16.gguf";
const PROMPT: usize = 6;
const TOKENS: usize = 9;
/// To rotate twice is to rotate by twice the position.
const TWICE: &str = "RoPE is applied twice, in blk.2.q_rope and blk.2.k_rope, which were not recorded \
                     (indistinguishable here from rope.scaled)";
const VOCABULARY: usize = 4000;

/// What was found in a run with mistakes of which whatever ends in one of `hidden` is not recorded.
fn found(wrong: &[&str], hidden: &[&str], tokens: &[u32]) -> Option<Findings> {
    let shown = |checkpoint: Checkpoint| !hidden.contains(&checkpoint.kind().name());
    let how = Made { tokens, prompt: PROMPT, flash: true };
    let ran = run_with(gguf(TINY)?, &how, &specs(wrong), &|_, _, _| None, &shown);
    let (ran, _) = ran.unwrap_or_else(|| panic!("no place for {wrong:?}"));
    Some(ran.audit())
}

#[test]
fn a_mistake_in_a_hidden_node_is_named_where_it_shows() {
    let tokens = Random(8).tokens(TOKENS, VOCABULARY);
    let rope: &[&str] = &["q_rope", "k_rope"];
    let products: &[&str] = &["q_proj", "k_proj", "v_proj"];
    let mut failures = Vec::new();
    for (wrong, hidden, origin, fault, text) in [
        (&["rope.base=500000@1"][..], rope, "blk.1.attn_ctx", "rope.base", "RoPE base is 500000"),
        (&["rope.interleaved@1"], rope, "blk.1.attn_ctx", "rope.interleaved", "RoPE pairs neighbours"),
        (&["rope.sign@2"], rope, "blk.2.attn_ctx", "rope.sign", "backwards"),
        (&["rope.twice@2"], rope, "blk.2.attn_ctx", "rope.twice", TWICE),
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
        let Some(findings) = found(wrong, hidden, &tokens) else {
            return eprintln!("SKIP: {TINY} is not there");
        };
        let origins: Vec<String> = Ran::origins(&findings).iter().map(ToString::to_string).collect();
        assert_eq!(origins.first().map(String::as_str), Some(origin), "{wrong:?}");
        let (found, tried) = findings.nodes[&origin.parse::<Checkpoint>().unwrap()].diagnosis();
        let named: Vec<&str> = found.iter().map(|item| item.fault.as_str()).collect();
        if named != [fault] || !found[0].text.contains(text) {
            failures.push(format!("{wrong:?}: {found:?} {tried:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What an engine gives for free: outputs of modules. Mistakes of attention lie between those, and some show in decode steps
/// alone, which read what steps before left in a cache that nobody recorded.
#[test]
fn mistakes_between_modules_are_named_in_every_step() {
    const HIDDEN: [&str; 10] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "q_rope",
        "k_rope",
        "kq",
        "kq_soft_max",
        "attn_ctx",
        "attn_residual",
        "ffn_act",
    ];
    let tokens = Random(8).tokens(TOKENS, VOCABULARY);
    for (wrong, origin, fault, text) in [
        ("rope.decode_shift=-1", "blk.0.attn_out", "rope.decode_shift", ""),
        ("rope.position_in_step", "blk.0.attn_out", "rope.position_in_step", ""),
        ("rope.decode_shift=-1@2", "blk.2.attn_out", "rope.decode_shift", ""),
        ("attn.window=4", "blk.0.attn_out", "attn.window", ""),
        ("attn.window=7", "blk.0.attn_out", "attn.window", "the last 7 positions"),
        ("attn.no_mask", "blk.0.attn_out", "attn.no_mask", ""),
        ("attn.kv_first", "blk.0.attn_out", "attn.kv_first", ""),
        ("attn.head_order=7,6,5,4,3,2,1,0", "blk.0.attn_out", "attn.head_order", ""),
        // Numbers that no list has.
        ("rope.base=26000", "blk.0.attn_out", "rope.base", "RoPE base is 26000"),
        ("attn.scale=0.19@2", "blk.2.attn_out", "attn.scale", "scaled by 0.19,"),
        ("attn.scale=0.1785@2", "blk.2.attn_out", "attn.scale", "scaled by 0.1785,"),
        ("attn.scale=0.175@2", "blk.2.attn_out", "attn.scale", "scaled by 0.175,"),
        ("attn.clamp=2", "blk.0.attn_out", "attn.clamp", "beyond ±2 are"),
        ("attn.softcap=30@1", "blk.1.attn_out", "attn.softcap", "soft-capped at 30,"),
        ("rope.partial=16,32", "blk.0.attn_out", "rope.partial", "with frequencies of 32"),
        ("residual.parallel@1", "blk.1.norm#2", "residual.parallel", ""),
        ("linear.no_bias@1", "blk.1.q", "linear.no_bias", ""),
    ] {
        let Some(findings) = found(&[wrong], &HIDDEN, &tokens) else {
            return eprintln!("SKIP: {TINY} is not there");
        };
        let origins: Vec<String> = Ran::origins(&findings).iter().map(ToString::to_string).collect();
        assert_eq!(origins.first().map(String::as_str), Some(origin), "{wrong}");
        let (named, tried) = findings.nodes[&origin.parse::<Checkpoint>().unwrap()].diagnosis();
        let first = named.first().map(|named| named.fault.as_str());
        assert_eq!(first, Some(fault), "{wrong}: {named:?} {tried:?}");
        assert!(named[0].text.contains(text), "{wrong}: {}", named[0].text);
    }
}

/// What is passed on may lie behind several nodes that nobody recorded.
#[test]
fn a_norm_that_is_left_out_is_named_where_its_input_was_not_recorded() {
    let tokens = Random(8).tokens(TOKENS, VOCABULARY);
    let hidden = ["attn_out", "attn_residual", "norm", "norm#2"];
    for (more, origin) in
        [(&[][..], "blk.1.ffn_norm"), (&["ffn_norm", "ffn_gate", "ffn_up"], "blk.1.ffn_act")]
    {
        let hidden = [&hidden[..], more].concat();
        let Some(findings) = found(&["norm.none@blk.1.ffn_norm"], &hidden, &tokens) else {
            return eprintln!("SKIP: {TINY} is not there");
        };
        let origins: Vec<String> = Ran::origins(&findings).iter().map(ToString::to_string).collect();
        assert_eq!(origins.first().map(String::as_str), Some(origin));
        let (named, tried) = findings.nodes[&origin.parse::<Checkpoint>().unwrap()].diagnosis();
        assert_eq!(named.first().map(|named| named.fault.as_str()), Some("norm.none"), "{origin}: {tried:?}");
        assert!(named[0].text.contains("blk.1.attn_residual is passed on"), "{}", named[0].text);
    }
}

#[test]
fn hidden_nodes_of_a_clean_run_are_silent() {
    let mut random = Random(9);
    for hidden in [&["q_rope", "k_rope"][..], &["q_proj", "k_proj", "v_proj"], &["ffn_norm"]] {
        let tokens = random.tokens(TOKENS, VOCABULARY);
        let Some(findings) = found(&[], hidden, &tokens) else {
            return eprintln!("SKIP: {TINY} is not there");
        };
        assert_eq!(Ran::origins(&findings), [], "{hidden:?}");
        for (id, node) in &findings.nodes {
            let (named, tried) = node.diagnosis();
            assert!(named.is_empty() && tried.is_empty() && node.residual().is_none(), "{hidden:?} {id}");
        }
        let context = &findings.nodes[&"blk.1.attn_ctx".parse::<Checkpoint>().unwrap()];
        assert!(context.judged > 0 && context.is_healthy(), "{hidden:?}");
    }
}
