//! Engines that compute what the model says by other formulas, or in other steps, than llama.cpp: healthy ones are not accused,
//! and what is wrong in them is found. What they round is written down here as they do it, and not as parity allows for it.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::MODEL;
use crate::support::graphs::foreign::Engine;
use crate::support::graphs::record::Mistake;
use crate::support::program::{Audited, audit};
use crate::support::samples::sample;
use crate::support::tiny_model::tiny_qwen2;

/// To the nearest number of a type.
type Round = fn(f32) -> f32;

const NARROW: [(Element, Round); 2] =
    [(Element::F16, |x| f16::from_f32(x).to_f32()), (Element::Bf16, |x| bf16::from_f32(x).to_f32())];

/// An engine in a type that rounds nothing else.
fn engine<'a>(kept: Element, computes: Mistake<'a>) -> Engine<'a> {
    Engine { kept, computes, some: &|_| true, arithmetic: Arithmetic::EXACT, stores: |_, x| x }
}

fn judged(engine: &Engine<'_>, tokens: usize, model: &Path) -> Audited {
    let folder = tempfile::tempdir().unwrap();
    let dump: PathBuf = folder.path().join("dump");
    engine.record(model, tokens, &dump);
    audit(&dump, model, &["--allow-missing"])
}

/// Exit code, and the first checkpoint that is wrong.
fn found(engine: &Engine<'_>, tokens: usize) -> (i32, String) {
    let audited = judged(engine, tokens, Path::new(MODEL));
    (audited.code, audited.first)
}

const HEALTHY: (i32, String) = (0, String::new());

fn wrong(id: &str) -> (i32, String) {
    (1, id.to_owned())
}

/// How an attention is computed: its scores are rounded after each step, scaled by so much more, by so much more again in
/// each row behind the first ones, and capped.
#[derive(Clone, Copy)]
struct Attention {
    round: Round,
    scale: f32,
    grows: f32,
    cap: Option<f32>,
}

impl Attention {
    /// As the model says, with scores rounded by `round`.
    fn usual(round: Round) -> Attention {
        Attention { round, scale: 1.0, grows: 0.0, cap: None }
    }
}

/// The weights that scores come to, in f32.
pub fn softmax(scores: &[f32]) -> Vec<f32> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// Attention in f32 but for its scores; its weights are not rounded, as in fused kernels.
fn attention(args: &Args<'_, f64>, how: Attention) -> Vec<f64> {
    let [_, rows, heads, width] = args.shape;
    let [q, k, v] = [0, 1, 2].map(|slot| args.get(slot).unwrap());
    let group = heads / k.shape()[1];
    let mut out = Vec::new();
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let scale = args.params.float(0) * how.scale * (1.0 + how.grows * row.saturating_sub(7) as f32);
        let query = q.row([0, head, row]);
        let score = |at: usize| {
            let key = k.row([0, head / group, at]);
            let product = query.iter().zip(key.iter()).map(|(q, k)| (q * k) as f32).sum::<f32>();
            let scaled = (how.round)((how.round)(product) * scale);
            how.cap.map_or(scaled, |cap| (how.round)(cap * (how.round)(((how.round)(scaled / cap)).tanh())))
        };
        let scores: Vec<f32> = (0..=row).map(score).collect();
        let weights = softmax(&scores);
        let mut own = vec![0f64; width];
        for (at, weight) in weights.iter().enumerate() {
            let value = v.row([0, head / group, at]);
            own.iter_mut().zip(value.iter()).for_each(|(own, v)| *own += f64::from(*weight) * v);
        }
        out.extend(own);
    }
    out
}

/// Attention in all layers, or in one.
fn attends(id: Checkpoint, layer: Option<u32>) -> bool {
    id.kind() == Kind::AttnCtx && layer.is_none_or(|layer| id.layer_index() == Some(layer))
}

#[test]
fn a_scale_and_a_cap_of_scores_are_found_in_narrow_attention() {
    let of = |(kept, round): (Element, Round)| [(kept, (|x| x) as Round, 40), (kept, round, 60)];
    for (kept, step, tokens) in sample("attentions", 1, NARROW.into_iter().flat_map(of)) {
        let usual = Attention::usual(step);
        let by = |how: Attention, layer: Option<u32>, first: &str| {
            let computes = |id: Checkpoint, args: &Args<'_, f64>| {
                let is_wrong = attends(id, layer);
                attends(id, None).then(|| attention(args, if is_wrong { how } else { usual }))
            };
            let said = found(&engine(kept, &computes), tokens);
            let wanted = if first.is_empty() { HEALTHY } else { wrong(first) };
            assert_eq!(said, wanted, "{kept:?} {tokens} {first}");
        };
        by(usual, None, "");
        by(Attention { scale: 1.1, ..usual }, None, "blk.0.attn_ctx");
        by(Attention { cap: Some(50.0), ..usual }, Some(3), "blk.3.attn_ctx");
    }
}

