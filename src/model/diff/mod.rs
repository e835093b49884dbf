//! Two graphs of one model: the one that a recording holds, and the one that the model file asks for.
//!
//! Arithmetic nodes are matched through movements of data by what they compute; what is equal is said in one line, and
//! what differs is named without looking at a value: a number, a source, an op, a node that is missing or extra. The
//! order of execution and of operands that commute, chains of views, the padding of caches and the form of attention
//! make no difference.

mod matching;
mod names;
mod parameter;
mod wiring;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use parity_graph::known::adapter_rank;
use parity_graph::{Graph, Id, Op};

use matching::{Matching, matching};
use names::names;
use wiring::{From, Node, Source, Wiring, reduce};

pub use names::Name;
pub use parameter::Parameter;
use parameter::{ADAPTER_ALPHA, ADAPTER_SCALE};
pub use wiring::Number;
pub use words::{Aspect, Group, Whose, grouped, sentence};

/// One thing that the recorded graph and the model file do not agree in.
#[derive(Clone, Debug)]
pub enum Difference {
    /// A number that fixes what a node computes.
    Number {
        /// Which node.
        node: Name,
        /// Which number.
        parameter: Parameter,
        /// In the recorded graph.
        recorded: Number,
        /// By the model file.
        built: Number,
    },
    /// What a node computes.
    Op {
        /// Which node.
        node: Name,
        /// In the recorded graph, by ggml's name.
        recorded: String,
        /// By the model file.
        built: String,
    },
    /// What a node reads.
    Source {
        /// Which node.
        node: Name,
        /// Which of its sources.
        slot: usize,
        /// In the recorded graph; `None` where it reads nothing there.
        recorded: Option<String>,
        /// By the model file.
        built: Option<String>,
    },
    /// A node that the model file asks for and the recorded graph lacks.
    Missing {
        /// Which node.
        node: Name,
        /// Its op by ggml's name.
        op: String,
    },
    /// A node of the recorded graph that the model file does not ask for.
    Extra {
        /// Which node.
        node: Name,
        /// Its op by ggml's name.
        op: String,
    },
}

/// What a comparison of two graphs found.
#[derive(Clone, Debug)]
pub struct Diff {
    /// Arithmetic nodes of the recorded graph; attention counts as one.
    pub nodes: usize,
    /// In the order of execution.
    pub differences: Vec<Difference>,
}

/// Compares a recorded graph with a built one.
pub fn diff(recorded: &Graph, built: &Graph) -> Diff {
    let reduce = if wiring::turns(recorded) == wiring::turns(built) { reduce } else { wiring::reduce_turned };
    let (a, b) = (reduce(recorded), reduce(built));
    let (first, second) = (names(recorded, &a), names(built, &b));
    let matched = matching(&a, &b, &|x, y| first[x] == second[y]);
    let inputs = inputs(&a, &b, &matched);
    let called = [&first[..], &second[..]];
    let pair = Pair { recorded, built, a: &a, b: &b, called, matched: &matched, inputs };
    let mut found: Vec<(usize, Difference)> = Vec::new();
    for (y, node) in b.nodes.iter().enumerate() {
        match matched.back[y] {
            Some(x) => found.extend(pair.node(x, y).into_iter().map(|difference| (y, difference))),
            None => {
                let op = node.op.name().to_owned();
                found.push((y, Difference::Missing { node: second[y].clone(), op }));
            }
        }
    }
    let aside = aside(&a, &b, &matched);
    for (x, node) in a.nodes.iter().enumerate().filter(|(x, _)| matched.there[*x].is_none() && !aside[*x]) {
        let before = matched.there[..x].iter().rev().flatten().next().copied().unwrap_or(0);
        found.push((before, Difference::Extra { node: first[x].clone(), op: node.op.name().to_owned() }));
    }
    found.sort_by_key(|(place, _)| *place);
    Diff { nodes: a.nodes.len(), differences: found.into_iter().map(|(_, difference)| difference).collect() }
}

