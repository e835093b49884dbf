//! Mixtures of experts: routing function, scale, renormalisation, number and index of experts, shared expert.

use super::site::{edit, made};
use super::{Argument, Entry, Fault, Made, PLAIN, Scene, Site, find, plain, spell_order, when};
use crate::graph::{Graph, Id};
use crate::known::adapter_rank;
use crate::op::Op;
use crate::rewrite::{Change, Edit};

/// `GGML_UNARY_OP_SIGMOID`
const SIGMOID: u32 = 7;

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "moe.top_k",
        summary: "one expert too few is used, or normalised over",
        place: "k read from another key, or shared experts counted in",
        fix: "use {arch}.expert_used_count experts, all of them in the sum of the weights",
        parameter: Some("form"),
        ops: &[Op::Add, Op::SumRows, Op::SoftMax],
        values: |_| vec![Argument::name("fewer"), Argument::name("last")],
        make: top_k,
        ..PLAIN
    },
    plain(
        "moe.order",
        &[Op::Argsort],
        ["the experts with the lowest scores are chosen", "scores sorted upwards", "take the k largest"],
        |site, _| {
            when(site.is_called("moe"))?;
            let other = site.with_int("descending", 1 - site.int("descending"));
            made(other, "the experts with the lowest scores are chosen")
        },
    ),
    Entry {
        name: "moe.routing",
        summary: "experts are weighted by another function of the scores",
        place: "softmax for sigmoid (DeepSeek-V3, GLM) or the reverse; softmax before or after the choice",
        fix: "read {arch}.expert_gating_func",
        parameter: Some("function"),
        ops: &[Op::SoftMax, Op::Sigmoid],
        values: |_| ["softmax", "sigmoid", "none"].map(Argument::name).into(),
        make: routing,
        ..PLAIN
    },
    Entry {
        silent: Some("where the weights of the chosen experts add up to 1 already"),
        ..plain(
            "moe.no_renorm",
            &[Op::Div],
            [
                "the weights of the chosen experts are not renormalised",
                "norm_topk_prob not read",
                "divide the chosen weights by their sum",
            ],
            |site, _| {
                when(site.origin_op(1).is_some_and(|op| matches!(op, Op::Clamp | Op::SumRows)))?;
                let text = "the weights of the chosen experts are not renormalised";
                made(Change::Bypass { slot: 0 }, text)
            },
        )
    },
    Entry {
        name: "moe.expert_index",
        summary: "another expert's weights are read",
        place: "experts counted from 1, stacked in another order, or expert and token exchanged in a stride",
        fix: "expert e is matrix e of the stacked tensor",
        parameter: Some("order"),
        ops: &[Op::MulMatId],
        values: |site| {
            let experts = site.src(0).map_or(1, |weights| weights.ne[2]) as u32;
            vec![Argument::Order((0..experts).map(|expert| (expert + 1) % experts).collect())]
        },
        make: expert_index,
        ..PLAIN
    },
    plain(
        "moe.no_scale",
        &[Op::Scale],
        [
            "the scale of the routed experts is left out",
            "routed_scaling_factor not read",
            "multiply the weights by {arch}.expert_weights_scale",
        ],
        |site, _| unscaled(site, true),
    ),
    plain(
        "scale.missing",
        &[Op::Scale],
        [
            "a factor of the model is left out",
            "embedding, residual or logit scales that most architectures do not have",
            "read the architecture's scales from the file and apply each where the graph has it",
        ],
        |site, _| unscaled(site, false),
    ),
    plain(
        "moe.no_shared",
        &[Op::Add],
        [
            "the shared expert is left out",
            "a mixture of routed experts alone",
            "add the shared expert's output to that of the routed ones",
        ],
        |site, _| {
            when(site.is_called("ffn"))?;
            let is_shared =
                |slot: &usize| site.origin(*slot).is_some_and(|id| site.graph.get(id).name.contains("shexp"));
            let slot = [0, 1].into_iter().find(is_shared)?;
            made(Change::Bypass { slot: 1 - slot }, "the shared expert is left out")
        },
    ),
];

