//! What the findings of one pass take from those of another.

use std::collections::HashSet;

use super::{APART, Assumed, Passes};
use crate::arithmetic::{Narrow, Operands};
use crate::audit::bridge::Unseen;
use crate::audit::{Finding, Findings, attentions, operands, parts, shown_products, storage_types};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Storage;

/// Operands whose halves are rounded away from zero.
const AWAY: Operands = Operands::Both(Narrow::Tf32Away);

impl Passes<'_> {
    /// An engine rounds operands of all products alike, sums them in as many parts, and has all values rounded when they are
    /// recorded: those that were not recorded as those that were, where what follows them is explained by that alone. What
    /// was taken for it is noted.
    pub(super) fn products(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let (unseen, kept) = (assumed.unseen, assumed.kept);
        let declared = self.steps.declared();
        let of_operands =
            operands::rounded(declared).map(|(name, one)| (name, Unseen { products: Some(one), ..unseen }));
        let of_parts = parts::hypotheses(kept).into_iter().filter(move |_| kept != Storage::F32);
        let of_parts = of_parts.map(|one| (one.name, Unseen { parts: one.arithmetic.parts, ..unseen }));
        // Values of f32 too, where an engine computes in f64.
        let better = storage_types::readings(kept).map_or(storage_types::IN_BETTER, |[_, better]| better);
        let of_better = [(better, Unseen { recorded: Some(kept), ..unseen })];
        // Where all of them were recorded nothing shows whether sums read what was: to allow for it is to allow for one rounding.
        let added = Some(kept).filter(|kept| *kept != Storage::F32);
        let of_sums = added.map(|kept| (better, Unseen { added: Some(kept), ..unseen }));
        for (name, unseen) in of_operands.chain(of_parts).chain(of_sums).chain(of_better) {
            let mut nodes = findings.nodes.values();
            let is_shown = match unseen.products {
                // Which way halves are rounded shows in those rows alone that have one.
                Some(AWAY) => shown_products::are_of_eleven_bits(findings, self.graphs),
                None if unseen.added.is_some() => true,
                _ => nodes.any(|finding| finding.is_healthy() && finding.computed_in.contains(name)),
            };
            let crosses = |finding: &Finding| finding.is_wrong() && !finding.bridged.is_empty();
            if !is_shown || !findings.nodes.values().any(crosses) {
                continue;
            }
            let tried = Assumed { unseen, ..assumed.clone() };
            self.take(findings, assumed, &tried, name)?;
        }
        Ok(())
    }

    /// An engine whose products are those of the narrow values that were recorded, none of better ones, goes on with these in
    /// its attention too.
    pub(super) fn goes_on_with_them(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        let Some([narrow, better]) = storage_types::readings(assumed.kept) else { return Ok(()) };
        let explains = |id: &Checkpoint, name| {
            findings
                .nodes
                .get(id)
                .is_some_and(|finding| finding.is_healthy() && finding.computed_in.contains(name))
        };
        let graphs = self.graphs.iter().take(1).map(|(_, labelled)| labelled);
        let products: HashSet<Checkpoint> =
            graphs.flat_map(|labelled| labelled.products()).map(|(_, id)| id).collect();
        let attention: HashSet<Checkpoint> = findings
            .nodes
            .keys()
            .filter(|id| attentions::attends(id.kind()) && explains(id, better))
            .copied()
            .collect();
        if attention.is_empty()
            || products.iter().any(|id| explains(id, better))
            || !products.iter().any(|id| explains(id, narrow))
        {
            return Ok(());
        }
        assumed.may_be_better = false;
        let again = self.run(assumed, &|id| attention.contains(&id))?;
        findings.nodes.extend(again.nodes);
        Ok(())
    }

    /// An engine whose attention comes in a narrow type in some steps may compute it in f32 in others, where another kernel meets single
    /// rows: with operands rounded as any engine of f32 may round them.
    pub(super) fn attends_in_both(&self, assumed: &Assumed, findings: &mut Findings) -> Result<()> {
        let kept = assumed.kept;
        if kept == Storage::F32 {
            return Ok(());
        }
        let comes_in_f32 = |id: Checkpoint, step: usize| {
            self.steps.tensor(step, id).is_some_and(|recorded| !storage_types::holds(kept, &recorded.values))
        };
        let is_open = |(id, finding): &(&Checkpoint, &Finding)| {
            let is_beyond = |step: usize| finding.is_beyond_in(&self.steps.positions(step));
            let mut beyond = self.graphs.iter().map(|(step, _)| *step).filter(|step| is_beyond(*step));
            attentions::attends(id.kind())
                && finding.is_wrong()
                && beyond.all(|step| comes_in_f32(**id, step))
        };
        let open: HashSet<Checkpoint> = findings.nodes.iter().filter(is_open).map(|(id, _)| *id).collect();
        if open.is_empty() {
            return Ok(());
        }
        let any = Assumed { any_attention: None, ..assumed.clone() };
        let found = self.run(&any, &|id| open.contains(&id))?;
        findings.nodes.extend(found.nodes.into_iter().filter(|(_, finding)| finding.is_healthy()));
        Ok(())
    }

    /// Takes what is explained where something else is assumed of nodes that were not recorded, which is assumed from then
    /// on: of which kinds that is.
    pub(super) fn take(
        &self,
        findings: &mut Findings,
        assumed: &mut Assumed,
        tried: &Assumed,
        name: &'static str,
    ) -> Result<HashSet<Kind>> {
        let is_wrong = |id: Checkpoint| findings.nodes.get(&id).is_some_and(Finding::is_wrong);
        let mut other = self.explained(tried, &is_wrong)?;
        // What other nodes are explained by is this as well, where none of what they read is such a half.
        let has_exceptions = |kind| tried.unseen.products != Some(AWAY) && findings.has_exceptions(kind);
        let kinds: HashSet<Kind> =
            findings.explained_by(&other).into_iter().filter(|kind| !has_exceptions(*kind)).collect();
        if kinds.is_empty() {
            return Ok(kinds);
        }
        // Those that are wrong all the same are shown in all rows.
        let left = |id: Checkpoint| {
            kinds.contains(&id.kind()) && other.nodes.get(&id).is_some_and(|found| !found.is_healthy())
        };
        let wholly = self.run(tried, &left)?;
        other.nodes.extend(wholly.nodes);
        findings.take_kinds(other, &kinds, name);
        assumed.unseen = tried.unseen;
        Ok(kinds)
    }
}

