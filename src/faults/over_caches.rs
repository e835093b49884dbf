//! Mistakes in attention over a cache that rounds what it keeps: without that rounding they explain too little.

use parity_graph::Op;
use parity_graph::rewrite::Change;

use super::sample::{Sample, within};
use super::trial::Trial;
use crate::arithmetic::bounded_by;
use crate::audit::{Named, Narrowed, Suspect};
use crate::numerics::Storage;
use crate::ops::Args;

impl Trial<'_, '_> {
    /// Every mistake but coarser arithmetic, over what keys and values may have been cached as: another scale hides in what a cache
    /// rounds, and one that is fitted to values that are not rounded is another.
    pub(super) fn over_caches(&self) -> Vec<Named> {
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
            let found = self.singles(&evidence, sample.as_ref(), &mut Vec::new(), false);
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }
}
