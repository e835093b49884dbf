//! Keys and values that an engine keeps in eight bits, or at a scale, which shows in attention alone: they are recorded before
//! they are kept.
//!
//! An engine keeps them alike in all layers. So nothing is tried unless no layer's attention is explained as it would be
//! without such a cache.

use indexmap::IndexSet;

use super::super::attentions::attends;
use super::super::best::Simulated;
use super::super::finding::MISTAKES_SHOW;
use super::super::{coarseness, name_of_cache, simulate};
use super::{Assumed, DIAGNOSED_MAX, Findings, Passes};
use crate::arithmetic::{Arithmetic, Packed};
use crate::audit::Finding;
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_F16, storage_unit};

/// What attention needs that eight bits of some kind would explain.
const NEEDS: &str = "keys and values as its cache holds them: a cache of 8 bits, at scales that were not recorded, would \
                     explain it, and hides mistakes of that size";

/// What attention needs that numbers of f16 or bf16 at some scale would explain.
const NEEDS_SCALE: &str = "keys and values as its cache holds them: numbers of f16 or bf16 at a scale that was not recorded would \
                           explain it, and hide mistakes of that size";

/// How much of a node such a cache is off by at most: half of that of most mistakes, three times (of fp8 with two bits of
/// mantissa 0.13 was measured).
const MOST: f64 = 3.0 * MISTAKES_SHOW;

