//! Mistakes in the gated feed-forward part.

use super::{Argument, Fault, Home, PLAIN, diagnose, named, when};
use crate::checkpoint::Kind;
use crate::model::graph::{Activation, Glu, Node, Op};
use parity_graph::weights;

const HOME: Home = Home::First(&[Kind::FfnAct]);

fn glu(node: &mut Node) -> Option<&mut Glu> {
    match &mut node.op {
        Op::Glu(glu) => Some(glu),
        _ => None,
    }
}

/// Gate for up and up for gate, in the weights or in what the activation reads.
pub fn swapped(node: &mut Node) -> Option<()> {
    if let Op::Glu(_) = node.op {
        node.inputs.swap(0, 1);
        return Some(());
    }
    let Op::Linear { weight, .. } = &mut node.op else { return None };
    let swapped = match node.checkpoint.kind() {
        Kind::FfnGate => weight.name.replace(weights::FFN_GATE, weights::FFN_UP),
        Kind::FfnUp => weight.name.replace(weights::FFN_UP, weights::FFN_GATE),
        _ => return None,
    };
    when(swapped != weight.name)?;
    weight.name = swapped;
    Some(())
}

/// Faults of `ffn_gate`, `ffn_up` and `ffn_act`.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "ffn.swapped",
        summary: "gate and up change places",
        place: "a fused gate/up tensor split in the wrong order, or w1 and w3 of Llama mixed up",
        fix: "gate is w1 (gate_proj), up is w3 (up_proj): silu(gate)·up",
        home: Home::All(&[Kind::FfnGate, Kind::FfnUp]),
        change: |_, node, _| swapped(node),
        guess: Some(diagnose::swapped),
        sentence: |_, node, _| {
            match node.checkpoint.kind() {
            Kind::FfnAct => "gate and up change places: silu(up)·gate".to_owned(),
            _ => {
                "gate and up are exchanged: ffn_gate holds the output of the up matmul, ffn_up that of the gate matmul".to_owned()
            }
        }
        },
        ..PLAIN
    },
    Fault {
        name: "ffn.gelu",
        summary: "GELU for SiLU",
        place: "the activation of another architecture (Gemma, GPT-2)",
        fix: "silu(x) = x / (1 + e^-x)",
        parameter: named("form"),
        home: HOME,
        change: |_, node, argument| {
            let Argument::Tensor(form) = argument else { return None };
            glu(node)?.activation = match form.as_str() {
                "tanh" => Activation::GeluTanh,
                "erf" => Activation::GeluErf,
                _ => return None,
            };
            Some(())
        },
        default: |_, _| Some(Argument::Tensor("tanh".to_owned())),
        guess: Some(diagnose::gelu),
        sentence: |_, _, argument| format!("GELU ({argument}) for SiLU"),
        ..PLAIN
    },
    Fault {
        name: "ffn.act_on_up",
        summary: "the activation is applied to up and not to gate",
        place: "the arguments of a fused SwiGLU kernel in the wrong order",
        fix: "silu(gate)·up",
        home: HOME,
        change: |_, node, _| {
            glu(node)?.swapped = true;
            Some(())
        },
        sentence: |_, _, _| "the activation is applied to up: gate·silu(up) for silu(gate)·up".to_owned(),
        ..PLAIN
    },
    Fault {
        name: "ffn.no_up",
        summary: "the gate is not multiplied by up",
        place: "the feed-forward part of a model without gating",
        fix: "silu(gate)·up",
        home: HOME,
        change: |_, node, _| {
            glu(node)?.gated = false;
            Some(())
        },
        sentence: |_, _, _| "the activated gate is not multiplied by up".to_owned(),
        ..PLAIN
    },
];
