//! Mixtures of experts: routing function, scale, renormalisation, number and index of experts, shared expert.

use super::{Fault, Site};
use crate::graph::Id;
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// `GGML_UNARY_OP_SIGMOID`
const SIGMOID: u32 = 7;

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        // The weights of those that were chosen.
        Op::SoftMax if site.origin_op(0) == Some(&Op::GetRows) => fewer(site, f32::NEG_INFINITY, out),
        Op::SumRows if site.is_called("moe") => fewer(site, 0.0, out),
        Op::Argsort if site.is_called("moe") => {
            let other = site.with_int("descending", 1 - site.int("descending"));
            out.push(site.fault("moe.order", "the experts with the lowest scores are chosen", other));
        }
        Op::Add if one_more_expert(site) => {
            let text = "the last of the chosen experts is left out: k is one too small";
            out.push(site.fault("moe.top_k", text, Change::Bypass { slot: 0 }));
            let text = "only the last of the chosen experts is used";
            out.push(site.fault("moe.top_k", text, Change::Bypass { slot: 1 }));
        }
        Op::SoftMax if site.src(1).is_none() && site.src(2).is_none() => routing(site, out),
        Op::Sigmoid if site.is_called("moe") => routing(site, out),
        Op::Div if site.origin_op(1).is_some_and(|op| matches!(op, Op::Clamp | Op::SumRows)) => {
            let text = "the weights of the chosen experts are not renormalised";
            out.push(site.fault("moe.no_renorm", text, Change::Bypass { slot: 0 }));
        }
        Op::MulMatId => {
            let experts = site.src(0).map_or(1, |weights| weights.ne[2]);
            let experts = i32::try_from(experts).unwrap_or(1);
            if experts > 1 {
                let edit = site.edit(2, Edit::AddModulo(1, experts));
                out.push(site.fault("moe.expert_index", "the next expert's weights are read", edit));
            }
        }
        Op::Scale => factor(site, out),
        Op::Add if site.is_called("ffn") => {
            for slot in [0, 1] {
                let shared = site.origin(slot).is_some_and(|id| site.graph.get(id).name.contains("shexp"));
                if shared {
                    let text = "the shared expert is left out";
                    out.push(site.fault("moe.no_shared", text, Change::Bypass { slot: 1 - slot }));
                }
            }
        }
        _ => {}
    }
}

/// A factor of the model.
fn factor(site: Site<'_>, out: &mut Vec<Fault>) {
    let (scale, bias) = (site.float("scale"), site.float("bias"));
    if scale != 1.0 && scale != 0.0 && bias == 0.0 {
        let name = if site.is_called("moe") { "moe.no_scale" } else { "scale.missing" };
        out.push(site.fault(name, format!("the factor {scale} is left out"), Change::Bypass { slot: 0 }));
    }
}

/// The weights of the chosen experts are normalised without the last one.
fn fewer(site: Site<'_>, nothing: f32, out: &mut Vec<Fault>) {
    if site.src(0).is_some_and(|weights| weights.ne[0] > 1) {
        let text = "the weights are normalised over one expert too few";
        out.push(site.fault("moe.top_k", text, site.edit(0, Edit::SetLast(nothing))));
    }
}

/// Whether a sum adds one of the chosen experts to those before it: windows into the outputs of all.
pub(super) fn one_more_expert(site: Site<'_>) -> bool {
    let (graph, op) = (site.graph, |id: Id| &site.graph.get(id).op);
    let window = |slot: usize| {
        let view = graph.src(site.id, slot).filter(|&view| *op(view) == Op::View)?;
        let mut experts = graph.storage(view);
        // Outputs are weighted, scaled or shifted before they are added up.
        while matches!(op(experts), Op::Mul | Op::AddId | Op::Add) {
            experts = graph.origin(graph.src(experts, 0)?);
        }
        (*op(experts) == Op::MulMatId).then(|| graph.storage(view))
    };
    window(1).is_some_and(|last| {
        let before = site.origin(0).map(|id| Site { graph, id });
        window(0) == Some(last)
            || before.is_some_and(|sum| *sum.op() == Op::Add && sum.origin(1) == Some(last))
    })
}

/// What scores are made weights by.
fn routing(site: Site<'_>, out: &mut Vec<Fault>) {
    if *site.op() == Op::Sigmoid {
        let other = Change::Op(Op::SoftMax, vec![(0, 1f32.to_bits()), (1, 0)]);
        out.push(site.fault(
            "moe.routing",
            "experts are weighted by a softmax, the graph has a sigmoid",
            other,
        ));
        return;
    }
    let other = Change::Op(Op::Sigmoid, vec![(0, SIGMOID), (1, 0)]);
    out.push(site.fault("moe.routing", "experts are weighted by a sigmoid, the graph has a softmax", other));
    let text = "the router's scores are used as they are";
    out.push(site.fault("moe.routing", text, Change::Bypass { slot: 0 }));
}
