//! Convolutions and recurrent states: stale, shifted, not carried over from the prefill to a decode step.

use super::{Fault, Site};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

const NOT_CARRIED: &str =
    "the state starts from zero in every step: it is not carried over, or never written";

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        Op::SsmConv => convolution(site, out),
        Op::SsmScan => {
            out.push(site.fault("state.not_carried", NOT_CARRIED, site.edit(0, Edit::Set(0.0))));
            let flipped = site.edit(3, Edit::Multiply(-1.0));
            out.push(site.fault("state.decay_sign", "the decay has the wrong sign", flipped));
            out.push(site.fault("state.exchanged", "B and C are exchanged", Change::Exchange(4, 5)));
        }
        Op::GatedDeltaNet => {
            out.push(site.fault("state.not_carried", NOT_CARRIED, site.edit(5, Edit::Set(0.0))));
            let gate = site.edit(3, Edit::Set(0.0));
            out.push(site.fault("state.no_gate", "the state does not decay", gate));
            if site.src(0).zip(site.src(1)).is_some_and(|(q, k)| q.ne == k.ne) {
                let text = "queries and keys are exchanged";
                out.push(site.fault("state.exchanged", text, Change::Exchange(0, 1)));
            }
        }
        _ => {}
    }
}

/// Each row of the convolution's input is what is left of the past, then the tokens of the step.
fn convolution(site: Site<'_>, out: &mut Vec<Fault>) {
    let (columns, kernel) = (site.src(0).map_or(0, |x| x.ne[0]), site.src(1).map_or(0, |w| w.ne[0]));
    let past = kernel.saturating_sub(1);
    if past == 0 {
        return;
    }
    out.push(site.fault("state.not_carried", NOT_CARRIED, site.edit(0, Edit::SetFirst(past, 0.0))));
    let text = "the convolution reads one position too early";
    out.push(site.fault("state.shifted", text, site.edit(0, Edit::Lag(columns))));
    let text = "what the convolution keeps of the past is one token old";
    out.push(site.fault("state.stale", text, site.edit(0, Edit::Lag(past))));
    let turned = site.edit(1, Edit::Rotate(1));
    out.push(site.fault("state.conv_kernel", "the convolution's weights are one place off", turned));
}