impl Passes<'_> {
    /// Takes keys and values for those that such a cache holds where that explains most of the attention that is wrong: what is
    /// followed before mistakes are named, what is bounded, and undecided then, where none was. A mistake that explains it leaves less.
    pub(super) fn packed(
        &self,
        assumed: &mut Assumed,
        findings: &mut Findings,
        is_followed: bool,
    ) -> Result<()> {
        let all = wrong_attention(findings);
        let is_named = |id: &Checkpoint| !findings.nodes[id].diagnosis().0.is_empty();
        let (named, wrong): (Vec<Checkpoint>, Vec<Checkpoint>) = all.iter().partition(|id| is_named(id));
        // The first ones alone are diagnosed.
        if assumed.packed.is_some() || 2 * named.len() >= all.len().min(DIAGNOSED_MAX) && !named.is_empty() {
            return Ok(());
        }
        let (Some(first), Some(last)) = (wrong.first().copied(), wrong.last().copied()) else {
            return Ok(());
        };
        let declared = self.steps.declared().and_then(|numerics| numerics.eight_bits);
        // What an engine of a narrower type rounds itself is as much as what a scale makes of its cache.
        let may_be = |packed: Packed| match packed.bounded_by() {
            None => is_followed && packed.may_be(declared),
            Some(_) => !is_followed && packed.may_be(declared) && assumed.kept == Storage::F32,
        };
        for (name, packed) in Packed::ALL.into_iter().filter(|(_, packed)| may_be(*packed)) {
            // Nothing else shows it of an engine that does not declare such a cache: then it shows in the sizes of the scores, which
            // differ from layer to layer, and operands of that type explain some.
            let is_declared = |kept: Storage| {
                self.steps.declared().is_some_and(|numerics| numerics.kv == kept && kept != Storage::F32)
            };
            let is_shown = |kept: Storage| is_declared(kept) || healthy_attention(findings).next().is_some();
            if !packed.bounded_by().is_none_or(is_shown) {
                continue;
            }
            // What is bounded hides more than what rounds less: nothing else may explain other layers by that.
            let unit = packed.bounded_by().map_or(UNIT_F16, storage_unit);
            if !healthy_attention(findings).all(|(_, finding)| is_as_coarse(finding, unit)) {
                continue;
            }
            let tried = Assumed { packed: Some((name, packed)), ..assumed.clone() };
            let scouts = self.explained(&tried, &|id| id == first || id == last)?;
            if !scouts.nodes.values().any(|found| found.judged > 0 && found.is_healthy()) {
                continue;
            }
            let mut found = self.run(&tried, &|id| wrong.contains(&id))?;
            found.nodes.retain(|_, found| found.judged > 0 && found.is_healthy());
            if 2 * found.nodes.len() > wrong.len() {
                if packed.bounded_by().is_some() {
                    // A scale of a head that is off by a few thousandths is as much: it was passed so.
                    found.nodes.values_mut().for_each(|found| *found = found.as_undecided(NEEDS_SCALE));
                } else {
                    assumed.packed = tried.packed;
                }
                findings.nodes.extend(found.nodes);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes attention for undecided that is off by little, has no name and is wrong in every layer, where eight bits of any kind
    /// would explain it in most: a mistake in a few rows or layers, or one of the catalogue, is none. Where such a cache is
    /// declared, so is what follows attention that was not recorded.
    pub(super) fn doubt_eight_bits(&self, assumed: &Assumed, findings: &mut Findings) -> Result<()> {
        let wrong = wrong_attention(findings);
        let is_everywhere = healthy_attention(findings).next().is_none() && wrong.len() > 1;
        if assumed.packed.is_none() && is_everywhere {
            let open = self.faint(assumed, findings, &wrong)?;
            let tried = Assumed { packed: Some(("", Packed::Eight)), ..assumed.clone() };
            let found = match 2 * open.len() > wrong.len() {
                true => self.run(&tried, &|id| open.contains(&id))?,
                false => Findings::default(),
            };
            let is_explained = |id: &Checkpoint| {
                found.nodes.get(id).is_some_and(|found| found.judged > 0 && found.is_healthy())
            };
            let open: Vec<Checkpoint> = open.into_iter().filter(is_explained).collect();
            if 2 * open.len() > wrong.len() {
                open.iter().for_each(|id| findings.nodes[id] = findings.nodes[id].as_undecided(NEEDS));
            }
        }
        if self.steps.declared().is_some_and(|numerics| numerics.eight_bits.is_some()) {
            let is_behind = |finding: &Finding| finding.bridged.iter().any(|id| attends(id.kind()));
            let behind =
                findings.nodes.values_mut().filter(|finding| finding.is_wrong() && is_behind(finding));
            behind.for_each(|finding| *finding = finding.as_undecided(NEEDS));
        }
        Ok(())
    }
}

impl Passes<'_> {
    /// Those of some attention that are off by little, have no name, and are off in all rows. Of a narrow engine in half of them,
    /// beyond its bound or beyond what roundings come to by chance: their worst case hides what the cache rounds.
    fn faint(&self, assumed: &Assumed, findings: &Findings, wrong: &[Checkpoint]) -> Result<Vec<Checkpoint>> {
        let kept = assumed.kept;
        let share = if kept == Storage::F32 { 1 } else { 2 };
        let (mut faint, mut open) = (Vec::new(), IndexSet::new());
        for id in wrong {
            let finding = &findings.nodes[id];
            let local = finding.audit().map(|audit| audit.local);
            let Some(local) = local.filter(|local| local.rel_l2 <= MOST && finding.diagnosis().0.is_empty())
            else {
                continue;
            };
            // A first row sees one key, whatever that is: without it keys alone could not be told from another scale.
            if share * finding.rows_beyond() as u64 >= local.rows {
                faint.push(*id);
            } else if kept != Storage::F32 {
                open.insert(*id);
            }
        }
        if !open.is_empty() {
            let narrow = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
            let by_chance = simulate::in_one(self.steps, self.graphs, self.gguf, narrow, &open)?;
            let is_off = |(_, found): &(Checkpoint, Simulated)| share as f64 * found.beyond >= 1.0;
            faint.extend(by_chance.into_iter().filter(is_off).map(|(id, _)| id));
        }
        Ok(faint)
    }
}

/// Attention that was recorded with all that it reads, and is wrong.
fn wrong_attention(findings: &Findings) -> Vec<Checkpoint> {
    let is = |id: &&Checkpoint| {
        let finding = findings.nodes.get(*id);
        id.kind() == Kind::AttnCtx
            && finding.is_some_and(|found| found.is_wrong() && found.bridged.is_empty())
    };
    findings.order.iter().filter(is).copied().collect()
}

/// Attention that something explains.
pub(super) fn healthy_attention(findings: &Findings) -> impl Iterator<Item = (&Checkpoint, &Finding)> {
    let is = |finding: &Finding| finding.judged > 0 && finding.is_healthy();
    findings.nodes.iter().filter(move |(id, finding)| id.kind() == Kind::AttnCtx && is(finding))
}

/// Whether a node is explained by what rounds to a unit or more, and in no cache whose rounding is known.
fn is_as_coarse(finding: &Finding, least: f64) -> bool {
    let is_cache = |name: &str| [Storage::F16, Storage::Bf16].map(name_of_cache).contains(&name);
    let mut names = finding.computed_in.iter();
    names.all(|name| !is_cache(name) && coarseness(name).is_some_and(|unit| unit >= least))
}
