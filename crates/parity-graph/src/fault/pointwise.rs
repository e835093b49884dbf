//! Gated activations, activations, residual sums.

use super::moe::one_more_expert;
use super::{Fault, Site};
use crate::graph::Id;
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::weights::{FFN_NORM, POST_ATTENTION_NORM};

/// `GGML_GLU_OP_*`
const REGLU: u32 = 0;
const GEGLU: u32 = 1;
const SWIGLU: u32 = 2;
/// `GGML_UNARY_OP_*`
const RELU: u32 = 6;
const GELU: u32 = 8;
const SILU: u32 = 10;

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        Op::Swiglu => {
            glu(site, "ffn.gelu", "GELU is used for SiLU", Op::Geglu, GEGLU, out);
            glu(site, "ffn.relu", "ReLU is used for SiLU", Op::Reglu, REGLU, out);
            exchanged(site, out);
        }
        Op::Geglu => {
            glu(site, "ffn.silu", "SiLU is used for GELU", Op::Swiglu, SWIGLU, out);
            glu(site, "ffn.relu", "ReLU is used for GELU", Op::Reglu, REGLU, out);
            exchanged(site, out);
        }
        Op::Reglu => {
            glu(site, "ffn.silu", "SiLU is used for ReLU", Op::Swiglu, SWIGLU, out);
            glu(site, "ffn.gelu", "GELU is used for ReLU", Op::Geglu, GEGLU, out);
            exchanged(site, out);
        }
        Op::SwigluOai | Op::SwigluClamp => {
            let limit = site.float("limit");
            let none = site.with_float("limit", f32::MAX);
            out.push(site.fault("ffn.clamp", format!("gate and up are not limited to {limit}"), none));
            if *site.op() == Op::SwigluOai {
                let alpha = site.float("alpha");
                let text = format!("the gate's factor {alpha} is left out");
                out.push(site.fault("ffn.alpha", text, site.with_float("alpha", 1.0)));
                glu(
                    site,
                    "ffn.glu",
                    "the plain SwiGLU is used, without + 1 and limits",
                    Op::Swiglu,
                    SWIGLU,
                    out,
                );
            }
            exchanged(site, out);
        }
        Op::Silu => unary(site, "ffn.gelu", "GELU is used for SiLU", Op::Gelu, GELU, out),
        Op::Gelu => {
            unary(site, "ffn.silu", "SiLU is used for GELU", Op::Silu, SILU, out);
            unary(site, "ffn.relu", "ReLU is used for GELU", Op::Relu, RELU, out);
        }
        Op::Relu => unary(site, "ffn.gelu", "GELU is used for ReLU", Op::Gelu, GELU, out),
        Op::Sqr => {
            out.push(site.fault("ffn.no_square", "the square is left out", Change::Bypass { slot: 0 }))
        }
        Op::Softplus => {
            out.push(site.fault("state.no_softplus", "the softplus is left out", Change::Bypass { slot: 0 }));
        }
        Op::Add if site.weight().is_none() && !one_more_expert(site) => residual(site, out),
        Op::RmsNorm | Op::Norm => parallel(site, out),
        _ => {}
    }
}

fn glu(site: Site<'_>, name: &'static str, text: &str, op: Op, kind: u32, out: &mut Vec<Fault>) {
    out.push(site.fault(name, text, Change::Op(op, vec![(0, kind)])));
}

fn unary(site: Site<'_>, name: &'static str, text: &str, op: Op, kind: u32, out: &mut Vec<Fault>) {
    out.push(site.fault(name, text, Change::Op(op, vec![(0, kind)])));
}

fn exchanged(site: Site<'_>, out: &mut Vec<Fault>) {
    let change = match site.src(1) {
        Some(_) => Change::Exchange(0, 1),
        None => site.with_int("swapped", 1 - site.int("swapped")),
    };
    out.push(site.fault("ffn.swapped", "gate and up are exchanged", change));
}

/// A sum of a branch and what came before it.
fn residual(site: Site<'_>, out: &mut Vec<Fault>) {
    let same = site.src(0).zip(site.src(1)).is_some_and(|(a, b)| a.ne == b.ne);
    if !same {
        return;
    }
    for slot in [0, 1] {
        out.push(site.fault(
            "residual.missing",
            "one of the two summands is left out",
            Change::Bypass { slot: 1 - slot },
        ));
        let twice = site.edit(slot, Edit::Multiply(2.0));
        out.push(site.fault("residual.twice", "one of the two summands is added twice", twice));
    }
}

/// The norm of a feed-forward part reads the layer's input, as in a layer with parallel parts.
fn parallel(site: Site<'_>, out: &mut Vec<Fault>) {
    let graph = site.graph;
    let of_feed_forward = |id: &Id| {
        let reader = Site { graph, id: *id };
        let weight = reader.weight().map(|(_, weight)| graph.get(weight).name.as_str());
        reader.origin(0) == Some(site.id)
            && weight.is_some_and(|name| name.contains(FFN_NORM) || name.contains(POST_ATTENTION_NORM))
    };
    // The weight of a norm is multiplied in right behind it.
    if !(site.id + 1..graph.nodes).take(2).any(|id| of_feed_forward(&id)) {
        return;
    }
    let Some(sum) = site.origin(0).filter(|&id| graph.get(id).op == Op::Add) else { return };
    let sum = Site { graph, id: sum };
    let is_norm = |id: Id| matches!(graph.get(id).op, Op::RmsNorm | Op::Norm);
    // What goes round the layer's first part was normalised for it.
    let around = [0, 1].into_iter().filter_map(|slot| sum.origin(slot)).find(|&id| {
        graph.is_arithmetic(id) && (id..sum.id).any(|norm| is_norm(norm) && graph.src(norm, 0) == Some(id))
    });
    if let Some(around) = around.filter(|&id| graph.get(id).ne == sum.tensor().ne) {
        let text = "the feed-forward part reads the layer's input, as if both parts were parallel";
        out.push(site.fault("residual.parallel", text, Change::Source { slot: 0, with: Some(around) }));
    }
}
