//! Engines that round the operands of some products alone: of some kinds, in some layers, or where many rows meet a weight at once.

use std::cell::RefCell;
use std::path::Path;

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::op_by_op::compute;
use parity::ops::{Args, Strided, rule};
use parity_dump::Element;
use parity_graph::Op;

use crate::copies::over_rounded;
use crate::emulated::Evidence;
use crate::precision::{product, tf32};
use crate::support::edited::MODEL;
use crate::support::graphs::foreign::{Engine, is_product};
use crate::support::graphs::record::Mistake;
use crate::support::program::{Audited, audit};
use crate::support::samples::sample;

/// What of a value of 32 bits is left where the bits that TF32 lacks are cut off.
fn cut(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & !((1 << 13) - 1))
}

/// An engine of f32 that rounds the operands of some products, and what it is off by in one.
struct Mixed<'a> {
    rounds: fn(f32) -> f32,
    /// Which products, in a step of so many rows.
    is_rounded: &'a dyn Fn(Checkpoint, usize) -> bool,
    evidence: fn(Kind) -> bool,
    steps: &'a [usize],
    /// A row of this node is off by this factor.
    spoiled: (&'a str, f64),
}

impl Mixed<'_> {
    fn audit(&self) -> Audited {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| -> Option<Vec<f64>> {
            let rows = args.shape[2];
            let is_spoiled = id.to_string() == self.spoiled.0;
            let rounds = if (self.is_rounded)(id, rows) { self.rounds } else { |x| x };
            if !is_product(id) || !is_spoiled && !(self.is_rounded)(id, rows) {
                return None;
            }
            let mut values = product(args, rounds, |x| x);
            if is_spoiled {
                let width = args.shape[3];
                values[(rows - 1) * width..].iter_mut().for_each(|value| *value *= self.spoiled.1);
            }
            Some(values)
        };
        audited_in_f32(&computes, self.evidence, self.steps, &[])
    }
}

/// What an audit says of an engine of f32 that records the `evidence` of some steps.
pub fn audited_in_f32(
    computes: Mistake<'_>,
    evidence: fn(Kind) -> bool,
    steps: &[usize],
    more: &[&str],
) -> Audited {
    let some = |id: Checkpoint| evidence(id.kind());
    let (kept, arithmetic) = (Element::F32, Arithmetic::EXACT);
    let engine = Engine { kept, computes, some: &some, arithmetic, stores: |_, x| x };
    let folder = tempfile::tempdir().unwrap();
    let dump = folder.path().join("dump");
    engine.record_steps(Path::new(MODEL), steps, &dump);
    audit(&dump, Path::new(MODEL), &[&["--allow-missing"], more].concat())
}

fn of_queries_keys_and_values(id: Checkpoint, _: usize) -> bool {
    matches!(id.kind(), Kind::QProj | Kind::KProj | Kind::VProj)
}

fn of_feed_forward(id: Checkpoint, _: usize) -> bool {
    matches!(id.kind(), Kind::FfnGate | Kind::FfnUp | Kind::FfnOut)
}

fn of_last_of_feed_forward(id: Checkpoint, _: usize) -> bool {
    id.kind() == Kind::FfnOut
}

fn of_one_layer(id: Checkpoint, _: usize) -> bool {
    id.to_string().starts_with("blk.2.")
}

fn of_prompts(_: Checkpoint, rows: usize) -> bool {
    rows > 1
}

fn of_single_rows(id: Checkpoint, rows: usize) -> bool {
    rows == 1 && id.kind() == Kind::FfnOut
}

/// What modules give, products with their biases added.
pub fn of_modules(kind: Kind) -> bool {
    use Kind::{
        AttnNorm, AttnOut, Embed, FfnGate, FfnNorm, FfnOut, FfnUp, FinalNorm, K, LayerOut, Logits, Q, V,
    };
    let within = matches!(kind, Q | K | V | AttnOut | FfnGate | FfnUp | FfnOut);
    within || matches!(kind, Embed | AttnNorm | FfnNorm | LayerOut | FinalNorm | Logits)
}

/// Hidden states, and what the last product reads and gives.
pub fn of_layers(kind: Kind) -> bool {
    matches!(kind, Kind::Embed | Kind::LayerOut | Kind::FinalNorm | Kind::Logits)
}

