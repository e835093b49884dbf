//! Names the mistake in a wrong node: tries what people do wrong on what the node itself read, and keeps what reproduces
//! its output to the node's rounding.

use parity_graph::fault::{self, Argument, Entry, Evidence, Fault};
use parity_graph::rewrite::Change;

use super::described::{Rows, describe, recognised};
use super::sample::{Sample, within};
use super::trial::{Base, Explained, PARTIAL, PROMISING, Trial, WEIGHT_MAX, finite};
use super::{between, guessed, precision, ranks, rolled_back};
use crate::audit::further::is_nearer;
use crate::audit::{Named, Names, Suspect};
use crate::report::{Diagnosis, Tried};
use crate::watch;

/// First mistakes that a second one is tried with.
const PARTIAL_MAX: usize = 4;
/// How much of the error, as a length, a mistake leaves at most that is named though something else is wrong too.
const REST_MAX: f64 = 0.01;
/// How many times more, as a length, every other mistake must leave then.
const REST_APART: f64 = 10.0;
/// Multiplications up to which a node is computed in full for every pair of mistakes.
const PAIR_WORK_MAX: usize = 1 << 26;

/// The mistakes that explain the output of a node, the more specific ones first, and where there are none what was tried
/// and what the error looks like.
pub fn diagnose(suspect: &Suspect<'_>) -> Names {
    if between::is_healthy_by_another_cache(suspect) {
        return Names { is_healthy: true, ..Names::default() };
    }
    let Some(trial) = Trial::new(suspect) else { return Names::default() };
    let names = trial.names();
    // Of mistakes of which others were not tried nobody knows whether they are the likeliest.
    if watch::is_over() { Names::default() } else { names }
}

/// A mistake, and what it accounts for.
pub(super) struct Attempt {
    pub(super) fault: Fault,
    pub(super) explains: f64,
}

impl<'s, 'a> Trial<'s, 'a> {
    fn names(&self) -> Names {
        // Of a single row, which a decode step has, a factor explains much that is none.
        let behind = self.suspect.is_known_out_of_sight.then(|| between::found(self.suspect));
        if behind.iter().flatten().any(|named| self.suspect.known.contains(&named.spelling)) {
            return Names { found: behind.unwrap_or_default(), out_of_sight: true, ..Names::default() };
        }
        let mut tried: Vec<Attempt> = Vec::new();
        let sample = Sample::of(self.suspect, self.suspect.args, &self.base.exact);
        let within = |change: &Change, limit: f64| within(sample.as_ref(), change, limit);
        let source = |slot: usize| self.source(slot);
        let evidence = self.evidence(&self.base, &source, &within);
        let mut found = self.singles(&evidence, sample.as_ref(), &mut tried, &|entry| !entry.rounds);
        if let Some(found) = self.nearer_before(&found) {
            return Names { found, out_of_sight: true, ..Names::default() };
        }
        ranks::prefer(self.suspect, &mut found);
        if found.is_empty() {
            let guessed = || self.all(guessed::guesses(self.suspect), &mut tried);
            found = rolled_back::found(self.suspect).map_or_else(guessed, |named| vec![named]);
        }
        if found.is_empty() {
            found = self.over_caches(&tried);
        }
        let rows = self.rows(&evidence);
        if found.is_empty() {
            let seen = rows.as_ref().map_or_else(Vec::new, recognised);
            found = seen.into_iter().map(|(name, text)| in_itself(name, text)).collect();
        }
        if found.is_empty() {
            found = precision::coarser(self.suspect, sample.as_ref());
        }
        if found.is_empty() {
            // How far a rounding brings a node tells nothing before what it is computed in is known.
            found = self.singles(&evidence, None, &mut tried, &|entry| entry.rounds);
        }
        if found.is_empty() {
            found = self.refitted(sample.as_ref(), &tried);
        }
        if found.is_empty() {
            found = ranks::unsummed(self.suspect);
        }
        if found.is_empty() {
            found = behind.unwrap_or_else(|| between::found(self.suspect));
            if !found.is_empty() {
                return Names { found, out_of_sight: true, ..Names::default() };
            }
            found = self.pairs(&tried, sample.as_ref());
        }
        if found.is_empty() {
            found.extend(self.all_but_little(&tried));
        }
        if !found.is_empty() {
            return Names { found, ..Names::default() };
        }
        let of =
            |attempt: &Attempt| Tried { fault: attempt.fault.name.to_owned(), explains: attempt.explains };
        let tried = super::nearest(tried.iter().map(of).collect());
        // Of what is far behind what was recorded no element is known to be wrong.
        if self.suspect.allowed.is_some() {
            return Names { tried, ..Names::default() };
        }
        Names { tried, residual: self.residual(&evidence, sample.as_ref()), ..Names::default() }
    }

