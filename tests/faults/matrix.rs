//! Every fault of the catalogue, injected in the engine: found at the right node and called by its name; and
//! nothing found where nothing is injected.

use std::collections::BTreeMap;
use std::time::Instant;

use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::fused::Model;
use parity::faults::inject::{Injected, inject};
use parity::faults::{Argument, Fault, ParameterKind, Site, catalogue};

use crate::support::runs::{Random, audit_all, diagnose_at, model, run, run_some};

const TINY: [&str; 2] = ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"];
/// Tokens of a run: a prompt and three decode steps.
const PROMPT: usize = 6;
const TOKENS: usize = 9;

/// How one injected fault came out.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// Right node, right name first.
    Named,
    /// Right node; the right name is among several that these data do not tell apart.
    Among,
    /// Right node, no name.
    Unnamed,
    /// Right node, wrong name.
    Wrong(String),
    /// Wrong node, or none.
    Elsewhere(Vec<Checkpoint>),
    /// The mistake is within rounding on these data.
    Silent,
}

fn judge(model: &Model, fault: &Fault, injected: &Injected, kept: &parity::dump::Kept) -> (Outcome, f64) {
    let audit = audit_all(model, kept);
    let origins: Vec<Checkpoint> = audit.origins().collect();
    if origins.is_empty() && fault.silent.is_some() {
        return (Outcome::Silent, 0.0);
    }
    // Rows of values up to 1e36 become rows with one value that is not zero: there the bound of a sum, which
    // counts on terms of both signs, is exceeded by up to a half, and later nodes seem faulty too.
    let degenerate = fault.name == "data.f16_as_bf16";
    let strayed = origins.iter().any(|origin| !injected.nodes.contains(origin)) && !degenerate;
    if origins.first() != injected.nodes.first() || strayed {
        return (Outcome::Elsewhere(origins), 0.0);
    }
    let start = Instant::now();
    let found = diagnose_at(model, kept, origins[0]).diagnosis;
    let seconds = start.elapsed().as_secs_f64();
    let names: Vec<&str> = found.iter().map(|item| item.fault.as_str()).collect();
    let outcome = match &names[..] {
        [] => Outcome::Unnamed,
        [first, ..] if *first == fault.name => Outcome::Named,
        names if names.contains(&fault.name) => Outcome::Among,
        names => Outcome::Wrong(names.join(", ")),
    };
    (outcome, seconds)
}

/// Layers from which on a run keeps only those around the injected one, and ends there.
const LARGE: usize = 8;

/// Runs the engine with one mistake on random tokens; `None` where the model has no place for it.
fn injected_run(model: &Model, fault: &Fault, spec: &str, random: &mut Random) -> Option<(Outcome, f64)> {
    let mut graph = model.graph.clone();
    let injected = inject(&mut graph, &[spec.parse().unwrap()], model).ok()?;
    let tokens = random.tokens(TOKENS, model.config.dims.vocab);
    let kept = if model.config.dims.layers < LARGE {
        run(model, &graph, &tokens, PROMPT, false)
    } else {
        let last = *injected[0].nodes.last()?;
        let layer = injected[0].nodes[0].layer_index();
        let end = last.layer_index().map_or(last, |layer| Checkpoint::layer(Kind::LayerOut, layer + 1));
        let near = |checkpoint: Checkpoint| match (checkpoint.layer_index(), layer) {
            (Some(own), Some(layer)) => own.abs_diff(layer) <= 1,
            (Some(own), None) => own == 0 || own as usize + 1 == model.config.dims.layers,
            (None, _) => true,
        };
        run_some(model, &graph.until(end), &tokens, PROMPT, false, &near)
    };
    Some(judge(model, fault, &injected[0], &kept))
}

