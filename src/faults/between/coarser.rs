//! Nodes that were not recorded in a coarser arithmetic than the engine around them: a bf16 table of sines and cosines, a
//! softmax in the type of the scores. One piece of code computes them in all layers, so those of a stretch are tried together.

use parity_graph::{Id, Op};

use super::{EXPLAINS_MIN, is_spent, most, out_of_sight};
use crate::audit::{Across, Named, Replay, Suspect};
use crate::engine::op_by_op::{Node, Values, compute};
use crate::faults::precision;
use crate::ops::Args;
use crate::watch;

/// Ops that one piece of code computes.
const TOGETHER: [&[Op]; 2] = [&[Op::Rope], &[Op::FlashAttn, Op::SoftMax]];

/// What leaves least of those that explain a suspect, and the first node that it is in.
pub(super) fn coarser(suspect: &Suspect<'_>, replay: &Replay<'_>, work: &mut usize) -> Option<(Id, Named)> {
    let graph = &suspect.node.program.graph;
    let mut best: Option<(Id, Named)> = None;
    for ops in TOGETHER {
        let is_such = |id: &Id| ops.contains(&graph.get(*id).op);
        let nodes: Vec<Id> = replay.through.iter().copied().filter(is_such).collect();
        let Some(&first) = nodes.first() else { continue };
        for (name, arithmetic) in precision::out_of_products(&graph.get(first).op) {
            if is_spent(replay, &nodes, work) {
                return best;
            }
            watch::at(|| suspect.asked(&name), || None);
            // Its roundings are as large as those that it is judged by, and its values are its own.
            let injected = |node: &Node<'_>, args: &Args<'_, f64>, across: Across<'_>| {
                let rule = node.rule.filter(|_| nodes.contains(&node.id))?;
                let coarse = Args { arithmetic: &arithmetic, sources: args.sources.clone(), ..*args };
                let own = across(node, Ok(args));
                Some(own.and_then(|own| Ok(Values { data: compute::<f64>(rule, &coarse)?, ..own })))
            };
            let judging = (&nodes[..], most(suspect));
            let held = replay.held_by(suspect, judging, &injected, &|node, args, said| {
                said(node.rule?, args, &node.carried)
            });
            let Some(held) = held.filter(|held| suspect.is_explained(held)) else { continue };
            let (left, error) = (held.squares[0], suspect.held.squares[0]);
            let explains = 1.0 - left / error;
            if !(explains >= EXPLAINS_MIN) || best.as_ref().is_some_and(|(_, best)| best.left <= left) {
                continue;
            }
            let Some(mut named) = precision::told(&name, explains, left) else { continue };
            named.diagnosis.text += &out_of_sight(suspect, replay, &nodes);
            named.values = left.to_bits();
            best = Some((first, named));
        }
    }
    best
}
