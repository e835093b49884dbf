//! Mistakes in nodes that were not recorded: what lies between the recorded ones and a wrong node is computed again
//! with each of them, and the wrong node must be what that comes to.

mod coarser;
mod hypotheses;

use std::cell::RefCell;

use parity_graph::Id;
use parity_graph::fault::{self, Argument, Fault, Scene};
use parity_graph::rewrite::{Change, Rewrite};

use super::diagnosis::{prefer_later, told};
use super::precision;
use super::trial::{SLACK, carried, under};
use crate::audit::{Across, MISTAKES_SHOW, Named, Replay, Said, Suspect};
use crate::engine::op_by_op::{Carried, Node, Unknown, Value, Values};
use crate::ops::Args;
use crate::watch;
use coarser::coarser;
use hypotheses::{Hypothesis, hypotheses, of_all_layers};

/// Multiplications that all hypotheses about one node may cost.
const WORK_MAX: usize = 1 << 34;
/// Share of the squared error that a mistake out of sight has to account for: where much lies between, rounding alone
/// explains a lot.
pub(super) const EXPLAINS_MIN: f64 = 0.9;

/// Share from which on nobody asks for another number.
const CERTAIN: f64 = 0.9999;

impl Hypothesis {
    fn nodes(&self) -> Vec<Id> {
        self.nodes.iter().map(|rewrite| rewrite.node).collect()
    }

    /// What a node comes to with it, where something is wrong in the node.
    fn injected(
        &self,
        suspect: &Suspect<'_>,
        node: &Node<'_>,
        args: &Args<'_, f64>,
        across: Across<'_>,
    ) -> Option<Value<f64>> {
        let rewrite = self.nodes.iter().find(|rewrite| rewrite.node == node.id)?;
        Some(with_mistake(suspect, across, node, args, &rewrite.change))
    }
}

/// The mistakes in what was not recorded that explain a node. Where all layers are wrong nothing shows what their keys and
/// values are cached in: then each type is tried.
pub fn found(suspect: &Suspect<'_>) -> Vec<Named> {
    let Some(replay) = &suspect.replay else { return Vec::new() };
    let mut work = 0;
    let found = found_by(suspect, replay, &mut work);
    if is_beside(suspect, &found) {
        let nearer = searched_by(suspect, replay, &mut work);
        let is_nearer = nearer.iter().any(|named| {
            precision::ALIKE * named.left < found[0].left || suspect.known.contains(&named.spelling)
        });
        return if is_nearer { nearer } else { found };
    }
    if !found.is_empty() {
        return found;
    }
    let others = replay.with_other_caches();
    let mut found = others.iter().map(|replay| found_by(suspect, replay, &mut work));
    if let Some(found) = found.find(|found| !found.is_empty()) {
        return found;
    }
    // What is left of the work.
    let mut found =
        std::iter::once(replay).chain(&others).map(|replay| searched_by(suspect, replay, &mut work));
    found.find(|found| !found.is_empty()).unwrap_or_default()
}

/// Whether what was found is a number of a list, and another may come nearer, or explained the steps before.
fn is_beside(suspect: &Suspect<'_>, found: &[Named]) -> bool {
    let is_other = |named: &Named| !suspect.known.is_empty() && !suspect.known.contains(&named.spelling);
    found.first().is_some_and(|named| {
        let is_searched = fault::find(&named.diagnosis.fault).is_some_and(fault::Entry::is_searched);
        is_searched && (named.diagnosis.explains < CERTAIN || is_other(named))
    })
}

/// Whether nothing is wrong in this step where keys and values that were not recorded are cached in another type.
pub fn is_healthy_by_another_cache(suspect: &Suspect<'_>) -> bool {
    let others = suspect.replay.iter().flat_map(Replay::with_other_caches);
    let mut held = others.filter_map(|replay| replay.held(suspect, &[], &|_, _, _| None));
    held.any(|held| suspect.is_explained(&held))
}