    /// What the error looks like in what leaves least of it: the roundings of another arithmetic hide that.
    fn residual(&self, evidence: &Evidence<'_>, sample: Option<&Sample<'_, '_>>) -> Option<String> {
        let (_, least) = self.base(self.least(sample))?;
        let evidence = Evidence { exact: &least.exact, bound: &least.bound, ..*evidence };
        self.rows(&evidence).map(|rows| describe(&rows))
    }

    /// Which of [`Trial::base`] comes nearest; of a large node on the sample, though chance decides between those that are alike.
    fn least(&self, sample: Option<&Sample<'_, '_>>) -> usize {
        let sample = sample.filter(|_| self.work() > PAIR_WORK_MAX);
        let left = |at: usize| {
            let on_sample = sample.and_then(|sample| sample.left_in(&self.hypotheses().nth(at)?.arithmetic));
            let on_all = || self.base(at).map(|(_, base)| (self.beyond(base), self.beside(base).0));
            Some((at, on_sample.map(|left| (0, left)).or_else(on_all)?))
        };
        let elements = || self.suspect.sight.count(self.suspect.recorded.len());
        let nearer = |a: (usize, _), b: (usize, _)| if is_nearer(b.1, a.1, &elements) { b } else { a };
        (0..=self.others.len()).filter_map(left).reduce(nearer).map_or(0, |(at, _)| at)
    }

    /// Mistakes in nodes before it that were not recorded, where what can happen to any value is all that was `found` and leaves
    /// more: another epsilon is next to a factor common to all rows.
    fn nearer_before(&self, found: &[Named]) -> Option<Vec<Named>> {
        let is_general = |named: &Named| fault::find(&named.diagnosis.fault).is_some_and(is_general);
        if found.is_empty() || !found.iter().all(is_general) {
            return None;
        }
        let least = |found: &[Named]| found.iter().map(|named| named.left).fold(f64::INFINITY, f64::min);
        Some(between::found(self.suspect)).filter(|before| least(before) < least(found))
    }

