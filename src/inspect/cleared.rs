//! Nodes that are zero as long as nothing was carried: memory of recurrent layers is cleared where a text begins, and
//! what is multiplied with it is zero as well.

use std::collections::HashSet;

use parity_graph::label::labels;
use parity_graph::op::Op;
use parity_graph::{Graph, Id, Leaf};

use crate::checkpoint::Checkpoint;

/// The checkpoints of a graph whose values are zero in the first forward pass of a text, rightly.
pub fn of_cleared_state(graph: &Graph) -> HashSet<Checkpoint> {
    let mut zero: Vec<bool> = (0..graph.tensors.len()).map(|id| is_recurrent(graph, id)).collect();
    for id in 0..graph.nodes {
        let is_zero = |source: Id| zero[source] || zero[graph.root(source)];
        let first = || graph.src(id, 0).is_some_and(is_zero);
        let op = &graph.get(id).op;
        zero[id] = match op {
            Op::Mul | Op::MulMat => graph.sources(id).any(is_zero),
            Op::Add | Op::Concat => graph.sources(id).all(is_zero),
            Op::Scale | Op::SumRows | Op::Repeat => first(),
            op => (op.is_view() || op.is_copy() || op.is_movement()) && first(),
        };
    }
    let labels = labels(graph).into_iter().zip(zero);
    labels.filter_map(|(label, zero)| label.filter(|_| zero)).collect()
}

/// Whether a leaf is memory that is read before anything was written: not a cache of keys and values, whose cells are
/// written first.
fn is_recurrent(graph: &Graph, id: Id) -> bool {
    let name = &graph.get(id).name;
    graph.leaf(id) == Some(Leaf::State) && !name.starts_with("cache_k") && !name.starts_with("cache_v")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECAYED: &str = "graph 5 of 7\n\
        RESHAPE f32 4,1 view=5 < 5 : cache_s_l0 (reshaped)\n\
        MUL f32 4 < 0 6 : decayed_state-0\n\
        ADD f32 4 < 1 6 : new_state-0\n\
        MUL f32 4 < 2 6 : gated-0\n\
        CPY f32 4 view=5 < 2 5 : cache_s_l0 (copy)\n\
        NONE f32 4 : cache_s_l0\n\
        NONE f32 4 : blk.0.ssm_a.weight\n";

    #[test]
    fn what_is_made_of_cleared_memory_alone_is_zero() {
        let of = |text: &str| {
            let graph = parity_graph::text::read(text).unwrap().remove(0);
            let mut found: Vec<String> = of_cleared_state(&graph).iter().map(ToString::to_string).collect();
            found.sort();
            found
        };
        assert_eq!(of(DECAYED), ["blk.0.decayed_state"]);
        // Keys are written before they are read: zeros there are a mistake.
        assert_eq!(of(&DECAYED.replace("cache_s", "cache_k")), [""; 0]);
    }
}
