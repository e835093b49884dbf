//! Keys and values that an engine keeps in eight bits, or at a scale, which shows in attention alone: they are recorded before
//! they are kept.
//!
//! An engine keeps them alike in all layers. So nothing is tried unless no layer's attention is explained as it would be
//! without such a cache.

use std::collections::BTreeSet;

use indexmap::IndexSet;
use parity_graph::{Op, fault};

use super::super::best::Simulated;
use super::super::factor_of_scores::DEVIATIONS;
use super::super::finding::{MISTAKES_SHOW, OF_EIGHT_BITS};
use super::super::{coarseness, exact, name_of_cache};
use super::names::DIAGNOSED_MAX;
use super::{Assumed, Findings, Labelled, Passes, unlike};
use crate::arithmetic::{Arithmetic, CACHES, Cached, Packed, both, bounded_by};
use crate::audit::{AuditRows, Finding};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_F16, UNIT_F32};
use crate::report::Diagnosis;

/// What attention needs that eight bits of some kind would explain.
const NEEDS: &str = "keys and values as its cache holds them: a cache of 8 bits, at scales that were not recorded, would \
                     explain it, and hides mistakes of that size";

/// What attention needs that four bits of some kind would explain.
const NEEDS_OF_FOUR: &str = "keys and values as its cache holds them: values repeat as those of a cache of 4 bits do, which \
                             would explain it, and hides mistakes of that size";

/// What attention needs that numbers of f16 or bf16 at some scale would explain.
const NEEDS_SCALE: &str = "keys and values as its cache holds them: numbers of f16 or bf16 at a scale that was not recorded would \
                           explain it, and hide mistakes of that size";

/// How much of a node a cache of four bits, whose numbers show, is off by at most (0.3 was measured).
pub(super) const OF_FOUR_BITS: f64 = 10.0 * MISTAKES_SHOW;

/// Share of a head's values that are unlike each other, at most, where they are numbers of four bits: of sixteen numbers at random
/// sixteen values show ten.
const UNLIKE_MAX: f64 = 3.0 / 4.0;

/// A first row sees one key, whatever that is: without it another scale is told from keys by what scores have in common alone.
const SEES_ONE: usize = 1;
/// How many times what roundings come to at most a factor of all scores must come to if it is one.
const SHOWN: f64 = 1.5;

