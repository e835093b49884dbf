//! One wrong node under a mistake: what it should come to with it, how far rounding explains that it is off, and how much of
//! the error that leaves.

use std::cell::OnceCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use parity_graph::fault::{self, Fault, Scene};
use parity_graph::rewrite::{Change, Edit};

use super::others::{Other, other};
use super::rewritten::{Rewritten, rewrite};
use crate::audit::{Held, Hypothesis, Sight, Suspect, expected, hypotheses, judge};
use crate::engine::op_by_op::{Carried, Node};
use crate::ops::source::Data;
use crate::ops::{Args, Source, rule};

/// A value that is passed on unchanged is rounded at most once.
const PASSED_ROUNDINGS: f64 = 1.0;
/// Bounds are derived for right nodes; a mistaken one may round a few operations more.
pub const SLACK: f64 = 4.0;
/// What a node may have been computed in besides the likeliest, at most: each costs a computation of it.
const OTHERS_MAX: usize = 7;
/// Share of the squared error that a mistake seen in the values alone, or one that is computed in full, accounts for.
pub const PROMISING: f64 = 0.9;
/// The same of a mistake whose number is searched for: some number comes near any noise, a tenth of which must not be left.
const FITTED: f64 = 1.0 - 0.1 * 0.1;
/// Share of the error above which a second mistake is looked for besides the first.
pub const PARTIAL: f64 = 0.3;
/// Values of a weight that is changed as a whole, at most.
pub const WEIGHT_MAX: usize = 1 << 26;

/// What a node should have come to.
pub struct Base {
    pub exact: Vec<f64>,
    pub bound: Vec<f64>,
}

impl Base {
    fn of(suspect: &Suspect<'_>, hypothesis: &Hypothesis) -> Option<Base> {
        let Suspect { node, args, recorded, sight, .. } = *suspect;
        let (exact, bound) = expected(node.rule?, args, recorded, sight, hypothesis).ok()?;
        Some(Base { exact, bound })
    }
}

pub struct Trial<'s, 'a> {
    pub suspect: &'s Suspect<'a>,
    pub scene: Scene<'s>,
    /// What comes nearest of all that the node may have been computed in.
    nearest: &'s Hypothesis,
    /// In that.
    pub base: Base,
    /// In each of the others, for mistakes that nearly explain it.
    pub others: Vec<(&'s Hypothesis, OnceCell<Option<Base>>)>,
}

/// What a mistake accounts for.
pub struct Explained {
    /// Share of the squared error.
    pub explains: f64,
    /// Squared error that it leaves.
    pub left: f64,
    /// Whether rounding explains that.
    pub whole: bool,
}

impl Explained {
    /// Whether the mistake explains the node. What rounds the result is itself known to a rounding alone, which is enough for
    /// small errors of any kind: it has to account for most of one.
    pub fn is_by(&self, fault: &Fault) -> bool {
        let least = fault::find(fault.name).map_or(0.0, |entry| match (entry.rounds, entry.is_searched()) {
            (true, _) => PROMISING,
            (_, true) => FITTED,
            _ => 0.0,
        });
        self.whole && self.explains >= least
    }
}

impl<'s, 'a> Trial<'s, 'a> {
    pub fn new(suspect: &'s Suspect<'a>) -> Option<Trial<'s, 'a>> {
        let scene = Scene::new(&suspect.node.program.graph);
        let is_nearest = |one: &&Hypothesis| suspect.held.under == Some(one.arithmetic);
        let nearest = suspect.tried.iter().find(is_nearest).or(suspect.tried.first())?;
        let others = suspect.tried.iter().filter(|one| !std::ptr::eq(*one, nearest)).take(OTHERS_MAX);
        let others = others.map(|one| (one, OnceCell::new())).collect();
        Some(Trial { suspect, scene, nearest, base: Base::of(suspect, nearest)?, others })
    }

