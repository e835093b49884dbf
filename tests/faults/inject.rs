//! Mistakes are injected where they are told to sit, and refused where they cannot. What `parity run --inject` refuses
//! besides is in tests/judge/graph_runs.rs.

use std::collections::BTreeSet;

use parity::audit::{Labelled, Steps};
use parity::checkpoint::Checkpoint;
use parity::faults::injected::{Injected, injected, parse, refuse_uninjected};
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build};
use parity_graph::fault::{Argument, entries};

use crate::support::graphs::{MODELS, filled};
use crate::support::injected::{Made, Ran, run, specs};
use crate::support::runs::gguf as tiny;

const TINY: [&str; 2] = ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"];

/// A prefill of five tokens.
fn prefill(gguf: &Gguf, flash: bool) -> Labelled {
    Labelled::new(build(gguf, Shape::step(0, 5, 5, flash, Cache::F32)).unwrap().graph).unwrap()
}

fn names(injected: &[Injected]) -> Vec<String> {
    injected.iter().map(|one| one.checkpoint.to_string()).collect()
}

/// Whether a node comes to other numbers in some step.
fn is_changed(ran: &Ran, clean: &Ran, steps: usize, node: Checkpoint) -> bool {
    let bits = |ran: &Ran, step: usize| {
        let values = ran.tensor(step, node).map(|tensor| tensor.values);
        values.map(|values| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
    };
    (0..steps).any(|step| bits(ran, step) != bits(clean, step))
}

/// Mistakes of models that none of these is: with states, scaled positions, sections, ALiBi, shared experts, an adapter; and
/// of a cache that is shifted, which a prefill has none of.
const ELSEWHERE: [&str; 27] = [
    "attn.alibi",
    "cache.no_shift",
    "ffn.no_square",
    "linear.merged_order",
    "lora.alpha",
    "lora.missing",
    "lora.no_scale",
    "lora.scale",
    "moe.no_scale",
    "moe.no_shared",
    "norm.rms",
    "rope.magnitude",
    "rope.scale",
    "rope.sections",
    "rope.yarn",
    "rope.yarn_factor",
    "rope.yarn_ramp",
    "state.conv_kernel",
    "state.decay_sign",
    "state.exchanged",
    "state.head_mapping",
    "state.no_gate",
    "state.no_rollback",
    "state.no_softplus",
    "state.not_carried",
    "state.shifted",
    "state.stale",
];

#[test]
fn every_mistake_can_be_injected_in_some_model_and_changes_it() {
    let all = || entries().filter(|entry| !entry.recognised).map(|entry| entry.name);
    let (mut missing, mut placeless): (BTreeSet<&str>, BTreeSet<&str>) = (all().collect(), all().collect());
    let open: Vec<Box<dyn Fn() -> Option<Gguf>>> = TINY
        .iter()
        .map(|name| Box::new(|| tiny(name)) as Box<dyn Fn() -> Option<Gguf>>)
        .chain(MODELS.iter().map(|name| Box::new(|| Some(filled(name))) as Box<_>))
        .collect();
    let tokens: Vec<u32> = (1..=7).map(|i| i * 13 % 97).collect();
    for open in open {
        for flash in [true, false] {
            let Some(gguf) = open() else { continue };
            let how = Made { tokens: &tokens, prompt: 5, flash };
            let mut clean = None;
            for name in missing.clone() {
                let found = injected(&prefill(&gguf, flash), &specs(&[name]));
                let Some(first) = found.first() else { continue };
                placeless.remove(name);
                assert!(!first.fault.text.is_empty(), "{name}");
                let clean = clean.get_or_insert_with(|| run(open().unwrap(), &how, &[]).unwrap().0);
                let at = format!("{name}@{}", first.checkpoint);
                let (ran, nodes) = run(open().unwrap(), &how, &specs(&[&at])).unwrap();
                assert_eq!(nodes, [first.checkpoint], "{name}");
                if is_changed(&ran, clean, 3, first.checkpoint) {
                    missing.remove(name);
                }
            }
        }
    }
    assert_eq!(placeless, BTreeSet::from(ELSEWHERE));
    let silent = |name: &&&str| entries().any(|entry| entry.name == **name && entry.silent.is_some());
    let wrong: Vec<_> = missing.difference(&placeless).filter(|name| !silent(name)).collect();
    assert!(wrong.is_empty(), "a place, and nothing changes: {wrong:?}");
}

#[test]
fn a_mistake_sits_where_it_is_told_to() {
    let Some(gguf) = tiny(TINY[0]) else { return eprintln!("SKIP: no tiny models") };
    let labelled = prefill(&gguf, true);
    let nodes = |spec: &str| names(&injected(&labelled, &specs(&[spec])));
    assert_eq!(nodes("rope.base@3"), ["blk.3.q_rope", "blk.3.k_rope"]);
    assert_eq!(nodes("rope.base@blk.1.k_rope"), ["blk.1.k_rope"]);
    assert_eq!(nodes("linear.no_bias@0..1").len(), 6);
    assert_eq!(nodes("attn.kv_head@2"), ["blk.2.attn_ctx"]);
    assert_eq!(nodes("norm.eps=1e-3@norm"), ["norm"]);
    // Both sums of each of four layers.
    assert_eq!(nodes("residual.missing").len(), 8);
    assert_eq!(nodes("logits.stride"), ["logits"]);

    let two = injected(&labelled, &specs(&["rope.base=5000@2", "data.nan@blk.3.v"]));
    assert_eq!(two[0].fault.argument, Argument::Number(5000.0));
    assert_eq!(two[0].fault.text, "RoPE base is 5000, the model says 1000000");
    let last = two.last().unwrap();
    assert_eq!((last.spec, last.checkpoint.to_string().as_str()), (1, "blk.3.v"));
}

#[test]
fn what_cannot_be_injected_is_refused_with_a_reason() {
    let Some(gguf) = tiny(TINY[0]) else { return eprintln!("SKIP: no tiny models") };
    let labelled = prefill(&gguf, true);
    let refusal = |spec: &str| match parse(spec) {
        Ok(wanted) => {
            assert_eq!(names(&injected(&labelled, std::slice::from_ref(&wanted))), [""; 0], "{spec}");
            refuse_uninjected(&[wanted], std::iter::once(&labelled), &[]).unwrap_err().to_string()
        }
        Err(error) => error.to_string(),
    };
    for (spec, says) in [
        ("rope.bsae@1", "rope.base"),
        ("rope.base@4", "layers 0 to 3"),
        ("rope.base@three", "three, which the graph has not"),
        ("rope.base=wide", "another base than the model's"),
        ("rope.none#a", "a number is expected after `#`"),
        ("attn.no_scale=3", "takes no value"),
        ("embed.transposed@1", "e.g. embed.transposed@embed"),
        ("rope.base@blk.0.ffn_norm", "one of norm."),
        ("rope.base@blk.9.q_rope", "blk.9.q_rope, which the graph has not"),
        ("rope.partial=7", "the value 7, which blk.0.q_rope has already or cannot take"),
        ("rope.base=1000000@1", "the value 1000000, which blk.1.q_rope has already or cannot take"),
    ] {
        let said = refusal(spec);
        assert!(said.contains(says), "{spec}: {said}");
    }
}
