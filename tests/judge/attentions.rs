//! Engines that bring no graph and whose attention rounds what it multiplies: healthy ones are at parity without a word of
//! theirs, the answer says what they were taken to compute in, and what is wrong in them is found. What they round is
//! written down here as they do it, and not as parity allows for it.

use half::{bf16, f16};
use parity::checkpoint::{Checkpoint, Kind};
use parity::gguf::Gguf;
use parity::model::builders::{Cache, Shape, build};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::without_graph;
use crate::support::graphs::record::{Mistake, record_as};
use crate::support::graphs::{fill_with, head};
use crate::support::program::{Audited, audit};
use crate::support::samples::sample;
use crate::support::subset;

/// To the nearest number of a type, or towards zero.
type Round = fn(f32) -> f32;

const TOKENS: usize = 12;
const PLAIN: Round = |x| x;
const HALF: Round = |x| f16::from_f32(x).to_f32();
const BRAIN: Round = |x| bf16::from_f32(x).to_f32();
/// What the answer calls them, and the name of the fault in an engine of f32; f16 and TF32 have the same significant bits.
const ROUNDINGS: [(&str, &str, Round); 4] = [
    ("attention with f16 operands", "precision.tf32", HALF),
    ("attention with f16 operands", "precision.tf32", |x| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)),
    ("attention with bf16 operands", "precision.bf16_operands", BRAIN),
    ("attention with TF32 operands, cut", "precision.tf32", |x| f32::from_bits(x.to_bits() & !0x1fff)),
];

/// The powers of the scale that queries and keys are multiplied by before they are rounded, those of 1/sqrt(128) being no
/// powers of two: none, all of it, its root each.
const SCALED: [[f64; 2]; 3] = [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]];

/// How an engine attends.
#[derive(Clone, Copy)]
struct Attention {
    /// What operands of both products are rounded by.
    round: Round,
    /// What keys and values are rounded by before that, in their cache.
    cached: Round,
    /// Of [`SCALED`]; what is left of the scale is multiplied by the score.
    scaled: [f64; 2],
    /// Whether weights are rounded before they are divided by their sum.
    fused: bool,
    /// What the scale is multiplied by.
    scale: f64,
    /// How many further on the head of keys and values is that a head of queries reads.
    beside: usize,
}

impl Attention {
    /// (B, N, H, DV) of Q (B, H, N, DK), K and V (B, K, M, DK) and a mask.
    fn of(&self, args: &Args<'_, f64>) -> Vec<f64> {
        let [q, k, v, mask] = [0, 1, 2, 3].map(|slot| args.get(slot).unwrap());
        let ([_, heads, rows, width], [_, keys, positions, _]) = (q.shape(), k.shape());
        let round = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|x| f64::from((self.round)(*x as f32))).collect()
        };
        let scale = f64::from(args.params.float(0)) * self.scale;
        let [of_q, of_k] = self.scaled;
        let [q, k, v] = [(q, of_q), (k, of_k), (v, 0.0)].map(|(source, power)| {
            let factor = scale.powf(power) as f32;
            round(&source.values().iter().map(|x| f64::from(*x as f32 * factor)).collect::<Vec<_>>())
        });
        let [k, v] = [k, v]
            .map(|all| all.into_iter().map(|x| f64::from((self.cached)(x as f32))).collect::<Vec<f64>>());
        let (mask, scale) = (mask.values(), scale.powf(1.0 - of_q - of_k));
        let mut out = vec![0.0; rows * heads * width];
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let own = &q[(head * rows + row) * width..][..width];
            let of_head = (head / (heads / keys) + self.beside) % keys;
            let at = |position: usize| (of_head * positions + position) * width;
            let z: Vec<f64> = (0..positions)
                .map(|m| {
                    scale * own.iter().zip(&k[at(m)..]).map(|(q, k)| q * k).sum::<f64>()
                        + mask[row * positions + m]
                })
                .collect();
            let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = z.iter().map(|z| (z - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let out = &mut out[(row * heads + head) * width..][..width];
            for (m, weight) in weights.iter().enumerate() {
                let weight = match self.fused {
                    true => round(&[*weight])[0] / sum,
                    false => round(&[*weight / sum])[0],
                };
                out.iter_mut().zip(&v[at(m)..]).for_each(|(out, v)| *out += weight * v);
            }
        }
        out
    }
}

