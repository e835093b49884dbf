//! Mistakes with other values than the usual ones, in real models, two in one node; and nothing found where nothing is
//! injected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use parity::audit::{Finding, Findings};
use parity::checkpoint::{Checkpoint, Kind};
use parity::gguf::Gguf;
use parity_graph::fault::{Entry, entries};

use super::catalogue::{Outcome, judged};
use crate::support::injected::{Made, Ran, run, run_with, specs};
use crate::support::runs::{Random, gguf, path};
use crate::support::samples::sample;

const TINY: [&str; 2] = ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"];
/// Tokens of a run: a prompt and three decode steps.
const PROMPT: usize = 6;
const TOKENS: usize = 9;
/// Tokens that both tiny models know.
const VOCABULARY: usize = 4000;

fn layers(gguf: &Gguf) -> u32 {
    let of = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
    gguf.tensors().filter_map(|tensor| of(&tensor.name)).max().map_or(0, |last| last + 1)
}

/// What was found in a run with mistakes, that the model has a place for, of an engine that says what it computes in.
fn found(model: &str, flash: bool, tokens: &[u32], wrong: &[&str]) -> Option<Findings> {
    let how = Made { tokens, prompt: PROMPT, flash };
    let (ran, _) = run(gguf(model)?, &how, &specs(wrong)).unwrap_or_else(|| panic!("no place for {wrong:?}"));
    Some(ran.declaring("f32").audit())
}

fn at<'f>(findings: &'f Findings, node: &str) -> &'f Finding {
    &findings.nodes[&node.parse::<Checkpoint>().unwrap()]
}

/// Runs a model with one mistake on random tokens, up to the layer behind the one that it is in; `None` where the model has
/// no place for it. Seconds are those of the audit, with the diagnosis.
fn injected_run(
    path: &Path,
    entry: &Entry,
    spec: &str,
    layer: Option<u32>,
    random: &mut Random,
) -> Option<(Outcome, f64)> {
    let gguf = Gguf::open(path).unwrap();
    let layers = layers(&gguf);
    let near = |checkpoint: Checkpoint| match (checkpoint.layer_index(), layer) {
        (Some(own), Some(layer)) => own.abs_diff(layer) <= 1,
        (Some(own), None) => own == 0 || own + 1 == layers,
        (None, Some(layer)) => checkpoint.kind() == Kind::Embed || layer + 1 == layers,
        (None, None) => true,
    };
    let tokens = random.tokens(TOKENS, gguf.tensor("token_embd.weight")?.info.shape[0]);
    let how = Made { tokens: &tokens, prompt: PROMPT, flash: true };
    let (ran, nodes) = run_with(gguf, &how, &specs(&[spec]), &|_, _, _| None, &near)?;
    let start = Instant::now();
    let outcome = judged(entry, &ran, &nodes);
    Some((outcome, start.elapsed().as_secs_f64()))
}

/// A mistake in a layer, or where it has no place in one at an end of the model: as it is written, and how it came out.
/// What can happen to any value happens to one node of the layer.
fn injected_at(
    path: &Path,
    entry: &Entry,
    argument: &str,
    layer: u32,
    random: &mut Random,
) -> Option<(String, Option<u32>, Outcome, f64)> {
    let within = if entry.ops.is_empty() { format!("blk.{layer}.attn_out") } else { layer.to_string() };
    let ends = ["embed", "final_norm", "logits"].map(|end| (end.to_owned(), None));
    std::iter::once((within, Some(layer))).chain(ends).find_map(|(place, layer)| {
        let spec = format!("{}{argument}@{place}", entry.name);
        let (outcome, seconds) = injected_run(path, entry, &spec, layer, random)?;
        Some((spec, layer, outcome, seconds))
    })
}