/// What is recorded of attention and of layers, nothing within feed-forward blocks.
fn without_feed_forward(kind: Kind) -> bool {
    use Kind::{AttnCtx, AttnNorm, AttnOut, Embed, K, KRope, LayerOut, Logits, Q, QRope, V};
    matches!(kind, Embed | AttnNorm | Q | K | V | QRope | KRope | AttnCtx | AttnOut | LayerOut | Logits)
}

#[test]
fn products_of_some_kinds_alone_may_round_their_operands() {
    let (prompt, later): (&[usize], &[usize]) = (&[20], &[13, 1, 1]);
    let healthy = Mixed {
        rounds: tf32,
        is_rounded: &of_queries_keys_and_values,
        evidence: of_modules,
        steps: prompt,
        spoiled: ("", 1.0),
    };
    let cases = [
        ("products before biases", Mixed { ..healthy }),
        ("of one layer", Mixed { is_rounded: &of_one_layer, rounds: cut, ..healthy }),
        ("cut, of decode steps too", Mixed { rounds: cut, steps: later, ..healthy }),
        ("of prompts alone", Mixed { is_rounded: &of_prompts, steps: later, ..healthy }),
        (
            "of decode steps alone",
            Mixed { is_rounded: &of_single_rows, steps: later, evidence: of_layers, ..healthy },
        ),
        ("three in a row", Mixed { is_rounded: &of_feed_forward, evidence: without_feed_forward, ..healthy }),
        (
            "the last of three",
            Mixed {
                is_rounded: &of_last_of_feed_forward,
                evidence: without_feed_forward,
                rounds: cut,
                ..healthy
            },
        ),
        ("layers alone", Mixed { is_rounded: &of_feed_forward, evidence: of_layers, ..healthy }),
    ];
    for (name, mixed) in sample("mixes", 3, cases) {
        let audited = mixed.audit();
        assert_eq!(audited.code, 0, "{name}: {} at {}", audited.report["reason"], audited.first);
        let notes = audited.report["notes"].to_string();
        assert!(notes.contains("matmuls with TF32 operands"), "{name}: {notes}");
    }
}

#[test]
fn a_mistake_beside_such_roundings_is_found() {
    let healthy = Mixed {
        rounds: tf32,
        is_rounded: &of_feed_forward,
        evidence: without_feed_forward,
        steps: &[20],
        spoiled: ("", 1.0),
    };
    let cases = [
        ("blk.1.layer_out", Mixed { spoiled: ("blk.1.ffn_out", 1.002), ..healthy }),
        ("blk.2.layer_out", Mixed { spoiled: ("blk.2.ffn_up", 1.002), ..healthy }),
        (
            "blk.1.v",
            Mixed {
                is_rounded: &of_queries_keys_and_values,
                evidence: of_modules,
                spoiled: ("blk.1.v_proj", 1.0002),
                ..healthy
            },
        ),
        ("blk.2.layer_out", Mixed { evidence: of_layers, spoiled: ("blk.2.ffn_out", 1.05), ..healthy }),
    ];
    for (wanted, mixed) in sample("mistakes beside mixes", 2, cases) {
        let audited = mixed.audit();
        let found = (audited.code, &audited.first[..]);
        assert_eq!(found, (1, wanted), "{:?}: {}", mixed.spoiled, audited.report["reason"]);
    }
}

