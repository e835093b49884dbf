//! Two graphs of one model: the one that a recording holds, and the one that the model file asks for.
//!
//! Arithmetic nodes are matched through movements of data by what they compute; what is equal is said in one line, and
//! what differs is named without looking at a value: a number, a source, an op, a node that is missing or extra. The
//! order of execution and of operands that commute, chains of views, the padding of caches and the form of attention
//! make no difference.

mod matching;
mod names;
mod wiring;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use parity_graph::{Graph, Id};

use matching::{Matching, matching};
use names::{Name, names};
use wiring::{From, Node, Source, Wiring, reduce};

pub use wiring::Number;

/// One thing that the recorded graph and the model file do not agree in.
#[derive(Clone, Debug)]
pub enum Difference {
    /// A number that fixes what a node computes.
    Number {
        /// Which node.
        node: Name,
        /// Which number, in words.
        word: &'static str,
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
    for (x, node) in a.nodes.iter().enumerate().filter(|(x, _)| matched.there[*x].is_none()) {
        let before = matched.there[..x].iter().rev().flatten().next().copied().unwrap_or(0);
        found.push((before, Difference::Extra { node: first[x].clone(), op: node.op.name().to_owned() }));
    }
    found.sort_by_key(|(place, _)| *place);
    Diff { nodes: a.nodes.len(), differences: found.into_iter().map(|(_, difference)| difference).collect() }
}

/// Heads of the queries and of the keys of each attention of a graph, where these are told apart.
pub fn heads(graph: &Graph) -> BTreeSet<[i64; 2]> {
    let number = |node: &Node, word: &str| {
        node.numbers.iter().find_map(|(known, number)| match number {
            Number::Int(number) if *known == word => Some(*number),
            _ => None,
        })
    };
    let attention = |node: &Node| Some([number(node, "query heads")?, number(node, "key heads")?]);
    reduce(graph).nodes.iter().filter_map(attention).collect()
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
        for (word, built) in &other.numbers {
            let recorded = one.numbers.iter().find(|(known, _)| known == word).map(|(_, number)| *number);
            if let Some(recorded) = recorded.filter(|recorded| !recorded.same(*built)) {
                found.push(Difference::Number { node: node(), word, recorded, built: *built });
            }
        }
        for (recorded, built) in self.sources(one, other) {
            let recorded = recorded.map(|source| show(self.recorded, self.called[0], source));
            let built = built.map(|source| show(self.built, self.called[1], source));
            found.push(Difference::Source { node: node(), recorded, built });
        }
        found
    }

    /// Pairs of sources that are not the same.
    fn sources<'s>(&self, one: &'s Node, other: &'s Node) -> Vec<(Option<&'s Source>, Option<&'s Source>)> {
        let slots = one.sources.len().max(other.sources.len());
        let at = |node: &'s Node, slot: usize| node.sources.get(slot).and_then(Option::as_ref);
        let pairs = (0..slots).map(|slot| (at(one, slot), at(other, slot)));
        let same = |pair: &(Option<&Source>, Option<&Source>)| match *pair {
            (Some(one), Some(other)) => self.same(one, other),
            (None, None) => true,
            _ => false,
        };
        let straight: Vec<_> = pairs.filter(|pair| !same(pair)).collect();
        if !(one.commutes() && other.commutes()) || straight.is_empty() {
            return straight;
        }
        let crossed: Vec<_> = (0..slots)
            .map(|slot| (at(one, slot), at(other, slots - 1 - slot)))
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

impl Diff {
    /// Whether the recorded graph is what the model file asks for.
    pub fn is_equal(&self) -> bool {
        self.differences.is_empty()
    }

    /// What was found, in plain sentences: one of equal wiring, else one for each thing that differs. What differs in
    /// the same way in several nodes or layers is said once.
    pub fn sentences(&self) -> Vec<String> {
        if self.is_equal() {
            return vec![format!(
                "wiring: all {} nodes of the graph are those that the file asks for",
                self.nodes
            )];
        }
        let mut groups: Vec<(String, Vec<&Name>)> = Vec::new();
        for difference in &self.differences {
            let (node, text) = difference.parts();
            match groups.iter_mut().find(|(known, _)| *known == text) {
                Some((_, nodes)) => nodes.push(node),
                None => groups.push((text, vec![node])),
            }
        }
        groups.into_iter().map(|(text, nodes)| text.replacen('@', &names::list(&nodes, &text), 1)).collect()
    }
}

impl Difference {
    /// The node, and the sentence with `@` where it is named. Numbers of RoPE and of attention are the same in all
    /// nodes of a layer: there the layer is enough.
    fn parts(&self) -> (&Name, String) {
        let absent = || "nothing".to_owned();
        match self {
            Difference::Number { node, word, recorded, built } => {
                (node, format!("@: {word} {recorded} in the graph, {built} in the file"))
            }
            Difference::Op { node, recorded, built } => {
                (node, format!("@ is {recorded} in the graph, {built} in the file"))
            }
            Difference::Source { node, recorded, built } => {
                let (recorded, built) =
                    (recorded.clone().unwrap_or_else(absent), built.clone().unwrap_or_else(absent));
                (node, format!("@ reads {recorded} in the graph, {built} in the file"))
            }
            Difference::Missing { node, op } => {
                (node, format!("@ ({op}) is missing in the graph: the file asks for it"))
            }
            Difference::Extra { node, op } => {
                (node, format!("@ ({op}) is extra in the graph: the file does not ask for it"))
            }
        }
    }
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentences().join("\n"))
    }
}
