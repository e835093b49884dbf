//! Names the mistake in a wrong node: tries what people do wrong on what the node itself read, and keeps what reproduces
//! its output to the node's rounding.

use std::cell::OnceCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use parity_graph::fault::{self, Argument, Entry, Evidence, Fault, Scene};
use parity_graph::rewrite::{Change, Edit};

use super::described::{Rows, describe, recognised};
use super::rewritten::{Other, Rewritten, other, rewrite};
use super::sample::Sample;
use super::{between, guessed, precision, ranks};
use crate::audit::{Held, Hypothesis, Named, Names, Sight, Suspect, expected, hypotheses, judge};
use crate::engine::op_by_op::{Carried, Node};
use crate::ops::source::Data;
use crate::ops::{Args, Source, rule};
use crate::report::{Diagnosis, Tried};

/// A value that is passed on unchanged is rounded at most once.
const PASSED_ROUNDINGS: f64 = 1.0;
/// Share of the squared error that a mistake seen in the values alone, or one that is computed in full, accounts for.
const PROMISING: f64 = 0.9;
/// Bounds are derived for right nodes; a mistaken one may round a few operations more.
const SLACK: f64 = 4.0;
/// Share of the error above which a second mistake is looked for besides the first.
const PARTIAL: f64 = 0.3;
/// First mistakes that a second one is tried with.
const PARTIAL_MAX: usize = 4;
/// Values of a weight that is changed as a whole, at most.
const WEIGHT_MAX: usize = 1 << 26;
/// What a node may have been computed in besides the likeliest, at most: each costs a computation of it.
const OTHERS_MAX: usize = 7;
/// Multiplications up to which a node is computed in full for every pair of mistakes.
const PAIR_WORK_MAX: usize = 1 << 26;

/// The mistakes that explain the output of a node, the more specific ones first, and where there are none what was tried
/// and what the error looks like.
pub fn diagnose(suspect: &Suspect<'_>) -> Names {
    let Some(trial) = Trial::new(suspect) else { return Names::default() };
    trial.names()
}

/// What a node should have come to.
struct Base {
    exact: Vec<f64>,
    bound: Vec<f64>,
}

impl Base {
    fn of(suspect: &Suspect<'_>, hypothesis: &Hypothesis) -> Option<Base> {
        let Suspect { node, args, recorded, sight, .. } = *suspect;
        let (exact, bound) = expected(node.rule?, args, recorded, sight, hypothesis).ok()?;
        Some(Base { exact, bound })
    }
}

struct Trial<'s, 'a> {
    suspect: &'s Suspect<'a>,
    scene: Scene<'s>,
    /// What comes nearest of all that the node may have been computed in.
    nearest: &'s Hypothesis,
    /// In that.
    base: Base,
    /// In each of the others, for mistakes that nearly explain it.
    others: Vec<(&'s Hypothesis, OnceCell<Option<Base>>)>,
}

/// A mistake, and what it accounts for.
struct Attempt {
    fault: Fault,
    explains: f64,
}

/// What a mistake accounts for.
struct Explained {
    /// Share of the squared error.
    explains: f64,
    /// Squared error that it leaves.
    left: f64,
    /// Whether rounding explains that.
    whole: bool,
}

impl<'s, 'a> Trial<'s, 'a> {
    fn new(suspect: &'s Suspect<'a>) -> Option<Trial<'s, 'a>> {
        let scene = Scene::new(&suspect.node.program.graph);
        let is_nearest = |one: &&Hypothesis| suspect.held.under == Some(one.arithmetic);
        let nearest = suspect.tried.iter().find(is_nearest).or(suspect.tried.first())?;
        let others = suspect.tried.iter().filter(|one| !std::ptr::eq(*one, nearest)).take(OTHERS_MAX);
        let others = others.map(|one| (one, OnceCell::new())).collect();
        Some(Trial { suspect, scene, nearest, base: Base::of(suspect, nearest)?, others })
    }

    /// What the node may have been computed in, the nearest first, and what it should have come to in that.
    fn base(&self, at: usize) -> Option<(&Hypothesis, &Base)> {
        let Some(other) = at.checked_sub(1) else { return Some((self.nearest, &self.base)) };
        let (hypothesis, base) = self.others.get(other)?;
        Some((hypothesis, base.get_or_init(|| Base::of(self.suspect, hypothesis)).as_ref()?))
    }

