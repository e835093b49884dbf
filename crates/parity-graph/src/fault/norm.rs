//! RMS_NORM, NORM, and the MUL and ADD by their weights.

use super::{Fault, Site};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// Epsilons that models use.
const EPSILONS: [f32; 4] = [1e-5, 1e-6, 1e-8, 1e-12];

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        Op::RmsNorm => {
            epsilon(site, out);
            let eps = site.tensor().params.0[0];
            let other = Change::Op(Op::Norm, vec![(0, eps)]);
            out.push(site.fault("norm.layernorm", "the mean is subtracted, as in LayerNorm", other));
        }
        Op::Norm => {
            epsilon(site, out);
            let eps = site.tensor().params.0[0];
            let other = Change::Op(Op::RmsNorm, vec![(0, eps)]);
            out.push(site.fault("norm.rms", "the mean is not subtracted, as in an RMS norm", other));
        }
        Op::Mul => weight(site, out),
        _ => {}
    }
}

fn epsilon(site: Site<'_>, out: &mut Vec<Fault>) {
    let own = site.float("eps");
    for eps in EPSILONS.into_iter().filter(|eps| *eps != own) {
        let text = format!("epsilon is {eps:e}, the graph says {own:e}");
        out.push(site.fault("norm.eps", text, site.with_float("eps", eps)));
    }
}

/// A norm's result times its weight.
fn weight(site: Site<'_>, out: &mut Vec<Fault>) {
    let Some((slot, _)) = site.weight() else { return };
    let norm = 1 - slot.min(1);
    if !matches!(site.origin_op(norm), Some(Op::RmsNorm | Op::Norm)) {
        return;
    }
    out.push(site.fault("norm.no_weight", "the norm's weight is left out", Change::Bypass { slot: norm }));
    out.push(site.fault(
        "norm.weight_twice",
        "the norm's weight is multiplied in twice",
        site.edit(slot, Edit::Square),
    ));
    out.push(site.fault("norm.unit_offset", "1 + w is used for w", site.edit(slot, Edit::Add(1.0))));
}