/// With `work` spent so far.
fn found_by(suspect: &Suspect<'_>, replay: &Replay<'_>, work: &mut usize) -> Vec<Named> {
    let scene = Scene::new(&suspect.node.program.graph);
    let of_layers = of_all_layers(suspect, &scene, &replay.through);
    let spans_layers = !of_layers.is_empty();
    let mut out = explained_by_some(suspect, replay, of_layers, work);
    if spans_layers && out.is_empty() {
        out.extend(coarser(suspect, replay, work));
    }
    // What is wrong in all layers alike is one mistake; of single nodes there are as many hypotheses in each.
    if !spans_layers || out.is_empty() {
        out.extend(explained_by_some(suspect, replay, hypotheses(suspect, replay), work));
    }
    let found = ranked(suspect, out);
    if spans_layers || !found.is_empty() {
        return found;
    }
    ranked(suspect, coarser(suspect, replay, work).into_iter().collect())
}

/// Those of some mistakes that explain a node, and the first node that each is in.
fn explained_by_some(
    suspect: &Suspect<'_>,
    replay: &Replay<'_>,
    some: Vec<Hypothesis>,
    work: &mut usize,
) -> Vec<(Id, Named)> {
    let affordable = some.into_iter().take_while(|one| !is_spent(replay, &one.nodes(), work));
    affordable.filter_map(|one| explained_by(suspect, replay, &one)).collect()
}

/// Mistakes of one number that nobody lists: of those that explain a node the roundest that leaves next to nothing more than the
/// best.
fn searched_by(suspect: &Suspect<'_>, replay: &Replay<'_>, work: &mut usize) -> Vec<Named> {
    let scene = Scene::new(&suspect.node.program.graph);
    let best = |found: Vec<(Id, Named)>| {
        let least = found.iter().map(|(_, named)| named.left).fold(f64::INFINITY, f64::min);
        found.into_iter().find(|(_, named)| named.left <= precision::ALIKE * least)
    };
    let of_each = searched(suspect, &scene, replay, work)
        .filter_map(|told| best(told.iter().filter_map(|one| explained_by(suspect, replay, one)).collect()));
    // A cap of another form comes near to a limit: both are searched for before one is told.
    let found = best(of_each.collect());
    ranked(suspect, found.into_iter().collect())
}

/// The likeliest first of those that explain a node.
fn ranked(suspect: &Suspect<'_>, out: Vec<(Id, Named)>) -> Vec<Named> {
    // What a healthy reader contradicts is none, unless it is so small that it need not show there. Of those that come to the same
    // that one is likeliest which other wrong readers of its node speak for.
    let [error, size, ..] = suspect.held.squares;
    let is_large = error > MISTAKES_SHOW * MISTAKES_SHOW * size;
    let read = |(node, named): (Id, Named)| (suspect.others_that_read(node), named);
    let ranked = out.into_iter().map(read).filter(|((_, right), _)| *right == 0 || !is_large);
    let mut ranked: Vec<((usize, usize), Named)> = ranked.collect();
    let values: Vec<u64> = ranked.iter().map(|(_, named)| named.values).collect();
    let is_alone = |named: &Named| values.iter().filter(|values| **values == named.values).count() == 1;
    ranked.sort_by_key(|((wrong, _), named)| *wrong == 0 && !is_alone(named));
    let mut out: Vec<Named> = ranked.into_iter().map(|(_, named)| named).collect();
    prefer_later(suspect, &mut out);
    out
}

/// Whether nobody wants to wait for a mistake in these nodes any longer: with it so much is computed again.
fn is_spent(replay: &Replay<'_>, nodes: &[Id], work: &mut usize) -> bool {
    *work = work.saturating_add(replay.work(nodes));
    *work > WORK_MAX || watch::is_over()
}

