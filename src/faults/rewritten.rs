//! A node computed with a mistake: injected into a machine, or tried on a node whose recorded output is wrong.

use std::cmp::Ordering;

use parity_graph::rewrite::{Change, Edit};
use parity_graph::{Graph, Id, Op, Params, fault};

use crate::audit::recorded::{Sight, Suspect, hypotheses, judge};
use crate::gguf::{DType, TensorRef};
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided, rule};
use crate::report::{Diagnosis, Tried};
use crate::scalar::Scalar;

/// What a rewrite reads besides the node's own sources.
pub enum Other<'a> {
    /// A weight of the model file.
    Weight(TensorRef<'a>),
    /// Values in the shape of the tensor that they stand for.
    Values(Vec<f64>),
}

/// Memory that a rewritten node borrows from.
#[derive(Default)]
pub struct Scratch {
    params: Params,
    values: Vec<f64>,
}

/// A node as a mistake makes it.
pub enum Rewritten<'a> {
    /// Computed by this rule from these sources, and edited then, if at all.
    Computed(&'static Rule, Args<'a, f64>, Option<Edit>),
    /// Values that are passed on.
    Passed(Vec<f64>),
}

/// The node under a change; `None` where the change has no place in it.
pub fn rewrite<'a>(
    op: &Op,
    args: &'a Args<'a, f64>,
    change: &Change,
    other: Option<Other<'a>>,
    scratch: &'a mut Scratch,
) -> Option<Rewritten<'a>> {
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
            scratch.values = edit_values(*edit, shape[3], &source.values());
            // An edited weight is held in the type of the weight.
            if source.dtype == DType::F32 {
                scratch.values.iter_mut().for_each(|value| *value = f64::from(*value as f32));
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
    let Args { name, shape, dtype, arithmetic, .. } = *args;
    let args = Args { name, params: &scratch.params, sources, shape, dtype, arithmetic };
    Some(Rewritten::Computed(rule(&op)?, args, edited))
}

fn set(params: &mut Params, words: &[(usize, u32)]) {
    words.iter().for_each(|&(word, bits)| params.0[word] = bits);
}

/// Rows of `width` values, edited.
fn edit_values<S: Scalar>(edit: Edit, width: usize, values: &[S]) -> Vec<f64> {
    let mut edited: Vec<f64> = values.iter().map(|value| value.to_f64()).collect();
    edit.apply(width, &mut edited);
    edited
}

/// A value that is passed on unchanged is rounded at most once.
const PASSED_ROUNDINGS: f64 = 1.0;
/// Share of the squared error that a mistake seen in the values alone has to account for.
const EXPLAINS_MIN: f64 = 0.9;
/// Faults that a report lists where none explains the error.
const TRIED_MAX: usize = 8;

/// The mistakes that explain the output of a node, the likeliest first, and where there are none what was tried.
pub fn diagnose(suspect: &Suspect<'_>) -> (Vec<Diagnosis>, Vec<Tried>) {
    let graph = &suspect.node.program.graph;
    let (mut found, mut tried) = (Vec::new(), Vec::new());
    for fault in fault::at(graph, suspect.node.id) {
        let Some((explains, whole)) = explained(suspect, &fault.rewrite.change) else { continue };
        if whole {
            found.push(Diagnosis { fault: fault.name.to_owned(), explains, text: fault.text, fix: None });
        }
        tried.push(Tried { fault: fault.name.to_owned(), explains });
    }
    found.extend(of_the_values(suspect));
    if !found.is_empty() {
        return (found, Vec::new());
    }
    tried.sort_by(|a, b| b.explains.partial_cmp(&a.explains).unwrap_or(Ordering::Equal));
    tried.truncate(TRIED_MAX);
    (found, tried)
}

/// Share of the squared error that a mistake accounts for, and whether rounding explains the rest.
fn explained(suspect: &Suspect<'_>, change: &Change) -> Option<(f64, bool)> {
    let Suspect { node, args, recorded, sight, .. } = *suspect;
    let tensor = node.program.graph.get(node.id);
    let op = &tensor.op;
    let other = match change {
        Change::Source { with: Some(id), .. } => Some(other(suspect, *id)?),
        _ => None,
    };
    let mut scratch = Scratch::default();
    let (left, whole) = match rewrite(op, args, change, other, &mut scratch)? {
        Rewritten::Passed(values) => {
            let all = || recorded.iter().zip(&values).enumerate().filter(|(i, _)| (sight.looked_at)(*i));
            let unit = PASSED_ROUNDINGS * crate::ops::bound::UNIT_F32;
            let whole = all().all(|(_, (a, b))| a == b || (a - b).abs() <= unit * b.abs());
            (all().map(|(_, (a, b))| (a - b).powi(2)).sum(), whole)
        }
        Rewritten::Computed(rule, args, None) => {
            // What was carried through nodes that were not recorded is another node's business.
            let sight = Sight { looked_at: sight.looked_at, carried: &[] };
            let tried = hypotheses(&rule.op, tensor.backend.as_deref(), &args);
            let held = judge(rule, &args, recorded, &sight, &tried).ok()?;
            (held.squares[0], held.is_healthy())
        }
        Rewritten::Computed(_, _, Some(_)) => return None,
    };
    let all = suspect.held.squares[0];
    (all > 0.0).then(|| (1.0 - left / all, whole))
}

/// A tensor of the same graph that the node does not read.
fn other<'a>(suspect: &Suspect<'a>, id: Id) -> Option<Other<'a>> {
    let graph: &Graph = &suspect.node.program.graph;
    let leaf = graph.origin(id);
    if let Some(weight) = suspect.gguf.tensor(&graph.get(leaf).name) {
        return (leaf == id).then_some(Other::Weight(weight));
    }
    let same = graph.get(leaf).elements() == graph.get(id).elements();
    (suspect.leaf)(leaf).filter(|_| same).map(Other::Values)
}

/// Mistakes that are seen in the values alone, whatever the node computes.
fn of_the_values(suspect: &Suspect<'_>) -> Option<Diagnosis> {
    let Suspect { args, recorded, sight, held, .. } = *suspect;
    let exact = crate::engine::machine::compute::<f64>(suspect.node.rule?, args).ok()?;
    let seen = || {
        recorded.iter().zip(&exact).enumerate().filter(|(i, _)| (sight.looked_at)(*i)).map(|(_, pair)| pair)
    };
    let diagnosis = |fault: &str, explains: f64, text: String| {
        Some(Diagnosis { fault: fault.to_owned(), explains, text, fix: None })
    };
    if seen().all(|(recorded, _)| *recorded == 0.0) {
        return diagnosis("data.zero", 1.0, "the output is all zeros: it was not written".to_owned());
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
        -1.0 => diagnosis("data.sign", explains, "the sign is wrong".to_owned()),
        factor => diagnosis("data.scaled", explains, format!("everything is {factor} times too large")),
    }
}
