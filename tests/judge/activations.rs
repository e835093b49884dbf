//! Engines whose activations are in eight bits of a form that nobody knows, or whose sums are rounded to f16 as they come: none of
//! them is accused, none is at parity, and what is wrong beside that is found. What they round is written down here as they do it.

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::MODEL;
use crate::support::graphs::foreign::{Engine, is_product, of_modules};
use crate::support::program::Audited;
use crate::support::samples::sample;

/// A row of activations as a kernel multiplies it.
type Quantised = fn(&[f64]) -> Vec<f64>;
/// A row times a row of a matrix.
type Sum = fn(&[f64], &[f64]) -> f64;

/// In groups of so many values, with a scale that is rounded.
fn groups(row: &[f64], of: usize, scale: fn(f32) -> f32) -> Vec<f64> {
    let group = |values: &[f64]| -> Vec<f64> {
        let most = values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let step = f64::from(scale((most / 127.0) as f32)).max(f64::MIN_POSITIVE);
        values.iter().map(|x| (x / step).round().clamp(-127.0, 127.0) * step).collect()
    };
    row.chunks(of).flat_map(group).collect()
}

/// A row with a zero of its own, as torchao and XNNPACK have it.
fn with_zero(row: &[f64]) -> Vec<f64> {
    let (low, high) = row.iter().fold((0.0, 0.0), |(low, high): (f64, f64), x| (low.min(*x), high.max(*x)));
    let step = ((high - low) / 255.0).max(f64::MIN_POSITIVE);
    let zero = (-low / step).round();
    row.iter().map(|x| ((x / step + zero).round().clamp(0.0, 255.0) - zero) * step).collect()
}

const FORMS: [(&str, Quantised); 4] = [
    ("groups of 64 (OpenVINO)", |row| groups(row, 64, |scale| scale)),
    ("groups of 32, scales in f16 (CUDA)", |row| groups(row, 32, |scale| f16::from_f32(scale).to_f32())),
    ("groups of 128, scales in bf16", |row| groups(row, 128, |scale| bf16::from_f32(scale).to_f32())),
    ("rows with a zero (torchao)", with_zero),
];

/// Rows x (T, I), quantised, times a matrix (O, I), summed up by `sum`.
fn product(args: &Args<'_, f64>, quantised: Quantised, sum: Sum) -> Vec<f64> {
    let [w, x] = [0, 1].map(|slot| args.get(slot).unwrap().values().into_owned());
    let [_, _, tokens, outputs] = args.shape;
    let k = x.len() / tokens;
    let rows: Vec<Vec<f64>> = x.chunks(k).map(quantised).collect();
    let pairs = rows.iter().flat_map(|row| (0..outputs).map(move |output| (row, output)));
    pairs.map(|(row, output)| sum(row, &w[output * k..][..k])).collect()
}

fn exactly(row: &[f64], weights: &[f64]) -> f64 {
    row.iter().zip(weights).map(|(x, w)| x * w).sum()
}

/// With what is summed up so far rounded to f16 after every fourth product, as shaders do.
fn in_f16(row: &[f64], weights: &[f64]) -> f64 {
    let fours = row.chunks(4).zip(weights.chunks(4));
    fours.fold(0.0, |sum, (row, weights)| f16::from_f64(sum + exactly(row, weights)).to_f64())
}

fn is_of_feed_forward(id: Checkpoint) -> bool {
    matches!(id.kind(), Kind::FfnGate | Kind::FfnUp | Kind::FfnOut)
}

/// What an audit says of an engine whose products are these, and whose values of one node are off by a factor.
fn judged(
    recorded: (&[usize], Element),
    how: (Quantised, Sum),
    spoiled: (&dyn Fn(Checkpoint) -> bool, &str, f64),
) -> Audited {
    judged_where(&is_product, recorded, how, spoiled)
}

/// The same of an engine that has some of its products so.
fn judged_where(
    is_so: &dyn Fn(Checkpoint) -> bool,
    (steps, kept): (&[usize], Element),
    (quantised, sum): (Quantised, Sum),
    (some, spoiled, factor): (&dyn Fn(Checkpoint) -> bool, &str, f64),
) -> Audited {
    let computes = |id: Checkpoint, args: &Args<'_, f64>| {
        let mut values = is_so(id).then(|| product(args, quantised, sum))?;
        if id.to_string() == spoiled {
            values.iter_mut().step_by(3).for_each(|value| *value *= factor);
        }
        Some(values)
    };
    let engine = Engine { kept, computes: &computes, some, arithmetic: Arithmetic::EXACT, stores: |_, x| x };
    engine.audited(MODEL, steps)
}

