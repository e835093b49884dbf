//! Mistakes in nodes that were not recorded: what a failing node reads of them is computed with each mistake in them.

use super::predict::{Lab, Prediction};
use super::sample::Base;
use super::turns::KNOWN_BASES;
use super::{Found, PROMISING, SLACK, explained, nearest, over_bound};
use crate::audit::Context;
use crate::audit::case::{Case, gather};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::faults::catalogue::{self, in_layer, same_shape};
use crate::faults::{Argument, Fault};
use crate::model::graph::{Graph, Node, Op};

/// Multiplications that all hypotheses together may cost.
const WORK_MAX: usize = 1 << 35;

/// A fault with one argument, in one or in several of the nodes.
struct Hypothesis {
    fault: &'static Fault,
    argument: Argument,
    nodes: Vec<Checkpoint>,
}

/// The mistakes in what was bridged, alone or along with the node itself, that reproduce the output.
pub fn found(lab: &Lab<'_>, base: &Base) -> Result<Vec<Found>> {
    let own = lab.case.node.checkpoint;
    let open: Vec<Checkpoint> = lab.case.bridged.iter().copied().chain([own]).collect();
    if open.len() == 1 {
        return Ok(Vec::new());
    }
    let mut work = 0usize;
    let mut found: Vec<Found> = Vec::new();
    let sample: Vec<u32> = base.rows.iter().map(|&row| lab.case.positions[row]).collect();
    for hypothesis in hypotheses(lab, &open) {
        if found.iter().any(|found| found.faults == [hypothesis.fault.name]) {
            continue;
        }
        let Some(graph) = injected(lab, &hypothesis) else { continue };
        work = work.saturating_add(cost(lab));
        if work > WORK_MAX {
            break;
        }
        // Where attention reads the whole cache a part of its rows costs as much as all.
        let few = gathered(lab, &graph, own, &sample)?;
        let promising = few.is_some_and(|few| share(&few, base) > PROMISING);
        let Some(tried) = (match promising {
            true => gathered(lab, &graph, own, &lab.case.positions)?,
            false => None,
        }) else {
            continue;
        };
        let context = Context { graph: &graph, ..*lab.context };
        let own_lab = Lab { context: &context, site: lab.site, case: &tried.case };
        if over_bound(&own_lab, &tried.prediction) <= SLACK {
            let explains = explained(&own_lab, base, &tried.prediction);
            found.push(spoken(lab, &hypothesis, explains));
        }
    }
    Ok(found)
}

/// A node computed from inputs with a mistake in them.
struct Tried {
    case: Case,
    prediction: Prediction,
}

fn gathered(lab: &Lab<'_>, graph: &Graph, own: Checkpoint, positions: &[u32]) -> Result<Option<Tried>> {
    let context = Context { graph, ..*lab.context };
    let Some(node) = graph.node(own) else { return Ok(None) };
    let Ok(case) = gather(&context, node, positions)? else { return Ok(None) };
    let own_lab = Lab { context: &context, site: lab.site, case: &case };
    let Some(prediction) = own_lab.predict(&case.node)?.and_then(|p| nearest(&own_lab, p)) else {
        return Ok(None);
    };
    Ok(Some(Tried { prediction, case }))
}

/// Share of the squared error on the rows of the sample.
fn share(few: &Tried, base: &Base) -> f64 {
    let (mut before, mut after) = (0.0, 0.0);
    for (row, &of_base) in base.rows.iter().enumerate() {
        let both = few.prediction.value.row(row).iter().zip(base.value.row(of_base));
        for (recorded, (predicted, healthy)) in few.case.recorded.row(row).iter().zip(both) {
            before += (recorded - healthy).powi(2);
            after += (recorded - predicted).powi(2);
        }
    }
    1.0 - after / before
}

/// The graph with the mistake in it; `None` where a node has no place for it, or where it is one of values and not of
/// what the node computes: those of unrecorded nodes are nobody's to edit.
fn injected(lab: &Lab<'_>, hypothesis: &Hypothesis) -> Option<Graph> {
    let mut graph = lab.context.graph.clone();
    for &checkpoint in &hypothesis.nodes {
        let node = graph.node_mut(checkpoint)?;
        let healthy = node.clone();
        (hypothesis.fault.change)(&lab.site, node, &hypothesis.argument)?;
        (*node != healthy && node.edits == healthy.edits).then_some(())?;
    }
    Some(graph)
}

