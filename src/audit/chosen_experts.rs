//! What an engine records in part: the experts that it chose, rows of a step.

use parity_graph::{Graph, Id, Op};

use super::{Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Node, Unknown, Values, own};
use crate::ops::Args;

/// llama.cpp's name for the order of a layer's experts, and for the first of it, which engines record.
pub const ORDER: &str = "ffn_moe_argsort";
const CHOSEN: &str = "ffn_moe_topk";

/// The order of all experts of which an engine tells only those that it chose: these come first.
pub fn order(
    steps: &dyn Steps,
    step: usize,
    node: &Node<'_>,
    checkpoint: Checkpoint,
    args: std::result::Result<&Args<'_, f64>, &Unknown>,
) -> Option<Tensor> {
    let of_choice = format!("{}{CHOSEN}", checkpoint.to_string().strip_suffix(ORDER)?);
    let of_choice: Checkpoint = of_choice.parse().ok()?;
    let chosen = steps.tensor(step, of_choice)?;
    let order = own(node, args).ok()?.data;
    let [rows, experts] = [chosen.positions.len(), *node.program.graph.get(node.id).ne.first()?];
    let k = chosen.values.len().checked_div(rows)?;
    if order.len() != rows * experts || k > experts {
        return None;
    }
    let mut values = Vec::with_capacity(order.len());
    for (chosen, order) in chosen.values.chunks(k.max(1)).zip(order.chunks(experts.max(1))) {
        values.extend_from_slice(chosen);
        let others = order.iter().map(|expert| *expert as f32).filter(|expert| !chosen.contains(expert));
        values.extend(others.take(experts - k));
    }
    (values.len() == order.len()).then(|| Tensor {
        shape: vec![rows, experts],
        positions: chosen.positions.clone(),
        values,
    })
}

/// An order that nobody recorded, of scores that leave no doubt: as far as it is read, any two neighbours lie farther
/// apart than rounding may have moved both.
pub fn settled(node: &Node<'_>, args: &Args<'_, f64>) -> Option<Vec<f64>> {
    let graph = &node.program.graph;
    if graph.get(node.id).op != Op::Argsort {
        return None;
    }
    let width = args.shape[3];
    let scores = args.get(0)?.values();
    let off = node.carried.first().and_then(Option::as_ref).map(|carried| &carried.error);
    let order = own(node, Ok(args)).ok()?.data;
    let read = read(graph, node.id, width);
    for (row, order) in order.chunks(width.max(1)).enumerate() {
        let at = |place: usize| row * width + order[place] as usize;
        let off = |place: usize| off.map_or(0.0, |off| off[at(place)]);
        for place in 1..width.min(read + 1) {
            let apart = (scores[at(place - 1)] - scores[at(place)]).abs();
            if !(apart > off(place - 1) + off(place)) {
                return None;
            }
        }
    }
    Some(order)
}

/// An order by scores that leave a doubt, and the same with the last expert that is chosen in the place of the first that is not,
/// in rows in which rounding decides between these two. The order of those that are chosen decides nothing.
pub fn either(node: &Node<'_>, args: &Args<'_, f64>) -> Option<[Vec<f64>; 2]> {
    let graph = &node.program.graph;
    let width = args.shape[3];
    let scores = args.get(0)?.values();
    let off = node.carried.first().and_then(Option::as_ref).map(|carried| &carried.error);
    let order = own(node, Ok(args)).ok()?.data;
    let chosen = read(graph, node.id, width);
    let mut other = order.clone();
    for (row, order) in other.chunks_mut(width.max(1)).enumerate().filter(|_| (1..width).contains(&chosen)) {
        let [last, next] = [chosen - 1, chosen].map(|place| row * width + order[place] as usize);
        let off = off.map_or(0.0, |off| off[last] + off[next]);
        if !((scores[last] - scores[next]).abs() > off) {
            order.swap(chosen - 1, chosen);
        }
    }
    Some([order, other])
}

/// How many of the first places of an order are read.
fn read(graph: &Graph, order: Id, width: usize) -> usize {
    let readers =
        graph.computed().filter(|&id| id != order && graph.sources(id).any(|source| source == order));
    let places = readers.map(|id| {
        let tensor = graph.get(id);
        let from_first = tensor.view.is_some_and(|view| view.root == order && view.offset == 0);
        if tensor.op == Op::View && from_first { tensor.ne[0] } else { width }
    });
    places.max().unwrap_or(width)
}

/// Recorded values, and computed ones where there are none.
pub fn filled(mut own: Values<f64>, recorded: &[f64], lacks: impl Fn(usize) -> bool) -> Values<f64> {
    for (element, value) in recorded.iter().enumerate().filter(|(element, _)| !lacks(*element)) {
        own.data[element] = *value;
        if let Some(carried) = &mut own.carried {
            carried.error[element] = 0.0;
        }
    }
    own
}
