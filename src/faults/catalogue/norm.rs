//! Mistakes in RMS norm.

use super::linear::{in_layer, same_shape};
use super::residual::sources;
use super::{Argument, Fault, Home, PLAIN, diagnose, integer, named, number, weight_name, when};
use crate::checkpoint::Kind;
use crate::faults::spell;
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
        guess: Some(diagnose::eps),
        sentence: |_, node, argument| {
            let Op::Norm(norm) = &node.op else { return String::new() };
            format!("the norm's eps is {argument}, the model says {}", spell(f64::from(norm.eps as f32)))
        },
    },
    Fault {
        name: "norm.none",
        summary: "the norm is left out: its input is passed on",
        place: "a norm whose result is written to a buffer that nobody reads, or a module replaced by the identity",
        fix: "feed what follows the normalised row",
        home: HOME,
        change: |_, node, _| {
            norm(node)?;
            // A bias that a model lacks is a copy.
            node.op = Op::Bias { bias: None, times: 0 };
            Some(())
        },
        sentence: |_, node, _| {
            let source = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("the norm is left out: {source} is passed on")
        },
        ..PLAIN
    },
    Fault {
        name: "norm.no_weight",
        summary: "the norm's weight is left out",
        place: "a norm kernel that takes the weight as optional, or a weight that was not found by name",
        fix: "multiply the normalised row by the weight",
        home: HOME,
        change: |_, node, _| style(node, NormStyle { times: 0, ..NormStyle::RMS }),
        sentence: |_, node, _| format!("{} is left out", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.weight_twice",
        summary: "the norm's weight is multiplied in twice",
        place: "the weight folded into the next matrix, or multiplied by the kernel and by its caller",
        fix: "multiply by the weight once",
        home: HOME,
        change: |_, node, _| style(node, NormStyle { times: 2, ..NormStyle::RMS }),
        sentence: |_, node, _| format!("{} is multiplied in twice", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.layernorm",
        summary: "LayerNorm for RMS norm: the mean is subtracted first",
        place: "a framework's layer_norm called where the model has RMS norm",
        fix: "divide by the root of the mean square; subtract nothing",
        home: HOME,
        change: |_, node, _| style(node, NormStyle { centred: true, ..NormStyle::RMS }),
        sentence: |_, _, _| "LayerNorm for RMS norm: the row's mean is subtracted first".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "norm.unit_offset",
        summary: "1 + w for w, as in Gemma checkpoints",
        place: "a norm shared with Gemma; GGUF files of Gemma already contain 1 + w",
        fix: "multiply by the weight as it is stored",
        home: HOME,
        change: |_, node, _| style(node, NormStyle { offset: 1.0, ..NormStyle::RMS }),
        sentence: |_, node, _| format!("1 + {0} is multiplied in for {0}", weight_name(node)),
        ..PLAIN
    },
    Fault {
        name: "norm.wrong_layer",
        summary: "the norm's weight of another layer is used",
        place: "a loop over layers that is off by one, or names matched by prefix (blk.1 and blk.10)",
        fix: "take the tensor of the node's own layer",
        parameter: integer("layer"),
        home: HOME,
        change: |site, node, argument| {
            let layer = argument.integer()?;
            let norm = norm(node)?;
            let other = in_layer(&norm.weight.name, layer)?;
            when(site.shape(&other)? == site.shape(&norm.weight.name)?)?;
            norm.weight.name = other;
            Some(())
        },
        default: |site, node| {
            let layer = node.checkpoint.layer_index()?;
            when(site.layers() > 1)?;
            Some(Argument::Number(f64::from(layer.checked_sub(1).unwrap_or(1))))
        },
        guess: Some(diagnose::layers),
        sentence: |_, node, argument| {
            let other = argument.integer().and_then(|layer| in_layer(weight_name(node), layer));
            format!("{} is used in place of {}", other.unwrap_or_default(), weight_name(node))
        },
        ..PLAIN
    },
    Fault {
        name: "norm.wrong_weight",
        summary: "the weight of another norm is used",
        place: "attn_norm and ffn_norm (input_layernorm, post_attention_layernorm) mixed up",
        fix: "attn_norm is input_layernorm, ffn_norm is post_attention_layernorm",
        parameter: named("tensor"),
        home: HOME,
        change: |site, node, argument| {
            let Argument::Tensor(other) = argument else { return None };
            let norm = norm(node)?;
            when(*other != norm.weight.name && site.shape(other)? == site.shape(&norm.weight.name)?)?;
            norm.weight.name.clone_from(other);
            Some(())
        },
        default: |site, node| {
            when(matches!(node.op, Op::Norm(_)))?;
            same_shape(site, node).into_iter().find(|name| name.contains("norm")).map(Argument::Tensor)
        },
        guess: Some(diagnose::weights),
        sentence: |_, node, argument| format!("{argument} is used in place of {}", weight_name(node)),
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
            when(source != own)?;
            *own = *source;
            Some(())
        },
        default: |site, node| {
            when(matches!(node.op, Op::Norm(_)))?;
            sources(site, node).first().copied().map(Argument::Checkpoint)
        },
        guess: Some(diagnose::sources),
        sentence: |_, node, argument| {
            let own = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!("the norm reads {argument} in place of {own}")
        },
        ..PLAIN
    },
];