/// A compiler adds a product as it has it, and rounds what is recorded of it: the sum, which was not recorded, is that of no
/// recorded value then. It is healthy, and a row of the product that is off is not.
#[test]
fn sums_may_read_products_before_they_are_rounded() {
    let cases =
        [Element::Bf16, Element::F16].map(|kept| [("", 1.0), ("blk.1.attn_out", 1.5)].map(|one| (kept, one)));
    for (kept, (spoiled, factor)) in cases.into_iter().flatten() {
        let unrounded: RefCell<Vec<f64>> = RefCell::default();
        let stored = |x: f64| match kept {
            Element::F16 => f16::from_f64(x).to_f64(),
            _ => bf16::from_f64(x).to_f64(),
        };
        let computes = |id: Checkpoint, args: &Args<'_, f64>| match id.kind() {
            Kind::AttnOut => {
                let mut values = product(args, |x| x, |x| x);
                if id.to_string() == spoiled {
                    let width = args.shape[3];
                    values[5 * width..6 * width].iter_mut().for_each(|value| *value *= factor);
                }
                unrounded.replace(values.clone());
                Some(values)
            }
            Kind::AttnResidual => {
                let read = [0, 1].map(|slot| args.get(slot).unwrap().values().into_owned());
                let product = unrounded.borrow();
                let is_product = |values: &[f64]| {
                    let alike = values.iter().zip(product.iter()).filter(|(a, b)| **a == stored(**b)).count();
                    2 * alike > values.len()
                };
                let residual = read.iter().find(|values| !is_product(values)).unwrap();
                Some(residual.iter().zip(product.iter()).map(|(a, b)| a + b).collect())
            }
            _ => None,
        };
        let some = |id: Checkpoint| of_modules(id.kind());
        let engine = Engine {
            kept,
            computes: &computes,
            some: &some,
            arithmetic: Arithmetic::EXACT,
            stores: |_, x| x,
        };
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("dump");
        engine.record(Path::new(MODEL), 20, &dump);
        let audited = audit(&dump, Path::new(MODEL), &["--allow-missing"]);
        let found = (audited.code, &audited.first[..]);
        let wanted = (i32::from(!spoiled.is_empty()), spoiled);
        assert_eq!(found, wanted, "{kept:?}: {}", audited.report["reason"]);
    }
}

/// The last rows of a step may be multiplied by another kernel, which rounds operands or does not: each row is right by itself.
/// One that is off by more than either is found.
#[test]
fn rows_of_one_step_may_be_computed_by_two_kernels() {
    let brain: fn(f32) -> f32 = |x| bf16::from_f32(x).to_f32();
    let half: fn(f32) -> f32 = |x| f16::from_f32(x).to_f32();
    let exact: fn(f32) -> f32 = |x| x;
    let kernels = [[brain, exact], [half, exact], [exact, brain], [exact, tf32]];
    let evidence: [fn(Kind) -> bool; 2] = [|_| true, of_modules];
    let cases = kernels.into_iter().flat_map(|kernels| [(kernels, 1), (kernels, 5)]);
    let cases = cases.flat_map(|case| evidence.map(|some| (case, some)));
    let cases = cases.flat_map(|case| [(case, &[20][..]), (case, &[12, 1, 1, 1])]);
    for ((([first, last], count), some), steps) in sample("kernels, rows, evidence and steps", 4, cases) {
        // A product that was recorded, and one of which the sum with its bias was alone.
        let behind = if some(Kind::VProj) { "blk.1.v_proj" } else { "blk.1.v" };
        for (at, shown) in [("", ""), ("blk.1.ffn_up", "blk.1.ffn_up"), ("blk.1.v_proj", behind)] {
            let computes = |id: Checkpoint, args: &Args<'_, f64>| -> Option<Vec<f64>> {
                let (width, rows) = (args.shape[3], args.shape[2]);
                // Steps of one row are computed as most rows of a prompt are.
                let from = if rows == 1 { width } else { rows.saturating_sub(count) * width };
                let mut values = is_product(id).then(|| product(args, first, |x| x))?;
                values[from..].copy_from_slice(&product(args, last, |x| x)[from..]);
                if id.to_string() == at {
                    let row = (rows - 1) * width;
                    values[row..].iter_mut().for_each(|value| *value *= 1.005);
                }
                Some(values)
            };
            let audited = audited_in_f32(&computes, some, steps, &[]);
            let reason = audited.reason();
            let wanted = (i32::from(!shown.is_empty()), shown);
            let kernels = [first(0.1), last(0.1)];
            assert_eq!((audited.code, &audited.first[..]), wanted, "{kernels:?} {count}: {reason}");
        }
    }
}