    /// What the node may have been computed in, the nearest first, and what it should have come to in that.
    pub fn base(&self, at: usize) -> Option<(&Hypothesis, &Base)> {
        let Some(other) = at.checked_sub(1) else { return Some((self.nearest, &self.base)) };
        let (hypothesis, base) = self.others.get(other)?;
        Some((hypothesis, base.get_or_init(|| Base::of(self.suspect, hypothesis)).as_ref()?))
    }

    /// What the node may have been computed in, in the order of [`Trial::base`].
    pub fn hypotheses(&self) -> impl Iterator<Item = &'s Hypothesis> + '_ {
        [self.nearest].into_iter().chain(self.others.iter().map(|(one, _)| *one))
    }

    /// What `see` makes of the node under a change; `None` where the change has no place in it.
    pub fn with<T>(&self, change: &Change, see: impl FnOnce(Rewritten<'_, f64>) -> Option<T>) -> Option<T> {
        let Suspect { node, args, .. } = *self.suspect;
        under(self.suspect, node, args, change, see)
    }

    /// What becomes of a result under a change of it.
    pub fn finished(&self, change: &Change, values: Vec<f64>) -> Option<Vec<f64>> {
        self.with(change, |rewritten| rewritten.finished(values, self.suspect.args).ok())
    }

    /// What the node should come to with a mistake in it, and how far rounding explains that it is off: what moves the
    /// result by as much as its bound moves the edited one by that.
    pub fn under(&self, change: &Change, at: usize) -> Option<Base> {
        let hypothesis = self.hypotheses().nth(at)?;
        let arithmetic = &hypothesis.arithmetic;
        let Args { params, shape, name, dtype, tokens, ref sources, .. } = *self.suspect.args;
        let args = &Args { params, shape, name, dtype, tokens, sources: sources.clone(), arithmetic };
        let values =
            || under(self.suspect, self.suspect.node, args, change, |rewritten| rewritten.values(args).ok());
        let is_of_scores = matches!(change, Change::Scores(_));
        let is_by_rule = || self.with(change, |one| Some(one.is_by_rule_before()));
        if !is_of_scores && !is_after(change) && is_by_rule()? {
            return self.by_rule(change, hypothesis);
        }
        let (_, base) = self.base(at)?;
        let Base { exact, bound } = base;
        if is_of_scores {
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
        // What is passed on is off by as much as the node's own values.
        let exact = values()?;
        let mut bound = bound.clone();
        roundings(&mut bound, &exact);
        bound.iter_mut().for_each(|bound| *bound = finite(*bound));
        Some(Base { exact, bound })
    }

    pub fn by_rule(&self, change: &Change, hypothesis: &Hypothesis) -> Option<Base> {
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
    pub fn alike(&self, values: &[f64], base: &Base) -> Vec<f64> {
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

    pub fn explained(&self, change: &Change) -> Option<Explained> {
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
            let sight = Sight { carried: &carried, row: None, ..*sight };
            let backend = node.program.graph.get(node.id).backend.as_deref();
            let fits = |held: &Held| self.suspect.is_explained(held);
            let held = judge(rule, &args, recorded, &sight, &hypotheses(&rule.op, backend, &args)).ok()?;
            let near = 1.0 - held.squares[0] / self.suspect.held.squares[0] >= PROMISING;
            // What is nearly right may be so in an arithmetic of the producer's own; a cache of its own hides how near it is.
            let is_packed = self.suspect.tried.iter().any(|one| one.arithmetic.packed != [None; 2]);
            let own = ((near || is_packed) && !fits(&held))
                .then(|| judge(rule, &args, recorded, &sight, self.suspect.tried));
            let held = own.and_then(Result::ok).filter(fits).unwrap_or(held);
            Some(Some((held.squares[0], fits(&held))))
        })?;
        let (left, whole) = match by_rule {
            Some(known) => known,
            None => self.in_any(change)?,
        };
        let whole = whole && self.suspect.allowed.is_none_or(|allowed| left <= allowed);
        let explains = match self.suspect.held.squares[0] {
            // NaN and Inf have no size: what has them where they are accounts for them.
            _ if whole && self.suspect.held.nonfinite > 0 => 1.0,
            all if all > 0.0 => 1.0 - left / all,
            // Nothing but NaN and Inf where there should be none, or none where there should be.
            _ if whole => 1.0,
            _ => 0.0,
        };
        // What leaves more of the error than there was is no explanation, however wide a bound is.
        Some(Explained { explains, left, whole: whole && explains > 0.0 })
    }

    /// As [`Trial::beside`], in the first of what the node may have been computed in that explains it with a mistake, where
    /// that may be near.
    pub fn in_any(&self, change: &Change) -> Option<(f64, bool)> {
        let (left, whole) = self.beside(&self.under(change, 0)?);
        let Held { squares: [all, ..], nonfinite, .. } = *self.suspect.held;
        let near = nonfinite > 0 || 1.0 - left / all >= PARTIAL;
        if whole || !near {
            return Some((left, whole));
        }
        let others = (1..=self.others.len()).filter_map(|at| Some(self.beside(&self.under(change, at)?)));
        Some(others.into_iter().find(|(_, whole)| *whole).unwrap_or((left, whole)))
    }

    /// Whether a change of a result that comes behind what is known leaves nearly all of the error: then it is not looked at in
    /// anything else that the node may have been computed in.
    pub fn is_far_behind(&self, before: &Base, change: &Change) -> bool {
        let Held { squares: [all, ..], nonfinite, .. } = *self.suspect.held;
        if nonfinite > 0 || !change.is_of_result() {
            return false;
        }
        let values = self.finished(change, before.exact.clone());
        values.is_some_and(|exact| {
            let (left, _) = self.beside(&Base { exact, bound: before.bound.clone() });
            1.0 - left / all < PARTIAL
        })
    }

    /// Whether a bound explains a difference, which must be a number: that of an infinite value is infinite too. Of a bound
    /// that is too wide nothing else is asked.
    fn within(&self, off: f64, bound: f64) -> bool {
        off.is_finite() && (self.suspect.allowed.is_some() || off <= bound)
    }

    /// How many elements are beyond what rounding explains beside that.
    pub fn beyond(&self, base: &Base) -> usize {
        let all = self.suspect.recorded.iter().zip(base.exact.iter().zip(&base.bound)).enumerate();
        all.filter(|(i, (x, (y, bound)))| self.suspect.looks_at(*i) && !((*x - *y).abs() <= **bound)).count()
    }

    /// The squared differences of what was recorded from what a mistake comes to, and whether bounds explain each.
    pub fn beside(&self, base: &Base) -> (f64, bool) {
        let (mut left, mut whole) = (0.0, true);
        let recorded = self.suspect.recorded.iter().enumerate();
        for (i, recorded) in recorded.filter(|(i, _)| self.suspect.looks_at(*i)) {
            let (exact, bound) = (base.exact[i], base.bound[i]);
            if *recorded == exact || recorded.is_nan() && exact.is_nan() {
                continue;
            }
            let off = (recorded - exact).abs();
            whole &= self.within(off, bound);
            left += if off.is_finite() { off.powi(2) } else { 0.0 };
        }
        (left, whole)
    }

    /// A digest of what the node comes to under a change, where it was looked at.
    pub fn digest(&self, change: &Change) -> u64 {
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
}

/// Whether a change makes a copy of a weight that is too large for a hypothesis.
pub fn is_too_large(args: &Args<'_, f64>, change: &Change) -> bool {
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
pub fn finite(value: f64) -> f64 {
    if value.is_finite() { value.abs() } else { 0.0 }
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

/// What `see` makes of a node of the suspect's graph under a change.
pub fn under<T>(
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
pub fn carried(change: &Change, args: &Args<'_, f64>, known: &[Option<Carried>]) -> Vec<Option<Carried>> {
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