/// By node of `a`: whether it is one that the program has computed beside what the file asks for, of what the last node reads, and
/// that nothing else reads: embeddings that are pooled.
fn aside(a: &Wiring, b: &Wiring, matched: &Matching) -> Vec<bool> {
    let is_last = |&(reader, _): &(usize, usize)| b.nodes[reader].readers.is_empty();
    let mut aside = vec![false; a.nodes.len()];
    for (x, node) in a.nodes.iter().enumerate().filter(|(x, _)| matched.there[*x].is_none()) {
        let read = node.sources.iter().flatten().filter_map(|source| match source.from {
            From::Node(from) => Some(from),
            _ => None,
        });
        let begins =
            |from: usize| matched.there[from].is_some_and(|y| b.nodes[y].readers.iter().any(is_last));
        let of: Vec<bool> = read.map(|from| aside[from] || begins(from)).collect();
        aside[x] = !of.is_empty() && of.iter().all(|of| *of);
    }
    for x in (0..a.nodes.len()).rev() {
        aside[x] &= a.nodes[x].readers.iter().all(|&(reader, _)| aside[reader]);
    }
    aside
}

/// The attentions of a graph, in order, each with the input that masks it.
pub fn masks(graph: &Graph) -> Vec<(Name, Id)> {
    const MASK: usize = 3;
    let wiring = reduce(graph);
    let called = names(graph, &wiring);
    let of = |(node, name): (&Node, Name)| match node.sources.get(MASK)?.as_ref()?.from {
        From::Input(mask) if node.op == Op::FlashAttn => Some((name, mask)),
        _ => None,
    };
    wiring.nodes.iter().zip(called).filter_map(of).collect()
}

