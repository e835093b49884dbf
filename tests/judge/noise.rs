//! Engines that round in a form that nobody knows what their ranks exchange: they are not accused, and not at parity. What is wrong
//! beside that is found, and a mistake that is the same in all layers is none of rounding.

use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::MODEL;
use crate::support::graphs::foreign::Engine;
use crate::support::program::Audited;

/// Rows x (T, I) times a matrix (O, I), whose element `i` is multiplied by `weight(i)`, as two ranks have their halves of the sums.
fn halves(args: &Args<'_, f64>, weight: fn(usize) -> f64) -> [Vec<f64>; 2] {
    let [w, x] = [0, 1].map(|slot| args.get(slot).unwrap().values().into_owned());
    let [_, _, tokens, outputs] = args.shape;
    let k = x.len() / tokens;
    [0..k / 2, k / 2..k].map(|part| {
        let sum = |row: &[f64], output: usize| -> f64 {
            let term = |i: usize| row[i] * w[output * k + i] * weight(output * k + i);
            part.clone().map(term).sum()
        };
        x.chunks(k).flat_map(|row| (0..outputs).map(move |output| sum(row, output))).collect()
    })
}

/// Blocks of 32 in numbers up to `most`.
fn in_blocks(values: &[f64], most: f64) -> Vec<f64> {
    let block = |values: &[f64]| -> Vec<f64> {
        let scale = values.iter().fold(f64::MIN_POSITIVE, |most: f64, x| most.max(x.abs())) / most;
        values.iter().map(|x| (x / scale).round() * scale).collect()
    };
    values.chunks(32).flat_map(block).collect()
}

/// What is added to both products that ranks sum up.
type Spoil<'a> = &'a dyn Fn(Checkpoint, &mut [f64], usize);

/// What an audit says of an engine whose ranks exchange sums in numbers up to `most`, if any.
fn judged(
    (kept, most): (Element, Option<f64>),
    steps: &[usize],
    weight: fn(usize) -> f64,
    spoil: Spoil<'_>,
) -> Audited {
    let computes = |id: Checkpoint, args: &Args<'_, f64>| {
        let parts = matches!(id.kind(), Kind::AttnOut | Kind::FfnOut).then(|| halves(args, weight))?;
        let [a, b] = parts.map(|part| most.map_or(part.clone(), |most| in_blocks(&part, most)));
        let mut values: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        spoil(id, &mut values, args.shape[3]);
        Some(values)
    };
    let (arithmetic, some) = (Arithmetic::EXACT, &|_| true);
    let engine = Engine { kept, computes: &computes, some, arithmetic, stores: |_, x| x };
    engine.audited(MODEL, steps)
}

#[test]
fn what_ranks_exchange_in_few_bits_is_no_mistake_and_no_parity() {
    for (kept, most, steps) in [
        (Element::F32, 127.0, &[20][..]),
        (Element::F32, 31.0, &[5, 1, 1, 1]),
        (Element::F32, 7.0, &[40]),
        (Element::Bf16, 31.0, &[20]),
        (Element::Bf16, 7.0, &[5, 1, 1, 1]),
    ] {
        let audited = judged((kept, Some(most)), steps, |_| 1.0, &|_, _, _| ());
        assert_eq!(audited.code, 2, "{kept:?}, {most}, {steps:?}: {}", audited.reason());
        assert!(audited.reason().contains("random"), "{kept:?}, {most}, {steps:?}: {}", audited.reason());
    }
}

#[test]
fn a_mistake_beside_that_is_found() {
    type Of = fn(&mut [f64], usize);
    let row: Of = |values, width| values[4 * width..][..width].iter_mut().for_each(|x| *x *= 1.2);
    let element: Of = |values, width| values[4 * width + 3] += 4.0;
    let zeros: Of = |values, _| values.iter_mut().step_by(2).for_each(|x| *x = 0.0);
    for (kept, wrong) in
        [(Element::F32, row), (Element::Bf16, row), (Element::F32, element), (Element::Bf16, zeros)]
    {
        let spoil = |id: Checkpoint, values: &mut [f64], width: usize| {
            if id.to_string() == "blk.1.ffn_out" {
                wrong(values, width);
            }
        };
        let audited = judged((kept, Some(127.0)), &[20], |_| 1.0, &spoil);
        assert_eq!(
            (audited.code, &audited.first[..]),
            (1, "blk.1.ffn_out"),
            "{kept:?}: {}",
            audited.reason()
        );
    }
}

/// Each of them is off by as much in all layers.
#[test]
fn a_mistake_in_all_layers_is_no_noise() {
    let nothing = |_: Checkpoint, _: &mut [f64], _: usize| ();
    let other_weights: fn(usize) -> f64 = |i| 1.0 + 0.05 * (i as f64 * 1.7).sin();
    let added = |_: Checkpoint, values: &mut [f64], width: usize| {
        values.iter_mut().enumerate().for_each(|(i, x)| *x += 0.02 * ((i % width) as f64).cos());
    };
    for kept in [Element::F32, Element::Bf16] {
        for (weight, spoil) in [(other_weights, &nothing as Spoil<'_>), (|_| 1.0, &added)] {
            let audited = judged((kept, None), &[20], weight, spoil);
            assert_eq!(audited.code, 1, "{kept:?}: {}", audited.reason());
        }
    }
}
