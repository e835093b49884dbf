//! Engines that round one side of their products alone, and loaders that round norms and leave biases: none is accused, the answer
//! says what they do, and a mistake beside it is found.

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited;
use crate::support::graphs::foreign::{Engine, is_product, of_modules, product as times};
use crate::support::program::Audited;
use crate::support::samples::sample;

/// Weights of it have more bits than f16 and bf16 have.
const QUANTISED: &str = "reference-dumps/models/qwen2-tiny-py-Q4_K_M.gguf";

/// To a narrower type.
type Rounds = fn(f64) -> f64;

fn to_f16(x: f64) -> f64 {
    f16::from_f32(x as f32).to_f64()
}

// `from_f64` of the crate leaves out bits that decide between two numbers.
fn to_bf16(x: f64) -> f64 {
    bf16::from_f32(x as f32).to_f64()
}

fn as_it_is(x: f64) -> f64 {
    f64::from(x as f32)
}

/// What is rounded of weights and of activations, and what that is called.
const SIDES: [(&str, Rounds, Rounds); 4] = [
    ("matmuls with activations in f16", as_it_is, to_f16),
    ("matmuls with activations in bf16", as_it_is, to_bf16),
    ("weights of matmuls of the recording are those of the file rounded to f16", to_f16, as_it_is),
    ("weights of matmuls of the recording are those of the file rounded to bf16", to_bf16, as_it_is),
];

/// Rows x (T, I) times a matrix (O, I), each side, which is in f32, rounded.
fn product(args: &Args<'_, f64>, weights: Rounds, activations: Rounds) -> Vec<f64> {
    let rounded = |slot: usize, rounds: Rounds| -> Vec<f64> {
        args.get(slot).unwrap().values().iter().map(|x| rounds(*x)).collect()
    };
    let (w, x) = (rounded(0, weights), rounded(1, activations));
    times(args, &w, &x)
}

/// What an audit says of an engine of such products; every third value of `spoiled` is off by a factor.
fn judged(
    (weights, activations): (Rounds, Rounds),
    (some, steps): (&dyn Fn(Checkpoint) -> bool, &[usize]),
    spoiled: &str,
) -> Audited {
    let computes = |id: Checkpoint, args: &Args<'_, f64>| {
        let mut values = is_product(id).then(|| product(args, weights, activations))?;
        if id.to_string() == spoiled {
            values.iter_mut().step_by(3).for_each(|value| *value *= 1.05);
        }
        Some(values)
    };
    let arithmetic = Arithmetic::EXACT;
    let engine = Engine { kept: Element::F32, computes: &computes, some, arithmetic, stores: |_, x| x };
    engine.audited(QUANTISED, steps)
}

#[test]
fn one_side_of_products_may_be_rounded() {
    let steps: [&[usize]; 2] = [&[20], &[8, 1, 1]];
    let cases = SIDES.into_iter().flat_map(|side| steps.map(|steps| (side, steps)));
    let cases = cases.flat_map(|(side, steps)| [true, false].map(|whole| (side, steps, whole)));
    for ((name, weights, activations), steps, whole) in sample("sides", 4, cases) {
        let some = |id: Checkpoint| whole || of_modules(id);
        let audited = judged((weights, activations), (&some, steps), "");
        assert_eq!(audited.code, 0, "{name}, {steps:?}, {whole}: {}", audited.report["origins"]);
        let notes = audited.report["notes"].to_string();
        assert!(notes.contains(name), "{name}, {steps:?}, {whole}: {notes}");
    }
}

#[test]
fn a_mistake_in_such_a_product_is_found() {
    for ((name, weights, activations), spoiled) in sample(
        "mistakes in sides",
        3,
        SIDES.into_iter().flat_map(|side| ["blk.0.attn_out", "blk.2.ffn_up"].map(|spoiled| (side, spoiled))),
    ) {
        let audited = judged((weights, activations), (&|_| true, &[20]), spoiled);
        assert_eq!((audited.code, &audited.first[..]), (1, spoiled), "{name}: {}", audited.report["origins"]);
        assert_eq!(audited.report["origins"].as_array().unwrap().len(), 1, "{name}");
    }
}

/// Engines that compute their logits in f32 leave the last weight as it is.
#[test]
fn the_last_weight_may_be_left_as_it_is() {
    for (name, rounds) in [("f16", to_f16 as Rounds), ("bf16", to_bf16)] {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let is_rounded = is_product(id) && id.kind() != Kind::Logits;
            is_rounded.then(|| product(args, rounds, as_it_is))
        };
        let arithmetic = Arithmetic::EXACT;
        let engine =
            Engine { kept: Element::F32, computes: &computes, some: &|_| true, arithmetic, stores: |_, x| x };
        let audited = engine.audited(QUANTISED, &[20]);
        let said = format!(
            "weights of matmuls other than the last of the recording are those of the file rounded to {name}"
        );
        assert!(audited.code == 0 && audited.notes.contains(&said), "{name}: {}", audited.notes);
    }
}

/// Norms of PyTorch are cast to the type of a model; a bias that a kernel adds to its sums in f32 may be left as it is in the file.
#[test]
fn norms_may_be_rounded_as_they_are_loaded_and_biases_not() {
    for (kept, rounds, name) in [(Element::F16, to_f16 as Rounds, "f16"), (Element::Bf16, to_bf16, "bf16")] {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| {
            let is_norm = matches!(id.kind(), Kind::AttnNorm | Kind::FfnNorm | Kind::FinalNorm);
            let of = |slot: usize| args.get(slot).unwrap().values();
            let each = |with: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
                let (x, w) = (of(0), of(1));
                x.iter().enumerate().map(|(i, x)| with(*x, w[i % w.len()])).collect()
            };
            match id.kind() {
                _ if is_norm => Some(each(&|x, w| x * rounds(w))),
                Kind::Q | Kind::K | Kind::V => Some(each(&|x, bias| x + bias)),
                _ => None,
            }
        };
        let is_recorded = |id: Checkpoint| !matches!(id.kind(), Kind::QProj | Kind::KProj | Kind::VProj);
        let arithmetic = Arithmetic::EXACT;
        let engine = Engine { kept, computes: &computes, some: &is_recorded, arithmetic, stores: |_, x| x };
        let audited = engine.audited(edited::MODEL, &[40]);
        let notes = audited.report["notes"].to_string();
        assert_eq!(audited.report["origins"].as_array().unwrap().len(), 0, "{name}: {notes}");
        // What bf16 rounds of sums hides which biases were added.
        let said = format!("norm weights of the recording are those of the file rounded to {name}");
        assert!(kept == Element::Bf16 || notes.contains(&said), "{name}: {notes}");
    }
}