/// The most of a suspect's squared error that a mistake may leave.
fn most(suspect: &Suspect<'_>) -> f64 {
    let most = (1.0 - EXPLAINS_MIN) * suspect.held.squares[0];
    suspect.allowed.map_or(most, |allowed| most.min(allowed))
}

/// The mistake, where it explains a node, and the first node that it is in.
fn explained_by(suspect: &Suspect<'_>, replay: &Replay<'_>, hypothesis: &Hypothesis) -> Option<(Id, Named)> {
    let (nodes, most) = (hypothesis.nodes(), most(suspect));
    watch::at(|| suspect.asked(hypothesis.fault.name), || None);
    let injected = |node: &Node<'_>, args: &Args<'_, f64>, across: Across<'_>| {
        hypothesis.injected(suspect, node, args, across)
    };
    let own = hypothesis.nodes.iter().find(|rewrite| rewrite.node == suspect.node.id);
    let judging = |node: &Node<'_>, args: &Args<'_, f64>, said: Said<'_>| match own {
        None => said(node.rule?, args, &node.carried),
        Some(Rewrite { change, .. }) => under(suspect, node, args, change, |rewritten| {
            let rule = crate::ops::rule(rewritten.op()).filter(|_| rewritten.is_by_rule())?;
            said(rule, &rewritten.args(args), &carried(change, args, &node.carried))
        }),
    };
    let held = replay.held_by(suspect, (&nodes, most), &injected, &judging)?;
    let left = held.squares[0];
    let explains = 1.0 - left / suspect.held.squares[0];
    if !(suspect.is_explained(&held) && explains >= EXPLAINS_MIN) {
        return None;
    }
    let mut diagnosis = told(suspect, &hypothesis.fault, explains);
    diagnosis.text += &out_of_sight(suspect, replay, &nodes);
    // What comes to the same leaves the same.
    let spelling = hypothesis.fault.spelling();
    let named = Named { diagnosis, spelling, left, rest: 0.0, reaches: None, values: left.to_bits() };
    Some((nodes.first().copied().unwrap_or(0), named))
}

/// Mistakes of one number that nobody lists, searched for in all nodes of an op alike and in each: the number that brings the
/// suspect nearest to what was recorded of it, as it is told, roundest first.
fn searched<'b>(
    suspect: &'b Suspect<'_>,
    scene: &'b Scene<'b>,
    replay: &'b Replay<'_>,
    work: &'b mut usize,
) -> impl Iterator<Item = Vec<Hypothesis>> + 'b {
    let graph = &suspect.node.program.graph;
    let groups = fault::entries().filter(|entry| entry.is_searched()).flat_map(move |entry| {
        let has_op = |id: &Id| entry.ops.contains(&graph.get(*id).op);
        let all: Vec<Id> = replay.through.iter().copied().filter(has_op).collect();
        let each = if all.len() > 1 { all.iter().map(|&id| vec![id]).collect() } else { Vec::new() };
        std::iter::once(all).chain(each).map(move |nodes| (entry, nodes))
    });
    groups.filter(|(_, nodes)| !nodes.is_empty()).map(move |(entry, nodes)| {
        let with = |argument: &Argument| {
            let faults: Vec<Fault> = nodes.iter().filter_map(|&id| entry.at(scene, id, argument)).collect();
            let rewrites = faults.iter().map(|fault| fault.rewrite.clone()).collect();
            faults.into_iter().next().map(|fault| Hypothesis { nodes: rewrites, fault })
        };
        let spent = RefCell::new(&mut *work);
        let distance = |argument: &Argument, _: f64| {
            let hypothesis =
                with(argument).filter(|one| !is_spent(replay, &one.nodes(), &mut spent.borrow_mut()));
            hypothesis.map_or(f64::INFINITY, |hypothesis| {
                replay.distance(suspect, &hypothesis.nodes(), &|node, args, across| {
                    hypothesis.injected(suspect, node, args, across)
                })
            })
        };
        // A number that explained the steps before is asked for alone.
        let known = suspect.known.iter().filter_map(|known| known.split_once('='));
        let known = known.filter(|(name, _)| *name == entry.name).map(|(_, value)| Argument::parse(value));
        let known: Vec<Argument> = known.collect();
        let told = if known.is_empty() { entry.searched(scene, nodes[0], &distance) } else { known };
        told.iter().filter_map(with).collect::<Vec<Hypothesis>>()
    })
}