/// An engine may keep keys alone in a narrow type, as caches of it do, or multiply queries and keys in it alone: what follows its
/// attention shows which operands are rounded, and a head of a row that is off by more than these is found.
#[test]
fn attention_may_round_some_of_its_operands() {
    let brain: fn(f32) -> f32 = |x| bf16::from_f32(x).to_f32();
    let half: fn(f32) -> f32 = |x| f16::from_f32(x).to_f32();
    const QUERIES_AND_KEYS: [bool; 3] = [true, true, false];
    const KEYS: [bool; 3] = [false, true, false];
    const VALUES: [bool; 3] = [false, false, true];
    let operands = [KEYS, QUERIES_AND_KEYS, [true, false, false], VALUES];
    let cases = operands.into_iter().flat_map(|operands| [half, brain, tf32].map(|round| (operands, round)));
    let cases = cases.flat_map(|case| [&[20][..], &[12, 1, 1, 1, 1]].map(|steps| (case, steps)));
    for ((operands, round), steps) in sample("operands of attention, types and steps", 2, cases) {
        for (at, shown) in [("", ""), ("blk.1.attn_ctx", "blk.1.attn_out")] {
            let computes = |id: Checkpoint, args: &Args<'_, f64>| -> Option<Vec<f64>> {
                if id.kind() != Kind::AttnCtx {
                    return None;
                }
                let mut values = over_rounded(&Op::FlashAttn, args, operands, round);
                if id.to_string() == at {
                    let width = args.shape[3];
                    let head = values.len() - width;
                    values[head..].iter_mut().for_each(|value| *value *= 1.05);
                }
                Some(values)
            };
            let audited = audited_in_f32(&computes, of_modules, steps, &[]);
            let reason = audited.reason();
            let wanted = (i32::from(!shown.is_empty()), shown);
            let found = (audited.code, &audited.first[..]);
            assert_eq!(found, wanted, "{operands:?} {} {steps:?}: {reason}", round(0.1));
        }
    }
}

/// The first row of keys and values that a step adds: behind all that are older.
fn older(args: &Args<'_, f64>) -> usize {
    let rows = args.shape[1];
    let mask = args.get(3).unwrap();
    let seen = mask.row([0, 0, rows - 1]).iter().rposition(|mask| *mask == 0.0).unwrap();
    seen + 1 - rows
}

/// A step may be computed from its own keys and values as they are, and from a narrow cache of those before it: where nothing is
/// before it, where it has several tokens, or always. A head of a row that is off by more than such a cache rounds is found.
#[test]
fn keys_and_values_of_a_step_may_be_read_before_they_are_kept() {
    let brain: fn(f32) -> f32 = |x| bf16::from_f32(x).to_f32();
    let half: fn(f32) -> f32 = |x| f16::from_f32(x).to_f32();
    let first: fn(usize, usize) -> bool = |_, older| older == 0;
    let kinds: [fn(usize, usize) -> bool; 3] = [first, |own, _| own > 1, |_, _| true];
    let evidence: [Evidence; 2] = [("blk.1.attn_ctx", |_| true), ("blk.1.attn_out", of_modules)];
    let cases = kinds.into_iter().flat_map(|kind| [brain, half].map(|round| (kind, round)));
    let cases = cases.flat_map(|case| evidence.map(|evidence| (case, evidence)));
    for ((is_fresh, round), (shown, some)) in sample("steps, caches and evidence", 3, cases) {
        for at in ["", "blk.1.attn_ctx"] {
            let computes = |id: Checkpoint, args: &Args<'_, f64>| -> Option<Vec<f64>> {
                if id.kind() != Kind::AttnCtx {
                    return None;
                }
                let (own, older) = (args.shape[1], older(args));
                let kept = |slot: usize| {
                    let source = args.get(slot).filter(|_| (1..3).contains(&slot))?;
                    let (shape, mut values) = (source.shape(), source.values().into_owned());
                    let first = if is_fresh(own, older) { older } else { own + older };
                    for head in values.chunks_mut(shape[2] * shape[3]) {
                        head[..first * shape[3]].iter_mut().for_each(|x| *x = f64::from(round(*x as f32)));
                    }
                    Some((values, shape))
                };
                let kept: Vec<_> = (0..args.sources.len()).map(kept).collect();
                let of =
                    |slot: usize| kept[slot].as_ref().map(|(values, shape)| Strided::whole(values, *shape));
                let sources = args.replaced(of);
                let mut values = compute(rule(&Op::FlashAttn).unwrap(), &Args { sources, ..*args }).unwrap();
                if id.to_string() == at {
                    let head = values.len() - args.shape[3];
                    values[head..].iter_mut().for_each(|value| *value *= 1.05);
                }
                Some(values)
            };
            let audited = audited_in_f32(&computes, some, &[12, 6, 1, 1, 1], &[]);
            let reason = audited.reason();
            let wanted = if at.is_empty() { (0, "") } else { (1, shown) };
            let case = (is_fresh(3, 1), is_fresh(1, 1), round(0.1), shown);
            assert_eq!((audited.code, &audited.first[..]), wanted, "{case:?}: {reason}");
        }
    }
}
