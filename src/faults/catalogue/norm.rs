//! Mistakes in RMS norm.

use super::{Argument, Fault, Home, PLAIN, named, number, weight_name};
use crate::checkpoint::{Checkpoint, Kind};
use crate::faults::{Site, spell};
use crate::model::graph::{Node, Norm, NormStyle, Op};

const HOME: Home = Home::First(&[Kind::AttnNorm]);

fn norm(node: &mut Node) -> Option<&mut Norm> {
    match &mut node.op {
        Op::Norm(norm) => Some(norm),
        _ => None,
    }
}

fn style(node: &mut Node, style: NormStyle) -> Option<()> {
    norm(node)?.style = style;
    Some(())
}

/// What a norm might read by mistake: the input of its layer in place of the attention residual.
fn other_source(site: &Site<'_>, node: &Node) -> Option<Argument> {
    let layer = node.checkpoint.layer_index()?;
    let source = match node.checkpoint.kind() {
        Kind::FfnNorm => super::residual::layer_input(layer),
        Kind::AttnNorm if layer > 0 => Checkpoint::layer(Kind::AttnResidual, layer - 1),
        _ => return None,
    };
    site.model.graph.node(source).map(|_| Argument::Checkpoint(source))
}

/// Faults of `attn_norm`, `q_norm`, `k_norm`, `ffn_norm` and `final_norm`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "norm.eps",
        summary: "another epsilon than the model's",
        place: "a constant in the code where the file has attention.layer_norm_rms_epsilon",
        fix: "read {arch}.attention.layer_norm_rms_epsilon from the file",
        parameter: number("eps"),
        home: HOME,
        silent: Some(
            "where the mean square of the input is above about 1e6 times the difference of the epsilons",
        ),
        change: |_, node, argument| {
            let eps = argument.number().filter(|eps| *eps >= 0.0)?;
            norm(node)?.eps = eps;
            Some(())
        },
        default: |_, node| match &node.op {
            Op::Norm(norm) if norm.eps < 5e-6 => Some(Argument::Number(1e-5)),
            Op::Norm(_) => Some(Argument::Number(1e-6)),
            _ => None,
        },
        sentence: |_, node, argument| {
            let Op::Norm(norm) = &node.op else { return String::new() };
            format!("the norm's eps is {argument}, the model says {}", spell(f64::from(norm.eps as f32)))
        },
    },
    Fault {
        name: "norm.no_weight",
        summary: "the norm's weight is left out",
        place: "a norm kernel that takes the weight as optional, or a weight that was not found by name",
        fix: "multiply the normalised row by the weight",
        home: HOME,
        change: |_, node, _| style(node, NormStyle::NoWeight),
        sentence: |_, node, _| format!("{} is left out", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.weight_twice",
        summary: "the norm's weight is multiplied in twice",
        place: "the weight folded into the next matrix, or multiplied by the kernel and by its caller",
        fix: "multiply by the weight once",
        home: HOME,
        change: |_, node, _| style(node, NormStyle::WeightTwice),
        sentence: |_, node, _| format!("{} is multiplied in twice", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.layernorm",
        summary: "LayerNorm for RMS norm: the mean is subtracted first",
        place: "a framework's layer_norm called where the model has RMS norm",
        fix: "divide by the root of the mean square; subtract nothing",
        home: HOME,
        change: |_, node, _| style(node, NormStyle::LayerNorm),
        sentence: |_, _, _| "LayerNorm for RMS norm: the row's mean is subtracted first".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "norm.unit_offset",
        summary: "1 + w for w, as in Gemma checkpoints",
        place: "a norm shared with Gemma; GGUF files of Gemma already contain 1 + w",
        fix: "multiply by the weight as it is stored",
        home: HOME,
        change: |_, node, _| style(node, NormStyle::UnitOffset),
        sentence: |_, node, _| format!("1 + {0} is multiplied in for {0}", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.wrong_source",
        summary: "the norm reads another row of the residual stream than it should",
        place: "parallel attention and feed-forward as in GPT-J, or the attention branch not yet added",
        fix: "feed ffn_norm the sum of the layer's input and the attention branch",
        parameter: named("checkpoint"),
        home: Home::First(&[Kind::FfnNorm]),
        change: |_, node, argument| {
            let Argument::Checkpoint(source) = argument else { return None };
            norm(node)?;
            let own = node.inputs.first_mut()?;
            super::when(source != own)?;
            *own = *source;
            Some(())
        },
        default: other_source,
        sentence: |_, node, argument| {
            let own = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("the norm reads {argument} in place of {own}")
        },
        ..PLAIN
    },
];
