//! What a node reads, seen through everything that only moves values: views, copies, caches, picked rows.

use std::collections::BTreeSet;

use crate::graph::{Graph, Id, Leaf};
use crate::op::Op;

/// The arithmetic nodes, weights, inputs and states that the values of node `id` come from, in the order of its slots,
/// each once. Where a state is written before it is read, what was written stands for it.
pub fn reads(graph: &Graph, id: Id) -> Vec<Id> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::from([id]));
    let mut open: Vec<Id> = graph.sources(id).collect();
    open.reverse();
    while let Some(source) = open.pop() {
        if !seen.insert(source) {
            continue;
        }
        if !graph.is_leaf(source) && !graph.is_arithmetic(source) {
            open.extend(moved(graph, source).into_iter().rev());
            continue;
        }
        // Memory is read as it is when the node is computed.
        let written = |writer: &Id| *writer < id;
        match (graph.leaf(source), graph.root(source)) {
            (Some(Leaf::State), state) => match graph.writers(state).take_while(written).last() {
                Some(writer) => open.push(writer),
                None => found.push(source),
            },
            (None, root) if graph.is_leaf(source) && root != source => open.push(root),
            _ => found.push(source),
        }
    }
    found
}

/// The sources of a movement whose values it passes on; which rows are picked or written is left out.
fn moved(graph: &Graph, id: Id) -> Vec<Id> {
    match graph.get(id).op {
        Op::Concat => graph.sources(id).collect(),
        _ => graph.src(id, 0).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn caches_and_copies_are_read_through() {
        let graph = "graph 8 of 12 on=CPU\n\
                     MUL_MAT f32 4,2 < 8 9 : k\n\
                     MUL_MAT f32 4,2 < 10 9 : q\n\
                     SET_ROWS f16 4,8 view=11 < 0 9 11 : cache_k_l0 (view)\n\
                     VIEW f16 4,2 view=11 < 11 : cache_k_l0 (view)\n\
                     CONT f32 4,2 < 1 : q (cont)\n\
                     MUL_MAT f32 2,2 < 3 4 : kq\n\
                     VIEW f32 2,2 view=5 < 5 : kq (view)\n\
                     SOFT_MAX f32 2,2 < 6 : probs\n\
                     NONE f32 4,4 : blk.0.attn_k.weight\n\
                     NONE f32 4,2 : inp\n\
                     NONE f32 4,4 : blk.0.attn_q.weight\n\
                     NONE f16 4,8 : cache_k_l0\n";
        let graph = text::read(graph).unwrap().remove(0);
        assert_eq!(reads(&graph, 0), [8, 9]);
        assert_eq!(reads(&graph, 5), [0, 1]);
        assert_eq!(reads(&graph, 7), [5]);
    }
}