    fn names(&self) -> Names {
        // Of a single row, which a decode step has, a factor explains much that is none.
        let behind = self.suspect.is_known_out_of_sight.then(|| between::found(self.suspect));
        if behind.iter().flatten().any(|named| self.suspect.known.contains(&named.spelling)) {
            return Names { found: behind.unwrap_or_default(), out_of_sight: true, ..Names::default() };
        }
        let mut tried: Vec<Attempt> = Vec::new();
        let sample = Sample::of(self.suspect, &self.base.exact);
        let distance = |change: &Change| {
            let sampled = sample.as_ref().and_then(|sample| sample.distance(change));
            sampled.unwrap_or(f64::INFINITY)
        };
        let source = |slot: usize| self.source(slot);
        let evidence = Evidence {
            recorded: self.suspect.recorded,
            exact: &self.base.exact,
            bound: &self.base.bound,
            looked_at: self.suspect.sight.looked_at,
            source: &source,
            distance: &distance,
        };
        let mut found = self.singles(&evidence, sample.as_ref(), &mut tried, false);
        ranks::prefer(self.suspect, &mut found);
        if found.is_empty() {
            found = self.all(guessed::guesses(self.suspect), &mut tried);
        }
        let rows = self.rows(&evidence);
        if found.is_empty() {
            let seen = rows.as_ref().map_or_else(Vec::new, recognised);
            found = seen.into_iter().map(|(name, text)| in_itself(name, text)).collect();
        }
        if found.is_empty() {
            found = precision::coarser(self.suspect);
        }
        if found.is_empty() {
            found = self.singles(&evidence, sample.as_ref(), &mut tried, true);
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
        if !found.is_empty() {
            return Names { found, ..Names::default() };
        }
        let of =
            |attempt: &Attempt| Tried { fault: attempt.fault.name.to_owned(), explains: attempt.explains };
        let tried = super::nearest(tried.iter().map(of).collect());
        // In what leaves least: the roundings of another arithmetic hide what an error looks like.
        let bases = (0..=self.others.len()).filter_map(|at| Some(self.base(at)?.1));
        let left = |base: &&Base| self.beside(base).0;
        let least = bases.min_by(|a, b| left(a).total_cmp(&left(b))).unwrap_or(&self.base);
        let evidence = Evidence { exact: &least.exact, bound: &least.bound, ..evidence };
        let residual = self.rows(&evidence).map(|rows| describe(&rows));
        Names { tried, residual, ..Names::default() }
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

    /// Every mistake of the catalogue, of those that are `coarser` arithmetic or of the others. One that can happen to any
    /// value is looked for where no other explains the node.
    fn singles(
        &self,
        evidence: &Evidence<'_>,
        sample: Option<&Sample<'_, '_>>,
        tried: &mut Vec<Attempt>,
        coarser: bool,
    ) -> Vec<Named> {
        let id = self.suspect.node.id;
        let mut found: Vec<Named> = Vec::new();
        for general in [false, true] {
            if !found.is_empty() {
                break;
            }
            let wanted = |entry: &&Entry| is_general(entry) == general && entry.rounds == coarser;
            // How far a rounding brings a node tells nothing before what it is computed in is known.
            let sample = sample.filter(|_| !coarser);
            for entry in fault::entries().filter(wanted) {
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

    /// A mistake with the value that explains the steps before: a fit to a single row may end elsewhere.
    fn known<'e>(&'e self, entry: &'static Entry) -> impl Iterator<Item = Fault> + 'e {
        let spellings = self.suspect.known.iter().filter_map(|known| known.split_once('='));
        let own = spellings.filter(|(name, _)| *name == entry.name);
        own.filter_map(|(_, value)| entry.at(&self.scene, self.suspect.node.id, &Argument::parse(value)))
    }

    /// The first of some mistakes that explains the node.
    fn first(
        &self,
        faults: Vec<Fault>,
        sample: Option<&Sample<'_, '_>>,
        tried: &mut Vec<Attempt>,
    ) -> Option<Named> {
        for fault in faults {
            let share = self.share(&fault.rewrite.change, sample);
            if let Some(share) = share.filter(|share| *share < PROMISING) {
                tried.push(Attempt { fault, explains: share });
                continue;
            }
            let Some(explained) = self.explained(&fault.rewrite.change) else { continue };
            if explained.whole {
                return Some(self.named(&fault, &explained));
            }
            tried.push(Attempt { fault, explains: explained.explains });
        }
        None
    }

    fn all(&self, faults: Vec<Fault>, tried: &mut Vec<Attempt>) -> Vec<Named> {
        let mut found = Vec::new();
        for fault in faults {
            let Some(explained) = self.explained(&fault.rewrite.change) else { continue };
            match explained.whole {
                true => found.push(self.named(&fault, &explained)),
                false => tried.push(Attempt { fault, explains: explained.explains }),
            }
        }
        found
    }

    /// Share of the error on a sample that a mistake accounts for, where it can be told from that.
    fn share(&self, change: &Change, sample: Option<&Sample<'_, '_>>) -> Option<f64> {
        let sample = sample.filter(|sample| sample.error > 0.0 && self.suspect.held.nonfinite == 0)?;
        let distance = match change {
            Change::Misread { how, .. } => sample.misread(*how),
            change => sample.distance(change),
        }?;
        let all = if change.is_of_result() { self.suspect.held.squares[0] } else { sample.error };
        (distance / all).is_finite().then(|| 1.0 - distance / all)
    }

    /// Two mistakes at once: each of those that explain much, with every other.
    fn pairs(&self, tried: &[Attempt], sample: Option<&Sample<'_, '_>>) -> Vec<Named> {
        let args = self.suspect.args;
        let work = args.elements().saturating_mul(args.get(0).map_or(1, |source| source.shape()[3]));
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
        let distance = |change: &Change| {
            let both = Change::All(vec![own.clone(), change.clone()]);
            sample.and_then(|sample| sample.distance(&both)).unwrap_or(f64::INFINITY)
        };
        let base = self.under(own, at)?;
        let evidence = Evidence {
            recorded: self.suspect.recorded,
            exact: &base.exact,
            bound: &base.bound,
            looked_at: self.suspect.sight.looked_at,
            source: &|slot| self.source(slot),
            distance: &distance,
        };
        let is_nearest = at == 0;
        let wanted = |entry: &&Entry| entry.name != first.name && (is_nearest || is_general(entry));
        for entry in fault::entries().filter(wanted) {
            let known = if is_nearest { entry.all_at(&self.scene, id) } else { Vec::new() };
            let seconds = known.into_iter().chain(entry.guessed(&self.scene, id, &evidence));
            if let Some(named) = seconds.into_iter().find_map(|second| self.both(first, &second, sample)) {
                return Some(named);
            }
        }
        None
    }

    fn both(&self, first: &Fault, second: &Fault, sample: Option<&Sample<'_, '_>>) -> Option<Named> {
        let [a, b] = [first, second].map(|fault| fault.rewrite.change.clone());
        let change = Change::All(vec![a, b]);
        if self.share(&change, sample).is_some_and(|share| share < PROMISING) {
            return None;
        }
        let explained = self.explained(&change).filter(|explained| explained.whole)?;
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
        Some(Named { diagnosis, spelling, left: explained.left, values: self.digest(&change) })
    }

    fn of_model(&self, text: &str) -> String {
        of_model(self.suspect, text)
    }

    fn named(&self, fault: &Fault, explained: &Explained) -> Named {
        let diagnosis = told(self.suspect, fault, explained.explains);
        let (spelling, values) = (fault.spelling(), self.digest(&fault.rewrite.change));
        Named { diagnosis, spelling, left: explained.left, values }
    }

    /// A digest of what the node comes to under a change, where it was looked at.
    fn digest(&self, change: &Change) -> u64 {
        let mut digest = DefaultHasher::new();
        let values = match change.is_of_result() {
            true => self.finished(change, self.base.exact.clone()),
            false => self.with(change, |rewritten| rewritten.values(self.suspect.args).ok()),
        };
        for (_, value) in
            values.iter().flatten().enumerate().filter(|(i, _)| (self.suspect.sight.looked_at)(*i))
        {
            // Zeros of both signs are one.
            (value + 0.0).to_bits().hash(&mut digest);
        }
        digest.finish()
    }

    /// What `see` makes of the node under a change; `None` where the change has no place in it.
    fn with<T>(&self, change: &Change, see: impl FnOnce(Rewritten<'_, f64>) -> Option<T>) -> Option<T> {
        let Suspect { node, args, .. } = *self.suspect;
        under(self.suspect, node, args, change, see)
    }

    /// What becomes of a result under a change of it.
    fn finished(&self, change: &Change, values: Vec<f64>) -> Option<Vec<f64>> {
        self.with(change, |rewritten| rewritten.finished(values, self.suspect.args).ok())
    }

    /// What the node should come to with a mistake in it, and how far rounding explains that it is off: what moves the
    /// result by as much as its bound moves the edited one by that.
    fn under(&self, change: &Change, at: usize) -> Option<Base> {
        let (hypothesis, base) = self.base(at)?;
        let (Base { exact, bound }, arithmetic) = (base, &hypothesis.arithmetic);
        let Args { params, shape, name, dtype, tokens, ref sources, .. } = *self.suspect.args;
        let args = &Args { params, shape, name, dtype, tokens, sources: sources.clone(), arithmetic };
        let values =
            || under(self.suspect, self.suspect.node, args, change, |rewritten| rewritten.values(args).ok());
        if let Change::Scores(_) = change {
            let exact = values()?;
            let bound = self.alike(&exact, base);
            return Some(Base { exact, bound });
        }
        if is_after(change) {
            let behind = |one: Rewritten<'_, f64>| one.behind(exact.clone(), bound.clone(), args).ok();
            let (exact, mut bound) = under(self.suspect, self.suspect.node, args, change, behind)?;
            roundings(&mut bound, &exact);
            return Some(Base { exact, bound });
        }
        if self.with(change, |one| Some(one.is_by_rule_before()))? {
            return self.by_rule(change, hypothesis);
        }
        // What is passed on is off by as much as the node's own values.
        let exact = values()?;
        let mut bound = bound.clone();
        roundings(&mut bound, &exact);
        bound.iter_mut().for_each(|bound| *bound = finite(*bound));
        Some(Base { exact, bound })
    }

    fn by_rule(&self, change: &Change, hypothesis: &Hypothesis) -> Option<Base> {
        let Suspect { args, recorded, sight, .. } = *self.suspect;
        let sight = &Sight { carried: &carried(change, args, sight.carried), ..*sight };
        let (exact, bound) = self.with(change, |rewritten| {
            let args = &rewritten.args(args);
            let own = expected(rule(rewritten.op())?, args, recorded, sight, hypothesis).ok()?;
            if rewritten.is_by_rule() {
                return Some(own);
            }
            let like = &Args { arithmetic: &hypothesis.arithmetic, sources: args.sources.clone(), ..*args };
            let (exact, mut bound) = rewritten.behind(own.0, own.1, like).ok()?;
            roundings(&mut bound, &exact);
            Some((exact, bound))
        })?;
        Some(Base { exact, bound })
    }

    /// Bounds in proportion to the values of each row as they are for the node without a mistake, and the roundings of each
    /// value itself.
    fn alike(&self, values: &[f64], base: &Base) -> Vec<f64> {
        let row = self.suspect.args.shape[3].max(1);
        let size = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let rows = values.chunks(row).zip(base.exact.chunks(row)).zip(base.bound.chunks(row));
        rows.flat_map(|((values, exact), bound)| {
            let grown = size(values) / size(exact).max(f64::MIN_POSITIVE);
            let own = values.iter().map(|value| SLACK * crate::ops::bound::UNIT_F32 * finite(*value));
            bound.iter().zip(own).map(move |(bound, own)| SLACK * bound * grown + own).collect::<Vec<f64>>()
        })
        .collect()
    }

    fn explained(&self, change: &Change) -> Option<Explained> {
        if is_too_large(self.suspect.args, change) {
            return None;
        }
        let Suspect { node, args, recorded, sight, .. } = *self.suspect;
        let carried = carried(change, args, sight.carried);
        let by_rule = self.with(change, |rewritten| {
            if let Some((values, slot)) = rewritten.is_passed() {
                let off = slot.and_then(|slot| carried.get(slot)?.as_ref());
                return Some(Some(passed(
                    recorded,
                    values,
                    sight.looked_at,
                    off.map(|carried| &carried.error[..]),
                )));
            }
            if !rewritten.is_by_rule() {
                return Some(None);
            }
            let (rule, args) = (rule(rewritten.op())?, rewritten.args(args));
            let sight = Sight { looked_at: sight.looked_at, carried: &carried, row: None };
            let backend = node.program.graph.get(node.id).backend.as_deref();
            let fits = |held: &Held| held.is_healthy() && held.nonfinite == 0;
            let held = judge(rule, &args, recorded, &sight, &hypotheses(&rule.op, backend, &args)).ok()?;
            let near = 1.0 - held.squares[0] / self.suspect.held.squares[0] >= PROMISING;
            // What is nearly right may be so in an arithmetic of the producer's own.
            let own =
                (near && !fits(&held)).then(|| judge(rule, &args, recorded, &sight, self.suspect.tried));
            let held = own.and_then(Result::ok).filter(fits).unwrap_or(held);
            Some(Some((held.squares[0], fits(&held))))
        })?;
        let (left, whole) = match by_rule {
            Some(known) => known,
            None => self.in_any(change)?,
        };
        let explains = match self.suspect.held.squares[0] {
            all if all > 0.0 => 1.0 - left / all,
            // Nothing but NaN and Inf where there should be none, or none where there should be.
            _ if whole => 1.0,
            _ => 0.0,
        };
        Some(Explained { explains, left, whole })
    }

    /// As [`Trial::beside`], in the first of what the node may have been computed in that explains it with a mistake, where
    /// that may be near.
    fn in_any(&self, change: &Change) -> Option<(f64, bool)> {
        let (left, whole) = self.beside(&self.under(change, 0)?);
        let Held { squares: [all, ..], nonfinite, .. } = *self.suspect.held;
        let near = nonfinite > 0 || 1.0 - left / all >= PARTIAL;
        if whole || !near {
            return Some((left, whole));
        }
        let others = (1..=self.others.len()).filter_map(|at| Some(self.beside(&self.under(change, at)?)));
        Some(others.into_iter().find(|(_, whole)| *whole).unwrap_or((left, whole)))
    }

    /// The squared differences of what was recorded from what a mistake comes to, and whether bounds explain each.
    fn beside(&self, base: &Base) -> (f64, bool) {
        let (mut left, mut whole) = (0.0, true);
        let recorded = self.suspect.recorded.iter().enumerate();
        for (i, recorded) in recorded.filter(|(i, _)| (self.suspect.sight.looked_at)(*i)) {
            let (exact, bound) = (base.exact[i], base.bound[i]);
            if *recorded == exact || recorded.is_nan() && exact.is_nan() {
                continue;
            }
            let off = (recorded - exact).abs();
            whole &= off <= bound;
            left += if off.is_finite() { off.powi(2) } else { 0.0 };
        }
        (left, whole)
    }
}

/// Whether a change makes a copy of a weight that is too large for a hypothesis.
fn is_too_large(args: &Args<'_, f64>, change: &Change) -> bool {
    let slot = match change {
        Change::SourceEdit { slot, .. } | Change::Misread { slot, .. } => *slot,
        Change::All(changes) => return changes.iter().any(|change| is_too_large(args, change)),
        _ => return false,
    };
    args.get(slot).is_some_and(|source| {
        let elements: usize = source.shape().iter().product();
        matches!(source.data, Data::Weight(_)) && elements > WEIGHT_MAX
    })
}

/// The size of a value; a NaN or Inf moves by nothing.
fn finite(value: f64) -> f64 {
    if value.is_finite() { value.abs() } else { 0.0 }
}

/// Whether a mistake can happen to any value.
fn is_general(entry: &Entry) -> bool {
    entry.ops.is_empty()
}

/// Adds a few roundings of each value to how far it may be off.
fn roundings(bound: &mut [f64], values: &[f64]) {
    let unit = SLACK * crate::ops::bound::UNIT_F32;
    bound.iter_mut().zip(values).for_each(|(bound, value)| *bound += unit * finite(*value));
}

/// Whether nothing but what comes behind the node is changed.
fn is_after(change: &Change) -> bool {
    match change {
        Change::ResultEdit(_) | Change::After { .. } => true,
        Change::All(changes) => changes.iter().all(is_after),
        _ => false,
    }
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

/// What was right in a step before is no mistake that every step has.
pub(super) fn prefer_later(suspect: &Suspect<'_>, found: &mut Vec<Named>) {
    let is_later = |named: &Named| fault::find(&named.diagnosis.fault).is_some_and(|entry| entry.later);
    if suspect.was_healthy && found.iter().any(is_later) {
        found.retain(is_later);
    }
}

fn in_itself(name: &str, text: String) -> Named {
    let fix = fault::find(name).map(|entry| entry.fix.to_owned());
    let diagnosis = Diagnosis { fault: name.to_owned(), explains: 1.0, text, fix };
    Named { diagnosis, spelling: name.to_owned(), left: 0.0, values: 0 }
}

/// What `see` makes of a node of the suspect's graph under a change.
pub(super) fn under<T>(
    suspect: &Suspect<'_>,
    node: &Node<'_>,
    args: &Args<'_, f64>,
    change: &Change,
    see: impl FnOnce(Rewritten<'_, f64>) -> Option<T>,
) -> Option<T> {
    let graph = &node.program.graph;
    let others = |id| -> Option<Other<'_, f64>> { other(graph, suspect.gguf, id, suspect.others) };
    see(rewrite(&graph.get(node.id).op, args, change, &others)?)
}

/// What a node comes to under a change of what it reads, `args`: all of its rows or some.
pub fn changed(suspect: &Suspect<'_>, args: &Args<'_, f64>, change: &Change) -> Option<Vec<f64>> {
    if is_too_large(args, change) {
        return None;
    }
    under(suspect, suspect.node, args, change, |rewritten| rewritten.values(args).ok())
}

/// The squared differences of a result from values that were passed on, and whether a rounding, and how far these are
/// from what the producer had, explains each.
fn passed(
    recorded: &[f64],
    values: &[f64],
    looked_at: &(dyn Fn(usize) -> bool + Sync),
    off: Option<&[f64]>,
) -> (f64, bool) {
    let unit = PASSED_ROUNDINGS * crate::ops::bound::UNIT_F32;
    let (mut left, mut whole) = (0.0, recorded.len() == values.len());
    for (i, (a, b)) in recorded.iter().zip(values).enumerate().filter(|(i, _)| looked_at(*i)) {
        if a == b {
            continue;
        }
        let explained = unit * b.abs() + off.and_then(|off| off.get(i)).copied().unwrap_or_default();
        whole &= (a - b).is_finite() && (a - b).abs() <= explained;
        left += if (a - b).is_finite() { (a - b).powi(2) } else { 0.0 };
    }
    (left, whole)
}

/// How far sources that were computed again may be off, where a change reads them too; nothing where that is not known. As
/// many errors as the values that the change makes of a source.
pub(super) fn carried(
    change: &Change,
    args: &Args<'_, f64>,
    known: &[Option<Carried>],
) -> Vec<Option<Carried>> {
    let mut out = known.to_vec();
    match change {
        Change::Exchange(a, b) => {
            out.resize(out.len().max(a.max(b) + 1), None);
            out.swap(*a, *b);
        }
        Change::SourceEdit { edit: Edit::Add(_) | Edit::AddModulo(..) | Edit::Map(_), .. } => {}
        Change::SourceEdit { slot, edit: Edit::Multiply(factor) } => {
            if let Some(Some(carried)) = out.get_mut(*slot) {
                carried.error.iter_mut().for_each(|error| *error *= f64::from(factor.abs()));
            }
        }
        // Errors lie where their values do.
        Change::SourceEdit { slot, edit: edit @ Edit::Gather { .. } } => {
            let shape = args.get(*slot).map(Source::shape);
            if let (Some([d, c, b, a]), Some(carried)) = (shape, out.get_mut(*slot)) {
                let (mut ne, whole) = ([a, b, c, d], a * b * c * d);
                *carried = carried.take().filter(|carried| carried.error.len() == whole);
                carried.iter_mut().for_each(|carried| edit.apply(&mut ne, &mut carried.error));
            }
        }
        Change::Source { slot, .. } | Change::SourceEdit { slot, .. } | Change::Misread { slot, .. } => {
            out.get_mut(*slot).into_iter().for_each(|carried| *carried = None);
        }
        Change::All(changes) => {
            changes.iter().for_each(|change| out = carried(change, args, &out));
        }
        Change::Part { change, .. } => out = carried(change, args, &out),
        _ => {}
    }
    out
}
