//! What an engine records in part: the experts that it chose, rows of a step.

use super::{Steps, Tensor};
use crate::checkpoint::Checkpoint;
use crate::engine::machine::{Node, Unknown, Values, own};
use crate::ops::Args;

/// llama.cpp's name for the order of a layer's experts, and for the first of it, which engines record.
const ORDER: &str = "ffn_moe_argsort";
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