/// What an audit says of an engine with these attentions that declares such an arithmetic and records those nodes: exit
/// code, the first checkpoint that is wrong, and the notes and the names of faults.
fn audited(
    declared: Option<&str>,
    some: &dyn Fn(Kind) -> bool,
    mistake: Mistake<'_>,
) -> (i32, String, String) {
    audited_as(Element::F32, (declared, some), mistake)
}

/// The same of an engine that keeps its values in a type.
fn audited_as(
    kept: Element,
    (declared, some): (Option<&str>, &dyn Fn(Kind) -> bool),
    mistake: Mistake<'_>,
) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let [model, whole, dump] = ["model.gguf", "whole", "dump"].map(|name| folder.path().join(name));
    fill_with(&head("qwen2-dense"), &model, if kept == Element::F16 { HALF } else { PLAIN });
    let shape = Shape::step(0, TOKENS, TOKENS, true, Cache::F32);
    let graph = build(&Gguf::open(&model).unwrap(), shape).unwrap().graph;
    record_as(&model, &graph, &whole, kept, mistake);
    subset::copy(&whole, &dump, declared, some);
    without_graph(&dump);
    let Audited { code, first, notes, report, .. } = audit(&dump, &model, &["--allow-missing"]);
    let faults = report["first_divergence"]["diagnosis"].as_array().into_iter().flatten();
    let faults = faults.filter_map(|one| one["fault"].as_str());
    (code, first, [&*notes].into_iter().chain(faults).collect::<Vec<_>>().join("\n"))
}

fn is_context(id: Checkpoint) -> bool {
    id.kind() == Kind::AttnCtx
}

/// What engines record as a rule.
fn usual(kind: Kind) -> bool {
    use Kind::*;
    from_output(kind) || matches!(kind, QProj | KProj | VProj | Q | K | V | QRope | KRope | AttnCtx)
}

fn from_output(kind: Kind) -> bool {
    use Kind::*;
    let block = [AttnNorm, AttnOut, AttnResidual, FfnNorm, FfnGate, FfnUp, FfnAct, FfnOut, LayerOut];
    block.contains(&kind) || matches!(kind, Embed | FinalNorm | Logits)
}

#[test]
fn an_attention_that_rounds_accuses_nobody() {
    for (name, _, round) in ROUNDINGS {
        for fused in [false, true] {
            let own = Attention { round, cached: PLAIN, scaled: SCALED[0], fused, scale: 1.0, beside: 0 };
            let (code, first, notes) =
                audited(None, &usual, &|id, args| is_context(id).then(|| own.of(args)));
            assert_eq!((code, first), (0, String::new()), "{name}, fused {fused}");
            assert!(notes.contains(name), "{name}, fused {fused}: {notes}");
        }
    }
}

#[test]
fn nor_does_one_that_scales_before_it_rounds() {
    for ((name, _, round), scaled) in SCALED.into_iter().skip(1).flat_map(|s| ROUNDINGS.map(|r| (r, s))) {
        let own = Attention { round, cached: PLAIN, scaled, fused: true, scale: 1.0, beside: 0 };
        let (code, first, _) = audited(None, &usual, &|id, args| is_context(id).then(|| own.of(args)));
        assert_eq!((code, first), (0, String::new()), "{name}, {scaled:?}");
    }
}

#[test]
fn neither_does_one_that_was_not_recorded() {
    for (name, _, round) in ROUNDINGS {
        let own = Attention { round, cached: PLAIN, scaled: SCALED[0], fused: false, scale: 1.0, beside: 0 };
        let (code, first, _) = audited(None, &from_output, &|id, args| is_context(id).then(|| own.of(args)));
        assert_eq!((code, first), (0, String::new()), "{name}");
    }
}

#[test]
fn nor_does_one_whose_rotated_heads_were_not_recorded() {
    let unrotated = |kind: Kind| usual(kind) && !matches!(kind, Kind::QRope | Kind::KRope);
    for ((name, _, round), fused) in ROUNDINGS.into_iter().flat_map(|one| [(one, false), (one, true)]) {
        let own = Attention { round, cached: PLAIN, scaled: SCALED[0], fused, scale: 1.0, beside: 0 };
        let (code, first, _) = audited(None, &unrotated, &|id, args| is_context(id).then(|| own.of(args)));
        assert_eq!((code, first), (0, String::new()), "{name}, fused {fused}");
    }
}