/// Every fault in the first, a middle and the last layer of the model that `PARITY_REAL_MODEL` names.
#[test]
#[ignore = "minutes with a real model: scripts/fault-matrix.sh"]
fn every_fault_on_a_real_model() {
    let Some(path) = std::env::var_os("PARITY_REAL_MODEL") else { return eprintln!("SKIP: no real model") };
    let model = Model::open(path.as_ref()).unwrap();
    let last = model.config.dims.layers - 1;
    let mut random = Random(6);
    let (mut counts, mut failures) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for fault in catalogue::all() {
        for layer in [0, last / 2, last] {
            let spec =
                if in_layers(fault) { format!("{}@{layer}", fault.name) } else { fault.name.to_owned() };
            let Some((outcome, seconds)) = injected_run(&model, fault, &spec, &mut random) else { continue };
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
            if !in_layers(fault) {
                break;
            }
        }
    }
    println!("{counts:?}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn in_layers(fault: &Fault) -> bool {
    fault.home.kinds().iter().any(|kind| kind.in_layer())
}

#[test]
fn every_fault_is_found_where_it_sits_and_called_by_its_name() {
    let mut random = Random(1);
    let mut failures = Vec::new();
    let (mut named, mut among) = (0, 0);
    for name in TINY {
        let Some(model) = model(name) else { return eprintln!("SKIP: {name} is not there") };
        let last = model.config.dims.layers as u32 - 1;
        for fault in catalogue::all() {
            let places: Vec<String> = match in_layers(fault) {
                true => [0, last / 2 + 1, last].iter().map(|layer| format!("@{layer}")).collect(),
                false => vec![String::new()],
            };
            for place in places {
                let spec = format!("{}{place}", fault.name);
                let Some((outcome, _)) = injected_run(&model, fault, &spec, &mut random) else { continue };
                match outcome {
                    Outcome::Named => named += 1,
                    Outcome::Among => among += 1,
                    // 1e-5 for 1e-6 is within rounding where the mean square of a row is large.
                    Outcome::Silent if fault.name == "norm.eps" && !place.ends_with('0') => {}
                    other => failures.push(format!("{name} {spec}: {other:?}")),
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    // Pairs that no data tell apart are few: the names come first elsewhere.
    assert!(named > 300 && among <= 12, "{named} named first, {among} among others");
}

#[test]
fn with_the_attention_matrices_recorded_the_fault_sits_inside() {
    let Some(model) = model(TINY[0]) else { return eprintln!("SKIP: no tiny model") };
    let mut random = Random(2);
    for (name, node) in [
        ("attn.no_scale", "blk.1.attn_probs"),
        ("attn.scale", "blk.1.attn_probs"),
        ("attn.no_softmax", "blk.1.attn_probs"),
        ("attn.kv_head", "blk.1.attn_scores"),
        ("attn.self_only", "blk.1.attn_probs"),
    ] {
        let mut graph = model.graph.clone();
        inject(&mut graph, &[format!("{name}@1").parse().unwrap()], &model).unwrap();
        let tokens = random.tokens(TOKENS, 4000);
        let kept = run(&model, &graph, &tokens, PROMPT, true);
        let origin = audit_all(&model, &kept).origins().next();
        assert_eq!(origin.map(|o| o.to_string()).as_deref(), Some(node), "{name}");
        let found = diagnose_at(&model, &kept, origin.unwrap());
        assert_eq!(found.diagnosis.first().map(|d| d.fault.as_str()), Some(name), "{found:?}");
    }
}

#[test]
fn a_hundred_clean_runs_are_silent() {
    let mut random = Random(3);
    for name in TINY {
        let Some(model) = model(name) else { return eprintln!("SKIP: {name} is not there") };
        for _ in 0..50 {
            let tokens = random.tokens(TOKENS, model.config.dims.vocab);
            let prompt = 1 + random.below(TOKENS);
            let kept = run(&model, &model.graph, &tokens, prompt, false);
            let audit = audit_all(&model, &kept);
            assert_eq!(audit.origins().next(), None, "{name} {tokens:?}");
            assert!(audit.nodes.len() > 70 && audit.nodes.values().all(Result::is_ok));
            let nodes: Vec<Checkpoint> = audit.nodes.keys().copied().collect();
            let found = diagnose_at(&model, &kept, nodes[random.below(nodes.len())]);
            assert_eq!(found, Default::default());
        }
    }
}

#[test]
fn two_mistakes_in_one_node_are_both_named() {
    let Some(model) = model(TINY[0]) else { return eprintln!("SKIP: no tiny model") };
    let tokens = Random(4).tokens(TOKENS, 4000);
    for (specs, node) in [
        (["data.scaled=1.25@blk.2.q_proj", "linear.wrong_layer@2"], "blk.2.q_proj"),
        (["norm.unit_offset@1", "data.offset=0.25@blk.1.attn_norm"], "blk.1.attn_norm"),
        (["attn.kv_head@2", "attn.no_scale@2"], "blk.2.attn_ctx"),
    ] {
        let mut graph = model.graph.clone();
        inject(&mut graph, &specs.map(|spec| spec.parse().unwrap()), &model).unwrap();
        let kept = run(&model, &graph, &tokens, PROMPT, false);
        let found = diagnose_at(&model, &kept, node.parse().unwrap());
        let name = found.diagnosis.first().map(|item| item.fault.clone()).unwrap_or_default();
        let injected: Vec<&str> = specs.iter().map(|spec| spec.split(['=', '@']).next().unwrap()).collect();
        assert!(injected.iter().all(|fault| name.contains(fault)), "{specs:?}: {name}, {:?}", found.tried);
    }
}

#[test]
fn parameters_are_fitted() {
    let Some(model) = model(TINY[0]) else { return eprintln!("SKIP: no tiny model") };
    let tokens = Random(5).tokens(TOKENS, 4000);
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
        ("norm.eps=3e-4@2", "blk.2.attn_norm", "eps is 3e-4, the model says 1e-6"),
        ("attn.scale=0.11@2", "blk.2.attn_ctx", "scaled by 0.11, not"),
        ("attn.stale_cache=unread@2", "blk.2.attn_ctx", "rows do not see their own step"),
        ("attn.mask_shift=1@2", "blk.2.attn_ctx", "rows see 1 position after their own"),
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
    ] {
        let mut graph = model.graph.clone();
        inject(&mut graph, &[spec.parse().unwrap()], &model).unwrap();
        let kept = run(&model, &graph, &tokens, PROMPT, false);
        let found = diagnose_at(&model, &kept, node.parse().unwrap());
        let said = found.diagnosis.first().map(|item| item.text.clone()).unwrap_or_default();
        assert!(said.contains(text), "{spec}: {said:?} {:?}", found.tried);
    }
}

/// One query head that reads other keys, other values, or both: told which.
#[test]
fn a_single_head_that_reads_another_one_s_keys_or_values_is_named() {
    let Some(model) = model(TINY[0]) else { return eprintln!("SKIP: no tiny model") };
    let node: Checkpoint = "blk.1.attn_ctx".parse().unwrap();
    let heads = model.config.dims.heads;
    assert_eq!((heads, model.config.dims.kv_heads), (8, 2));
    let own: Vec<u32> = vec![0, 0, 0, 0, 1, 1, 1, 1];
    let with = |head: usize| [&own[..head], &[1 - own[head]], &own[head + 1..]].concat();
    let fault = catalogue::find("attn.wrong_kv_head").unwrap();
    let mut random = Random(7);
    for (read, text) in [
        ([with(1), own.clone()].concat(), "query head 1 reads the keys of KV head 1, the model says 0"),
        ([own.clone(), with(6)].concat(), "query head 6 reads the values of KV head 0, the model says 1"),
        ([with(3), with(3)].concat(), "query head 3 reads KV head 1, the model says 0"),
    ] {
        let mut graph = model.graph.clone();
        let (site, argument) = (Site { model: &model }, Argument::Order(read));
        for kind in fault.home.kinds() {
            let one = graph.node_mut(node.sibling(*kind)).unwrap();
            assert_eq!((fault.change)(&site, one, &argument), Some(()));
        }
        let kept = run(&model, &graph, &random.tokens(TOKENS, 4000), PROMPT, false);
        assert_eq!(audit_all(&model, &kept).origins().collect::<Vec<_>>(), [node], "{text}");
        let found = diagnose_at(&model, &kept, node);
        let said: Vec<(&str, &str)> =
            found.diagnosis.iter().map(|item| (item.fault.as_str(), item.text.as_str())).collect();
        assert_eq!(said, [(fault.name, text)], "{:?}", found.tried);
    }
}

/// A random argument for a fault, so that not only the defaults are found.
fn random_argument(fault: &Fault, model: &Model, random: &mut Random) -> String {
    let dims = model.config.dims;
    let value = match fault.name {
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
        "linear.truncated_k" => (dims.ffn - [1, 32, 100][random.below(3)]) as f64,
        _ => return String::new(),
    };
    match fault.parameter.map(|parameter| parameter.kind) {
        Some(ParameterKind::Number | ParameterKind::Integer) => format!("={value}"),
        _ => String::new(),
    }
}

/// 200 seeded runs over the tiny models and, where `PARITY_REAL_MODEL` names it, a real one; prints a table.
/// `scripts/fault-matrix.sh` runs it.
#[test]
#[ignore = "minutes with a real model: scripts/fault-matrix.sh"]
fn two_hundred_seeded_runs() {
    let count: usize = std::env::var("PARITY_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let mut models: Vec<Model> = TINY.iter().filter_map(|name| model(name)).collect();
    if let Some(path) = std::env::var_os("PARITY_REAL_MODEL") {
        models.push(Model::open(path.as_ref()).unwrap());
    }
    let faults: Vec<&Fault> = catalogue::all().collect();
    let mut random = Random(2024);
    let mut table: BTreeMap<String, [usize; 6]> = BTreeMap::new();
    let (mut slowest, mut done) = (0.0f64, 0);
    while done < count {
        let model = &models[done % models.len()];
        let fault = faults[random.below(faults.len())];
        let layer = random.below(model.config.dims.layers) as u32;
        let argument = random_argument(fault, model, &mut random);
        let place = if in_layers(fault) { format!("@{layer}") } else { String::new() };
        let spec = format!("{}{argument}{place}", fault.name);
        let Some((outcome, seconds)) = injected_run(model, fault, &spec, &mut random) else { continue };
        done += 1;
        slowest = slowest.max(seconds);
        let file = model.gguf.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let column = match &outcome {
            Outcome::Named => 0,
            Outcome::Among => 1,
            Outcome::Unnamed => 2,
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
    println!("slowest diagnosis {slowest:.2} s");
    let sum = |column: usize| table.values().map(|counts| counts[column]).sum::<usize>();
    assert_eq!(sum(4), 0, "every fault is found at its own node");
    assert_eq!(sum(3), 0, "no fault is called by a wrong name");
    assert!(100 * (sum(0) + sum(1)) >= 98 * (count - sum(5)), "98 % are named");
}
