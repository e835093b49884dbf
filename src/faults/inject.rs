//! Injects faults in a graph: `rope.base@3`, `rope.base=10000@0..2`, `data.zero@blk.3.v`, `norm.eps=1e-3`.

use std::str::FromStr;

use strsim::levenshtein;

use super::{Argument, Fault, Home, ParameterKind, Site, catalogue};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::graph::{Graph, Op};

/// A fault as a user writes it: `NAME[=ARGUMENT][@PLACE]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// E.g. `rope.base`.
    pub fault: String,
    /// What follows `=`.
    pub argument: Option<String>,
    /// What follows `@`.
    pub place: Place,
}

/// Where a fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In every layer, or at the model's ends where it belongs there.
    Everywhere,
    /// In the layers from the first up to and including the second, at the fault's home.
    Layers(u32, u32),
    /// In one node.
    Node(Checkpoint),
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Spec> {
        let (head, place) = text.split_once('@').map_or((text, None), |(head, place)| (head, Some(place)));
        let (fault, argument) =
            head.split_once('=').map_or((head, None), |(fault, argument)| (fault, Some(argument.to_owned())));
        let place = place.map_or(Ok(Place::Everywhere), |place| parse_place(text, place))?;
        Ok(Spec { fault: fault.trim().to_owned(), argument, place })
    }
}

/// A checkpoint of the hand-written graphs: any other word is a name, and no place in them.
fn fixed(text: &str) -> Option<Checkpoint> {
    text.parse().ok().filter(|checkpoint: &Checkpoint| checkpoint.kind().is_fixed())
}

/// `3` or `0..3`: the first and the last layer.
pub(super) fn layers(place: &str) -> Option<(u32, u32)> {
    match place.split_once("..") {
        Some((first, last)) => first.parse().ok().zip(last.trim_start_matches('=').parse().ok()),
        None => place.parse().ok().map(|layer| (layer, layer)),
    }
}

fn parse_place(text: &str, place: &str) -> Result<Place> {
    if let Some((first, last)) = layers(place) {
        return Ok(Place::Layers(first, last));
    }
    fixed(place).map(Place::Node).ok_or_else(|| {
        Error::new(text, "the place after `@` is not understood")
            .expected("a layer (3), layers (0..3) or a checkpoint (blk.3.q_rope)")
            .found(place)
            .hint("parity faults lists the catalogue")
    })
}

/// A fault that has been injected.
#[derive(Clone, Debug, PartialEq)]
pub struct Injected {
    /// Its name.
    pub fault: &'static str,
    /// Its parameter in the first of the nodes.
    pub argument: Argument,
    /// The nodes whose outputs are now wrong where their inputs are right, in execution order. Where
    /// neither scores nor probabilities are recorded, attention is one node.
    pub nodes: Vec<Checkpoint>,
    /// What a report should say of the first of the nodes.
    pub sentence: String,
}

/// Injects all `specs` in `graph`, which is the model's own or a part of it.
///
/// # Errors
/// A fault that is not in the catalogue, an argument that it cannot take, a layer that the model lacks, a
/// node that has no place for it.
pub fn inject(graph: &mut Graph, specs: &[Spec], model: &Model) -> Result<Vec<Injected>> {
    specs.iter().map(|spec| inject_one(graph, spec, model)).collect()
}

fn inject_one(graph: &mut Graph, spec: &Spec, model: &Model) -> Result<Injected> {
    let fault = catalogue::find(&spec.fault).ok_or_else(|| unknown(&spec.fault))?;
    let site = Site { model };
    let given = spec.argument.as_deref().map(|text| parse_argument(fault, text)).transpose()?;
    let mut injected: Vec<(Checkpoint, Argument, String)> = Vec::new();
    let mut unchanged = None;
    for group in groups(fault, spec, &site)? {
        for checkpoint in group {
            let healthy = model.graph.node(checkpoint);
            let Some((node, healthy)) = graph.node_mut(checkpoint).zip(healthy) else { continue };
            let argument = given.clone().or_else(|| (fault.default)(&site, healthy));
            let mut changed = node.clone();
            let Some(argument) = argument.filter(|a| (fault.change)(&site, &mut changed, a).is_some()) else {
                continue;
            };
            if changed == *node {
                unchanged = unchanged.or(Some(checkpoint));
                continue;
            }
            *node = changed;
            injected.push((checkpoint, argument.clone(), (fault.sentence)(&site, healthy, &argument)));
            if matches!(fault.home, Home::First(_)) {
                break;
            }
        }
    }
    let Some((_, argument, sentence)) = injected.first().cloned() else {
        return Err(match unchanged {
            Some(checkpoint) => no_mistake(spec, checkpoint),
            None => not_applicable(fault, spec, graph),
        });
    };
    let mut nodes: Vec<Checkpoint> = injected.into_iter().map(|(checkpoint, ..)| checkpoint).collect();
    // Whoever records the attention matrices sees the fault there; everyone else sees it in the context.
    nodes.retain(|checkpoint| !checkpoint.kind().is_optional());
    let places = model.graph.places();
    nodes.sort_by_key(|checkpoint| places.get(checkpoint).copied());
    Ok(Injected { fault: fault.name, argument, nodes, sentence })
}

