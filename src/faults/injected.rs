//! Mistakes injected into graphs: `moe.top_k@blk.1.ffn_moe_out`, `rope.base=10000@0..2`.
//!
//! What a mistake changes is in `parity_graph::fault`; here are the nodes that one is made in.

use parity_graph::Id;
use parity_graph::fault::{Argument, Fault, Place, Scene, Wanted, at_node, find};

use crate::audit::Labelled;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};

/// A mistake as a user writes it.
///
/// # Errors
/// Says what is not understood.
pub fn parse(text: &str) -> Result<Wanted> {
    text.parse().map_err(|why: String| {
        Error::new(text, format!("is no mistake: {why}"))
            .expected("FAULT[=VALUE][@LAYER|@A..B|@CHECKPOINT], as in rope.base=10000@0..2")
            .hint("parity faults lists them, and parity faults --of DUMP those at each node of a recording")
    })
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

/// The mistakes of a graph, by node, in order; several may be in one.
pub fn injected(labelled: &Labelled, specs: &[Wanted]) -> Vec<Injected> {
    let mut out: Vec<Injected> = Vec::new();
    if specs.is_empty() {
        return out;
    }
    let scene = Scene::new(&labelled.program.graph);
    for (id, checkpoint) in labelled.nodes() {
        for (spec, wanted) in specs.iter().enumerate().filter(|(_, spec)| spec.is_at(checkpoint)) {
            let Some(fault) = wanted.find(&scene, id) else { continue };
            out.push(Injected { spec, checkpoint, fault });
        }
    }
    out
}

/// Refuses a mistake that no node of any graph has a place for.
///
/// # Errors
/// Says which ones the graphs have.
pub fn refuse_uninjected<'a>(
    specs: &[Wanted],
    graphs: impl Iterator<Item = &'a Labelled> + Clone,
    injected: &[&Injected],
) -> Result<()> {
    let missing = specs.iter().enumerate().find(|(i, _)| !injected.iter().any(|one| one.spec == *i));
    let Some((_, spec)) = missing else { return Ok(()) };
    let error = Error::new(spec, "no node of this graph has a place for the mistake")
        .hint("parity faults lists the mistakes, parity inspect DUMP the nodes of a recording");
    let scenes: Vec<(&Labelled, Scene<'_>)> =
        graphs.map(|labelled| (labelled, Scene::new(&labelled.program.graph))).collect();
    let nodes =
        || scenes.iter().flat_map(|(labelled, scene)| labelled.nodes().map(move |(id, at)| (scene, id, at)));
    let entry = find(&spec.fault);
    let summary = entry.map_or("", |entry| entry.summary);
    let fits = |&(scene, id, _): &(&Scene<'_>, Id, Checkpoint)| {
        entry.is_some_and(|entry| !entry.all_at(scene, id).is_empty())
    };
    let here = nodes().filter(|(.., at)| spec.is_at(*at)).find(fits);
    if let Some((.., at)) = here.filter(|_| spec.argument != Argument::None) {
        let why = format!("the value {}, which {at} has already or cannot take", spec.argument);
        return Err(error.expected(summary).found(why));
    }
    let layers = nodes().filter_map(|(.., at)| at.layer_index()).max();
    match (&spec.place, layers) {
        (Place::Layers(first, last), Some(layers)) if first > last || *last > layers => {
            return Err(error.expected(format!("layers 0 to {layers}")).found(format!("{first}..{last}")));
        }
        (Place::Node(at), _) => {
            let here = || nodes().filter(|(.., known)| known.to_string() == *at);
            let mut names: Vec<&str> =
                here().flat_map(|(scene, id, _)| at_node(scene, id)).map(|fault| fault.name).collect();
            names.dedup();
            if here().next().is_none() {
                return Err(error.found(format!("{at}, which the graph has not")));
            }
            return Err(error.expected(format!("one of {}", names.join(", "))));
        }
        _ => {}
    }
    Err(match nodes().find(fits) {
        Some((.., first)) => error.expected(format!("{summary}: e.g. {}@{first}", spec.fault)),
        None => error.expected(summary),
    })
}