/// How many times its bound a healthy node is from what each mistake comes to that can be made in the one node before it
/// which was not recorded.
pub fn unlike(suspect: &Suspect<'_>) -> Vec<(Fault, f64)> {
    let Some(replay) = suspect.replay.as_ref().filter(|replay| replay.through.len() == 1) else {
        return Vec::new();
    };
    let faults = fault::at(&suspect.node.program.graph, replay.through[0]);
    let affordable = WORK_MAX / replay.work(&[]).max(1);
    let over = |fault: Fault| {
        let injected = |node: &Node<'_>, args: &Args<'_, f64>, across: Across<'_>| {
            let is_it = fault.rewrite.node == node.id;
            is_it.then(|| with_mistake(suspect, across, node, args, &fault.rewrite.change))
        };
        let held = replay.held(suspect, &[fault.rewrite.node], &injected)?;
        Some((fault, held.over))
    };
    faults.into_iter().take(affordable).filter_map(over).collect()
}

pub(super) fn with_mistake(
    suspect: &Suspect<'_>,
    across: Across<'_>,
    node: &Node<'_>,
    args: &Args<'_, f64>,
    change: &Change,
) -> Value<f64> {
    let value = under(suspect, node, args, change, |rewritten| {
        if let Some((values, slot)) = rewritten.is_passed() {
            let carried = node.carried.get(slot?).cloned().flatten();
            return Some(Ok(Values { data: values.to_vec(), carried }));
        }
        if let Change::Scores(_) = change {
            // Other weights of the same values, which are off by as much.
            let data = rewritten.values(args).ok()?;
            let off = |Carried { error, through }| Carried {
                error: error.into_iter().map(|error| SLACK * error).collect(),
                through,
            };
            return Some(across(node, Ok(args)).map(|own| Values { data, carried: own.carried.map(off) }));
        }
        let by_rule = rewritten.is_by_rule_before();
        let rule = crate::ops::rule(rewritten.op()).filter(|_| by_rule)?;
        let Node { id, program, .. } = *node;
        let node = Node { id, program, rule: Some(rule), carried: carried(change, args, &node.carried) };
        let own = across(&node, Ok(&rewritten.args(args)));
        Some(own.and_then(|Values { data, carried }| {
            let (error, through) = match carried {
                Some(Carried { error, through }) => (error, through),
                None => (vec![0.0; data.len()], Default::default()),
            };
            let (data, error) = rewritten.behind(data, error, args)?;
            Ok(Values { data, carried: Some(Carried { error, through }) })
        }))
    });
    value.unwrap_or_else(|| Err(Unknown::new(args.name)))
}

/// Nodes that are listed one by one; a mistake of one piece of code is in as many as the model has layers.
const LISTED: usize = 3;

fn out_of_sight(suspect: &Suspect<'_>, replay: &Replay<'_>, nodes: &[Id]) -> String {
    let unseen = nodes.iter().copied().filter(|&node| node != suspect.node.id);
    let names: Vec<String> = unseen.filter_map(|node| Some(replay.name(node)?.to_string())).collect();
    let verb = if names.len() == 1 { "was" } else { "were" };
    let nodes = match &names[..] {
        [first, .., last] if names.len() > LISTED => format!("{} nodes from {first} to {last}", names.len()),
        _ => names.join(" and "),
    };
    format!(", in {nodes}, which {verb} not recorded")
}