/// Every fault in each of the nodes, and in those that one piece of code serves; a product and its bias together.
fn hypotheses(lab: &Lab<'_>, open: &[Checkpoint]) -> Vec<Hypothesis> {
    let node = |checkpoint: &Checkpoint| lab.context.graph.node(*checkpoint);
    let (&own, bridged) = open.split_last().unwrap_or((&lab.case.node.checkpoint, &[]));
    let mut groups: Vec<Vec<Checkpoint>> = Vec::new();
    for &checkpoint in bridged {
        let biased = open.iter().copied().filter(|other| {
            node(other)
                .is_some_and(|n| matches!(n.op, Op::Bias { bias: Some(_), .. }) && n.inputs == [checkpoint])
        });
        groups.extend(biased.map(|bias| vec![checkpoint, bias]));
        groups.push(vec![checkpoint]);
    }
    let mut out: Vec<Hypothesis> = Vec::new();
    for fault in catalogue::all() {
        let kinds = fault.home.kinds();
        let served = open.iter().copied().filter(|c| kinds.contains(&c.kind()) && *c != own);
        let served: Vec<Checkpoint> = served.collect();
        let all = Some(served).filter(|served| served.len() > 1);
        for nodes in all.into_iter().chain(groups.iter().cloned()) {
            let Some(first) = nodes.first().and_then(node) else { continue };
            for argument in arguments(lab, fault, first) {
                out.push(Hypothesis { fault, argument, nodes: nodes.clone() });
            }
        }
    }
    out
}

/// Factors of positions that scaled models use.
const FACTORS: [f64; 6] = [0.5, 0.25, 0.125, 2.0, 4.0, 8.0];

/// Arguments to try where there is no output to fit them to.
fn arguments(lab: &Lab<'_>, fault: &Fault, node: &Node) -> Vec<Argument> {
    let numbers = |numbers: &[f64]| numbers.iter().map(|number| Argument::Number(*number)).collect();
    match (fault.name, &node.op) {
        ("rope.base", Op::Rope(_)) => numbers(&KNOWN_BASES),
        ("rope.scaled", Op::Rope(_)) => numbers(&FACTORS),
        ("rope.position_shift" | "rope.decode_shift" | "linear.qk_permuted", _) => numbers(&[1.0, -1.0]),
        ("rope.partial", Op::Rope(rope)) => {
            let parts = [2, 4].map(|part| (rope.head_width / part / 2 * 2) as f64);
            numbers(&parts)
        }
        ("linear.wrong_layer" | "norm.wrong_layer", _) => {
            let own = node.op.weight().map_or("", |weight| &weight.name);
            let layers = (0..i64::from(lab.site.layers())).filter(|layer| in_layer(own, *layer).is_some());
            layers.map(|layer| Argument::Number(layer as f64)).collect()
        }
        ("linear.wrong_weight" | "norm.wrong_weight", _) => {
            same_shape(&lab.site, node).into_iter().map(Argument::Tensor).collect()
        }
        _ => (fault.default)(&lab.site, node).into_iter().collect(),
    }
}

/// Multiplications of one hypothesis: each bridged product at the rows that are looked at, or at all that are cached.
fn cost(lab: &Lab<'_>) -> usize {
    let cached = lab.case.positions.iter().max().map_or(1, |last| *last as usize + 1);
    let rows = match lab.case.node.op {
        Op::Attention(_) | Op::Scores(_) | Op::Context(_) => cached,
        _ => lab.case.positions.len(),
    };
    let weights = lab.case.bridged.iter().filter_map(|checkpoint| {
        let node = lab.context.graph.node(*checkpoint)?;
        Some(lab.site.shape(&node.op.weight()?.name)?.iter().product::<usize>())
    });
    rows * weights.sum::<usize>()
}

/// The mistake in words.
fn spoken(lab: &Lab<'_>, hypothesis: &Hypothesis, explains: f64) -> Found {
    let Hypothesis { fault, argument, nodes } = hypothesis;
    let own = lab.case.node.checkpoint;
    let sentences = nodes.iter().filter_map(|checkpoint| {
        let node = lab.context.graph.node(*checkpoint)?;
        Some((fault.sentence)(&lab.site, node, argument))
    });
    let mut told: Vec<String> = sentences.collect();
    told.dedup();
    let unseen: Vec<String> = nodes.iter().filter(|node| **node != own).map(ToString::to_string).collect();
    let verb = if unseen.len() == 1 { "was" } else { "were" };
    let text = format!("{}, in {}, which {verb} not recorded", told.join("; "), unseen.join(" and "));
    Found { faults: vec![fault.name], explains, text, fix: fault.fix.to_owned() }
}
