//! Convolutions and recurrent states: stale, shifted, not carried over from the prefill to a decode step.

use super::{Fault, Site};
use crate::op::Op;
use crate::rewrite::Edit;

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        Op::SsmConv => {
            let shifted = site.edit(0, Edit::Rotate(1));
            out.push(site.fault("state.shifted", "the convolution reads one position too early", shifted));
            let kernel = site.edit(1, Edit::Rotate(1));
            out.push(site.fault("state.conv_kernel", "the convolution's weights are one place off", kernel));
        }
        Op::SsmScan => {
            let zero = site.edit(0, Edit::Set(0.0));
            out.push(site.fault("state.not_carried", "the state starts from zero in every step", zero));
            let twice = site.edit(3, Edit::Multiply(-1.0));
            out.push(site.fault("state.decay_sign", "the decay has the wrong sign", twice));
        }
        Op::GatedDeltaNet => {
            let zero = site.edit(5, Edit::Set(0.0));
            out.push(site.fault("state.not_carried", "the state starts from zero in every step", zero));
            let gate = site.edit(3, Edit::Set(0.0));
            out.push(site.fault("state.no_gate", "the state does not decay", gate));
        }
        _ => {}
    }
}