impl Passes<'_> {
    /// Takes keys and values for those that such a cache holds where that explains most of the attention that is wrong: what is
    /// followed before mistakes are named, what is bounded, and undecided then, where none was. A mistake that explains it leaves less.
    pub(super) fn packed(
        &self,
        assumed: &mut Assumed,
        findings: &mut Findings,
        is_followed: bool,
    ) -> Result<()> {
        if self.tells_forms() {
            return Ok(());
        }
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
        for (name, packed) in self.possible(assumed, &findings.nodes[&first], is_followed) {
            let bounded = bounded_by(packed);
            // Nothing else shows it of an engine that does not declare such a cache: then it shows in the sizes of the scores, which
            // differ from layer to layer, and operands of that type explain some.
            let is_declared = |kept: Storage| {
                self.steps.declared().is_some_and(|numerics| numerics.kv == kept && kept != Storage::F32)
            };
            if let [Some(Packed::Scaled(kept)), _] = packed
                && !is_declared(kept)
                && healthy_attention(findings).next().is_none()
            {
                continue;
            }
            // What is bounded hides more than what rounds less: nothing else may explain other layers by that.
            let unit = bounded.unwrap_or(UNIT_F16);
            let is_as_coarse = |(_, finding): (&Checkpoint, &Finding)| match bounded {
                None if self.graphs.len() > 1 => is_somewhere_as_coarse(finding, unit),
                _ => is_as_coarse(finding, unit),
            };
            if !healthy_attention(findings).all(is_as_coarse) {
                continue;
            }
            let tried = Assumed { packed: Some((name, packed)), ..assumed.clone() };
            let scouts = self.explained(&tried, &|id| id == first || id == last)?;
            if !scouts.nodes.values().any(|found| found.judged > 0 && found.is_healthy()) {
                continue;
            }
            // What rounding in any order explains of other layers is explained by such a cache as well, and hides less then.
            let loose = |id: &Checkpoint| findings.nodes.get(id).is_some_and(unlike::is_in_any_order);
            let loose = |id: &Checkpoint| bounded.is_none() && id.kind() == Kind::AttnCtx && loose(id);
            let mut found = self.run(&tried, &|id| wrong.contains(&id) || loose(&id))?;
            found.nodes.retain(|_, found| found.judged > 0 && found.is_healthy());
            if 2 * wrong.iter().filter(|id| found.nodes.contains_key(*id)).count() > wrong.len() {
                if bounded.is_some() {
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

    /// Whether a few rows are judged to tell which form a dump was computed in: what a cache of another kind would explain speaks for
    /// none, and takes most of the time of an audit.
    fn tells_forms(&self) -> bool {
        matches!(self.how.rows, AuditRows::Only(_))
    }

    /// Of all caches those that may be an engine's of whose attention the `first` is wrong: what is followed, or what is bounded.
    fn possible(
        &self,
        assumed: &Assumed,
        first: &Finding,
        is_followed: bool,
    ) -> impl Iterator<Item = (&'static str, Cached)> + use<> {
        let declared = self.steps.declared().and_then(|numerics| numerics.eight_bits);
        // What an engine of a narrower type rounds itself is as much as what a scale makes of its cache.
        let is_f32 = assumed.kept == Storage::F32;
        // A first row is the one value that it sees.
        let prompt = self.steps.positions(0);
        let shows = is_f32 && prompt.first() == Some(&0) && first.is_beyond_in(&prompt);
        let keeps_values = shows.then(|| first.is_beyond_in(&[0]));
        CACHES.into_iter().filter(move |(_, cached)| {
            let is_bounded = bounded_by(*cached).is_some();
            let is_possible = if is_bounded { !is_followed && is_f32 } else { is_followed };
            let is_shown = is_bounded || keeps_values.is_none_or(|keeps| keeps == cached[1].is_some());
            is_possible && is_shown && cached.iter().flatten().all(|packed| packed.may_be(declared))
        })
    }

    /// Takes attention for undecided that is off by little, has no name and is wrong in every layer, where eight bits of any kind
    /// would explain it in most: a mistake in a few rows or layers, or one of the catalogue, is none, nor is what scores have in
    /// common. Four bits hide more, and are tried where values show them.
    pub(super) fn doubt_packed(&self, assumed: &mut Assumed, findings: &mut Findings) -> Result<()> {
        if self.tells_forms() {
            return Ok(());
        }
        let wrong = wrong_attention(findings);
        // Rounding in any order may hide what the cache of a layer rounds.
        let healthy = || healthy_attention(findings).map(|(_, finding)| finding);
        let is_everywhere = healthy().all(unlike::is_in_any_order) && wrong.len() > 1;
        let is_everywhere = is_everywhere && wrong.len() >= healthy().count();
        let is_open = assumed.packed.is_none() && is_everywhere;
        if is_open && !self.named_over(assumed, findings, &wrong)? {
            let bits = match self.is_of_four_bits(&wrong) {
                true => (Packed::Four, OF_FOUR_BITS, NEEDS_OF_FOUR),
                false => (Packed::Eight, OF_EIGHT_BITS, NEEDS),
            };
            self.doubt_bits(assumed, findings, &wrong, bits)?;
        }
        Ok(())
    }
}

impl Passes<'_> {
    /// Takes attention for undecided that bits of a kind explain, where it is off by a share of a node at `most`.
    fn doubt_bits(
        &self,
        assumed: &Assumed,
        findings: &mut Findings,
        wrong: &[Checkpoint],
        (bits, most, needs): (Packed, f64, &'static str),
    ) -> Result<()> {
        let open = self.faint(assumed, findings, (wrong, most))?;
        if 2 * open.len() <= wrong.len() {
            return Ok(());
        }
        // Of a narrow type roundings of its own hide which heads are off.
        if assumed.kept == Storage::F32 && !self.is_off_in_all_heads(open[0])? {
            return Ok(());
        }
        // What is off in fewer rows is so by the same cache.
        let tried = Assumed { packed: Some(("", both(bits))), ..assumed.clone() };
        let found = self.run(&tried, &|id| wrong.contains(&id) && is_faint(&findings.nodes[&id], most))?;
        let is_explained = |id: &&Checkpoint| {
            found.nodes.get(*id).is_some_and(|found| found.judged > 0 && found.is_healthy())
        };
        if 2 * open.iter().filter(is_explained).count() > wrong.len() {
            for id in wrong.iter().filter(is_explained) {
                findings.nodes[id] = findings.nodes[id].as_undecided(needs);
            }
        }
        Ok(())
    }

    /// Whether a mistake over a cache whose form is followed has a name, which is taken then: a mistake hides that form.
    fn named_over(
        &self,
        assumed: &mut Assumed,
        findings: &mut Findings,
        wrong: &[Checkpoint],
    ) -> Result<bool> {
        if !wrong.first().is_some_and(|id| is_faint(&findings.nodes[id], OF_EIGHT_BITS)) {
            return Ok(false);
        }
        let first = wrong[0];
        let is_alike = |(_, [keys, values]): &(&str, Cached)| keys == values;
        let is_followed = |one: &(&str, Cached)| bounded_by(one.1).is_none() && is_alike(one);
        let off = |findings: &Findings| Some(findings.nodes.get(&first)?.audit()?.local.rel_l2);
        let mut nearest = (off(findings).unwrap_or(f64::INFINITY), None);
        for packed in CACHES.into_iter().filter(is_followed) {
            let tried = Assumed { packed: Some(packed), ..assumed.clone() };
            // In another form than its own a cache is off by what both round.
            if let Some(off) = off(&self.run(&tried, &|id| id == first)?).filter(|off| *off < nearest.0) {
                nearest = (off, Some(tried));
            }
        }
        let (_, Some(tried)) = nearest else { return Ok(false) };
        let names = self.named_beyond(&tried, &[first], findings)?;
        // Coarser arithmetic looks like a cache of another form.
        let is_mistake = |name: &Diagnosis| fault::find(&name.fault).is_none_or(|entry| !entry.rounds);
        if !names.nodes.values().any(|finding| finding.diagnosis().0.iter().any(is_mistake)) {
            return Ok(false);
        }
        let found = self.run(&tried, &|id| wrong.contains(&id))?;
        findings.nodes.extend(found.nodes);
        *assumed = tried;
        self.name(assumed, findings)?;
        Ok(true)
    }

    /// Whether the last row of some attention is off in each of its heads by more than f32 rounds in as many terms, all of them to
    /// one side: an engine keeps all its heads alike.
    fn is_off_in_all_heads(&self, id: Checkpoint) -> Result<bool> {
        let Passes { steps, graphs, gguf, .. } = *self;
        let recorded = graphs.iter().rev().find_map(|(step, _)| steps.tensor(*step, id));
        let last = recorded.and_then(|recorded| recorded.positions.last().copied());
        let (Some(last), Some(width)) = (last, self.attention().map(|[.., width]| width)) else {
            return Ok(true);
        };
        let Some(rows) = exact(steps, graphs, gguf, id, &BTreeSet::from([last]))? else { return Ok(true) };
        let of_f32 = (last as usize + 1 + width) as f64 * UNIT_F32;
        let mut heads = rows.recorded.data.chunks(width.max(1)).zip(rows.exact.data.chunks(width.max(1)));
        let is_off = |(recorded, exact): (&[f64], &[f64])| {
            let off = recorded.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            off > of_f32.powi(2) * exact.iter().map(|x| x * x).sum::<f64>()
        };
        Ok(heads.all(is_off))
    }

    /// The shape of attention in the first step that has one.
    fn attention(&self) -> Option<[usize; 4]> {
        self.graphs.iter().find_map(|(_, labelled)| {
            let graph = &labelled.program.graph;
            let attention = labelled.program.executed().find(|node| graph.get(*node).op == Op::FlashAttn)?;
            Some(graph.get(attention).shape())
        })
    }

    /// Whether the attention of a step has so many rows that what its scores have in common shows in them.
    fn shows_factors(&self) -> bool {
        let rows = |(_, labelled): &(usize, &Labelled)| {
            let graph = &labelled.program.graph;
            let attention = labelled.program.executed().filter(|node| graph.get(*node).op == Op::FlashAttn);
            let [b, rows, heads, _] = attention.map(|node| graph.get(node).shape()).next()?;
            Some((b * rows * heads) as f64)
        };
        self.graphs.iter().filter_map(rows).any(|rows| rows.sqrt() >= SHOWN * DEVIATIONS)
    }

    /// Whether first rows, which are the one value that they see, repeat numbers within each head.
    fn is_of_four_bits(&self, wrong: &[Checkpoint]) -> bool {
        let repeats = |id: &Checkpoint| {
            let (step, _) = self.graphs.first()?;
            let [.., width] = self.attention()?;
            let recorded = self.steps.tensor(*step, *id)?;
            let first = recorded.values.get(..recorded.values.len() / recorded.positions.len().max(1))?;
            let unlike = |head: &[f32]| head.iter().map(|x| x.to_bits()).collect::<IndexSet<u32>>().len();
            let mut heads = first.chunks(width.max(1));
            let is_few = heads.all(|head| unlike(head) as f64 <= UNLIKE_MAX * head.len() as f64);
            Some(is_few && recorded.positions.first() == Some(&0))
        };
        wrong.iter().all(|id| repeats(id).unwrap_or(false))
    }

    /// Those of some attention that are off by little, have no name, and are off in all rows. Of a narrow engine in half of them,
    /// beyond its bound or beyond what roundings come to by chance: their worst case hides what the cache rounds.
    fn faint(
        &self,
        assumed: &Assumed,
        findings: &Findings,
        (wrong, most): (&[Checkpoint], f64),
    ) -> Result<Vec<Checkpoint>> {
        let kept = assumed.kept;
        let share = if kept == Storage::F32 { 1 } else { 2 };
        let seen_by_one = if self.shows_factors() { SEES_ONE } else { 0 };
        let (mut faint, mut open) = (Vec::new(), IndexSet::new());
        for id in wrong {
            let finding = &findings.nodes[id];
            if !is_faint(finding, most) {
                continue;
            }
            if (share * finding.rows_beyond() + seen_by_one) as f64 >= self.rows_over_cache(finding).0 {
                faint.push(*id);
            } else if kept != Storage::F32 {
                open.insert(*id);
            }
        }
        if !open.is_empty() {
            let narrow = Arithmetic { narrow: kept, cache: kept, ..Arithmetic::EXACT };
            let by_chance = self.known().explained(narrow, &open)?;
            let is_off = |(id, found): &(Checkpoint, Simulated)| {
                let (rows, all) = self.rows_over_cache(&findings.nodes[id]);
                share as f64 * found.beyond * all >= rows
            };
            faint.extend(by_chance.into_iter().filter(is_off).map(|(id, _)| id));
        }
        Ok(faint)
    }
}

impl Passes<'_> {
    /// How many rows of a node may be off by what a cache holds, and how many there are in all. Of an engine that declares such a
    /// cache a prompt that is right may have been computed before its keys were kept; of any other one that would be undecided
    /// which is wrong in later steps alone.
    fn rows_over_cache(&self, finding: &Finding) -> (f64, f64) {
        let all = finding.audit().map_or(0, |audit| audit.local.rows) as f64;
        let prompt = self.steps.positions(0);
        let declares = self.steps.declared().is_some_and(|numerics| numerics.eight_bits.is_some());
        let is_right = self.graphs.len() > 1 && prompt.first() == Some(&0) && !finding.is_beyond_in(&prompt);
        let later =
            || self.graphs.iter().skip(1).map(|(step, _)| self.steps.positions(*step).len()).sum::<usize>();
        (if declares && is_right { all.min(later() as f64) } else { all }, all)
    }
}

/// Whether a node is off by a share at `most`, and has no name.
fn is_faint(finding: &Finding, most: f64) -> bool {
    let is_little = finding.audit().is_some_and(|audit| audit.local.rel_l2 <= most);
    is_little && finding.diagnosis().0.is_empty()
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
    finding.computed_in.iter().all(|name| rounds_to(name, least))
}

/// The same of some of its steps: a prompt may be computed from its keys and values as they are, before they are kept.
fn is_somewhere_as_coarse(finding: &Finding, least: f64) -> bool {
    finding.computed_in.iter().any(|name| rounds_to(name, least))
}

fn rounds_to(name: &str, least: f64) -> bool {
    let is_cache = [Storage::F16, Storage::Bf16].map(name_of_cache).contains(&name);
    !is_cache && coarseness(name).is_some_and(|unit| unit >= least)
}
