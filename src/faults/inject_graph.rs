//! Mistakes injected into graphs that the machine executes: `moe.top_k@blk.1.ffn_moe_out`, `rope.base#1@0..2`.
//!
//! What a mistake changes is in `parity_graph::fault`; here are the nodes that one is made in.

use std::str::FromStr;

use parity_graph::Id;
use parity_graph::fault::{self, Fault};
use strsim::levenshtein;

use super::inject::layers;
use crate::audit::recorded::Labelled;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};

/// A mistake as a user writes it: `FAULT[#N][@PLACE]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Its name in the catalogue.
    fault: String,
    /// Which of a node's mistakes of that name, counted from 0.
    variant: usize,
    /// What follows `@`.
    place: Place,
    text: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Place {
    /// Every node that has a place for it.
    Everywhere,
    /// Those of the layers from the first up to and including the second.
    Layers(u32, u32),
    /// One node.
    Node(String),
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Spec> {
        let wrong = |expected: &str| {
            Error::new(text, "is no mistake in a graph").expected(expected).hint(
                "parity faults lists them, and parity faults --of DUMP those at each node of a recording",
            )
        };
        let (head, place) = text.split_once('@').map_or((text, None), |(head, place)| (head, Some(place)));
        if head.contains('=') {
            return Err(wrong(
                "a name without a value, as in rope.base#1@blk.3.q_rope: variants are counted",
            ));
        }
        let (fault, variant) = match head.split_once('#') {
            Some((fault, variant)) => {
                (fault, variant.parse().map_err(|_| wrong("a number after `#`, as in rope.base#1"))?)
            }
            None => (head, 0),
        };
        let place = match place {
            None => Place::Everywhere,
            Some("") => return Err(wrong("a layer or a checkpoint after `@`")),
            Some(place) => layers(place)
                .map_or_else(|| Place::Node(place.to_owned()), |(first, last)| Place::Layers(first, last)),
        };
        Ok(Spec { fault: fault.trim().to_owned(), variant, place, text: text.to_owned() })
    }
}

impl Spec {
    /// Whether it is made in this node.
    fn is_at(&self, checkpoint: Checkpoint) -> bool {
        match &self.place {
            Place::Everywhere => true,
            Place::Layers(first, last) => {
                checkpoint.layer_index().is_some_and(|layer| (*first..=*last).contains(&layer))
            }
            Place::Node(id) => checkpoint.to_string() == *id,
        }
    }
}

/// A node of a graph, and the mistake in it.
pub struct Injected {
    /// Which of the specs it is of.
    pub spec: usize,
    /// The node.
    pub checkpoint: Checkpoint,
    /// What is wrong.
    pub fault: Fault,
}

/// The mistakes of a graph, by node, in order.
///
/// # Errors
/// Two at one node.
pub fn injected(labelled: &Labelled, specs: &[Spec]) -> Result<Vec<Injected>> {
    let mut out: Vec<Injected> = Vec::new();
    if specs.is_empty() {
        return Ok(out);
    }
    for (id, checkpoint) in labelled.nodes() {
        for (spec, wanted) in specs.iter().enumerate().filter(|(_, spec)| spec.is_at(checkpoint)) {
            let Some(fault) = find(labelled, id, wanted) else { continue };
            if let Some(other) = out.last().filter(|other| other.checkpoint == checkpoint) {
                return Err(Error::new(&wanted.text, "a second mistake in one node")
                    .expected("one mistake in each node")
                    .found(format!("{} in {checkpoint} as well", other.fault.name)));
            }
            out.push(Injected { spec, checkpoint, fault });
        }
    }
    Ok(out)
}

fn find(labelled: &Labelled, id: Id, wanted: &Spec) -> Option<Fault> {
    let faults = fault::at(&labelled.program.graph, id).into_iter();
    faults.filter(|fault| fault.name == wanted.fault).nth(wanted.variant)
}

/// Names that are shown where one is unknown, and nodes where one has no place for it.
const SUGGESTIONS: usize = 3;

/// Refuses a mistake that no node of any graph has a place for.
///
/// # Errors
/// Says which ones the graphs have.
pub fn refuse_uninjected<'a>(
    specs: &[Spec],
    graphs: impl Iterator<Item = &'a Labelled> + Clone,
    injected: &[&Injected],
) -> Result<()> {
    let missing = specs.iter().enumerate().find(|(i, _)| !injected.iter().any(|one| one.spec == *i));
    let Some((_, spec)) = missing else { return Ok(()) };
    let nodes =
        || graphs.clone().flat_map(|labelled| labelled.nodes().map(move |(id, at)| (labelled, id, at)));
    let mistakes = |(labelled, id, _): (&'a Labelled, Id, Checkpoint)| fault::at(&labelled.program.graph, id);
    let error = Error::new(&spec.text, "no node of this graph has a place for the mistake")
        .hint("parity faults lists the mistakes, parity inspect DUMP the nodes of a recording");
    if let Place::Node(at) = &spec.place {
        let here = nodes().filter(|(.., known)| known.to_string() == *at);
        let mut names: Vec<&str> = here.flat_map(mistakes).map(|fault| fault.name).collect();
        names.dedup();
        if !names.is_empty() {
            return Err(error.expected(format!("one of {}", names.join(", "))));
        }
    }
    let places = nodes().filter(|(labelled, id, _)| find(labelled, *id, spec).is_some());
    if let Some((.., first)) = places.take(1).last() {
        return Err(error.expected(format!("e.g. {}@{first}", spec.fault)));
    }
    let mut near: Vec<(usize, &str)> =
        nodes().flat_map(mistakes).map(|fault| (levenshtein(&spec.fault, fault.name), fault.name)).collect();
    near.sort_unstable();
    near.dedup();
    let near: Vec<&str> = near.into_iter().take(SUGGESTIONS).map(|(_, name)| name).collect();
    Err(error.expected(format!("e.g. {}", near.join(", "))))
}
