//! Gated activations and activations.

use super::site::made;
use super::{Argument, Entry, Made, PLAIN, Site, plain, when};
use crate::op::Op;
use crate::rewrite::Change;

/// `GGML_GLU_OP_*`
const REGLU: u32 = 0;
const GEGLU: u32 = 1;
const SWIGLU: u32 = 2;
const GEGLU_ERF: u32 = 4;
/// `GGML_UNARY_OP_*`, as of 2026.
const RELU: u32 = 6;
const GELU: u32 = 8;
const SILU: u32 = 10;
const GELU_ERF: u32 = 16;

const FIX: &str = "use the activation of the architecture";

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "ffn.gelu",
        summary: "GELU, or another form of it, is used for the model's activation",
        place: "the activation of another architecture (Gemma, GPT-2)",
        fix: FIX,
        parameter: Some("form"),
        ops: &[Op::Swiglu, Op::Reglu, Op::Geglu, Op::GegluErf, Op::Silu, Op::Relu, Op::Gelu, Op::GeluErf],
        values: |_| ["tanh", "erf"].map(|form| Argument::Name(form.to_owned())).to_vec(),
        make: |site, argument| match argument.text() {
            Some("erf") => activation(
                site,
                "GELU with the error function",
                (Op::GegluErf, GEGLU_ERF),
                (Op::GeluErf, GELU_ERF),
            ),
            None | Some("tanh") => activation(site, "GELU", (Op::Geglu, GEGLU), (Op::Gelu, GELU)),
            Some(_) => None,
        },
        ..PLAIN
    },
    plain(
        "ffn.silu",
        &[Op::Geglu, Op::GegluErf, Op::Reglu, Op::Gelu, Op::GeluErf],
        [
            "SiLU is used for the model's activation",
            "the default of Llama for an architecture with GELU or ReLU",
            FIX,
        ],
        |site, _| activation(site, "SiLU", (Op::Swiglu, SWIGLU), (Op::Silu, SILU)),
    ),
    plain(
        "ffn.relu",
        &[Op::Swiglu, Op::Geglu, Op::GegluErf, Op::Gelu, Op::GeluErf],
        ["ReLU is used for the model's activation", "an activation chosen by its place in a list", FIX],
        |site, _| activation(site, "ReLU", (Op::Reglu, REGLU), (Op::Relu, RELU)),
    ),
    Entry {
        silent: Some("where no activation is beyond the limit"),
        ..plain(
            "ffn.clamp",
            &[Op::SwigluOai, Op::SwigluClamp],
            [
                "gate and up are not limited",
                "the limit of gpt-oss' SwiGLU forgotten: only large activations show it",
                "limit the gate from above, up from both sides",
            ],
            |site, _| {
                let text = format!("gate and up are not limited to {}", site.float("limit"));
                made(site.with_float("limit", f32::MAX), text)
            },
        )
    },
    plain(
        "ffn.alpha",
        &[Op::SwigluOai],
        ["the slope of the gate's sigmoid is 1", "gpt-oss' 1.702 forgotten", "gate/(1 + exp(-alpha·gate))"],
        |site, _| {
            let text = format!("the gate's factor {} is left out", site.float("alpha"));
            made(site.with_float("alpha", 1.0), text)
        },
    ),
    plain(
        "ffn.glu",
        &[Op::SwigluOai],
        [
            "the plain SwiGLU is used",
            "gpt-oss' variant taken for Llama's",
            "limit gate and up, and multiply by up + 1",
        ],
        |_, _| {
            let text = "the plain SwiGLU is used, without + 1 and limits";
            made(Change::Op(Op::Swiglu, vec![(0, SWIGLU)]), text)
        },
    ),
    plain(
        "ffn.swapped",
        &[Op::Swiglu, Op::Geglu, Op::GegluErf, Op::Reglu, Op::SwigluOai, Op::SwigluClamp],
        [
            "gate and up change places: the activation is applied to up",
            "a fused gate/up tensor split in the wrong order, w1 and w3 of Llama mixed up, or the arguments of a fused \
             kernel in the wrong order",
            "gate is w1 (gate_proj), up is w3 (up_proj): silu(gate)·up",
        ],
        |site, _| {
            let change = match site.src(1) {
                Some(_) => Change::Exchange(0, 1),
                None => site.with_int("swapped", 1 - site.int("swapped")),
            };
            made(change, "gate and up change places: the activation is applied to up")
        },
    ),
    plain(
        "ffn.no_up",
        &[Op::Swiglu, Op::Geglu, Op::GegluErf, Op::Reglu],
        [
            "the gate is not multiplied by up",
            "the feed-forward part of a model without gating",
            "silu(gate)·up",
        ],
        no_up,
    ),
    plain(
        "ffn.no_square",
        &[Op::Sqr],
        [
            "the square behind ReLU is left out",
            "squared ReLU (Nemotron, Arcee) taken for ReLU",
            "square what ReLU gives",
        ],
        |_, _| made(Change::Bypass { slot: 0 }, "the square is left out"),
    ),
];

/// What an op computes with.
fn called(op: &Op) -> &'static str {
    match op {
        Op::Geglu | Op::Gelu => "GELU",
        Op::GegluErf | Op::GeluErf => "GELU with the error function",
        Op::Reglu | Op::Relu => "ReLU",
        _ => "SiLU",
    }
}

fn activation(site: Site<'_>, name: &str, (glu, of_glu): (Op, u32), (unary, of_unary): (Op, u32)) -> Made {
    when(*site.op() != glu && *site.op() != unary)?;
    let text = format!("{name} for {}", called(site.op()));
    match site.op() {
        Op::Swiglu | Op::Geglu | Op::GegluErf | Op::Reglu => made(Change::Op(glu, vec![(0, of_glu)]), text),
        _ => made(Change::Op(unary, vec![(0, of_unary)]), text),
    }
}

fn no_up(site: Site<'_>, _: &Argument) -> Made {
    // One merged source would have to be taken apart first.
    when(site.src(1).is_some() && site.int("swapped") == 0)?;
    let (op, number) = match site.op() {
        Op::Geglu => (Op::Gelu, GELU),
        Op::GegluErf => (Op::GeluErf, GELU_ERF),
        Op::Reglu => (Op::Relu, RELU),
        _ => (Op::Silu, SILU),
    };
    made(Change::Op(op, vec![(0, number)]), "the activated gate is not multiplied by up")
}
