//! Which mistakes are tried in nodes that were not recorded, and in what order: what one piece of code does to all layers
//! comes before single nodes, and what has few spellings before what has many.

use std::collections::BTreeSet;

use parity_graph::fault::{self, Argument, Fault, Scene};
use parity_graph::rewrite::{Change, Edit, Rewrite};
use parity_graph::{Graph, Id, Op};

use super::super::exchanged_experts::pairs;
use super::super::passed_on::passed_on;
use crate::audit::{Replay, Suspect};
use crate::checkpoint::Kind;

/// Spellings of a mistake in one node that are tried before those of others that have more.
const SPELLINGS: usize = 3;

/// What is recorded under another name, which what was not recorded is not: out of sight it is a bias that is added twice.
const MISNAMED: &str = "linear.bias_included";

/// An embedding that is multiplied by a constant.
const SCALED: &str = "embed.scaled";

/// A sliding window where there is none, or of another width.
const WINDOW: &str = "attn.window";

/// One mistake, in one node or in several that one piece of code or one part of the file serves.
pub(super) struct Hypothesis {
    pub fault: Fault,
    pub nodes: Vec<Rewrite>,
}

/// Every mistake of each node, another layer's weights, and experts by the tokens that went to them.
pub(super) fn hypotheses(suspect: &Suspect<'_>, replay: &Replay<'_>) -> Vec<Hypothesis> {
    let graph = &suspect.node.program.graph;
    let scene = Scene::new(graph);
    // One piece of code is wrong more often than one node.
    let mut out = of_all_alike(graph, &scene, &replay.through);
    // What has a dozen spellings is tried last: of a whole model not all that may be wrong in a node can be tried.
    for is_listed in [false, true] {
        out.extend(of_nodes(suspect, &scene, &replay.through, is_listed));
    }
    out.extend(of_products_with_bias(suspect, &scene, &replay.through));
    out.extend(of_scaled_embedding(graph, &scene, &replay.through));
    out.extend(of_windows(suspect, &scene, &replay.through));
    let products: Vec<Id> =
        replay.through.iter().copied().filter(|&id| graph.get(id).op == Op::MulMatId).collect();
    let mut groups: Vec<Vec<Id>> = products.iter().map(|&product| vec![product]).collect();
    // Gate and up may be one matrix, and an expert may be exchanged as a whole.
    groups.extend((2..=products.len()).map(|count| products[..count].to_vec()));
    for pair in pairs(suspect, replay, &products) {
        for group in &groups {
            let of_each: Vec<Vec<Fault>> =
                group.iter().map(|&product| fault::experts(graph, product, pair)).collect();
            let Some(first) = of_each.first() else { continue };
            for (way, fault) in first.iter().enumerate() {
                let nodes =
                    of_each.iter().filter_map(|faults| Some(faults.get(way)?.rewrite.clone())).collect();
                out.push(Hypothesis { fault: fault.clone(), nodes });
            }
        }
    }
    let mut told = BTreeSet::new();
    out.retain(|one| {
        let nodes: Vec<Id> = one.nodes.iter().map(|rewrite| rewrite.node).collect();
        told.insert((one.fault.text.clone(), nodes))
    });
    out
}

/// Mistakes of each node by itself, of entries of many spellings or of others.
fn of_nodes(suspect: &Suspect<'_>, scene: &Scene<'_>, through: &[Id], is_listed: bool) -> Vec<Hypothesis> {
    let graph = &suspect.node.program.graph;
    // What happens to a result, nobody sees there.
    let specific = || fault::entries().filter(|entry| !entry.ops.is_empty() && entry.name != MISNAMED);
    let of = |id: Id| {
        let faults = specific().map(move |entry| entry.all_at(scene, id));
        let faults = faults.filter(move |all| (all.len() > SPELLINGS) == is_listed).flatten();
        faults.map(move |fault| Hypothesis { nodes: passed_on(graph, through, &fault.rewrite), fault })
    };
    // Of the suspect's own mistakes those are left that reach what was not recorded.
    let own = suspect.node.id;
    let reaches = |one: &Hypothesis| {
        one.fault.rewrite.node != own
            || matches!(one.fault.rewrite.change, Change::Pass(_))
            || one.nodes.iter().all(|rewrite| rewrite.node != own)
    };
    // Its own cost next to nothing.
    let all = [&own].into_iter().chain(through).flat_map(|id| of(*id));
    all.filter(reaches).collect()
}

/// An embedding that is scaled behind what was recorded of it: of what norms read, which shows in the share of epsilon alone.
fn of_scaled_embedding(graph: &Graph, scene: &Scene<'_>, through: &[Id]) -> Vec<Hypothesis> {
    let norms = through.iter().copied().filter(|&id| matches!(graph.get(id).op, Op::RmsNorm | Op::Norm));
    let scaled = |norm: Id| -> Option<Hypothesis> {
        let table = graph.origin(graph.src(norm, 0)?);
        let root = (graph.get(table).ne[0] as f64).sqrt();
        let mut fault = fault::find(SCALED)?.at(scene, table, &Argument::Number(root))?;
        fault.text += " behind what was recorded of it";
        let change = Change::SourceEdit { slot: 0, edit: Edit::Multiply(root as f32) };
        Some(Hypothesis { nodes: vec![Rewrite { node: norm, change }], fault })
    };
    norms.filter_map(scaled).collect()
}

/// Rows from which on a window may be wrong before that shows beyond rounding.
const BEFORE: u32 = 2;

