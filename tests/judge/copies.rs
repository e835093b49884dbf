//! Engines whose matrix units give sums in f32, which is what is recorded, and whose nodes read copies of them in bf16.

use half::bf16;
use parity::checkpoint::{Checkpoint, Kind};
use parity::engine::op_by_op::compute;
use parity::ops::{Args, Strided, rule};
use parity_graph::Op;

use crate::mixed::{audited_in_f32, of_modules};
use crate::precision::product;
use crate::support::graphs::foreign::is_product;
use crate::support::program::Audited;
use crate::support::samples::sample;

fn rounded(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// What an op comes to that reads copies of its sources in bf16.
fn of_copies(op: &Op, args: &Args<'_, f64>) -> Vec<f64> {
    over_rounded(op, args, [true; 3], rounded)
}

/// What an op comes to that reads some of its first sources rounded.
pub fn over_rounded(op: &Op, args: &Args<'_, f64>, which: [bool; 3], round: fn(f32) -> f32) -> Vec<f64> {
    let copy = |slot: usize| {
        let source = args.get(slot).filter(|_| which[slot])?;
        let values: Vec<f64> = source.values().iter().map(|x| f64::from(round(*x as f32))).collect();
        Some((values, source.shape()))
    };
    // The mask of attention is no number that a node computed.
    let copies = [0, 1, 2].map(copy);
    let of = |slot: usize| copies.get(slot)?.as_ref().map(|(values, shape)| Strided::whole(values, *shape));
    compute(rule(op).unwrap(), &Args { sources: args.replaced(of), ..*args }).unwrap()
}

/// An engine, of which nodes read copies or what was recorded, and what a row of a node, or all of a kind of nodes, is off by.
struct Copying {
    reads_copies: bool,
    spoiled: (&'static str, f64),
    steps: &'static [usize],
}

impl Copying {
    fn audit(&self, declared: &[&str]) -> Audited {
        let computes = |id: Checkpoint, args: &Args<'_, f64>| -> Option<Vec<f64>> {
            let own = match id.kind() {
                _ if is_product(id) => product(args, if self.reads_copies { rounded } else { |x| x }, |x| x),
                Kind::AttnCtx if self.reads_copies => of_copies(&Op::FlashAttn, args),
                Kind::FfnAct if self.reads_copies => of_copies(&Op::Swiglu, args),
                Kind::FfnAct => compute(rule(&Op::Swiglu).unwrap(), args).unwrap(),
                _ => return None,
            };
            let (name, factor) = self.spoiled;
            let id = id.to_string();
            let (is_row, is_all) = (id == name, name.starts_with('.') && id.ends_with(name));
            let (width, rows) = (args.shape[3], args.shape[2]);
            let first = if is_all { 0 } else { (rows - 1) * width };
            let mut own = own;
            own[first..].iter_mut().filter(|_| is_row || is_all).for_each(|value| *value *= factor);
            Some(own)
        };
        audited_in_f32(&computes, of_modules, self.steps, declared)
    }
}

#[test]
fn nodes_that_read_copies_are_not_accused() {
    for steps in sample("steps", 1, [&[20][..], &[13, 1, 1]]) {
        let healthy = Copying { reads_copies: true, spoiled: ("", 1.0), steps };
        let undeclared = healthy.audit(&[]);
        assert_eq!(undeclared.code, 2, "{steps:?}: {} at {}", undeclared.report["reason"], undeclared.first);
        let notes = undeclared.report["notes"].to_string();
        assert!(notes.contains("copies in bf16"), "{notes}");
        let declared = healthy.audit(&["--numerics", "bf16"]);
        assert_eq!(declared.code, 0, "{steps:?}: {} at {}", declared.report["reason"], declared.first);
    }
}

#[test]
fn mistakes_beside_such_copies_are_found() {
    let healthy = Copying { reads_copies: true, spoiled: ("", 1.0), steps: &[20] };
    let cases = [
        // Recorded with all that it reads.
        ("blk.1.ffn_up", Copying { spoiled: ("blk.1.ffn_up", 1.002), ..healthy }),
        // Behind what was not recorded, and much more than copies are rounded by.
        ("blk.2.ffn_out", Copying { spoiled: ("blk.2.ffn_act", 1.2), ..healthy }),
        // Products that round nothing show an engine of f32: what is wrong with it in all layers is no copy.
        ("blk.0.ffn_out", Copying { reads_copies: false, spoiled: (".ffn_act", 1.001), ..healthy }),
    ];
    for (wanted, engine) in sample("mistakes beside copies", 2, cases) {
        let audited = engine.audit(&[]);
        let found = (audited.code, &audited.first[..]);
        assert_eq!(found, (1, wanted), "{:?}: {}", engine.spoiled, audited.report["reason"]);
    }
}