/// Attention by powers of two: log2 e is folded into the scale, queries times that and scores are rounded; the weights are not.
fn folded(args: &Args<'_, f64>, scale: f32, [queries, scores]: [Round; 2]) -> Vec<f64> {
    let [_, rows, heads, width] = args.shape;
    let [q, k, v] = [0, 1, 2].map(|slot| args.get(slot).unwrap());
    let group = heads / k.shape()[1];
    let mut out = Vec::new();
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let query: Vec<f32> = q.row([0, head, row]).iter().map(|q| queries(*q as f32 * scale)).collect();
        let score = |at: usize| {
            let key = k.row([0, head / group, at]);
            scores(query.iter().zip(key.iter()).map(|(q, k)| q * *k as f32).sum())
        };
        let z: Vec<f32> = (0..=row).map(score).collect();
        let largest = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = z.iter().map(|z| (z - largest).exp2()).collect();
        let sum: f32 = weights.iter().sum();
        let mut own = vec![0f64; width];
        for (at, weight) in weights.iter().enumerate() {
            let value = v.row([0, head / group, at]);
            own.iter_mut().zip(value.iter()).for_each(|(own, v)| *own += f64::from(weight / sum) * v);
        }
        out.extend(own);
    }
    out
}

/// A scale that a kernel keeps in the engine's type is off by one rounding, in all scores alike. A scale that is 1.05 times as much
/// in one layer is found beside that.
#[test]
fn a_scale_with_the_logarithm_folded_in_may_be_rounded() {
    let plain: Round = |x| x;
    let each = |(kept, round): (Element, Round)| {
        let kinds = [[plain, plain], [round, plain], [plain, round], [round, round]];
        kinds.into_iter().flat_map(move |steps| [plain, round].map(|scaled| (kept, scaled, steps)))
    };
    for (kept, scaled, steps) in sample("folded scales", 3, NARROW.into_iter().flat_map(each)) {
        for times in [1.0, 1.05] {
            let computes = |id: Checkpoint, args: &Args<'_, f64>| {
                let times = if attends(id, Some(2)) { times } else { 1.0 };
                let scale = scaled(times * args.params.float(0) * std::f32::consts::LOG2_E);
                attends(id, None).then(|| folded(args, scale, steps))
            };
            let wanted = if times == 1.0 { HEALTHY } else { wrong("blk.2.attn_ctx") };
            assert_eq!(found(&engine(kept, &computes), 40), wanted, "{kept:?} {times}");
        }
    }
}

/// What rounding in any order explains of attention is most of it: passed in one layer, it would hide a mistake there.
#[test]
fn attention_of_one_layer_that_rounds_as_no_other_does_is_undecided() {
    for (kept, _) in NARROW {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let grows = if attends(id, Some(1)) { 0.02 } else { 0.0 };
            attends(id, None).then(|| attention(args, Attention { grows, ..Attention::usual(|x| x) }))
        };
        let audited = judged(&engine(kept, &computes), 22, Path::new(MODEL));
        let reason = audited.reason();
        let is_said =
            audited.code == 2 && reason.contains("blk.1.attn_ctx") && reason.contains("attn_scores");
        let is_found = audited.code == 1 && audited.first == "blk.1.attn_ctx";
        assert!(is_said || is_found, "{kept:?}: exit {}, {reason}", audited.code);
    }
}

/// The sum of a matmul over `ranks`, each of whose parts is rounded, and so is every sum of them.
fn over_ranks(args: &Args<'_, f64>, ranks: usize, round: Round) -> Vec<f64> {
    let [weight, x] = [0, 1].map(|slot| args.get(slot).unwrap());
    let [outputs, k] = [weight.shape()[2], weight.shape()[3]];
    let rows = x.shape()[2];
    let mut weights: Vec<f64> = weight.values().into_owned();
    weights.iter_mut().for_each(|w| *w = f64::from(round(*w as f32)));
    let own = k / ranks;
    let mut out = Vec::new();
    for row in 0..rows {
        let x = x.row([0, 0, row]);
        out.extend((0..outputs).map(|o| {
            let part = |rank: usize| -> f64 {
                let columns = rank * own..(rank + 1) * own;
                columns.map(|i| weights[o * k + i] * x[i]).sum()
            };
            let parts = (0..ranks).map(|rank| round(part(rank) as f32));
            f64::from(parts.reduce(|sum, part| round(sum + part)).unwrap())
        }));
    }
    out
}

