//! Mistakes in attention over a cache that rounds what it keeps: without that rounding they explain too little.

use parity_graph::Op;
use parity_graph::fault::Entry;
use parity_graph::rewrite::Change;

use super::diagnosis::Attempt;
use super::sample::{Sample, within};
use super::trial::{PROMISING, SLACK, Trial};
use crate::arithmetic::bounded_by;
use crate::audit::{Named, Narrowed, Suspect};
use crate::engine::op_by_op::compute;
use crate::numerics::Storage;
use crate::ops::Args;

impl Trial<'_, '_> {
    /// Every mistake but coarser arithmetic, over what keys and values may have been cached as: another scale hides in what a cache
    /// rounds, and one that is fitted to values that are not rounded is another. A number that was searched for without a cache
    /// is searched for again where the cache can bring it near.
    pub(super) fn over_caches(&self, tried: &[Attempt]) -> Vec<Named> {
        let Suspect { node, args, .. } = *self.suspect;
        let op = &node.program.graph.get(node.id).op;
        let mut seen = vec![(Storage::F32, [None; 2])];
        for (at, hypothesis) in self.hypotheses().enumerate().filter(|_| *op == Op::FlashAttn) {
            let arithmetic = &hypothesis.arithmetic;
            let cached = (arithmetic.cache, arithmetic.packed);
            if seen.contains(&cached) || bounded_by(arithmetic.packed).is_some() {
                continue;
            }
            seen.push(cached);
            let Some((_, base)) = self.base(at) else { continue };
            let narrowed = Narrowed::of(op, args, arithmetic);
            let args = &Args { arithmetic, sources: narrowed.sources(args), ..*args };
            let sample = Sample::of(self.suspect, args, &base.exact);
            let within = |change: &Change, limit: f64| within(sample.as_ref(), change, limit);
            let source = |slot: usize| args.get(slot).map(|source| source.values().into_owned());
            let evidence = self.evidence(base, &source, &within);
            let moved = sample.as_ref().and_then(|_| self.moved(args)).unwrap_or(f64::INFINITY);
            let is_far = |entry: &Entry| entry.is_searched() && is_far(entry, tried, moved);
            let asked = |entry: &Entry| !entry.rounds && !is_far(entry);
            let found = self.singles(&evidence, sample.as_ref(), &mut Vec::new(), &asked);
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    /// How far other sources move the node, as a share of the error, a length: in what mistakes are tried in on a sample.
    fn moved(&self, narrowed: &Args<'_, f64>) -> Option<f64> {
        let Suspect { node, args, held, tried, .. } = *self.suspect;
        let arithmetic = &tried.first()?.arithmetic;
        let values = |args: &Args<'_, f64>| {
            compute::<f64>(node.rule?, &Args { arithmetic, sources: args.sources.clone(), ..*args }).ok()
        };
        let (narrowed, plain) = (values(narrowed)?, values(args)?);
        let pairs = narrowed.iter().zip(&plain).enumerate();
        let seen = pairs.filter(|(i, _)| self.suspect.looks_at(*i));
        let squares: f64 = seen.map(|(_, (narrowed, plain))| (narrowed - plain).powi(2)).sum();
        Some((squares / held.squares[0]).sqrt())
    }
}

/// Whether no value of a mistake came so near that what moves the node so far could make it explain that.
fn is_far(entry: &Entry, tried: &[Attempt], moved: f64) -> bool {
    let own = tried.iter().filter(|attempt| attempt.fault.name == entry.name);
    let least = own.map(|attempt| (1.0 - attempt.explains).sqrt()).reduce(f64::min);
    least.is_some_and(|least| least - SLACK * moved > (1.0 - PROMISING).sqrt())
}
