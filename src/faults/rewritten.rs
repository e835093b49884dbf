//! A node computed with a mistake: injected into a machine, or tried on a node whose recorded output is wrong.

use std::hash::{DefaultHasher, Hash, Hasher};

use parity_graph::rewrite::{Change, Edit};
use parity_graph::{Graph, Id, Op, Params, fault};

use super::{between, catalogue, guessed, precision};
use crate::audit::recorded::{Held, Named, Names, Sight, Suspect, hypotheses, judge};
use crate::engine::machine::{Carried, Node, Number, Unknown, compute};
use crate::gguf::{DType, Gguf, TensorRef};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided, rule};
use crate::report::{Diagnosis, Tried};
use crate::scalar::Scalar;

/// What a rewrite reads besides the node's own sources.
pub enum Other<'a, S> {
    /// A weight of the model file.
    Weight(TensorRef<'a>),
    /// Values in the shape of the tensor that they stand for.
    Values(Vec<S>),
}

/// Memory that a rewritten node borrows from.
pub struct Scratch<S> {
    params: Params,
    values: Vec<S>,
}

impl<S> Default for Scratch<S> {
    fn default() -> Self {
        Scratch { params: Params::default(), values: Vec::new() }
    }
}

/// A node as a mistake makes it.
pub enum Rewritten<'a, S> {
    /// Computed by this rule from these sources, and edited then, if at all.
    Computed(&'static Rule, Args<'a, S>, Option<Edit>),
    /// Values that are passed on.
    Passed(Vec<S>),
}

impl<S: Number> Rewritten<'_, S> {
    /// What the node comes to.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn values(self) -> Result<Vec<S>, Unknown> {
        match self {
            Rewritten::Passed(values) => Ok(values),
            Rewritten::Computed(rule, args, edit) => {
                let mut values = compute(rule, &args)?;
                if let Some(edit) = edit {
                    edit_values(edit, args.shape[3], &mut values);
                }
                Ok(values)
            }
        }
    }
}

/// The node under a change; `None` where the change has no place in it.
pub fn rewrite<'a, S: Number>(
    op: &Op,
    args: &'a Args<'a, S>,
    change: &Change,
    other: Option<Other<'a, S>>,
    scratch: &'a mut Scratch<S>,
) -> Option<Rewritten<'a, S>> {
    let mut sources = args.sources.clone();
    scratch.params = *args.params;
    let (mut op, mut edited) = (op.clone(), None);
    match change {
        Change::Words(words) => set(&mut scratch.params, words),
        Change::Op(other, words) => {
            op = other.clone();
            set(&mut scratch.params, words);
        }
        Change::Source { slot, with } => {
            sources.resize(sources.len().max(slot + 1), None);
            sources[*slot] = match (with, other) {
                (None, _) => None,
                (Some(_), None) => return None,
                (Some(_), Some(Other::Weight(weight))) => {
                    Some(Source { dtype: weight.info.dtype, data: Data::Weight(weight) })
                }
                (Some(_), Some(Other::Values(values))) => {
                    let source = args.get(*slot)?;
                    (values.len() == source.shape().iter().product::<usize>()).then_some(())?;
                    scratch.values = values;
                    let values = Strided::whole(&scratch.values[..], source.shape());
                    Some(Source { dtype: source.dtype, data: Data::Values(values) })
                }
            };
        }
        Change::Exchange(a, b) => {
            sources.get(*a.max(b))?;
            sources.swap(*a, *b);
        }
        Change::SourceEdit { slot, edit } => {
            let source = args.get(*slot)?;
            let shape = source.shape();
            scratch.values = source.values().into_owned();
            edit_values(*edit, shape[3], &mut scratch.values);
            // An edited weight is held in the type of the weight.
            if source.dtype == DType::F32 {
                scratch.values.iter_mut().for_each(|value| *value = S::from_f64(f64::from(value.to_f32())));
            }
            let values = Strided::whole(&scratch.values[..], shape);
            sources[*slot] = Some(Source { dtype: source.dtype, data: Data::Values(values) });
        }
        Change::Bypass { slot } => {
            let source = args.get(*slot)?;
            let values = source.values().into_owned();
            return (values.len() == args.elements()).then_some(Rewritten::Passed(values));
        }
        Change::ResultEdit(edit) => edited = Some(*edit),
    }
    let Args { name, shape, dtype, arithmetic, tokens, .. } = *args;
    let args = Args { name, params: &scratch.params, sources, shape, dtype, arithmetic, tokens };
    Some(Rewritten::Computed(rule(&op)?, args, edited))
}

fn set(params: &mut Params, words: &[(usize, u32)]) {
    words.iter().for_each(|&(word, bits)| params.0[word] = bits);
}