/// What a graph has other numbers of heads of than `file`, which says those of the queries and of the keys: in the first
/// attention that tells them apart.
pub fn other_heads(graph: &Graph, file: [i64; 2]) -> Vec<Difference> {
    let wiring = reduce(graph);
    let called = names(graph, &wiring);
    let said = [(parameter::QUERY_HEADS, file[0]), (parameter::KEY_HEADS, file[1])];
    let of = |(node, name): (&Node, &Name)| -> Vec<Difference> {
        let differs = said.iter().filter_map(|(parameter, file)| {
            let (_, recorded) = node.numbers.iter().find(|(known, _)| known == parameter)?;
            let (parameter, recorded, built) = (*parameter, *recorded, Number::Int(*file));
            let node = name.clone();
            (!recorded.same(built)).then_some(Difference::Number { node, parameter, recorded, built })
        });
        differs.collect()
    };
    wiring.nodes.iter().zip(&called).map(of).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The parameter, or its mistake where an adapter's scale is alpha in one graph and alpha / rank in the other.
fn of_alpha(graph: &Graph, id: Id, parameter: Parameter, scales: [Number; 2]) -> Parameter {
    let rank = adapter_rank(graph, id).filter(|_| parameter == ADAPTER_SCALE);
    let [Number::Float(recorded), Number::Float(built)] = scales else { return parameter };
    match rank {
        Some(rank) if Number::Float(built * rank as f32).same(Number::Float(recorded)) => ADAPTER_ALPHA,
        _ => parameter,
    }
}

/// Which input of the recorded graph is which of the built one: each is bound to the one that it stands for most often.
fn inputs(a: &Wiring, b: &Wiring, matched: &Matching) -> BTreeMap<Id, Id> {
    let mut votes: BTreeMap<(Id, Id), usize> = BTreeMap::new();
    for (x, y) in matched.there.iter().enumerate().filter_map(|(x, y)| y.map(|y| (x, y))) {
        for (one, other) in a.nodes[x].sources.iter().zip(&b.nodes[y].sources) {
            if let (
                Some(Source { from: From::Input(one), .. }),
                Some(Source { from: From::Input(other), .. }),
            ) = (one, other)
            {
                *votes.entry((*one, *other)).or_insert(0) += 1;
            }
        }
    }
    let mut ranked: Vec<((Id, Id), usize)> = votes.into_iter().collect();
    ranked.sort_by_key(|(pair, votes)| (std::cmp::Reverse(*votes), *pair));
    let (mut bound, mut taken) = (BTreeMap::new(), BTreeSet::new());
    for ((one, other), _) in ranked {
        if !bound.contains_key(&one) && taken.insert(other) {
            bound.insert(one, other);
        }
    }
    bound
}

/// A slot, and what either graph's node reads there.
type Pairing<'a> = (usize, Option<&'a Source>, Option<&'a Source>);

/// Two graphs with what is known of how they correspond.
struct Pair<'a> {
    recorded: &'a Graph,
    built: &'a Graph,
    a: &'a Wiring,
    b: &'a Wiring,
    /// What the nodes of both are called.
    called: [&'a [Name]; 2],
    matched: &'a Matching,
    inputs: BTreeMap<Id, Id>,
}

impl Pair<'_> {
    /// What differs in one matched pair of nodes.
    fn node(&self, x: usize, y: usize) -> Vec<Difference> {
        let (one, other) = (&self.a.nodes[x], &self.b.nodes[y]);
        let node = || self.called[1][y].clone();
        let mut found = Vec::new();
        if one.op != other.op {
            let (recorded, built) = (one.op.name().to_owned(), other.op.name().to_owned());
            found.push(Difference::Op { node: node(), recorded, built });
        }
        for &(parameter, built) in &other.numbers {
            let recorded =
                one.numbers.iter().find(|(known, _)| *known == parameter).map(|(_, number)| *number);
            if let Some(recorded) = recorded.filter(|recorded| !recorded.same(built)) {
                let parameter = of_alpha(self.recorded, one.id, parameter, [recorded, built]);
                found.push(Difference::Number { node: node(), parameter, recorded, built });
            }
        }
        for (slot, recorded, built) in self.sources(one, other) {
            let recorded = recorded.map(|source| show(self.recorded, self.called[0], source));
            let built = built.map(|source| show(self.built, self.called[1], source));
            found.push(Difference::Source { node: node(), slot, recorded, built });
        }
        found
    }

    /// Pairs of sources that are not the same.
    fn sources<'s>(&self, one: &'s Node, other: &'s Node) -> Vec<Pairing<'s>> {
        let slots = one.sources.len().max(other.sources.len());
        let at = |node: &'s Node, slot: usize| node.sources.get(slot).and_then(Option::as_ref);
        let pairs = (0..slots).map(|slot| (slot, at(one, slot), at(other, slot)));
        let same = |pair: &Pairing<'_>| match *pair {
            (_, Some(one), Some(other)) => self.same(one, other),
            (_, None, None) => true,
            _ => false,
        };
        let straight: Vec<_> = pairs.filter(|pair| !same(pair)).collect();
        if !(one.commutes() && other.commutes()) || straight.is_empty() {
            return straight;
        }
        let crossed: Vec<_> = (0..slots)
            .map(|slot| (slot, at(one, slot), at(other, slots - 1 - slot)))
            .filter(|pair| !same(pair))
            .collect();
        if crossed.len() < straight.len() { crossed } else { straight }
    }

    /// Whether two sources are one, perhaps with nodes between that only one graph has: those are named themselves.
    fn same(&self, one: &Source, other: &Source) -> bool {
        if let (From::Input(one), From::Input(other)) = (&one.from, &other.from) {
            return self.inputs.get(one) == Some(other);
        }
        if self.matched.same(one, other) {
            return true;
        }
        let behind = reach(self.a, one, &self.matched.there);
        let beyond = reach(self.b, other, &self.matched.back);
        if behind.len() == 1 && beyond.len() == 1 && !behind[0].1 && !beyond[0].1 {
            return false;
        }
        behind.iter().any(|(one, through)| {
            beyond.iter().any(|(other, also)| (*through || *also) && self.matched.same(one, other))
        })
    }
}

/// The matched nodes that a source leads to through unmatched ones, and whether it does go through any.
fn reach(wiring: &Wiring, source: &Source, matched: &[Option<usize>]) -> Vec<(Source, bool)> {
    let (mut found, mut open, mut seen) = (Vec::new(), vec![(source.clone(), false)], BTreeSet::new());
    while let Some((source, through)) = open.pop() {
        match source.from {
            From::Node(node) if matched[node].is_none() => {
                if seen.insert(node) {
                    let sources = wiring.nodes[node].sources.iter().flatten();
                    open.extend(sources.map(|inner| {
                        let parts = source.parts.iter().chain(&inner.parts).copied().collect();
                        (Source { from: inner.from.clone(), parts }, true)
                    }));
                }
            }
            _ => found.push((source, through)),
        }
    }
    found
}

/// A source in words.
fn show(graph: &Graph, called: &[Name], source: &Source) -> String {
    let mut text = match &source.from {
        From::Node(node) => called[*node].to_string(),
        From::Weight(name) => name.clone(),
        From::Input(id) => graph.get(*id).name.clone(),
    };
    for (offset, [some, all]) in &source.parts {
        text += &format!(" ({some}/{all} from byte {offset})");
    }
    text
}