#[test]
fn activations_in_eight_bits_of_any_form_are_no_mistake_and_no_parity() {
    let lengths: [&[usize]; 2] = [&[20], &[5, 1, 1, 1]];
    let cases = FORMS.into_iter().flat_map(|form| [true, false].map(|whole| (form, whole)));
    let cases = cases.flat_map(|(form, whole)| lengths.map(|steps| (form, whole, steps)));
    for ((name, quantised), whole, steps) in sample("activations", 4, cases) {
        let some = |id: Checkpoint| whole || of_modules(id);
        let audited = judged((steps, Element::F32), (quantised, exactly), (&some, "", 1.0));
        assert_eq!(audited.code, 2, "{name}, {whole}, {steps:?}: {}", audited.reason());
        assert!(audited.reason().contains("eight bits"), "{name}, {whole}: {}", audited.reason());
    }
}

#[test]
fn a_mistake_beside_such_activations_is_found() {
    for (name, quantised) in sample("beside activations", 2, FORMS) {
        let audited = judged((&[20], Element::F32), (quantised, exactly), (&|_| true, "blk.1.ffn_out", 1.5));
        assert_eq!((audited.code, &audited.first[..]), (1, "blk.1.ffn_out"), "{name}: {}", audited.reason());
    }
}

/// An engine of a narrow type rounds as much itself, which hides some of them.
#[test]
fn an_engine_of_bf16_may_have_them_too() {
    for (name, quantised) in sample("activations in bf16", 2, FORMS) {
        let audited = judged((&[20], Element::Bf16), (quantised, exactly), (&|_| true, "", 1.0));
        assert_eq!(audited.code, 2, "{name}: {}", audited.reason());
    }
}

/// The error of what is multiplied is that of every product here as well, and none that rounding leaves.
#[test]
fn a_lost_column_in_all_products_is_no_rounding() {
    let lost: Quantised = |row| {
        let mut row = row.to_vec();
        row.last_mut().into_iter().for_each(|last| *last = 0.0);
        row
    };
    let audited = judged((&[20], Element::F32), (lost, exactly), (&|_| true, "", 1.0));
    assert_eq!(audited.code, 1, "{}", audited.reason());
}

#[test]
fn sums_in_f16_are_no_mistake() {
    let quantised: Quantised = <[f64]>::to_vec;
    for whole in [true, false] {
        let some = |id: Checkpoint| whole || of_modules(id);
        let found = |spoiled: &str| judged((&[20], Element::F16), (quantised, in_f16), (&some, spoiled, 1.5));
        // Most of them are explained by sums in parts as well, and the answer says what that hides.
        let audited = found("");
        assert_ne!(audited.code, 1, "{whole}: {}", audited.reason());
        let is_said = ["sums in f16", "would not be seen"].iter().any(|said| audited.reason().contains(said));
        assert!(is_said, "{whole}: {}", audited.reason());
        let audited = found("blk.1.ffn_up");
        assert_eq!((audited.code, &audited.first[..]), (1, "blk.1.ffn_up"), "{whole}: {}", audited.reason());
    }
}

/// Of layers alone nothing shows what products round. What an engine of bf16 rounds itself hides it in most rows.
#[test]
fn outputs_of_layers_of_such_engines_are_undecided() {
    let layers = |id: Checkpoint| matches!(id.kind(), Kind::Embed | Kind::LayerOut);
    let in_rows: Quantised = |row| groups(row, row.len(), |scale| scale);
    for (tokens, kept) in [(20, Element::F32), (100, Element::Bf16)] {
        let audited = judged((&[tokens], kept), (in_rows, exactly), (&layers, "", 1.0));
        assert_eq!(audited.code, 2, "{kept:?}: {}", audited.reason());
    }
}

/// It is the only product that was recorded, and as far off as the layers before it.
#[test]
fn logits_of_such_engines_are_undecided_and_their_mistakes_are_found() {
    let last = |id: Checkpoint| matches!(id.kind(), Kind::Embed | Kind::LayerOut | Kind::Logits);
    let (_, in_blocks) = FORMS[1];
    for (factor, wanted) in [(1.0, 2), (1.3, 1)] {
        let audited = judged((&[20], Element::F32), (in_blocks, exactly), (&last, "logits", factor));
        assert_eq!(audited.code, wanted, "{factor}: {}", audited.reason());
    }
}

#[test]
fn an_engine_may_have_them_in_its_feed_forward_blocks_alone() {
    for (name, quantised) in sample("in feed-forward blocks", 2, FORMS) {
        let found = |spoiled: &str| {
            let recorded: (&[usize], Element) = (&[20], Element::F32);
            judged_where(&is_of_feed_forward, recorded, (quantised, exactly), (&|_| true, spoiled, 1.5))
        };
        let audited = found("");
        assert_eq!(audited.code, 2, "{name}: {}", audited.reason());
        let audited = found("blk.2.ffn_up");
        assert_eq!((audited.code, &audited.first[..]), (1, "blk.2.ffn_up"), "{name}: {}", audited.reason());
    }
}
