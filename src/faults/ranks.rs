//! Mistakes of tensor-parallel engines, where the recording was put together of what their ranks recorded.
//!
//! Where ranks recorded their summands, these come to what is right, and only what reads the engine's own sum is wrong.

use parity_graph::fault::{self, Argument, Fault, Scene};

use super::between::{EXPLAINS_MIN, with_mistake};
use super::diagnosis::told;
use crate::audit::{Across, Named, Suspect};
use crate::engine::op_by_op::Node;
use crate::ops::Args;

/// The summand of a rank that is not in a sum.
const LOST_SUM: &str = "ranks.lost_sum";
/// A sum that ends early: the same, of the last rank.
const TRUNCATED: &str = "linear.truncated_k";

/// Of ranks a part that is not in a sum is a rank's.
pub fn prefer(suspect: &Suspect<'_>, found: &mut Vec<Named>) {
    let is = |named: &Named, name: &str| named.diagnosis.fault == name;
    if suspect.ranks().is_some() && found.iter().any(|named| is(named, LOST_SUM)) {
        found.retain(|named| !is(named, TRUNCATED));
    }
}

/// The rank whose summand is not in what a node reads of a sum that is right as it was recorded.
pub fn unsummed(suspect: &Suspect<'_>) -> Vec<Named> {
    let (Some(ranks), Some(entry)) = (suspect.ranks(), fault::find(LOST_SUM)) else { return Vec::new() };
    let graph = &suspect.node.program.graph;
    let scene = Scene::new(graph);
    for sum in graph.sources(suspect.node.id).map(|source| graph.origin(source)) {
        let of_rank = |rank| entry.at(&scene, sum, &Argument::Name(format!("{rank}/{ranks}")));
        let named = (0..ranks).filter_map(of_rank).find_map(|fault| without(suspect, &fault));
        if let Some(named) = named {
            return vec![named];
        }
    }
    Vec::new()
}

/// What says that the node is right with a mistake in the sum that it reads.
fn without(suspect: &Suspect<'_>, fault: &Fault) -> Option<Named> {
    let replay = suspect.again(fault.rewrite.node)?;
    let injected = |node: &Node<'_>, args: &Args<'_, f64>, across: Across<'_>| {
        let is_it = fault.rewrite.node == node.id;
        is_it.then(|| with_mistake(suspect, across, node, args, &fault.rewrite.change))
    };
    let held = replay.held(suspect, &[fault.rewrite.node], &injected)?;
    let left = held.squares[0];
    let explains = 1.0 - left / suspect.held.squares[0];
    if !(held.is_healthy() && held.nonfinite == 0 && explains >= EXPLAINS_MIN) {
        return None;
    }
    let sum = replay.name(fault.rewrite.node)?;
    let mut diagnosis = told(suspect, fault, explains);
    diagnosis.text =
        format!("{sum} as it is read here is not what the ranks' parts add up to: {}", diagnosis.text);
    Some(Named {
        diagnosis,
        spelling: fault.spelling(),
        left,
        rest: 0.0,
        reaches: None,
        values: left.to_bits(),
    })
}
