//! Nodes in a coarser type than the rest of their engine are found and named. How each rounds is written down here once
//! more, as engines do it, and not as parity repeats it.

use half::{bf16, f16};
use parity::arithmetic::round::{Rounding, activations};
use parity::checkpoint::{Checkpoint, Kind};
use parity::model::builders::{Cache, Shape, build};
use parity::ops::{Args, rule};
use parity::tensor::Matrix;
use parity_graph::Op;
use parity_graph::params::field;
use serde_json::Value;

use crate::mixed::{audited_in_f32, of_layers, of_modules};
use crate::support::graphs::record::{record, record_some, record_with};
use crate::support::graphs::{fill, head, recorded};
use crate::support::program::audit;
use crate::support::samples::sample;

/// Which kinds of nodes were recorded.
type Evidence = fn(Kind) -> bool;

/// What a node's values are by mistake; `None` of a node without one.
type Mistake<'a> = &'a dyn Fn(Checkpoint, &Args<'_, f64>) -> Option<Vec<f64>>;

/// What an audit says of a recording in which one node is computed by `mistake`: its exit code, the first checkpoint that
/// is wrong, and the name that it is given.
fn audited(mistake: Mistake<'_>) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let (model, dump) = (folder.path().join("model.gguf"), folder.path().join("dump"));
    fill(&head("qwen2-dense"), &model);
    record_with(&model, &recorded("qwen2-dense", ""), &dump, mistake);
    let audited = audit(&dump, &model, &[]);
    (audited.code, audited.first, audited.fault)
}

fn at(id: &str, change: impl Fn(&Args<'_, f64>) -> Vec<f64>) -> (i32, String, String) {
    let id: Checkpoint = id.parse().unwrap();
    audited(&|found, args| (found == id).then(|| change(args)))
}

fn values(args: &Args<'_, f64>, slot: usize) -> Vec<f32> {
    args.get(slot).unwrap().values().iter().map(|x| *x as f32).collect()
}

/// To 11 significant bits, halves away from zero, as NVIDIA's `cvt.rna.tf32` rounds.
pub fn tf32(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + (1 << 12)) & !((1 << 13) - 1))
}

/// A product of `round`ed operands, with sums in f32 or in whatever `sum` rounds to.
pub fn product(args: &Args<'_, f64>, round: impl Fn(f32) -> f32, sum: impl Fn(f32) -> f32) -> Vec<f64> {
    // Each operand is rounded once, and not for every sum that it is in: that took longer than what is tested.
    let [w, x] = [0, 1].map(|slot| values(args, slot).into_iter().map(&round).collect::<Vec<f32>>());
    let [_, _, tokens, rows] = args.shape;
    let k = x.len() / tokens;
    let columns: Vec<f32> = (0..k).flat_map(|i| w.iter().skip(i).step_by(k).copied()).collect();
    let mut out = Vec::with_capacity(tokens * rows);
    for x in x.chunks(k) {
        // Sums of all rows grow side by side, each in the order of its own terms.
        let mut totals = vec![0.0; rows];
        for (x, column) in x.iter().zip(columns.chunks(rows)) {
            totals.iter_mut().zip(column).for_each(|(total, w)| *total = sum(*total + sum(w * x)));
        }
        out.extend(totals.into_iter().map(f64::from));
    }
    out
}

#[test]
fn matmuls_in_a_coarser_type_are_named() {
    let said = at("blk.1.ffn_up", |args| product(args, tf32, |x| x));
    assert_eq!(said, (1, "blk.1.ffn_up".into(), "precision.tf32".into()));
    let brain: fn(f32) -> f32 = |x| bf16::from_f32(x).to_f32();
    let said = at("blk.0.q_proj", |args| product(args, brain, |x| x));
    assert_eq!(said, (1, "blk.0.q_proj".into(), "precision.bf16_operands".into()));
    let half: fn(f32) -> f32 = |x| f16::from_f32(x).to_f32();
    let said = at("blk.1.ffn_out", |args| product(args, half, half));
    assert_eq!(said, (1, "blk.1.ffn_out".into(), "precision.f16_sum".into()));
}

/// Halves of heads (T, H, E) are rotated by a table in bf16.
fn rotated_by_a_coarse_table(args: &Args<'_, f64>) -> Vec<f64> {
    let (x, positions) = (values(args, 0), values(args, 1));
    let [_, tokens, heads, width] = args.shape;
    let mut out = vec![0.0; x.len()];
    for (t, h) in (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))) {
        let start = (t * heads + h) * width;
        for i in 0..width / 2 {
            let angle = positions[t] * args.params.float(5).powf(-2.0 * i as f32 / width as f32);
            let table = |x: f32| bf16::from_f32(x).to_f32();
            let (sin, cos) = (table(angle.sin()), table(angle.cos()));
            let (a, b) = (x[start + i], x[start + i + width / 2]);
            out[start + i] = f64::from(a * cos - b * sin);
            out[start + i + width / 2] = f64::from(a * sin + b * cos);
        }
    }
    out
}