/// The nodes to try, in groups of which a [`Home::First`] changes one each.
fn groups(fault: &Fault, spec: &Spec, site: &Site<'_>) -> Result<Vec<Vec<Checkpoint>>> {
    let kinds = fault.home.kinds();
    let outside: Vec<Checkpoint> =
        kinds.iter().filter(|kind| !kind.in_layer()).map(|kind| Checkpoint::global(*kind)).collect();
    let in_layer = |layer: u32| -> Vec<Checkpoint> {
        let kinds = kinds.iter().filter(|kind| kind.in_layer());
        kinds.map(|kind| Checkpoint::layer(*kind, layer)).collect()
    };
    let layers = site.layers();
    match spec.place {
        Place::Everywhere => {
            let mut groups: Vec<Vec<Checkpoint>> = (0..layers).map(in_layer).collect();
            groups.push(outside);
            Ok(groups)
        }
        Place::Layers(first, last) if first <= last && last < layers => {
            if kinds.iter().all(|kind| !kind.in_layer()) {
                return Err(Error::new(fault.name, "the fault sits outside the layers")
                    .expected(format!("`{}` without a layer", fault.name))
                    .found(format!("layer {first}")));
            }
            Ok((first..=last).map(in_layer).collect())
        }
        Place::Layers(first, last) => Err(Error::new(fault.name, "the model has no such layer")
            .expected(format!("layers 0 to {}", layers.saturating_sub(1)))
            .found(if first == last { first.to_string() } else { format!("{first}..{last}") })),
        Place::Node(checkpoint) => Ok(node_group(fault, checkpoint)),
    }
}

/// One node; an attention as a whole where the fault is one of attention.
fn node_group(fault: &Fault, checkpoint: Checkpoint) -> Vec<Vec<Checkpoint>> {
    let kinds = fault.home.kinds();
    let whole = matches!(fault.home, Home::All(_))
        && kinds.contains(&Kind::AttnScores)
        && kinds.contains(&checkpoint.kind());
    match whole {
        true => vec![kinds.iter().map(|kind| checkpoint.sibling(*kind)).collect()],
        false => vec![vec![checkpoint]],
    }
}

fn parse_argument(fault: &Fault, text: &str) -> Result<Argument> {
    let wrong = |expected: &str| {
        Error::new(fault.name, "the argument after `=` is not understood").expected(expected).found(text)
    };
    let Some(parameter) = fault.parameter else {
        return Err(wrong("no argument"));
    };
    let number = || text.parse::<f64>().ok().filter(|number| number.is_finite());
    match parameter.kind {
        ParameterKind::Number => {
            number().map(Argument::Number).ok_or_else(|| wrong(&format!("{}: a number", parameter.name)))
        }
        ParameterKind::Integer => number()
            .filter(|number| number.fract() == 0.0 && number.abs() <= f64::from(i32::MAX))
            .map(Argument::Number)
            .ok_or_else(|| wrong(&format!("{}: a whole number of 32 bits", parameter.name))),
        ParameterKind::Name if text.is_empty() => Err(wrong(&format!("{}: a name", parameter.name))),
        ParameterKind::Name => {
            Ok(fixed(text).map_or_else(|| Argument::Tensor(text.to_owned()), Argument::Checkpoint))
        }
    }
}

/// Names of the catalogue that are shown where a name is unknown.
const SUGGESTIONS: usize = 3;

fn unknown(name: &str) -> Error {
    let mut near: Vec<(usize, &str)> =
        catalogue::all().map(|fault| (levenshtein(name, fault.name), fault.name)).collect();
    near.sort_unstable();
    let names: Vec<&str> = near.iter().take(SUGGESTIONS).map(|(_, name)| *name).collect();
    Error::new(name, "is not in the catalogue of faults")
        .expected(format!("e.g. {}", names.join(", ")))
        .hint("parity faults lists the catalogue")
}

fn no_mistake(spec: &Spec, checkpoint: Checkpoint) -> Error {
    let error = Error::new(&spec.fault, format!("would change nothing: {checkpoint} is so already"));
    let error = error.expected("a value that differs from the model's own");
    match &spec.argument {
        Some(argument) => error.found(argument),
        None => error.found("the same mistake twice, or one that this model cannot show"),
    }
}

fn not_applicable(fault: &Fault, spec: &Spec, graph: &Graph) -> Error {
    let place = match spec.place {
        Place::Everywhere => "this model".to_owned(),
        Place::Layers(first, last) if first == last => format!("layer {first} of this model"),
        Place::Layers(first, last) => format!("layers {first} to {last} of this model"),
        Place::Node(checkpoint) if graph.node(checkpoint).is_none() => {
            return Error::new(checkpoint, "the model has no such node, or the run ends before it")
                .hint("parity inspect MODEL lists what a model has");
        }
        Place::Node(checkpoint) => checkpoint.to_string(),
    };
    let mut error = Error::new(fault.name, format!("{place} has no place for the fault"));
    if let Some(argument) = &spec.argument {
        error = error.found(format!("the argument {argument}"));
    }
    let has_bias = graph.nodes.iter().any(|node| matches!(&node.op, Op::Bias { bias: Some(_), .. }));
    if fault.name.contains("bias") && !has_bias {
        error = error.found("a model without biases");
    }
    error.expected(fault.summary).hint("parity faults says where each fault sits")
}