impl Findings {
    /// Takes the names that a pass for names has.
    pub(super) fn take_names(&mut self, names: Findings) {
        names.nodes.into_iter().for_each(|(id, named)| self.at(id).named_as(named));
    }

    /// The kinds of wrong nodes that another audit explains.
    pub(super) fn explained_by(&self, other: &Findings) -> HashSet<Kind> {
        let explains =
            |id: &Checkpoint| other.nodes.get(id).is_some_and(|found| found.judged > 0 && found.is_healthy());
        let wrong = self.nodes.iter().filter(|(_, finding)| finding.is_wrong()).map(|(id, _)| id);
        wrong.filter(|id| explains(id)).map(|id| id.kind()).collect()
    }

    /// Takes the wrong nodes of some kinds from another audit, which is for an attention of another arithmetic.
    pub(super) fn take_kinds(&mut self, mut other: Findings, kinds: &HashSet<Kind>, attention: &'static str) {
        let is_taken =
            |(id, finding): &(&Checkpoint, &Finding)| finding.is_wrong() && kinds.contains(&id.kind());
        let taken: Vec<Checkpoint> = self.nodes.iter().filter(is_taken).map(|(id, _)| *id).collect();
        for id in taken {
            let Some(mut found) = other.nodes.swap_remove(&id) else { continue };
            if found.is_healthy() && !found.bridged.is_empty() {
                found.only_with(attention);
            }
            self.nodes.insert(id, found);
        }
    }

    /// Whether the wrong nodes of a kind are few, and far from all others.
    fn has_exceptions(&self, kind: Kind) -> bool {
        let of_kind = self.nodes.iter().filter(|(id, finding)| id.kind() == kind && finding.judged > 0);
        let (wrong, healthy): (Vec<&Finding>, Vec<&Finding>) =
            of_kind.map(|(_, finding)| finding).partition(|finding| finding.is_wrong());
        let nearest = wrong.iter().map(|finding| finding.over()).fold(f64::INFINITY, f64::min);
        let furthest = healthy.iter().map(|finding| finding.over()).fold(0.0, f64::max);
        wrong.len() < healthy.len() && !(nearest <= APART * furthest)
    }
}