fn top_k(site: Site<'_>, argument: &Argument) -> Made {
    let form = argument.text()?;
    // The weights of the chosen experts are normalised without the last one.
    let fewer = |nothing: f32| {
        let all = site.src(0).map(|weights| weights.ne[0]).filter(|all| *all > 1 && form == "fewer")?;
        let last = Edit::SetColumns { row: all, columns: all - 1..all, to: nothing };
        made(edit(0, last), "the weights are normalised over one expert too few")
    };
    match site.op() {
        Op::SoftMax if site.origin_op(0) == Some(&Op::GetRows) => fewer(f32::NEG_INFINITY),
        Op::SumRows if site.is_called("moe") => fewer(0.0),
        Op::Add if one_more_expert(site) && form == "fewer" => {
            let text = "the last of the chosen experts is left out: k is one too small";
            made(Change::Bypass { slot: 0 }, text)
        }
        Op::Add if one_more_expert(site) && form == "last" => {
            made(Change::Bypass { slot: 1 }, "only the last of the chosen experts is used")
        }
        _ => None,
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
        let before = site.origin(0).map(|id| site.other(id));
        window(0) == Some(last)
            || before.is_some_and(|sum| *sum.op() == Op::Add && sum.origin(1) == Some(last))
    })
}

/// What scores are made weights by.
fn routing(site: Site<'_>, argument: &Argument) -> Made {
    let is_softmax = *site.op() == Op::SoftMax;
    let is_router = match site.op() {
        Op::SoftMax => {
            site.src(1).is_none() && site.src(2).is_none() && site.origin_op(0) != Some(&Op::GetRows)
        }
        _ => site.is_called("moe"),
    };
    when(is_router)?;
    match argument.text()? {
        "softmax" if !is_softmax => made(
            Change::Op(Op::SoftMax, vec![(0, 1f32.to_bits()), (1, 0)]),
            "experts are weighted by a softmax, the graph has a sigmoid",
        ),
        "sigmoid" if is_softmax => made(
            Change::Op(Op::Sigmoid, vec![(0, SIGMOID), (1, 0)]),
            "experts are weighted by a sigmoid, the graph has a softmax",
        ),
        "none" if is_softmax => made(Change::Bypass { slot: 0 }, "the router's scores are used as they are"),
        _ => None,
    }
}

fn expert_index(site: Site<'_>, argument: &Argument) -> Made {
    let Argument::Order(order) = argument else { return None };
    let (weights, experts) = (site.weight()?.1, site.src(0)?.ne[2]);
    when(order.len() == experts && experts > 1 && order.iter().all(|e| (*e as usize) < experts))?;
    let moved: Vec<usize> = (0..experts).filter(|&e| order[e] as usize != e).collect();
    let name = &site.graph.get(weights).name;
    let next = (0..experts).all(|e| order[e] as usize == (e + 1) % experts);
    let text = match moved[..] {
        _ if next => "the next expert's weights are read".to_owned(),
        [one] => format!("expert {one} is computed with the weights of expert {} of {name}", order[one]),
        [a, b] if order[a] as usize == b && order[b] as usize == a => {
            format!("experts {a} and {b} are exchanged in {name}")
        }
        _ => format!("the experts of {name} stand in the order {}", spell_order(order)),
    };
    when(!moved.is_empty())?;
    made(edit(2, Edit::Map(order.clone())), text)
}

/// Two experts exchanged, and one read for another, in a product with the weights of experts.
pub fn experts(graph: &Graph, product: Id, [a, b]: [usize; 2]) -> Vec<Fault> {
    let (scene, entry) = (Scene::new(graph), find("moe.expert_index"));
    let all = graph.src(product, 0).map_or(0, |weights| graph.get(weights).ne[2]);
    let own: Vec<u32> = (0..all as u32).collect();
    if a >= all || b >= all {
        return Vec::new();
    }
    let (mut exchanged, mut replaced) = (own.clone(), own);
    exchanged.swap(a, b);
    replaced[a] = b as u32;
    let fault = |order| entry?.at(&scene, product, &Argument::Order(order));
    [exchanged, replaced].into_iter().filter_map(fault).collect()
}

/// A factor of the model.
fn unscaled(site: Site<'_>, of_experts: bool) -> Made {
    let (scale, bias) = (site.float("scale"), site.float("bias"));
    let of_adapter = adapter_rank(site.graph, site.id).is_some();
    when(scale != 1.0 && scale != 0.0 && bias == 0.0 && site.is_called("moe") == of_experts && !of_adapter)?;
    made(Change::Bypass { slot: 0 }, format!("the factor {scale} is left out"))
}
