//! Which experts of a mixture may have been taken for one another, by the tokens that are wrong.

use std::cell::RefCell;
use std::collections::BTreeSet;

use parity_graph::Id;

use crate::audit::{Across, Replay, Suspect};
use crate::engine::op_by_op::Node;
use crate::ops::Args;

/// Experts that may have been taken for one another: every wrong token went to one of them. Those come first to which
/// the fewest other tokens went.
pub fn pairs(suspect: &Suspect<'_>, replay: &Replay<'_>, products: &[Id]) -> Vec<[usize; 2]> {
    let (Some(first), Some(axis)) = (products.first(), replay.token_axis()) else { return Vec::new() };
    let seen: RefCell<Option<(Vec<f64>, usize, usize)>> = RefCell::new(None);
    let look = |node: &Node<'_>, args: &Args<'_, f64>, _: Across<'_>| {
        if node.id == *first
            && let (Some(weights), Some(ids)) = (args.get(0), args.get(2))
        {
            *seen.borrow_mut() = Some((ids.values().into_owned(), ids.shape()[3], weights.shape()[1]));
        }
        None
    };
    let _ = replay.held_by(suspect, (&[*first], f64::INFINITY), &look, &|_, _, _| None);
    let Some((ids, chosen, experts)) = seen.into_inner() else { return Vec::new() };
    let inner: usize = suspect.args.shape[axis + 1..].iter().product();
    let extent = suspect.args.shape[axis].max(1);
    let wrong: BTreeSet<usize> =
        suspect.held.beyond.iter().map(|element| element / inner.max(1) % extent).collect();
    let mut tokens: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); experts];
    for (row, id) in ids.iter().enumerate() {
        if let Some(tokens) = tokens.get_mut(*id as usize) {
            tokens.insert(row / chosen.max(1));
        }
    }
    let mut out: Vec<(usize, [usize; 2])> = Vec::new();
    for a in (0..experts).filter(|&a| !tokens[a].is_disjoint(&wrong)) {
        for b in (0..experts).filter(|&b| b != a) {
            let covered = wrong.iter().all(|token| tokens[a].contains(token) || tokens[b].contains(token));
            if covered {
                out.push((
                    tokens[a].union(&tokens[b]).filter(|token| !wrong.contains(token)).count(),
                    [a, b],
                ));
            }
        }
    }
    out.sort();
    out.into_iter().map(|(_, pair)| pair).collect()
}