#[test]
fn a_rope_with_coarse_angles_is_named() {
    let said = at("blk.0.q_rope", rotated_by_a_coarse_table);
    assert_eq!(said, (1, "blk.0.q_rope".into(), "precision.bf16_angles".into()));
}

/// Attention whose scores and weights are in bf16.
fn attention_in_bf16(args: &Args<'_, f64>) -> Vec<f64> {
    let ([q, k, v], mask) = ([0, 1, 2].map(|slot| values(args, slot)), values(args, 3));
    let [_, heads, tokens, width] = args.get(0).unwrap().shape();
    let [_, cached, seen, _] = args.get(1).unwrap().shape();
    let mut out = vec![0.0; tokens * heads * width];
    for (t, h) in (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))) {
        let row = |x: &[f32], h: usize, i: usize, n: usize| x[(h * n + i) * width..][..width].to_vec();
        let brain = |x: f32| bf16::from_f32(x).to_f32();
        let query = row(&q, h, t, tokens);
        let scores: Vec<f32> = (0..seen)
            .map(|s| {
                let dot: f32 =
                    query.iter().zip(row(&k, h * cached / heads, s, seen)).map(|(a, b)| a * b).sum();
                brain(dot * args.params.float(0) + mask[t * seen + s])
            })
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().map(|z| (z - max).exp()).sum();
        for (s, z) in scores.iter().enumerate() {
            let p = brain((z - max).exp() / sum);
            let to = &mut out[(t * heads + h) * width..][..width];
            to.iter_mut()
                .zip(row(&v, h * cached / heads, s, seen))
                .for_each(|(out, v)| *out += f64::from(p * v));
        }
    }
    out
}

#[test]
fn a_softmax_in_bf16_is_named() {
    let said = at("blk.1.attn_ctx", attention_in_bf16);
    assert_eq!(said, (1, "blk.1.attn_ctx".into(), "precision.bf16_softmax".into()));
}

/// One piece of code rounds them in all layers: where neither was recorded, what follows shows it.
#[test]
fn what_is_coarser_in_attention_is_named_of_what_follows() {
    use Kind::{AttnCtx, KRope, Logits, QRope};
    let rope = |id: Checkpoint, args: &Args<'_, f64>| {
        matches!(id.kind(), QRope | KRope).then(|| rotated_by_a_coarse_table(args))
    };
    let softmax =
        |id: Checkpoint, args: &Args<'_, f64>| matches!(id.kind(), AttnCtx).then(|| attention_in_bf16(args));
    let mistakes: [(Mistake<'_>, &str); 2] =
        [(&rope, "precision.bf16_angles"), (&softmax, "precision.bf16_softmax")];
    let evidence: [(Evidence, &str); 3] =
        [(of_modules, "blk.0.attn_out"), (of_layers, "blk.0.layer_out"), (|kind| kind == Logits, "logits")];
    let cases = evidence.into_iter().flat_map(|evidence| mistakes.map(|mistake| (evidence, mistake)));
    let cases = cases.flat_map(|case| [(case, &[20][..]), (case, &[12, 1, 1, 1])]);
    for (((some, at), (mistake, name)), steps) in sample("evidence, mistakes and steps", 2, cases) {
        let audited = audited_in_f32(mistake, some, steps, &[]);
        let said = (audited.code, &audited.first[..], &audited.fault[..]);
        assert_eq!(said, (1, at, name), "{steps:?}: {}", audited.report["reason"]);
    }
}

#[test]
fn a_norm_in_bf16_is_named() {
    let norm = |args: &Args<'_, f64>, steps: u16| {
        let brain = |x: f32| bf16::from_f32(x).to_f32();
        let width = args.shape[3];
        let mut out = Vec::new();
        for (number, row) in values(args, 0).chunks(width).enumerate() {
            let row: Vec<f32> = row.iter().map(|x| brain(*x)).collect();
            let square = brain(row.iter().map(|x| brain(x * x)).sum::<f32>() / width as f32);
            let scale = brain(1.0 / brain(square + args.params.float(0)).sqrt());
            // Squares added in another order may round to the next number.
            let scale =
                bf16::from_bits(bf16::from_f32(scale).to_bits() + if number % 2 == 1 { steps } else { 0 });
            out.extend(row.iter().map(|x| f64::from(brain(x * scale.to_f32()))));
        }
        out
    };
    for (steps, name) in [(0, "precision.bf16_norm"), (1, "precision.bf16_norm"), (4, "")] {
        let (code, id, said) = at("blk.1.norm", |args| norm(args, steps));
        assert_eq!((code, id.as_str()), (1, "blk.1.norm"));
        assert!(
            if name.is_empty() { !said.starts_with("precision") } else { said == name },
            "{steps}: {said}"
        );
    }
}