/// Windows of any width: the first row that one does not hold all of is the first that is wrong, or little before that, and stands
/// at as many positions.
fn of_windows(suspect: &Suspect<'_>, scene: &Scene<'_>, through: &[Id]) -> Vec<Hypothesis> {
    let wrong = suspect.held.beyond.iter().map(|element| (suspect.position)(*element)).min();
    // A first row sees one position, whatever its window is.
    let Some(wrong) = wrong.filter(|wrong| *wrong > 0) else { return Vec::new() };
    let of = |id: Id| {
        let widths = (0..=BEFORE).filter_map(move |before| wrong.checked_sub(before));
        widths.filter_map(move |width| {
            let fault = fault::find(WINDOW)?.at(scene, id, &Argument::Number(f64::from(width)))?;
            Some(Hypothesis { nodes: vec![fault.rewrite.clone()], fault })
        })
    };
    through.iter().flat_map(|id| of(*id)).collect()
}

/// Mistakes of a matmul and of what adds its bias, which may be the suspect.
fn of_products_with_bias(suspect: &Suspect<'_>, scene: &Scene<'_>, through: &[Id]) -> Vec<Hypothesis> {
    let (graph, own) = (&suspect.node.program.graph, suspect.node.id);
    let reads = |id: Id, product: Id| graph.sources(id).any(|source| graph.origin(source) == product);
    let products = through.iter().copied().filter(|&id| matches!(graph.get(id).op, Op::MulMat));
    let sums = |product: Id| {
        let behind = through.iter().copied().chain([own]);
        behind.filter(move |&id| graph.get(id).op == Op::Add && reads(id, product))
    };
    let mut out = Vec::new();
    for (product, sum) in products.flat_map(|product| sums(product).map(move |sum| (product, sum))) {
        for entry in fault::entries().filter(|entry| !entry.ops.is_empty()) {
            for mut fault in entry.all_at(scene, product) {
                let Some(of_bias) = entry.at(scene, sum, &fault.argument) else { continue };
                fault.text = format!("{}; {}", fault.text, of_bias.text);
                out.push(Hypothesis { nodes: vec![fault.rewrite.clone(), of_bias.rewrite], fault });
            }
        }
    }
    out
}

/// Mistakes in the nodes of one kind in all layers alike, which one piece of code computes: queries and keys together, and
/// norms wherever they are.
pub(super) fn of_all_layers(suspect: &Suspect<'_>, scene: &Scene<'_>, through: &[Id]) -> Vec<Hypothesis> {
    let labels = |id: Id| suspect.label(id).filter(|label| label.layer_index().is_some());
    let mut kinds: Vec<(Vec<Kind>, Vec<Id>)> = Vec::new();
    for &id in through {
        let Some(kind) = labels(id).map(|label| label.kind()) else { continue };
        let kind = if kind == Kind::KRope { Kind::QRope } else { kind };
        match kinds.iter_mut().find(|(known, _)| known.contains(&kind)) {
            Some((_, ids)) => ids.push(id),
            None => kinds.push((vec![kind], vec![id])),
        }
    }
    let layers =
        |ids: &[Id]| ids.iter().filter_map(|&id| labels(id)?.layer_index()).collect::<BTreeSet<u32>>().len();
    // One function computes all norms, those before attention and those before the feed-forward part.
    let is_norm = |id: &Id| matches!(suspect.node.program.graph.get(*id).op, Op::RmsNorm | Op::Norm);
    let norms: Vec<Id> = through.iter().copied().filter(is_norm).collect();
    let of_layers = kinds.iter().map(|(_, ids)| ids).filter(|ids| layers(ids) > 1);
    let mut out = Vec::new();
    let known = kinds.iter().any(|(_, ids)| layers(ids) > 1 && *ids == norms);
    // Keys may be left as they are, or cached before they are rotated, and queries not.
    let is_key = |id: &Id| labels(*id).is_some_and(|label| label.kind() == Kind::KRope);
    let keys: Vec<Id> = through.iter().copied().filter(is_key).collect();
    let norms = Some(&norms).filter(|norms| norms.len() > 1 && !known);
    for (ids, most) in of_layers
        .chain(norms)
        .map(|ids| (ids, usize::MAX))
        .chain(Some((&keys, SPELLINGS)).filter(|(keys, _)| layers(keys) > 1))
    {
        for entry in fault::entries().filter(|entry| !entry.ops.is_empty()) {
            for fault in
                Some(entry.all_at(scene, ids[0])).filter(|all| all.len() <= most).into_iter().flatten()
            {
                let of = |&id: &Id| Some(entry.at(scene, id, &fault.argument)?.rewrite);
                let Some(nodes) = ids.iter().map(of).collect::<Option<Vec<Rewrite>>>() else { continue };
                out.push(Hypothesis { nodes, fault });
            }
        }
    }
    out
}

/// Mistakes in several nodes of the same op alike, which one piece of code computes: queries and keys that are rotated, biases
/// that are added.
fn of_all_alike(graph: &Graph, scene: &Scene<'_>, through: &[Id]) -> Vec<Hypothesis> {
    let mut out = Vec::new();
    for entry in fault::entries().filter(|entry| !entry.ops.is_empty()) {
        let mut told = BTreeSet::new();
        for fault in through.iter().flat_map(|&id| entry.all_at(scene, id)) {
            let op = &graph.get(fault.rewrite.node).op;
            let alike = through.iter().copied().filter(|&id| graph.get(id).op == *op);
            let of = |id: Id| Some(entry.at(scene, id, &fault.argument)?.rewrite);
            let nodes: Vec<Rewrite> = alike.filter_map(of).collect();
            if nodes.len() > 1 && told.insert((fault.spelling(), op.to_string())) {
                out.push(Hypothesis { nodes, fault });
            }
        }
    }
    out
}