/// Edits rows of `width` values.
fn edit_values<S: Scalar>(edit: Edit, width: usize, values: &mut [S]) {
    let mut edited: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
    edit.apply(width, &mut edited);
    values.iter_mut().zip(edited).for_each(|(value, edited)| *value = S::from_f64(edited));
}

/// A value that is passed on unchanged is rounded at most once.
const PASSED_ROUNDINGS: f64 = 1.0;
/// Share of the squared error that a mistake seen in the values alone has to account for.
const EXPLAINS_MIN: f64 = 0.9;

/// The mistakes that explain the output of a node, the more specific ones first, and where there are none what was
/// tried. A mistake in what the node is told or reads comes before one that is seen in the values alone.
pub fn diagnose(suspect: &Suspect<'_>) -> Names {
    let graph = &suspect.node.program.graph;
    let (mut found, mut tried) = (Vec::new(), Vec::new());
    for guess in [false, true] {
        let faults = match guess {
            false => fault::at(graph, suspect.node.id),
            true if found.is_empty() => guessed::guesses(suspect),
            true => Vec::new(),
        };
        for fault in faults {
            let Some(explained) = explained(suspect, &fault.rewrite.change) else { continue };
            let Explained { explains, left, whole } = explained;
            tried.push(Tried { fault: fault.name.to_owned(), explains });
            if whole {
                let values = digest(suspect, &fault.rewrite.change);
                found.push(Named { diagnosis: told(&fault, explains), left, values });
            }
        }
    }
    if found.is_empty() {
        found = precision::coarser(suspect);
    }
    if found.is_empty() {
        found = between::found(suspect);
        if !found.is_empty() {
            return Names { found, out_of_sight: true, ..Names::default() };
        }
        found.extend(of_the_values(suspect));
    }
    let tried = if found.is_empty() { super::nearest(tried) } else { Vec::new() };
    Names { found, tried, out_of_sight: false }
}

/// A mistake in words.
pub(super) fn told(fault: &fault::Fault, explains: f64) -> Diagnosis {
    let fix = catalogue::fix(fault.name).map(str::to_owned);
    Diagnosis { fault: fault.name.to_owned(), explains, text: fault.text.clone(), fix }
}

/// A digest of what the node comes to under a change, where it was looked at.
fn digest(suspect: &Suspect<'_>, change: &Change) -> u64 {
    let mut digest = DefaultHasher::new();
    let _ = with(suspect, change, |rewritten| {
        let values = rewritten.values().ok()?;
        for (_, value) in values.iter().enumerate().filter(|(i, _)| (suspect.sight.looked_at)(*i)) {
            // Zeros of both signs are one.
            (value + 0.0).to_bits().hash(&mut digest);
        }
        Some(())
    });
    digest.finish()
}

