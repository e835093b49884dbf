//! The order in which the nodes of several graphs are shown, and whether one was recorded.

use std::collections::HashMap;

use super::{Labelled, Steps};
use crate::checkpoint::Checkpoint;

/// Whether a node was recorded in any step.
pub fn is_recorded(steps: &dyn Steps, graphs: &[(usize, &Labelled)], id: Checkpoint) -> bool {
    graphs.iter().any(|(step, _)| steps.rows(*step, id).is_some())
}

/// Every wanted id once, where it first comes; one that only a later graph has follows what stands before it there.
pub fn order(graphs: &[(usize, &Labelled)], wants: &dyn Fn(Checkpoint) -> bool) -> Vec<Checkpoint> {
    let mut order: Vec<Checkpoint> = Vec::new();
    for (i, (_, labelled)) in graphs.iter().enumerate() {
        if graphs[..i].iter().any(|(_, known)| std::ptr::eq(*known, *labelled)) {
            continue;
        }
        let known: HashMap<Checkpoint, usize> = order.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut merged: Vec<Checkpoint> = Vec::with_capacity(order.len());
        let mut taken = 0;
        for (_, id) in labelled.nodes().filter(|(_, id)| wants(*id)) {
            match known.get(&id) {
                Some(&at) if at >= taken => {
                    merged.extend_from_slice(&order[taken..=at]);
                    taken = at + 1;
                }
                Some(_) => {}
                None => merged.push(id),
            }
        }
        merged.extend_from_slice(&order[taken..]);
        order = merged;
    }
    order
}
