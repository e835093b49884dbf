//! Engines that took llama.cpp's kernels for CUDA, which multiply quantised weights with activations in blocks of Q8_1: none is
//! accused, the answer says so, and a mistake beside them is found.

use half::f16;
use parity::arithmetic::{Arithmetic, Integers, Operands};
use parity::checkpoint::Checkpoint;
use parity::engine::op_by_op::compute;
use parity::ops::{Args, rule};
use parity_dump::Element;
use parity_graph::Op;

use crate::support::audited::Q4;
use crate::support::graphs::foreign::{Engine, is_product, of_modules, product as times};
use crate::support::program::Audited;
use crate::support::samples::sample;

/// What such products are called.
const NAME: &str = "matmuls with activations in blocks of Q8_1";

/// What values are kept in, and whether all nodes were recorded.
const CASES: [(Element, bool); 4] =
    [(Element::F32, true), (Element::F32, false), (Element::F16, true), (Element::F16, false)];

/// Which steps meet these kernels: all, or those of one row alone, as where a prompt is multiplied with decoded weights; or those
/// of a prompt meet the ones for many rows, and a single row llama.cpp's on a CPU, as where weights lie in the memory of that.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Steps {
    All,
    OfOneRow,
    InTiles,
}

/// 32 numbers as multiples of the largest over 127, halves away from zero, of a scale that is kept in f16.
fn block(values: &[f64]) -> Vec<f64> {
    let scale = values.iter().fold(0.0f32, |most, x| most.max((*x as f32).abs())) / 127.0;
    let kept = f16::from_f32(scale).to_f64();
    let quant = |x: &f64| if scale == 0.0 { 0.0 } else { f64::from((*x as f32 / scale).round()) };
    values.iter().map(|x| quant(x) * kept).collect()
}

/// Rows x (T, I), in blocks where these are met, times a matrix (O, I).
fn product(args: &Args<'_, f64>, steps: Steps) -> Vec<f64> {
    if steps == Steps::InTiles {
        let tiles = Arithmetic { operands: Operands::Blocks(Integers::Many), ..Arithmetic::EXACT };
        let arithmetic = if args.shape[2] == 1 { &Arithmetic::LLAMA_CPU } else { &tiles };
        let args = Args { arithmetic, sources: args.sources.clone(), ..*args };
        return compute(rule(&Op::MulMat).unwrap(), &args).unwrap();
    }
    let (w, x) = (args.get(0).unwrap().values(), args.get(1).unwrap().values());
    let meets = steps == Steps::All || args.shape[2] == 1;
    let x: Vec<f64> = if meets { x.chunks(32).flat_map(block).collect() } else { x.into_owned() };
    times(args, &w, &x)
}

/// What an audit says of such an engine; every third value of `spoiled` is off by a factor.
fn judged(
    (kept, meets): (Element, Steps),
    (some, steps): (&dyn Fn(Checkpoint) -> bool, &[usize]),
    spoiled: &str,
) -> Audited {
    let computes = |id: Checkpoint, args: &Args<'_, f64>| {
        let mut values = is_product(id).then(|| product(args, meets))?;
        if id.to_string() == spoiled {
            values.iter_mut().step_by(3).for_each(|value| *value *= 1.5);
        }
        Some(values)
    };
    let arithmetic = Arithmetic::EXACT;
    let engine = Engine { kept, computes: &computes, some, arithmetic, stores: |_, x| x };
    engine.audited(Q4, steps)
}

#[test]
fn activations_in_blocks_are_known() {
    let kept = [Element::F32, Element::F16, Element::Bf16].into_iter();
    let cases = kept.flat_map(|kept| [true, false].map(|whole| (kept, whole)));
    let steps: [&[usize]; 2] = [&[20], &[8, 1, 1]];
    let cases = cases.flat_map(|(kept, whole)| steps.map(|steps| (kept, whole, steps)));
    for (kept, whole, steps) in sample("blocks", 4, cases) {
        let some = |id: Checkpoint| whole || of_modules(id);
        let audited = judged((kept, Steps::All), (&some, steps), "");
        let said = format!("{kept:?}, {whole}, {steps:?}: {}", audited.reason());
        assert!(audited.notes.contains(NAME), "{said}: {}", audited.notes);
        // What f16 rounds of an activation that was not recorded moves its quants.
        let may_be_open = !whole && kept != Element::F32;
        assert!(
            audited.code == 0 || may_be_open && audited.code == 2,
            "{said}, {}",
            audited.report["origins"]
        );
    }
}

/// What a prompt is multiplied with is another thing than what single rows are: where not all of it was recorded that is undecided.
#[test]
fn rows_that_come_alone_may_meet_other_kernels_than_a_prompt() {
    for (kept, whole) in sample("blocks of single rows", 2, CASES) {
        let some = |id: Checkpoint| whole || of_modules(id);
        let audited = judged((kept, Steps::OfOneRow), (&some, &[12, 1, 1, 1, 1]), "");
        assert_ne!(audited.code, 1, "{kept:?}, {whole}: {}", audited.report["origins"]);
    }
}

#[test]
fn prompts_may_be_multiplied_in_tiles() {
    let audited = judged((Element::F32, Steps::InTiles), (&|_| true, &[20, 1, 1]), "");
    let said = format!("{NAME}, in tiles");
    assert!(audited.code == 0 && audited.notes.contains(&said), "{}: {}", audited.reason(), audited.notes);
}

#[test]
fn a_mistake_beside_such_blocks_is_found() {
    let few = CASES.map(|(kept, whole)| (kept, whole, Steps::All)).into_iter();
    let tiles = std::iter::once((Element::F32, true, Steps::InTiles));
    for (kept, whole, met) in sample("beside blocks", 3, few.chain(tiles)) {
        let some = |id: Checkpoint| whole || of_modules(id);
        for spoiled in ["blk.1.ffn_up", "blk.2.ffn_out"] {
            let audited = judged((kept, met), (&some, &[20, 1]), spoiled);
            assert_eq!(
                (audited.code, &audited.first[..]),
                (1, spoiled),
                "{kept:?}, {whole}, {met:?}: {}",
                audited.reason()
            );
        }
    }
}
