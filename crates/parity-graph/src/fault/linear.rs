//! Matrix products with weights, and their biases.

use super::{Fault, Site, weights_of_other_layers};
use crate::graph::{Graph, Id};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    let Some((slot, weight)) = site.weight() else { return };
    let name = &site.graph.get(weight).name;
    match site.op() {
        Op::MulMat | Op::MulMatId => another_layer(site, slot, weight, "linear.wrong_layer", out),
        Op::Add | Op::AddId if name.contains("bias") => {
            out.push(site.fault(
                "linear.no_bias",
                format!("{name} is left out"),
                Change::Bypass { slot: 1 - slot.min(1) },
            ));
            let twice = site.edit(slot, Edit::Multiply(2.0));
            out.push(site.fault("linear.bias_twice", format!("{name} is added twice"), twice));
            another_layer(site, slot, weight, "linear.wrong_layer", out);
        }
        Op::Mul if !name.contains("norm") => {
            out.push(site.fault(
                "linear.no_scale",
                format!("{name} is left out"),
                Change::Bypass { slot: 1 - slot.min(1) },
            ));
        }
        _ => {}
    }
}

/// The first layer alone is among the mistakes of a node: see [`other_layers`] for all.
fn another_layer(site: Site<'_>, slot: usize, weight: usize, name: &'static str, out: &mut Vec<Fault>) {
    out.extend(layers(site, slot, weight, name).next());
}

/// The weight or bias of each other layer read for a node's own, all but the one that is among its mistakes already.
pub fn other_layers(graph: &Graph, id: Id) -> Vec<Fault> {
    let site = Site { graph, id };
    let Some((slot, weight)) = site.weight() else { return Vec::new() };
    let is_bias = graph.get(weight).name.contains("bias");
    match site.op() {
        Op::Add | Op::AddId if !is_bias => Vec::new(),
        Op::MulMat | Op::MulMatId | Op::Add | Op::AddId => {
            layers(site, slot, weight, "linear.wrong_layer").skip(1).collect()
        }
        _ => Vec::new(),
    }
}

fn layers<'g>(
    site: Site<'g>,
    slot: usize,
    weight: Id,
    name: &'static str,
) -> impl Iterator<Item = Fault> + 'g {
    // A weight that is seen through a view would need the view of the other one.
    let direct = site.graph.src(site.id, slot) == Some(weight);
    weights_of_other_layers(site.graph, weight).filter(move |_| direct).map(move |other| {
        let (own, other_name) = (&site.graph.get(weight).name, &site.graph.get(other).name);
        let text = format!("{other_name} is read for {own}");
        site.fault(name, text, Change::Source { slot, with: Some(other) })
    })
}