/// What `see` makes of the node under a change; `None` where the change has no place in it.
fn with<T>(
    suspect: &Suspect<'_>,
    change: &Change,
    see: impl FnOnce(Rewritten<'_, f64>) -> Option<T>,
) -> Option<T> {
    let Suspect { node, args, .. } = *suspect;
    under(suspect, node, args, change, see)
}

/// What `see` makes of a node of the suspect's graph under a change.
pub(super) fn under<T>(
    suspect: &Suspect<'_>,
    node: &Node<'_>,
    args: &Args<'_, f64>,
    change: &Change,
    see: impl FnOnce(Rewritten<'_, f64>) -> Option<T>,
) -> Option<T> {
    let other = match change {
        Change::Source { with: Some(id), .. } => {
            Some(other(&node.program.graph, suspect.gguf, *id, suspect.others)?)
        }
        _ => None,
    };
    let mut scratch = Scratch::default();
    see(rewrite(&node.program.graph.get(node.id).op, args, change, other, &mut scratch)?)
}

/// What a node comes to under a change of what it reads, `args`: all of its rows or some.
pub fn changed(suspect: &Suspect<'_>, args: &Args<'_, f64>, change: &Change) -> Option<Vec<f64>> {
    under(suspect, suspect.node, args, change, |rewritten| rewritten.values().ok())
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

fn explained(suspect: &Suspect<'_>, change: &Change) -> Option<Explained> {
    let Suspect { node, recorded, sight, .. } = *suspect;
    let carried = carried(change, sight.carried);
    let (left, whole) = with(suspect, change, |rewritten| match rewritten {
        Rewritten::Passed(values) => {
            let off = match change {
                Change::Bypass { slot } => carried.get(*slot).and_then(Option::as_ref),
                _ => None,
            };
            Some(passed(recorded, &values, sight.looked_at, off.map(|carried| &carried.error[..])))
        }
        Rewritten::Computed(rule, args, None) => {
            let sight = Sight { looked_at: sight.looked_at, carried: &carried, row: None };
            let backend = node.program.graph.get(node.id).backend.as_deref();
            let fits = |held: &Held| held.is_healthy() && held.nonfinite == 0;
            let held = judge(rule, &args, recorded, &sight, &hypotheses(&rule.op, backend, &args)).ok()?;
            let near = 1.0 - held.squares[0] / suspect.held.squares[0] >= EXPLAINS_MIN;
            // What is nearly right may be so in an arithmetic of the producer's own.
            let own = (near && !fits(&held)).then(|| judge(rule, &args, recorded, &sight, suspect.tried));
            let held = own.and_then(Result::ok).filter(fits).unwrap_or(held);
            Some((held.squares[0], fits(&held)))
        }
        Rewritten::Computed(_, _, Some(_)) => None,
    })?;
    let explains = match suspect.held.squares[0] {
        all if all > 0.0 => 1.0 - left / all,
        // Nothing but NaN and Inf where there should be none, or none where there should be.
        _ if whole => 1.0,
        _ => 0.0,
    };
    Some(Explained { explains, left, whole })
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
    let (mut left, mut whole) = (0.0, true);
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

/// How far sources that were computed again may be off, where a change reads them too; nothing where that is not known.
pub(super) fn carried(change: &Change, carried: &[Option<Carried>]) -> Vec<Option<Carried>> {
    let mut carried = carried.to_vec();
    match change {
        Change::Exchange(a, b) => {
            carried.resize(carried.len().max(a.max(b) + 1), None);
            carried.swap(*a, *b);
        }
        Change::SourceEdit {
            edit: Edit::Add(_) | Edit::AddModulo(..) | Edit::Exchange(..) | Edit::Replace(..),
            ..
        } => {}
        Change::SourceEdit { slot, edit: Edit::Multiply(factor) } => {
            if let Some(Some(carried)) = carried.get_mut(*slot) {
                carried.error.iter_mut().for_each(|error| *error *= f64::from(factor.abs()));
            }
        }
        Change::Source { slot, .. } | Change::SourceEdit { slot, .. } => {
            carried.get_mut(*slot).into_iter().for_each(|carried| *carried = None);
        }
        Change::Words(_) | Change::Op(..) | Change::Bypass { .. } | Change::ResultEdit(_) => {}
    }
    carried
}

/// A tensor of the same graph that a node does not read; `others` has the values of what is no weight.
pub fn other<'a, S>(
    graph: &Graph,
    gguf: &'a Gguf,
    id: Id,
    others: &dyn Fn(Id) -> Option<Vec<S>>,
) -> Option<Other<'a, S>> {
    let origin = graph.origin(id);
    if let Some(weight) = gguf.tensor(&graph.get(origin).name) {
        return (origin == id).then_some(Other::Weight(weight));
    }
    let same = graph.get(origin).elements() == graph.get(id).elements();
    others(origin).filter(|_| same).map(Other::Values)
}

/// Mistakes that are seen in the values alone, whatever the node computes.
fn of_the_values(suspect: &Suspect<'_>) -> Option<Named> {
    let Suspect { args, recorded, sight, held, .. } = *suspect;
    let exact = compute::<f64>(suspect.node.rule?, args).ok()?;
    let seen = || {
        recorded.iter().zip(&exact).enumerate().filter(|(i, _)| (sight.looked_at)(*i)).map(|(_, pair)| pair)
    };
    let all = held.squares[0];
    let diagnosis = |fault: &str, left: f64, text: String| {
        let explains = 1.0 - left / all;
        let diagnosis = Diagnosis { fault: fault.to_owned(), explains, text, fix: None };
        Some(Named { diagnosis, left, values: 0 })
    };
    // Where exact arithmetic gives nearly nothing zeros say nothing.
    let [_, exact_square, bound_square] = held.squares;
    if exact_square > bound_square && seen().all(|(recorded, _)| *recorded == 0.0) {
        return diagnosis("data.zero", 0.0, "the output is all zeros: it was not written".to_owned());
    }
    let (along, square) = seen().fold((0.0, 0.0), |(a, s), (r, e)| (a + r * e, s + e * e));
    let factor = along / square;
    let left: f64 = seen().map(|(r, e)| (r - factor * e).powi(2)).sum();
    // What is left of the error is what rounding leaves of it.
    let rounding = held.squares[2] * factor * factor;
    let explains = 1.0 - left / held.squares[0];
    if !(left <= rounding) || !(explains >= EXPLAINS_MIN) || !factor.is_finite() {
        return None;
    }
    match factor {
        -1.0 => diagnosis("data.sign", left, "the sign is wrong".to_owned()),
        factor => diagnosis("data.scaled", left, format!("everything is {factor} times too large")),
    }
}
