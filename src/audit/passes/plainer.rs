//! A mistake in plain arithmetic against a coarser arithmetic that nobody declared.
//!
//! Where much lies between two recorded nodes, what rounding of operands to f16 or bf16 explains is as much as many mistakes
//! come to: layer outputs of an engine of f32 with another epsilon in all norms are also what products of bf16 might give.
//! The two are told apart by what is left: a mistake of the catalogue leaves what f32 rounds, a thousandth of it, and no
//! rounding of operands looks like that by chance in hundreds of values.

use std::collections::HashMap;

use indexmap::{IndexMap, IndexSet};
use parity_graph::{Op, fault};

use super::super::best::Simulated;
use super::super::bridge::Unseen;
use super::super::operands;
use super::super::shown_products::Shown;
use super::names::DIAGNOSED_MAX;
use super::{Assumed, Findings, Passes};
use crate::arithmetic::{Arithmetic, Operands};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::numerics::Storage;
use crate::report::Diagnosis;

/// Whether the first name of a node is a mistake, and neither what a product rounds nor what may happen to any value.
fn is_mistake(names: &[Diagnosis]) -> bool {
    let entry = names.first().and_then(|first| fault::find(&first.fault));
    entry.is_some_and(|entry| {
        let is_of_products = entry.rounds && entry.ops.contains(&Op::MulMat);
        !is_of_products && !entry.ops.is_empty()
    })
}

impl Passes<'_> {
    /// Takes back a coarser arithmetic that comes nearest to nodes, where a mistake in f32 leaves of the first such node no more
    /// than f32 rounds: the engine computes in f32 then, and those nodes are wrong. What recorded products are `shown` to round is
    /// the engine's in any case.
    pub(super) fn prefer_plain(
        &self,
        (assumed, shown): (&Assumed, Option<Shown>),
        simulated: &IndexMap<Checkpoint, Simulated>,
        findings: &mut Findings,
    ) -> Result<()> {
        if assumed.kept != Storage::F32 || self.steps.declared().is_some() {
            return Ok(());
        }
        let operands = shown.map(|shown| shown.operands).filter(|one| operands::narrow(*one).is_some());
        let plain = Arithmetic { operands: operands.unwrap_or(Operands::Exact), ..Arithmetic::EXACT };
        let unseen = Unseen { products: operands.or(assumed.unseen.products), ..assumed.unseen };
        let assumed = &Assumed { unseen, ..assumed.clone() };
        let is_coarse = |id: &&Checkpoint| simulated.get(*id).is_some_and(|found| !found.is_plain);
        let coarse: IndexSet<Checkpoint> = findings.order.iter().filter(is_coarse).copied().collect();
        let Some(&first) = coarse.first() else { return Ok(()) };
        let in_f32 = |ids: &IndexSet<Checkpoint>| self.known().explained(plain, ids);
        let bands = |found: &IndexMap<Checkpoint, Simulated>| -> HashMap<Checkpoint, f64> {
            found.iter().filter(|(_, found)| !found.is_explained()).map(|(id, f)| (*id, f.band)).collect()
        };
        let of_first = bands(&in_f32(&IndexSet::from([first]))?);
        if of_first.is_empty() {
            return Ok(());
        }
        let names = self.named_simulated(assumed, &[first], (&of_first, findings))?;
        let found = names.nodes.get(&first).map_or(&[][..], |finding| finding.diagnosis().0);
        // Of a node that the coarser one does not explain either nothing speaks for that.
        let is_explained = simulated[&first].is_explained();
        if found.is_empty() || is_explained && !is_mistake(found) {
            return Ok(());
        }
        let all = in_f32(&coarse)?;
        let bands = bands(&all);
        all.into_iter().for_each(|(id, found)| findings.at(id).settle(found));
        findings.take_names(names);
        let others = coarse.into_iter().filter(|id| *id != first && bands.contains_key(id));
        let others: Vec<Checkpoint> = others.take(DIAGNOSED_MAX - 1).collect();
        findings.take_names(self.named_simulated(assumed, &others, (&bands, findings))?);
        Ok(())
    }
}
