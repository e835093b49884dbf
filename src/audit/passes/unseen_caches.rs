//! Keys and values that an engine keeps in eight or four bits, before nodes whose attention was not recorded, or not with all
//! that it reads.
//!
//! The stretch up to such a node is executed over each cache whose form is known. Of its own an engine is off by roundings of
//! the little that lies in the middle between two numbers, of any other by what both round.

use indexmap::{IndexMap, IndexSet};

use super::super::attentions::attends;
use super::super::best::{Simulated, scouts};
use super::super::shown_products::Shown;
use super::super::simulate::{Stretch, together};
use super::names::DIAGNOSED_MAX;
use super::packed::OF_FOUR_BITS;
use super::{APART, BARELY, Findings, Passes};
use crate::arithmetic::{Arithmetic, CACHES, Cached, Fresh, Operands, Packed, both, bounded_by};
use crate::audit::{Finding, OF_EIGHT_BITS, PRODUCTS};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::HEALTHY;

/// What such a node needs.
const NEEDS: &str = "k_rope, v and attn_ctx, or keys and values as its cache holds them: a cache of 8 or 4 bits, of a form that was \
                     not recorded, would explain it, and hides mistakes of that size";

impl Passes<'_> {
    /// Takes nodes that are wrong behind such attention, and have no name, for what an engine computes over a cache whose form
    /// is known, where that explains all such nodes: it keeps all layers alike. Where eight or four bits of any form would, or are
    /// declared, they are undecided.
    pub(super) fn unseen_caches(
        &self,
        (kept, shown): (Storage, Option<Shown>),
        findings: &mut Findings,
    ) -> Result<()> {
        let crosses = |id: &Checkpoint, finding: &Finding| {
            let within = attends(id.kind()) || finding.bridged.iter().any(|id| attends(id.kind()));
            finding.judged > 0 && within && !finding.bridged.is_empty()
        };
        let all: IndexSet<Checkpoint> = findings
            .order
            .iter()
            .filter(|id| findings.nodes.get(*id).is_some_and(|finding| crosses(id, finding)))
            .copied()
            .collect();
        let wrong: IndexSet<Checkpoint> =
            all.iter().filter(|id| findings.nodes[*id].is_wrong()).copied().collect();
        // The first ones alone are diagnosed.
        let is_named = |id: &Checkpoint| !findings.nodes[id].diagnosis().0.is_empty();
        let is_open = || 2 * wrong.len() >= all.len() && !wrong.iter().take(DIAGNOSED_MAX).any(is_named);
        let declared = self.steps.declared().map(|numerics| numerics.eight_bits.is_some());
        if wrong.is_empty() || !declared.unwrap_or_else(is_open) {
            return Ok(());
        }
        let own = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
        let own = Arithmetic { operands: shown.map_or(own.operands, |shown| shown.operands), ..own };
        // A prompt may be computed from its keys and values as they are, before they are kept: then it is right.
        let stretch = self.known();
        let some = scouts(&wrong);
        let plain = stretch.explained(own, &some)?;
        let is_right = plain.values().all(|found| found.over_in_prompt <= HEALTHY);
        let is_later = is_right && self.graphs.len() > 1;
        let later = Fresh::KINDS.into_iter().filter(|_| is_later);
        let ways: Vec<Fresh> = std::iter::once(Fresh::Never).chain(later).collect();
        // What products round as well shows in none of them where none was recorded.
        let narrow = PRODUCTS.into_iter().map(|(_, narrow)| Operands::Both(narrow));
        let narrow = narrow.filter(|_| kept == Storage::F32 && shown.is_none() && declared.is_none());
        if let Some(nearest) = self.nearest(&ways, own, (&some, &plain))? {
            for operands in std::iter::once(nearest.operands).chain(narrow) {
                // A form that leaves f32's roundings of most layers is the engine's, whatever is wrong in another.
                let tried = Arithmetic { operands, ..nearest };
                let explained = explain(&stretch, tried, &all, &Simulated::is_explained, 2)?;
                // Kernels of one row may round less than those of a prompt: what they keep then falls to other numbers.
                let one_row_is_open = operands != nearest.operands && !is_right;
                let is_of_prompt = |found: &Simulated| found.over_in_prompt <= BARELY * HEALTHY;
                let is_whole = explained.is_some();
                let found = match explained {
                    None if one_row_is_open => explain(&stretch, tried, &all, &is_of_prompt, 1)?,
                    explained => explained,
                };
                let Some(found) = found else { continue };
                take(found.into_iter().filter(|(id, _)| wrong.contains(id)), is_whole, findings);
                return Ok(());
            }
        }
        // Of a cache that is declared nothing else is known. Behind more than attention such bits would explain what any weight is
        // off by: low ranks beside a matmul looked like them, and still do where first rows do not tell. A prompt that is right
        // says that weights are. In f32 mistakes of decode steps alone are as little: there no such cache was seen.
        let is_later = is_later && kept != Storage::F32;
        let is_next = |id: &Checkpoint| is_later || is_next_to_attention(&findings.nodes[id]);
        let own = Arithmetic { fresh: if is_later { Fresh::First } else { Fresh::Never }, ..own };
        let is_possible =
            declared.is_some() || wrong.iter().all(is_next) && self.may_be_of_few_bits(own, &all, &wrong)?;
        if is_possible {
            wrong.iter().for_each(|id| findings.nodes[id] = findings.nodes[id].as_undecided(NEEDS));
        }
        Ok(())
    }

    /// Whether eight or four bits of any form would explain nodes that are off at all positions at which they are read; in f32 the
    /// first too, which sees one value whatever its key is. Where it is right in a prompt that reads them, keys alone might be of
    /// eight bits: that was tried, and only hid other bases of RoPE.
    fn may_be_of_few_bits(
        &self,
        own: Arithmetic,
        all: &IndexSet<Checkpoint>,
        wrong: &IndexSet<Checkpoint>,
    ) -> Result<bool> {
        // The roundings of an engine of a narrow type hide what its cache rounds in half of the rows.
        let share = if own.narrow == Storage::F32 { 1.0 } else { 2.0 };
        let is_later = own.fresh != Fresh::Never;
        let stretch = self.known();
        let plain = stretch.explained(own, wrong)?;
        let rows = |found: &Simulated| if is_later { found.later_beyond } else { found.beyond };
        let off = |found: &Simulated| (share * rows(found)).min(1.0);
        let off = plain.values().map(off).fold(if plain.len() < wrong.len() { 0.0 } else { 1.0 }, f64::min);
        // What a narrow type rounds hides whether values alone are off, and of a first row whether it is off at all.
        let is_of_values = own.narrow != Storage::F32
            || plain.values().all(|found| found.first_beyond) && self.first_rows_are_of_values(wrong)?;
        // Where it is little more than these roundings, they hide it in most rows.
        let is_hidden = plain.values().all(|found| found.is_hidden_in(own.narrow));
        if !(off >= 1.0 && is_of_values || is_hidden) {
            return Ok(false);
        }
        // An attention of fp8 rounds both sides of both products: in an engine of a narrow type it is twice to three times as far off.
        let times = if own.narrow == Storage::F32 { 1.0 } else { APART };
        let eight = (Packed::Eight, OF_EIGHT_BITS, times);
        for (bits, distance, most) in [eight, (Packed::Four, OF_FOUR_BITS, 1.0)] {
            let far = |found: &Simulated| if is_later { found.later_distance } else { found.distance };
            let is_little = |(_, found): &(Checkpoint, Simulated)| far(found) <= distance;
            let explained = explain(
                &stretch,
                Arithmetic { packed: both(bits), ..own },
                all,
                &|found| found.is_within(most),
                1,
            )?;
            if explained.is_some_and(|all| all.iter().all(is_little)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// In which cache some nodes are nearest to what was recorded, of those that are followed, and in which of some `ways` to read
    /// it; `None` where that is no nearer than they are without one, as `plain` says.
    fn nearest(
        &self,
        ways: &[Fresh],
        own: Arithmetic,
        (some, plain): (&IndexSet<Checkpoint>, &IndexMap<Checkpoint, Simulated>),
    ) -> Result<Option<Arithmetic>> {
        let stretch = self.known();
        let declared = self.steps.declared().and_then(|numerics| numerics.eight_bits);
        let may_be = |cached: &Cached| {
            bounded_by(*cached).is_none() && cached.iter().flatten().all(|packed| packed.may_be(declared))
        };
        let (mut least, mut nearest) =
            (together(plain.values().map(|found| found.distance), some.len()), None);
        for (_, packed) in CACHES.into_iter().filter(|(_, cached)| may_be(cached)) {
            for &fresh in ways {
                let tried = Arithmetic { packed, fresh, ..own };
                let apart = stretch.apart(tried, some)?;
                if apart < least {
                    (least, nearest) = (apart, Some(tried));
                }
            }
        }
        Ok(nearest)
    }
}

/// Takes what a cache explains of nodes that were wrong. Where it explains prompts and not the whole, what it leaves is undecided.
fn take(found: impl Iterator<Item = (Checkpoint, Simulated)>, is_whole: bool, findings: &mut Findings) {
    for (id, found) in found {
        findings.at(id).settle(found);
        if !is_whole && !found.is_explained() {
            findings.nodes[&id] = findings.nodes[&id].as_undecided(NEEDS);
        }
    }
}

/// What an arithmetic leaves of some nodes where that is no more than rounding of one of so many of them, the first and the last
/// tried first.
fn explain(
    stretch: &Stretch<'_>,
    arithmetic: Arithmetic,
    all: &IndexSet<Checkpoint>,
    is_rounding: &dyn Fn(&Simulated) -> bool,
    one_of: usize,
) -> Result<Option<Vec<(Checkpoint, Simulated)>>> {
    let ends: IndexSet<Checkpoint> = all.first().into_iter().chain(all.last()).copied().collect();
    let mut found = Vec::new();
    let first = Some(&ends).filter(|ends| ends.len() < all.len());
    for some in first.into_iter().chain([all]) {
        found = stretch.explained(arithmetic, some)?.into_iter().collect();
        let explained = found.iter().filter(|(_, found)| is_rounding(found)).count();
        if found.len() < some.len() || one_of * explained < some.len() {
            return Ok(None);
        }
    }
    Ok(Some(found))
}

/// Whether nothing but attention and rotations lie between a node and what was recorded before it.
fn is_next_to_attention(finding: &Finding) -> bool {
    let is_within = |kind: Kind| attends(kind) || matches!(kind, Kind::QRope | Kind::KRope);
    finding.bridged.iter().all(|id| is_within(id.kind()))
}