    /// What was recorded beside what the node should come to.
    pub(super) fn evidence<'e>(
        &'e self,
        base: &'e Base,
        source: &'e dyn Fn(usize) -> Option<Vec<f64>>,
        within: &'e dyn Fn(&Change, f64) -> f64,
    ) -> Evidence<'e> {
        let Suspect { recorded, sight, .. } = *self.suspect;
        let Base { exact, bound } = base;
        Evidence { recorded, exact, bound, looked_at: sight.looked_at, source, within }
    }

    /// The values of a source, where that is no weight that is too large to be looked at.
    fn source(&self, slot: usize) -> Option<Vec<f64>> {
        let source = self.suspect.args.get(slot)?;
        (source.shape().iter().product::<usize>() <= WEIGHT_MAX).then(|| source.values().into_owned())
    }

    fn rows<'e>(&'e self, evidence: &'e Evidence<'e>) -> Option<Rows<'e>> {
        let id = self.suspect.node.id;
        let row = self.scene.row(id)?;
        let ne = self.suspect.node.program.graph.get(id).ne;
        let head = if row > ne[0] { ne[0] } else { self.scene.head_width(id).unwrap_or(row) };
        Some(Rows { suspect: self.suspect, evidence, row, head })
    }

    /// Every mistake of the catalogue that is `asked` for. One that can happen to any value is looked for where no other explains
    /// the node.
    pub(super) fn singles(
        &self,
        evidence: &Evidence<'_>,
        sample: Option<&Sample<'_, '_>>,
        tried: &mut Vec<Attempt>,
        asked: &dyn Fn(&Entry) -> bool,
    ) -> Vec<Named> {
        let id = self.suspect.node.id;
        let mut found: Vec<Named> = Vec::new();
        for general in [false, true] {
            if !found.is_empty() {
                break;
            }
            let wanted = |entry: &&Entry| is_general(entry) == general && asked(entry);
            for entry in fault::entries().filter(wanted) {
                watch::at(|| self.suspect.asked(entry.name), || None);
                let known = self.known(entry).chain(entry.all_at(&self.scene, id)).collect();
                let named = self
                    .first(known, sample, tried)
                    .or_else(|| self.first(entry.guessed(&self.scene, id, evidence), sample, tried));
                found.extend(named);
            }
        }
        prefer_later(self.suspect, &mut found);
        found
    }

    /// Mistakes of any value, fitted to the others that the node may have been computed in: what comes nearest without a mistake may
    /// be a coarser one, by whose rounding a factor is off. What explains little is fitted to the one that leaves least.
    fn refitted(&self, sample: Option<&Sample<'_, '_>>, tried: &[Attempt]) -> Vec<Named> {
        let general = tried.iter().filter(|one| fault::find(one.fault.name).is_some_and(is_general));
        let bases = match general.map(|one| one.explains).fold(0.0, f64::max) {
            explains if explains >= PROMISING => 1..=self.others.len(),
            explains if explains >= PARTIAL => {
                let least = self.least(sample);
                least.max(1)..=least
            }
            _ => return Vec::new(),
        };
        let refit = |at: usize| {
            let (_, base) = self.base(at)?;
            let source = |slot: usize| self.source(slot);
            let evidence = self.evidence(base, &source, &|_, _| f64::INFINITY);
            let general = fault::entries().filter(|entry| is_general(entry) && !entry.rounds);
            let id = self.suspect.node.id;
            let named = general.filter_map(|entry| {
                self.first(entry.guessed(&self.scene, id, &evidence), sample, &mut Vec::new())
            });
            Some(named.collect::<Vec<Named>>()).filter(|found| !found.is_empty())
        };
        bases.into_iter().find_map(refit).unwrap_or_default()
    }

    /// A mistake with the value that explains the steps before: a fit to a single row may end elsewhere.
    fn known<'e>(&'e self, entry: &'static Entry) -> impl Iterator<Item = Fault> + 'e {
        let spellings = self.suspect.known.iter().filter_map(|known| known.split_once('='));
        let own = spellings.filter(|(name, _)| *name == entry.name);
        own.filter_map(|(_, value)| entry.at(&self.scene, self.suspect.node.id, &Argument::parse(value)))
    }

    /// The first of some mistakes that explains the node; of those that explain it by wide bounds more than by what they leave
    /// the one that leaves least, which is the same with another value.
    fn first(
        &self,
        faults: Vec<Fault>,
        sample: Option<&Sample<'_, '_>>,
        tried: &mut Vec<Attempt>,
    ) -> Option<Named> {
        let mut best: Option<(Fault, Explained)> = None;
        for fault in faults {
            if watch::is_over() {
                break;
            }
            let share = self.share(&fault.rewrite.change, sample);
            if let Some(share) = share.filter(|share| *share < PROMISING) {
                tried.push(Attempt { fault, explains: share });
                continue;
            }
            let Some(explained) = self.explained(&fault.rewrite.change) else { continue };
            if explained.is_by(&fault) {
                if explained.explains >= PROMISING {
                    return Some(self.named(&fault, &explained));
                }
                if best.as_ref().is_none_or(|(_, known)| explained.left < known.left) {
                    best = Some((fault, explained));
                }
                continue;
            }
            tried.push(Attempt { fault, explains: explained.explains });
        }
        best.map(|(fault, explained)| self.named(&fault, &explained))
    }

    fn all(&self, faults: Vec<Fault>, tried: &mut Vec<Attempt>) -> Vec<Named> {
        let mut found = Vec::new();
        for fault in faults {
            let Some(explained) = self.explained(&fault.rewrite.change) else { continue };
            match explained.is_by(&fault) {
                true => found.push(self.named(&fault, &explained)),
                false => tried.push(Attempt { fault, explains: explained.explains }),
            }
        }
        found
    }

    /// Share of the error on a sample that a mistake accounts for, where it can be told from that.
    fn share(&self, change: &Change, sample: Option<&Sample<'_, '_>>) -> Option<f64> {
        let sample = sample.filter(|sample| sample.error > 0.0 && self.suspect.held.nonfinite == 0)?;
        let left = sample.left(change)?;
        left.is_finite().then_some(1.0 - left)
    }

    /// Multiplications of the node.
    fn work(&self) -> usize {
        let args = self.suspect.args;
        args.elements().saturating_mul(args.get(0).map_or(1, |source| source.shape()[3]))
    }

    /// Two mistakes at once: each of those that explain much, with every other.
    fn pairs(&self, tried: &[Attempt], sample: Option<&Sample<'_, '_>>) -> Vec<Named> {
        let work = self.work();
        let mut firsts: Vec<&Attempt> = tried.iter().filter(|one| one.explains > PARTIAL).collect();
        firsts.sort_by(|a, b| b.explains.total_cmp(&a.explains));
        let mut seen: Vec<&str> = Vec::new();
        firsts.retain(|one| {
            let new = !seen.contains(&one.fault.name);
            seen.push(one.fault.name);
            new
        });
        for first in firsts.into_iter().take(PARTIAL_MAX).filter(|_| work <= PAIR_WORK_MAX) {
            // A factor is fitted to what the node may have been computed in, each in turn: others are off by a rounding.
            for at in 0..=self.others.len() {
                if let Some(named) = self.second(&first.fault, at, sample) {
                    return vec![named];
                }
            }
        }
        Vec::new()
    }

    /// A second mistake besides the first, with values that what the node may have been computed in speaks for.
    fn second(&self, first: &Fault, at: usize, sample: Option<&Sample<'_, '_>>) -> Option<Named> {
        let (id, own) = (self.suspect.node.id, &first.rewrite.change);
        let within = |change: &Change, limit: f64| {
            let both = Change::All(vec![own.clone(), change.clone()]);
            within(sample, &both, limit)
        };
        let base = self.under(own, at)?;
        let source = |slot: usize| self.source(slot);
        let evidence = self.evidence(&base, &source, &within);
        let is_nearest = at == 0;
        let wanted = |entry: &&Entry| entry.name != first.name && (is_nearest || is_general(entry));
        for entry in fault::entries().filter(wanted) {
            let known = if is_nearest { entry.all_at(&self.scene, id) } else { Vec::new() };
            let seconds = known.into_iter().chain(entry.guessed(&self.scene, id, &evidence));
            let before = Some(&base).filter(|_| is_nearest);
            let both = |second: Fault| self.both((first, before), &second, sample);
            if let Some(named) = seconds.into_iter().find_map(both) {
                return Some(named);
            }
        }
        None
    }

    /// Two mistakes, and what the node comes to with the first in what it was most likely computed in, where that is known.
    fn both(
        &self,
        (first, before): (&Fault, Option<&Base>),
        second: &Fault,
        sample: Option<&Sample<'_, '_>>,
    ) -> Option<Named> {
        let [a, b] = [first, second].map(|fault| fault.rewrite.change.clone());
        let change = Change::All(vec![a, b]);
        if self.share(&change, sample).is_some_and(|share| share < PROMISING) {
            return None;
        }
        if before.is_some_and(|before| self.is_far_behind(before, &second.rewrite.change)) {
            return None;
        }
        // Of huge values bounds are huge too: they explain what two mistakes do not come near.
        let is_near = |explained: &Explained| explained.whole && explained.explains >= PROMISING;
        let explained = self.explained(&change).filter(is_near)?;
        // A second mistake that leaves nothing of the first is one alone.
        let alone = self.explained(&second.rewrite.change);
        if alone.is_some_and(|alone| alone.left <= explained.left) {
            return None;
        }
        let fix = |fault: &Fault| fault::find(fault.name).map_or("", |entry| entry.fix);
        let diagnosis = Diagnosis {
            fault: format!("{} + {}", first.name, second.name),
            explains: explained.explains,
            text: format!("{}; and {}", first.text, second.text),
            fix: Some(self.of_model(&format!("{}; {}", fix(first), fix(second)))),
        };
        let spelling = diagnosis.fault.clone();
        Some(Named {
            diagnosis,
            spelling,
            left: explained.left,
            rest: 0.0,
            reaches: None,
            values: self.digest(&change),
        })
    }

    /// The one mistake that leaves next to nothing of an error that is otherwise not explained: something small is wrong as
    /// well, and the mistake is no less one.
    fn all_but_little(&self, tried: &[Attempt]) -> Option<Named> {
        let left = |one: &Attempt| (1.0 - one.explains).max(0.0).sqrt();
        let best =
            tried.iter().filter(|one| one.explains.is_finite()).min_by(|a, b| left(a).total_cmp(&left(b)))?;
        // A mistake that explains the steps before is told with the same value.
        let is_known =
            |one: &&Attempt| self.suspect.known.contains(&one.fault.spelling()) && left(one) <= REST_MAX;
        let best = tried.iter().find(is_known).unwrap_or(best);
        let is_other = |one: &&Attempt| one.fault.name != best.fault.name;
        let next = tried.iter().filter(is_other).map(left).fold(1.0, f64::min);
        if !(left(best) <= REST_MAX && REST_APART * left(best) <= next) {
            return None;
        }
        let explained = self.explained(&best.fault.rewrite.change)?;
        let looked_at =
            self.base.exact.iter().enumerate().filter(|(i, _)| (self.suspect.sight.looked_at)(*i));
        let size = looked_at.map(|(_, x)| finite(*x).powi(2)).sum::<f64>().sqrt();
        let mut named = self.named(&best.fault, &explained);
        let rest = explained.left.sqrt() / size.max(f64::MIN_POSITIVE);
        named.rest = rest;
        Some(named)
    }

    fn of_model(&self, text: &str) -> String {
        of_model(self.suspect, text)
    }

    fn named(&self, fault: &Fault, explained: &Explained) -> Named {
        let diagnosis = told(self.suspect, fault, explained.explains);
        let finite = self.base.exact.iter().filter(|x| x.is_finite());
        let largest = || finite.fold(0.0f64, |largest, x| largest.max(x.abs()));
        let reaches = (fault.name == OVERFLOW).then(largest);
        let (spelling, values) = (fault.spelling(), self.digest(&fault.rewrite.change));
        Named { diagnosis, spelling, left: explained.left, rest: 0.0, reaches, values }
    }
}

