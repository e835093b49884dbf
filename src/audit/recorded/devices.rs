//! Devices whose kernels are not followed: nobody is accused for an order of sums that nobody knows.
//!
//! A product or an attention that no followed kernel explains is held once more to what f16 may round in any order. If
//! that explains it, and no node of its kind was explained by a kernel of its backend that rounds on purpose, this is
//! another device than those that are followed, and what it computed cannot be judged. On a device that is followed
//! such a node is wrong: what f16 may round would hide it, but its kernel does not. Of a backend that there is no
//! recording of nobody knows that, whatever explains its other nodes.

use std::collections::{BTreeSet, HashMap, HashSet};

use parity_graph::Op;

use super::node::{Held, Sight, judge};
use super::{Checkpoint, Findings};
use crate::arithmetic::backend::{Backend, untested};
use crate::ops::{Args, Rule};

/// A backend's products, or its attention.
type Class = (Backend, bool);

/// What was seen of the kernels of devices.
#[derive(Default)]
pub struct Devices {
    followed: BTreeSet<Class>,
    /// With what may speak against them: nothing where the backend is not tested.
    excused: HashMap<Checkpoint, Option<Class>>,
    accused: HashSet<Checkpoint>,
}

impl Devices {
    /// Notes what was found of a node.
    pub fn note(
        &mut self,
        checkpoint: Checkpoint,
        backend: Option<&str>,
        (rule, args): (&Rule, &Args<'_, f64>),
        (recorded, sight): (&[f64], &Sight<'_>),
        held: &Held,
    ) {
        let attention = rule.op == Op::FlashAttn;
        let is_tested = backend.and_then(untested).is_none();
        let class = backend.and_then(Backend::of).filter(|_| is_tested).map(|backend| (backend, attention));
        if is_tested && class.is_none() {
            return;
        }
        if !attention && !matches!(rule.op, Op::MulMat | Op::MulMatId) {
            return;
        }
        if held.is_healthy() {
            self.followed.extend(class.filter(|_| held.followed));
            return;
        }
        let any_order = [Backend::any_order(attention)];
        if judge(rule, args, recorded, sight, &any_order).is_ok_and(|held| held.is_healthy()) {
            self.excused.insert(checkpoint, class);
        } else {
            self.accused.insert(checkpoint);
        }
    }

    /// Takes back what was found of nodes whose kernels are not followed.
    pub fn excuse(self, findings: &mut Findings) {
        for (checkpoint, class) in self.excused {
            if !class.is_some_and(|class| self.followed.contains(&class))
                && !self.accused.contains(&checkpoint)
            {
                findings.at(checkpoint).give_up(
                    "a device whose kernels parity follows (docs/backends.md): this one keeps its sums in f16, in an \
                     order of its own, or in f32 where f16 is switched off",
                );
            }
        }
    }
}
