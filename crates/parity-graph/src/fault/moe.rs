//! Mixtures of experts: routing function, scale, renormalisation, expert index, shared expert.

use super::{Fault, Site};
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// `GGML_UNARY_OP_SIGMOID`
const SIGMOID: u32 = 7;

pub(super) fn faults(site: Site<'_>, out: &mut Vec<Fault>) {
    match site.op() {
        Op::SoftMax if site.src(1).is_none() && site.src(2).is_none() => {
            let other = Change::Op(Op::Sigmoid, vec![(0, SIGMOID), (1, 0)]);
            out.push(site.fault(
                "moe.routing",
                "experts are weighted by a sigmoid, the graph has a softmax",
                other,
            ));
            out.push(site.fault(
                "moe.routing",
                "the router's scores are used as they are",
                Change::Bypass { slot: 0 },
            ));
        }
        Op::Sigmoid if site.is_called("moe") => {
            let other = Change::Op(Op::SoftMax, vec![(0, 1f32.to_bits()), (1, 0)]);
            out.push(site.fault(
                "moe.routing",
                "experts are weighted by a softmax, the graph has a sigmoid",
                other,
            ));
        }
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
        Op::Scale => {
            let (scale, bias) = (site.float("scale"), site.float("bias"));
            if scale != 1.0 && scale != 0.0 && bias == 0.0 {
                let name = if site.is_called("moe") { "moe.no_scale" } else { "scale.missing" };
                out.push(site.fault(
                    name,
                    format!("the factor {scale} is left out"),
                    Change::Bypass { slot: 0 },
                ));
            }
        }
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