/// Every mistake in the first, a middle and the last layer of the model that `PARITY_REAL_MODEL` names.
#[test]
#[ignore = "minutes with a real model: scripts/fault-matrix.sh"]
fn every_fault_on_a_real_model() {
    let Some(path) = std::env::var_os("PARITY_REAL_MODEL").map(PathBuf::from) else {
        return eprintln!("SKIP: no real model");
    };
    let last = layers(&Gguf::open(&path).unwrap()) - 1;
    let mut random = Random(6);
    let (mut counts, mut failures) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for entry in entries().filter(|entry| !entry.recognised) {
        for layer in [0, last / 2, last] {
            let Some((spec, layer, outcome, seconds)) = injected_at(&path, entry, "", layer, &mut random)
            else {
                continue;
            };
            println!("{spec}: {outcome:?} {seconds:.2} s");
            let column = match outcome {
                Outcome::Named => "named first",
                Outcome::Among => "among several",
                Outcome::Silent => "within rounding",
                _ => {
                    failures.push(format!("{spec}: {outcome:?}"));
                    "failed"
                }
            };
            *counts.entry(column).or_default() += 1;
            if layer.is_none() {
                break;
            }
        }
    }
    println!("{counts:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn with_the_attention_matrices_recorded_the_fault_sits_inside() {
    let mut random = Random(2);
    for (name, node) in [
        ("attn.no_scale", "blk.1.attn_probs"),
        ("attn.scale", "blk.1.attn_probs"),
        ("attn.no_softmax", "blk.1.attn_probs"),
        ("attn.kv_head", "blk.1.attn_scores"),
        ("attn.self_only", "blk.1.attn_probs"),
    ] {
        let tokens = random.tokens(TOKENS, VOCABULARY);
        let Some(findings) = found(TINY[0], false, &tokens, &[&format!("{name}@1")]) else {
            return eprintln!("SKIP: no tiny model");
        };
        let origins = Ran::origins(&findings);
        assert_eq!(origins.first().map(ToString::to_string).as_deref(), Some(node), "{name}");
        let (named, tried) = at(&findings, node).diagnosis();
        assert_eq!(named.first().map(|d| d.fault.as_str()), Some(name), "{named:?} {tried:?}");
    }
}

#[test]
fn a_hundred_clean_runs_are_silent() {
    let mut random = Random(3);
    for name in TINY {
        for _ in sample("clean runs", CLEAN, 0..50) {
            let Some(gguf) = gguf(name) else { return eprintln!("SKIP: {name} is not there") };
            let tokens = random.tokens(TOKENS, VOCABULARY);
            let how = Made { tokens: &tokens, prompt: 1 + random.below(TOKENS), flash: true };
            let (ran, _) = run(gguf, &how, &[]).unwrap();
            let findings = ran.audit();
            assert_eq!(Ran::origins(&findings), [], "{name} {tokens:?}");
            let nodes = || findings.nodes.values();
            assert!(nodes().count() > 70, "{name}");
            assert!(nodes().all(|node| node.judged > 0 && node.undecided.is_none()), "{name} {tokens:?}");
            for (id, node) in &findings.nodes {
                let (named, tried) = node.diagnosis();
                assert!(named.is_empty() && tried.is_empty() && node.residual().is_none(), "{name} {id}");
            }
        }
    }
}

/// Clean runs of a model in the quick tests.
const CLEAN: usize = 10;

#[test]
fn two_mistakes_in_one_node_are_both_named() {
    let tokens = Random(4).tokens(TOKENS, VOCABULARY);
    let mut failures = Vec::new();
    for (wrong, node) in [
        (["data.scaled=1.25@blk.2.q_proj", "linear.wrong_layer@blk.2.q_proj"], "blk.2.q_proj"),
        (["norm.unit_offset@blk.1.attn_norm", "data.offset=0.25@blk.1.attn_norm"], "blk.1.attn_norm"),
        (["attn.kv_head@2", "attn.no_scale@2"], "blk.2.attn_ctx"),
    ] {
        let Some(findings) = found(TINY[0], true, &tokens, &wrong) else {
            return eprintln!("SKIP: no tiny model");
        };
        let (named, tried) = at(&findings, node).diagnosis();
        let name = named.first().map(|item| item.fault.clone()).unwrap_or_default();
        let injected: Vec<&str> = wrong.iter().map(|spec| spec.split(['=', '@']).next().unwrap()).collect();
        if !injected.iter().all(|fault| name.contains(fault)) {
            failures.push(format!("{wrong:?}: {name}, {tried:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn parameters_are_fitted() {
    let tokens = Random(5).tokens(TOKENS, VOCABULARY);
    let mut failures = Vec::new();
    for (spec, node, text) in [
        ("rope.base=520000@1", "blk.1.q_rope", "RoPE base is 520000, the model says 1000000"),
        ("rope.scaled=0.125@1", "blk.1.q_rope", "positions are multiplied by 0.125"),
        ("rope.position_shift=-3@1", "blk.1.k_rope", "position -3"),
        ("rope.decode_shift=6@1", "blk.1.k_rope", "position +6"),
        ("attn.stale_cache=held@2", "blk.2.attn_ctx", "their slots hold the row before them"),
        (
            "residual.wrong_source=blk.1.ffn_norm@blk.1.layer_out",
            "blk.1.layer_out",
            "blk.1.ffn_norm is added in",
        ),
        ("norm.eps=3e-4@2", "blk.2.norm", "eps is 3e-4, the model says 1e-6"),
        ("data.zero=224..255@blk.1.attn_ctx", "blk.1.attn_ctx", "head 7 is zero"),
        ("attn.scale=0.11@2", "blk.2.attn_ctx", "scaled by 0.11, not"),
        ("attn.stale_cache=unread@2", "blk.2.attn_ctx", "rows do not see their own step"),
        ("attn.mask_shift=1@2", "blk.2.attn_ctx", "rows see 1 position after their own"),
        ("attn.mask_shift=unwritten@1", "blk.1.attn_ctx", "a slot of the cache that nothing was written to"),
        ("ranks.lost_sum=2/4@1", "blk.1.attn_out", "what rank 2 of 4 computes, from columns 128 to 191"),
        ("attn.window=5@2", "blk.2.attn_ctx", "the last 5 positions only"),
        ("attn.softcap=7.5@1", "blk.1.attn_ctx", "soft-capped at 7.5"),
        ("attn.clamp=0.75@1", "blk.1.attn_ctx", "beyond ±0.75 are"),
        ("data.scaled=0.0441941738@blk.0.ffn_out", "blk.0.ffn_out", "multiplied by 0.044194"),
        ("data.offset=-0.125@blk.0.v", "blk.0.v", "-0.125 is added"),
        ("linear.truncated_k=700@3", "blk.3.ffn_out", "the first 700 of 768"),
        ("linear.wrong_layer=3@0", "blk.0.q_proj", "blk.3.attn_q.weight is used"),
        ("embed.row_shift=-2", "embed", "row t-2"),
        ("logits.stride=4160", "logits", "4160 values apart"),
        ("rope.partial=8@0", "blk.0.q_rope", "rotates 8 columns"),
        ("rope.partial=16,32@0", "blk.0.q_rope", "with frequencies of 32"),
    ] {
        let Some(findings) = found(TINY[0], true, &tokens, &[spec]) else {
            return eprintln!("SKIP: no tiny model");
        };
        let (named, tried) = at(&findings, node).diagnosis();
        let said = named.first().map(|item| item.text.clone()).unwrap_or_default();
        if !said.contains(text) {
            failures.push(format!("{spec}: {said:?} {tried:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// One query head that reads other keys, other values, or both: told which.
#[test]
fn a_single_head_that_reads_another_one_s_keys_or_values_is_named() {
    let node: Checkpoint = "blk.1.attn_ctx".parse().unwrap();
    let own: Vec<u32> = vec![0, 0, 0, 0, 1, 1, 1, 1];
    let with = |head: usize| [&own[..head], &[1 - own[head]], &own[head + 1..]].concat();
    let mut random = Random(7);
    let mut failures = Vec::new();
    for (read, text) in [
        ([with(1), own.clone()].concat(), "query head 1 reads the keys of KV head 1, the model says 0"),
        ([own.clone(), with(6)].concat(), "query head 6 reads the values of KV head 0, the model says 1"),
        ([with(3), with(3)].concat(), "query head 3 reads KV head 1, the model says 0"),
    ] {
        let order = read.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let tokens = random.tokens(TOKENS, VOCABULARY);
        let wrong = format!("attn.wrong_kv_head={order}@{node}");
        let Some(findings) = found(TINY[0], true, &tokens, &[&wrong]) else {
            return eprintln!("SKIP: no tiny model");
        };
        assert_eq!(Ran::origins(&findings), [node], "{text}");
        let (named, tried) = findings.nodes[&node].diagnosis();
        let said: Vec<(&str, &str)> =
            named.iter().map(|item| (item.fault.as_str(), item.text.as_str())).collect();
        if said != [("attn.wrong_kv_head", text)] {
            failures.push(format!("{text}: {said:?} {tried:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// A random argument for a mistake, so that not only the defaults are found.
fn random_argument(entry: &Entry, gguf: &Gguf, random: &mut Random) -> String {
    let value = match entry.name {
        "rope.base" => [10_000.0, 500_000.0, 250_000.0, 5e6][random.below(4)],
        "norm.eps" => [1e-5, 1e-3, 1e-2][random.below(3)],
        "attn.scale" => [0.03125, 0.0625, 0.125, 0.5][random.below(4)],
        "attn.window" => [2.0, 4.0, 5.0][random.below(3)],
        "attn.softcap" => [2.0, 5.0, 20.0][random.below(3)],
        "attn.clamp" => [0.5, 1.0][random.below(2)],
        "data.scaled" => [0.5, 1.125, 11.3137085][random.below(3)],
        "data.offset" => [0.125, -1.0, 3.5][random.below(3)],
        "rope.position_shift" | "rope.decode_shift" => [1.0, -1.0, 5.0][random.below(3)],
        "embed.row_shift" => [1.0, -1.0, 3.0, 256.0][random.below(4)],
        "linear.truncated_k" => {
            let Some(ffn) = gguf.tensor("blk.0.ffn_down.weight") else { return String::new() };
            (ffn.cols() - [1, 32, 100][random.below(3)]) as f64
        }
        _ => return String::new(),
    };
    assert!(entry.parameter.is_some(), "{}", entry.name);
    format!("={value}")
}

/// 200 seeded runs over the tiny models and, where `PARITY_REAL_MODEL` names it, a real one; prints a table.
/// `scripts/fault-matrix.sh` runs it.
#[test]
#[ignore = "minutes with a real model: scripts/fault-matrix.sh"]
fn two_hundred_seeded_runs() {
    let count: usize = std::env::var("PARITY_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let real = std::env::var_os("PARITY_REAL_MODEL").map(PathBuf::from);
    let models: Vec<PathBuf> = TINY.iter().filter_map(|name| path(name)).chain(real).collect();
    let faults: Vec<&Entry> = entries().filter(|entry| !entry.recognised).collect();
    let mut random = Random(2024);
    let mut table: BTreeMap<String, [usize; 6]> = BTreeMap::new();
    let (mut slowest, mut done) = (0.0f64, 0);
    while done < count {
        let path = &models[done % models.len()];
        let model = Gguf::open(path).unwrap();
        let entry = faults[random.below(faults.len())];
        let layer = random.below(layers(&model) as usize) as u32;
        let argument = random_argument(entry, &model, &mut random);
        let run = injected_at(path, entry, &argument, layer, &mut random);
        let Some((spec, _, outcome, seconds)) = run else { continue };
        done += 1;
        slowest = slowest.max(seconds);
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let column = match &outcome {
            Outcome::Named => 0,
            Outcome::Among => 1,
            Outcome::Unnamed(_) => 2,
            Outcome::Wrong(_) => 3,
            Outcome::Elsewhere(_) => 4,
            Outcome::Silent => 5,
        };
        println!("{file} {spec}: {outcome:?} {seconds:.2} s");
        table.entry(file).or_default()[column] += 1;
    }
    println!(
        "\n| model | named first | among several | no name | wrong name | wrong node | within rounding |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (model, counts) in &table {
        println!("| {model} | {} |", counts.map(|n| n.to_string()).join(" | "));
    }
    println!("slowest audit with its diagnosis {slowest:.2} s");
    let sum = |column: usize| table.values().map(|counts| counts[column]).sum::<usize>();
    assert_eq!(sum(4), 0, "every fault is found at its own node");
    assert_eq!(sum(3), 0, "no fault is called by a wrong name");
    assert!(100 * (sum(0) + sum(1)) >= 98 * (count - sum(5)), "98 % are named");
}
