//! Recorded tensors that are no node's result: what a recording cuts out of a fused matmul's, and second names of the same
//! values. Each has to be, bit for bit, what was recorded of the node that it is a window into.

use std::collections::HashMap;

use parity_graph::Id;
use parity_graph::known::Found;
use parity_graph::label::aliases;

use super::node::{element, nothing};
use super::{Arrangement, Findings, Labelled, Steps};
use crate::checkpoint::Checkpoint;
use crate::ops::Strided;

/// A recorded tensor, and where it lies.
struct Window {
    id: Checkpoint,
    tensor: Id,
    /// The node that computes its values.
    of: Checkpoint,
    node: Id,
}

/// Those of a graph that `is_recorded` together with what they are cut out of, in the order of that.
fn windows(labelled: &Labelled, is_recorded: &dyn Fn(Checkpoint) -> bool) -> Vec<Window> {
    let graph = &labelled.program.graph;
    let of = |(id, found): (Checkpoint, Found)| {
        // The layout of a view into one node may be that of another's values: those of a product before its bias.
        let (tensor, node) = (found.tensor, found.within.unwrap_or_else(|| graph.origin(found.tensor)));
        let of = labelled.labels.get(node).copied().flatten()?;
        let is_other = of != id && !id.kind().is_optional() && is_recorded(id) && is_recorded(of);
        is_other.then_some(Window { id, tensor, of, node })
    };
    let mut out: Vec<Window> = aliases(graph).into_iter().filter_map(of).collect();
    out.sort_by_key(|window| (window.node, window.tensor));
    out
}

/// An order of nodes with those that are cut out of one behind it; `None` of a producer that computed another graph than this.
pub fn with_cut_out(
    order: Vec<Checkpoint>,
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    is_recorded: &dyn Fn(Checkpoint) -> bool,
) -> Vec<Checkpoint> {
    if !steps.is_own_graph() {
        return order;
    }
    let mut behind: HashMap<Checkpoint, Vec<Checkpoint>> = HashMap::new();
    each_once(graphs).flat_map(|labelled| windows(labelled, is_recorded)).for_each(|window| {
        let known = behind.entry(window.of).or_default();
        if !known.contains(&window.id) && !order.contains(&window.id) {
            known.push(window.id);
        }
    });
    order
        .into_iter()
        .flat_map(|id| std::iter::once(id).chain(behind.remove(&id).unwrap_or_default()))
        .collect()
}

/// Graphs that several steps have, once.
fn each_once<'a>(graphs: &'a [(usize, &'a Labelled)]) -> impl Iterator<Item = &'a Labelled> {
    let is_first = |i: usize| !graphs[..i].iter().any(|(_, known)| std::ptr::eq(*known, graphs[i].1));
    (0..graphs.len()).filter(move |i| is_first(*i)).map(|i| graphs[i].1)
}

/// Compares them, step by step.
pub fn judge(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    wants: &dyn Fn(Checkpoint) -> bool,
    findings: &mut Findings,
) {
    let by_graph: HashMap<*const Labelled, Vec<Window>> = each_once(graphs)
        .map(|labelled| (std::ptr::from_ref(labelled), windows(labelled, &|_| true)))
        .collect();
    for &(step, labelled) in graphs {
        let all = by_graph.get(&std::ptr::from_ref(labelled)).into_iter().flatten();
        for window in all.filter(|window| wants(window.id)) {
            compare(steps, (step, labelled), window, findings);
        }
    }
}

fn compare(
    steps: &dyn Steps,
    (step, labelled): (usize, &Labelled),
    window: &Window,
    findings: &mut Findings,
) {
    let both = [window.id, window.of].map(|id| steps.tensor(step, id));
    let [Some(recorded), Some(whole)] = both else { return };
    let arranged = |tensor: Id, id: Checkpoint, recorded: &super::Tensor| -> Option<Arrangement> {
        labelled.arrange(tensor, id, recorded)
    };
    let both = (arranged(window.tensor, window.id, &recorded), arranged(window.node, window.of, &whole));
    let (Some(own), Some(whole_arranged)) = both else { return };
    let Some(expected) = values(labelled, window, &whole_arranged.of_node(&whole.values, |_| f64::NAN))
    else {
        return;
    };
    let found = own.of_node(&recorded.values, |_| f64::NAN);
    if found.len() != expected.len() {
        return;
    }
    let mut held = nothing();
    let pairs = found.iter().zip(&expected).enumerate().filter(|(i, _)| own.is_recorded(*i));
    pairs.for_each(|(i, (found, expected))| element(&mut held, i, *found, *expected, 0.0));
    findings.at(window.id).add(held, &own, recorded.positions.len());
    findings.at(window.id).row_shape = recorded.shape.get(1..).unwrap_or_default().to_vec();
}

/// What a window shows of the values of its node; `None` where that does not lie in memory of its own.
fn values(labelled: &Labelled, window: &Window, of_node: &[f64]) -> Option<Vec<f64>> {
    let (program, mut tensor) = (&labelled.program, window.tensor);
    // A copy has the values of its source in their logical order.
    while tensor != window.node && program.graph.get(tensor).op.is_copy() {
        tensor = program.graph.src(tensor, 0)?;
    }
    if tensor == window.node {
        return Some(of_node.to_vec());
    }
    let (graph, data) = (&program.graph, of_node);
    let place = program.place(tensor)?;
    let is_alone = !graph.get(place.root).op.is_view()
        && graph.get(place.root).elements() == data.len()
        && place.end()? <= data.len();
    let (offset, shape, strides) = (place.offset, place.shape, place.strides);
    is_alone.then(|| Strided { data, offset, shape, strides }.to_vec())
}
