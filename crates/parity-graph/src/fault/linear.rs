//! Matrix products with weights, and their biases.

use super::{Fault, Site, weight_of_another_layer};
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

fn another_layer(site: Site<'_>, slot: usize, weight: usize, name: &'static str, out: &mut Vec<Fault>) {
    // A weight that is seen through a view would need the view of the other one.
    if site.graph.src(site.id, slot) != Some(weight) {
        return;
    }
    if let Some(other) = weight_of_another_layer(site.graph, weight) {
        let (own, other_name) = (&site.graph.get(weight).name, &site.graph.get(other).name);
        let text = format!("{other_name} is read for {own}");
        out.push(site.fault(name, text, Change::Source { slot, with: Some(other) }));
    }
}
