//! Engines whose kernels compute a norm or an activation with the products that read it where there is one row, as compilers make
//! them: the product reads what was not rounded yet, and what is recorded of its source is.

use std::cell::RefCell;
use std::collections::HashMap;

use half::{bf16, f16};
use parity::arithmetic::Arithmetic;
use parity::checkpoint::{Checkpoint, Kind};
use parity::ops::Args;
use parity_dump::Element;

use crate::support::edited::MODEL;
use crate::support::graphs::foreign::{Engine, product};
use crate::support::program::Audited;

/// What a value is kept as.
type Stores = fn(Checkpoint, f64) -> f64;

/// A prompt, and rows that come alone before and after a chunk.
const STEPS: [usize; 5] = [7, 1, 1, 5, 1];

/// Whether it is what a product of queries, keys or values has before its bias, which such an engine adds in f32.
fn is_of_attention(id: Checkpoint) -> bool {
    matches!(id.kind(), Kind::QProj | Kind::KProj | Kind::VProj)
}

/// Values in bf16, but products before their bias.
fn brain(id: Checkpoint, x: f64) -> f64 {
    if is_of_attention(id) { x } else { bf16::from_f64(x).to_f64() }
}

/// The same in f16.
fn half(id: Checkpoint, x: f64) -> f64 {
    if is_of_attention(id) { x } else { f16::from_f64(x).to_f64() }
}

/// Values in bf16, all of them.
fn all_brain(_: Checkpoint, x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

/// What an audit says of such an engine, and of a `spoil`ed one: rows of products of one token.
fn judged(stores: Stores, spoil: &dyn Fn(Checkpoint, &mut [f64])) -> Audited {
    let last: RefCell<HashMap<Kind, Vec<f64>>> = RefCell::default();
    let computes = |id: Checkpoint, args: &Args<'_, f64>| {
        let read = match id.kind() {
            Kind::QProj | Kind::KProj | Kind::VProj => Kind::AttnNorm,
            Kind::FfnGate | Kind::FfnUp => Kind::FfnNorm,
            Kind::Logits => Kind::FinalNorm,
            kind @ (Kind::AttnNorm | Kind::FfnNorm | Kind::FinalNorm) => {
                let [x, weight] = [0, 1].map(|slot| args.get(slot).unwrap().values());
                let values = x.iter().zip(weight.iter().cycle()).map(|(x, w)| x * w).collect();
                last.borrow_mut().insert(kind, values);
                return None;
            }
            _ => return None,
        };
        let is_of_one = args.get(1).unwrap().shape()[..3] == [1, 1, 1];
        let weight = is_of_one.then(|| args.get(0).unwrap().values())?;
        let mut values = product(args, &weight, &last.borrow()[&read]);
        spoil(id, &mut values);
        Some(values)
    };
    let arithmetic = Arithmetic::EXACT;
    let engine = Engine { kept: Element::F32, computes: &computes, some: &|_| true, arithmetic, stores };
    engine.audited(MODEL, &STEPS)
}

#[test]
fn products_of_one_row_may_read_a_norm_before_it_is_rounded() {
    // In bf16 throughout, what was rounded of the norm is no more than what a product may be off by anyway.
    for (name, stores, is_said) in
        [("bf16", brain as Stores, true), ("f16", half, true), ("bf16 throughout", all_brain, false)]
    {
        let audited = judged(stores, &|_, _| ());
        assert_eq!((audited.code, &audited.first[..]), (0, ""), "{name}: {}", audited.report["reason"]);
        let says = audited.notes.contains("before it was rounded");
        assert_eq!(says, is_said, "{name}: {}", audited.notes);
    }
}

#[test]
fn what_is_wrong_in_such_a_product_is_found() {
    // The one of attention is recorded in f32, and held to that; the other in bf16.
    for (stores, at, factor) in [
        (brain as Stores, "blk.1.k_proj", 1.0005),
        (half, "blk.1.k_proj", 1.0005),
        (brain, "blk.2.ffn_up", 1.02),
    ] {
        let audited = judged(stores, &|id, values| {
            if id.to_string() == at {
                values.iter_mut().for_each(|x| *x *= factor);
            }
        });
        assert_eq!((audited.code, &audited.first[..]), (1, at), "{}", audited.report["reason"]);
    }
}