#[test]
fn a_healthy_recording_has_no_coarser_node() {
    assert_eq!(audited(&|_, _| None), (0, String::new(), String::new()));
}

/// The dump of an engine that has no graph.
fn without_graph(dump: &std::path::Path) {
    let path = dump.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    manifest["graphs"] = Value::Array(Vec::new());
    manifest["producer"]["name"] = "an engine".into();
    std::fs::write(path, manifest.to_string()).unwrap();
}

/// A dump of an engine that attends in f16 and rotates by `base`, and one of a healthy engine in f32: exit code and report
/// of their diff.
fn attending_in_f16(base: f32, some: &dyn Fn(Checkpoint) -> bool) -> (Option<i32>, Value) {
    let folder = tempfile::tempdir().unwrap();
    let [model, ours, theirs] = ["model.gguf", "ours", "theirs"].map(|name| folder.path().join(name));
    fill(&head("qwen2-dense"), &model);
    let gguf = parity::gguf::Gguf::open(&model).unwrap();
    let graph = build(&gguf, Shape::step(0, 12, 12, true, Cache::F32)).unwrap().graph;
    let halves = |id: Checkpoint, args: &Args<'_, f64>| {
        let name = id.to_string();
        let is_half = ["q_rope", "k_rope", ".v", "attn_ctx"].iter().any(|end| name.ends_with(end));
        let op = op_of(&name);
        let mut params = *args.params;
        if op == Op::Rope {
            params.set_float(field(&op, "freq_base").unwrap().word, base);
        }
        let args = Args { params: &params, sources: args.sources.clone(), ..*args };
        let rule = rule(&op).filter(|_| is_half)?;
        let values = parity::engine::op_by_op::compute::<f64>(rule, &args).unwrap();
        Some(values.iter().map(|x| f16::from_f64(*x).to_f64()).collect())
    };
    record_some(&model, &graph, &ours, &halves, some);
    record(&model, &graph, &theirs);
    [&ours, &theirs].into_iter().for_each(|dump| without_graph(dump));
    let mut command = assert_cmd::Command::cargo_bin("parity").unwrap();
    let done = command.arg("diff").arg(&ours).arg(&theirs).arg("-m").arg(&model).args(["--format", "json"]);
    let done = done.output().unwrap();
    (done.status.code(), serde_json::from_slice(&done.stdout).unwrap())
}

/// Of the model.
const BASE: f32 = 1e4;

#[test]
fn an_engine_whose_attention_is_in_f16_is_not_accused() {
    let (code, report) = attending_in_f16(BASE, &|_| true);
    assert_eq!(code, Some(0), "{}", report["first_divergence"]);
    // Nor where something is missing besides.
    let (code, report) = attending_in_f16(BASE, &|id| id.to_string() != "logits");
    let reason = report["reason"].as_str().unwrap_or_default();
    assert_eq!(code, Some(2), "{}", report["first_divergence"]);
    assert!(reason.contains("logits"), "{reason}");
}

#[test]
fn a_mistake_beneath_f16_is_named() {
    let (code, report) = attending_in_f16(1e6, &|_| true);
    let first = &report["first_divergence"];
    assert_eq!((code, &first["checkpoint"]), (Some(1), &"blk.0.q_rope".into()), "{first}");
    assert_eq!(first["diagnosis"][0]["fault"], "rope.base", "{first}");
}

/// The op of a node whose values are halves.
fn op_of(name: &str) -> Op {
    match name.rsplit('.').next() {
        Some("q_rope" | "k_rope") => Op::Rope,
        Some("attn_ctx") => Op::FlashAttn,
        _ => Op::Add,
    }
}

/// candle's Q8_K: candle-core/src/quantized/k_quants.rs, `BlockQ8K::from_float`.
#[test]
fn candle_rounds_to_128_on_the_side_of_the_largest_value() {
    let rounded = |first: f64, second: f64| {
        let mut x = vec![0.5; 256];
        (x[0], x[1]) = (first, second);
        let values = activations(Rounding::CandleQ8K, Matrix::new(1, 256, x).view()).values.data;
        [values[0], values[1], values[2]]
    };
    assert_eq!(rounded(1.0, -1.0), [1.0, -127.0 / 128.0, 0.5]);
    assert_eq!(rounded(-1.0, 1.0), [-1.0, 127.0 / 128.0, 0.5]);
    assert_eq!(rounded(0.0, 0.0), [0.0, 0.0, 0.5]);
}