#[test]
fn an_engine_of_f16_may_cache_keys_and_values_in_bf16() {
    let own =
        Attention { round: HALF, cached: BRAIN, scaled: SCALED[0], fused: false, scale: 1.0, beside: 0 };
    for declared in [None, Some("f16 storage=f16 kv=bf16")] {
        let found = |scale: f64| {
            let wrong = Attention { scale, ..own };
            audited_as(Element::F16, (declared, &usual), &|id, args| is_context(id).then(|| wrong.of(args)))
        };
        let (code, first, notes) = found(1.0);
        assert_eq!((code, first), (0, String::new()), "{declared:?}");
        assert_eq!(notes.contains("keys and values in bf16"), declared.is_none(), "{notes}");
        let (code, first, _) = found(1.2);
        assert_eq!((code, first.as_str()), (1, "blk.0.attn_ctx"), "{declared:?}");
    }
}

#[test]
fn a_mistake_in_all_layers_is_named_though_no_layer_shows_what_is_cached() {
    let own =
        Attention { round: PLAIN, cached: HALF, scaled: SCALED[0], fused: false, scale: 1.01, beside: 0 };
    let (code, first, said) = audited(None, &usual, &|id, args| is_context(id).then(|| own.of(args)));
    assert_eq!((code, first.as_str()), (1, "blk.0.attn_ctx"));
    assert!(said.ends_with("attn.scale"), "{said}");
}

#[test]
fn what_is_wrong_in_such_an_attention_is_found() {
    let cases = SCALED.into_iter().flat_map(|s| ROUNDINGS.map(|r| (r, s)));
    for ((name, _, round), scaled) in sample("attentions", 3, cases) {
        let healthy = Attention { round, cached: PLAIN, scaled, fused: false, scale: 1.0, beside: 0 };
        for wrong in [Attention { scale: 1.5, ..healthy }, Attention { beside: 1, ..healthy }] {
            let (code, first, _) = audited(None, &usual, &|id, args| {
                let attention = if id.to_string() == "blk.1.attn_ctx" { wrong } else { healthy };
                is_context(id).then(|| attention.of(args))
            });
            assert_eq!((code, first.as_str()), (1, "blk.1.attn_ctx"), "{name}, {scaled:?}");
        }
    }
}

#[test]
fn who_says_f32_has_no_such_attention() {
    for (name, fault, round) in ROUNDINGS {
        for fused in [false, true] {
            let own = Attention { round, cached: PLAIN, scaled: SCALED[0], fused, scale: 1.0, beside: 0 };
            let (code, first, said) =
                audited(Some("f32"), &usual, &|id, args| is_context(id).then(|| own.of(args)));
            assert_eq!((code, first.as_str()), (1, "blk.0.attn_ctx"), "{name}, fused {fused}");
            assert!(said.contains(fault), "{name}, fused {fused}: {said}");
        }
    }
}

/// To the nearest number of e4m3, as tensor cores multiply it: three bits of mantissa, 448 the largest.
const EIGHT: Round = |x| {
    let step = f32::exp2(x.abs().log2().floor().max(-6.0) - 3.0);
    if x == 0.0 { 0.0 } else { ((x / step).round_ties_even() * step).clamp(-448.0, 448.0) }
};

/// Both sides of both products: twice as much as what a cache of eight bits rounds.
#[test]
fn attention_in_eight_bits_of_an_engine_of_bf16_is_undecided_where_it_was_not_recorded() {
    let own =
        Attention { round: EIGHT, cached: PLAIN, scaled: SCALED[0], fused: true, scale: 1.0, beside: 0 };
    let modules = |kind: Kind| usual(kind) && !matches!(kind, Kind::QRope | Kind::KRope | Kind::AttnCtx);
    let (code, first, _) =
        audited_as(Element::Bf16, (None, &modules), &|id, args| is_context(id).then(|| own.of(args)));
    assert_eq!((code, first), (2, String::new()));
}