#[test]
fn sums_over_ranks_may_be_rounded_on_the_way() {
    let of = |(kept, round): (Element, Round)| [(kept, round, 4, 20), (kept, round, 8, 30)];
    for (kept, round, ranks, tokens) in sample("sums over ranks", 2, NARROW.into_iter().flat_map(of)) {
        let computes = |spoil: &'static str, factor: f64, wrong: usize| {
            move |id: Checkpoint, args: &Args<'_, f64>| {
                let is_sum = matches!(id.kind(), Kind::AttnOut | Kind::FfnOut);
                let mut values = is_sum.then(|| over_ranks(args, ranks, round))?;
                if id.to_string() == spoil {
                    let width = args.shape[3];
                    values[7 * width..][..wrong * width].iter_mut().for_each(|value| *value *= factor);
                }
                Some(values)
            }
        };
        assert_eq!(found(&engine(kept, &computes("", 1.0, 0)), tokens), HEALTHY, "{kept:?} {ranks}");
        // One row, and a factor of many, which is no larger than several roundings of each value.
        for (spoil, factor, rows) in
            [("blk.1.attn_out", 1.05, 1), ("blk.2.ffn_out", 1.05, 1), ("blk.1.attn_out", 1.015, 10)]
        {
            let said = found(&engine(kept, &computes(spoil, factor, rows)), tokens);
            assert_eq!(said, wrong(spoil), "{kept:?} {ranks}");
        }
    }
}

/// SiLU of the gate times up in f32, by a formula of the sigmoid; a row of one node is off by a factor.
fn gated(args: &Args<'_, f64>, sigmoid: fn(f32) -> f32) -> Vec<f64> {
    let [gate, up] = [0, 1].map(|slot| args.get(slot).unwrap().values());
    let one = |(gate, up): (&f64, &f64)| f64::from(*gate as f32 * sigmoid(*gate as f32) * *up as f32);
    gate.iter().zip(up.iter()).map(one).collect()
}

/// A function of one value.
type Formula = fn(f32) -> f32;

#[test]
fn sigmoids_have_several_formulas() {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    let formulas: [(&str, Formula); 5] = [
        ("½ + ½·tanh(x/2)", |x| 0.5 + 0.5 * (0.5 * x).tanh()),
        ("½·(1 + tanh(x/2))", |x| 0.5 * (1.0 + (0.5 * x).tanh())),
        ("2^x", |x| 1.0 / (1.0 + (-x * LOG2_E).exp2())),
        ("e^x/(1 + e^x)", |x| x.exp() / (1.0 + x.exp())),
        ("by sign", |x| {
            let e = (-x.abs()).exp();
            if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
        }),
    ];
    for (name, sigmoid) in formulas {
        let healthy =
            |id: Checkpoint, args: &Args<'_, f64>| (id.kind() == Kind::FfnAct).then(|| gated(args, sigmoid));
        assert_eq!(found(&engine(Element::F32, &healthy), 20), HEALTHY, "{name}");
    }
    let (_, sigmoid) = formulas[0];
    for (spoil, tokens) in [("blk.1.ffn_act", 12), ("blk.3.ffn_act", 40)] {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let mut values = (id.kind() == Kind::FfnAct).then(|| gated(args, sigmoid))?;
            if id.to_string() == spoil {
                let width = args.shape[3];
                values[5 * width..6 * width].iter_mut().for_each(|value| *value *= 1.0 + 5e-6);
            }
            Some(values)
        };
        assert_eq!(found(&engine(Element::F32, &computes), tokens), wrong(spoil));
    }
}

#[test]
fn a_head_of_one_row_of_a_long_text_is_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::write(&model, tiny_qwen2().bytes()).unwrap();
    let cases = [("blk.1.attn_ctx", 530, [417, 3]), ("", 530, [0, 0]), ("blk.2.attn_ctx", 600, [201, 0])];
    for (first, tokens, place) in sample("heads of long texts", 1, cases) {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let usual = Attention::usual(|x| x);
            let mut values = (id.to_string() == first).then(|| attention(args, usual))?;
            let ([row, head], [heads, width]) = (place, [args.shape[2], args.shape[3]]);
            values[(row * heads + head) * width..][..width].fill(0.0);
            Some(values)
        };
        let audited = judged(&engine(Element::F32, &computes), tokens, &model);
        assert_eq!((audited.code, &audited.first[..]), (i32::from(!first.is_empty()), first));
    }
}
