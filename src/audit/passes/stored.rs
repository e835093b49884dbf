//! Engines of a narrow type that do not store the nearest number: bf16 as the upper half of f32, whose other bits are cut
//! off, and f16 whose numbers that are not normal become 0.

use std::borrow::Cow;

use parity_graph::Op;

use super::unrounded::reads_unrounded;
use super::{Assumed, Findings, Passes};
use crate::arithmetic::round::NORMAL_F16;
use crate::arithmetic::{Arithmetic, Hypothesis, Storing};
use crate::audit::{Finding, Steps, exact, loaded, storage_types};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::Node;
use crate::error::Result;
use crate::numerics::Storage;

/// Sums that are looked at.
const SUMS_MAX: usize = 8;
/// Share of the values of one that are nearer to zero where bits are cut off; half of them are where the nearest number is stored.
const NEARER_ZERO: f64 = 0.95;
/// Values that must show it.
const VALUES_MIN: usize = 64;
/// Values within twice the least normal number that must have been recorded where none lies below: as many are expected there.
const LEAST_MIN: usize = 8;

impl Assumed {
    /// What a node may have been computed in, and its recorded values, as its engine stores them.
    pub fn as_stored<'v>(
        &self,
        steps: &dyn Steps,
        (kept, recorded): (Storage, &crate::audit::Tensor),
        node: &Node<'_>,
        (mut tried, values): (Vec<Hypothesis>, &'v [f64]),
    ) -> (Vec<Hypothesis>, Cow<'v, [f64]>) {
        let op = &node.program.graph.get(node.id).op;
        // What a cache in blocks holds is carried too: of nothing but products is it known that their source was not rounded.
        if !self.unrounded.is_empty() && *op == Op::MulMat && reads_unrounded(node) {
            tried.retain(|one| one.arithmetic.operands == Arithmetic::EXACT.operands);
        }
        let kept =
            Some(kept).filter(|kept| storage_types::holds(*kept, &recorded.values)).unwrap_or_default();
        if let Some(packed) = self.packed.filter(|_| *op == Op::FlashAttn) {
            // A prompt may be computed from its keys and values as they are, before they are kept.
            let is_prompt = recorded.positions.first() == Some(&0);
            let own = if is_prompt { tried } else { Vec::new() };
            tried = storage_types::over_packed(kept, steps.declared(), packed);
            tried.extend(own);
        }
        let of_type = tried.iter_mut().filter(|one| one.arithmetic.narrow != Storage::F32);
        of_type.for_each(|one| one.arithmetic.storing = self.storing);
        let is_cut = self.storing == Storing::Cut && kept == Storage::Bf16;
        (tried, if is_cut { storage_types::centred(values).into() } else { values.into() })
    }
}

impl Passes<'_> {
    /// Judges what is wrong once more where values show that their engine does not store the nearest numbers.
    pub(super) fn stored(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        if findings.wrong() == 0 {
            return Ok(());
        }
        let storing = match assumed.kept {
            Storage::Bf16 if self.cuts()? => Storing::Cut,
            Storage::F16 if self.flushes() => Storing::Flushed,
            _ => return Ok(()),
        };
        let is_wrong = |id: Checkpoint| findings.nodes.get(&id).is_some_and(Finding::is_wrong);
        let tried = Assumed { storing, ..assumed.clone() };
        let found = self.run(&tried, &is_wrong)?;
        if found.wrong() < findings.wrong() {
            findings.nodes.extend(found.nodes);
            findings.storing = storing;
            *assumed = tried;
        }
        Ok(())
    }

    /// Whether most recorded sums of two values are the next numbers towards zero: of some, one of the two was not recorded.
    fn cuts(&self) -> Result<bool> {
        let Passes { steps, graphs, gguf, .. } = *self;
        let sums = loaded::sampled(steps, graphs, SUMS_MAX, |_, _, op| *op == Op::Add);
        let mut showing = 0;
        for (id, positions) in &sums {
            let Some(rows) = exact(steps, graphs, gguf, *id, positions)? else { continue };
            let pairs = rows.recorded.data.iter().zip(&rows.exact.data).filter(|(own, exact)| own != exact);
            let [nearer, all] = pairs.fold([0usize, 0], |[nearer, all], (own, exact)| {
                [nearer + usize::from(own.abs() < exact.abs()), all + 1]
            });
            showing += usize::from(all >= VALUES_MIN && nearer as f64 >= NEARER_ZERO * all as f64);
        }
        Ok(showing > 0 && 2 * showing >= sums.len())
    }

    /// Whether no recorded value lies between 0 and the least normal number of f16, though many lie right above it.
    fn flushes(&self) -> bool {
        let nodes =
            self.graphs.iter().flat_map(|(step, labelled)| labelled.nodes().map(|(_, id)| (*step, id)));
        let recorded = nodes.filter_map(|(step, id)| self.steps.tensor(step, id));
        let (mut below, mut above) = (0, 0);
        for tensor in recorded {
            let sizes = tensor.values.iter().map(|x| f64::from(x.abs()));
            for size in sizes.filter(|size| *size > 0.0 && *size < 2.0 * NORMAL_F16) {
                *(if size < NORMAL_F16 { &mut below } else { &mut above }) += 1;
            }
        }
        below == 0 && above >= LEAST_MIN
    }
}
