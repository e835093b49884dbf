//! Mistakes in the residual sums.

use super::{Argument, Fault, Home, PLAIN, Site, diagnose, named, when};
use crate::checkpoint::{Checkpoint, Kind};
use crate::model::graph::{Node, Op};

const HOME: Home = Home::First(&[Kind::AttnResidual]);

/// The checkpoint that a layer reads.
pub fn layer_input(layer: u32) -> Checkpoint {
    match layer.checked_sub(1) {
        Some(previous) => Checkpoint::layer(Kind::LayerOut, previous),
        None => Checkpoint::global(Kind::Embed),
    }
}

fn scale(node: &mut Node, factors: [f64; 2]) -> Option<()> {
    let Op::Add { scale } = &mut node.op else { return None };
    *scale = factors;
    Some(())
}

/// Rows of the model's width that a residual sum (or a norm) may take by mistake, the likeliest first.
pub fn sources(site: &Site<'_>, node: &Node) -> Vec<Checkpoint> {
    let Some(layer) = node.checkpoint.layer_index() else { return vec![] };
    let at = |kind| Checkpoint::layer(kind, layer);
    let likely = match node.checkpoint.kind() {
        Kind::AttnResidual => at(Kind::AttnNorm),
        Kind::LayerOut | Kind::FfnNorm => layer_input(layer),
        Kind::AttnNorm if layer > 0 => Checkpoint::layer(Kind::AttnResidual, layer - 1),
        _ => return vec![],
    };
    const WIDE: [Kind; 6] =
        [Kind::AttnNorm, Kind::AttnOut, Kind::AttnResidual, Kind::FfnNorm, Kind::FfnOut, Kind::LayerOut];
    let here = WIDE.map(at);
    let before = layer.checked_sub(1).map(|before| WIDE.map(|kind| Checkpoint::layer(kind, before)));
    let mut sources = vec![likely];
    sources.extend(here.into_iter().chain(before.into_iter().flatten()));
    sources.push(Checkpoint::global(Kind::Embed));
    let places = site.model.graph.places();
    let own = places.get(&node.checkpoint).copied().unwrap_or_default();
    let computed = |source: &Checkpoint| places.get(source).is_some_and(|place| *place < own);
    let mut seen: Vec<Checkpoint> = Vec::new();
    for source in sources {
        if computed(&source) && !node.inputs.contains(&source) && !seen.contains(&source) {
            seen.push(source);
        }
    }
    seen
}

/// Faults of `attn_residual` and `layer_out`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "residual.missing",
        summary: "the residual is not added: the output is the branch alone",
        place: "a sum that writes into the branch's buffer before it is filled",
        fix: "add the input of the branch to its output",
        home: HOME,
        change: |_, node, _| scale(node, [1.0, 0.0]),
        sentence: |_, node, _| {
            let residual = node.inputs.get(1).map_or(String::new(), ToString::to_string);
            format!("the residual {residual} is not added")
        },
        ..PLAIN
    },
    Fault {
        name: "residual.no_branch",
        summary: "the branch is not added: the output is the residual alone",
        place: "a branch whose result stays in a temporary",
        fix: "add the output of the branch to its input",
        home: HOME,
        change: |_, node, _| scale(node, [0.0, 1.0]),
        sentence: |_, node, _| {
            let branch = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("the branch {branch} is not added")
        },
        ..PLAIN
    },
    Fault {
        name: "residual.twice",
        summary: "the residual is added twice",
        place: "a kernel that fuses the sum into the matmul, and a sum after it",
        fix: "add the residual once",
        home: HOME,
        change: |_, node, _| scale(node, [1.0, 2.0]),
        sentence: |_, node, _| {
            let residual = node.inputs.get(1).map_or(String::new(), ToString::to_string);
            format!("the residual {residual} is added twice")
        },
        ..PLAIN
    },
    Fault {
        name: "residual.wrong_source",
        summary: "another row is added in place of the residual",
        place: "post-norm for pre-norm (the normalised row is added), or a buffer that was overwritten",
        fix: "keep the row before the norm and add that",
        parameter: named("checkpoint"),
        home: HOME,
        change: |_, node, argument| {
            let Argument::Checkpoint(source) = argument else { return None };
            when(matches!(node.op, Op::Add { .. }))?;
            let residual = node.inputs.get_mut(1)?;
            when(source != residual)?;
            *residual = *source;
            Some(())
        },
        default: |site, node| {
            when(matches!(node.op, Op::Add { .. }))?;
            sources(site, node).first().copied().map(Argument::Checkpoint)
        },
        guess: Some(diagnose::sources),
        sentence: |_, node, argument| {
            let residual = node.inputs.get(1).map_or(String::new(), ToString::to_string);
            format!("{argument} is added in place of {residual}")
        },
        ..PLAIN
    },
];