/// Values that are infinite since their type is too narrow.
pub const OVERFLOW: &str = "data.f16_overflow";

/// Whether a mistake can happen to any value.
fn is_general(entry: &Entry) -> bool {
    entry.ops.is_empty()
}

fn of_model(suspect: &Suspect<'_>, text: &str) -> String {
    let architecture = suspect.gguf.str("general.architecture").ok().flatten();
    architecture.map_or_else(|| text.to_owned(), |name| text.replace("{arch}", name))
}

/// A mistake in words.
pub(super) fn told(suspect: &Suspect<'_>, fault: &Fault, explains: f64) -> Diagnosis {
    let fix = fault::find(fault.name).map(|entry| of_model(suspect, entry.fix));
    Diagnosis { fault: fault.name.to_owned(), explains, text: fault.text.clone(), fix }
}

/// What was right in a step before is no mistake that every step has. But wide bounds call a step healthy that is not: one that
/// leaves far less is the likelier.
pub(super) fn prefer_later(suspect: &Suspect<'_>, found: &mut Vec<Named>) {
    let is_later = |named: &Named| fault::find(&named.diagnosis.fault).is_some_and(|entry| entry.later);
    let least = |of: &dyn Fn(&Named) -> bool| {
        found.iter().filter(|named| of(named)).map(|named| named.left).fold(f64::INFINITY, f64::min)
    };
    let (later, all) = (least(&is_later), least(&|_| true));
    if suspect.was_healthy && found.iter().any(is_later) && later <= precision::ALIKE * all {
        found.retain(is_later);
    }
}

fn in_itself(name: &str, text: String) -> Named {
    let fix = fault::find(name).map(|entry| entry.fix.to_owned());
    let diagnosis = Diagnosis { fault: name.to_owned(), explains: 1.0, text, fix };
    Named { diagnosis, spelling: name.to_owned(), left: 0.0, rest: 0.0, reaches: None, values: 0 }
}
