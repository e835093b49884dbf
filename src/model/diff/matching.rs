//! Which node of one graph is which of the other: by their weights first, then by what reads them and what they read.

use std::collections::BTreeMap;

use super::wiring::{From, Node, Source, Wiring};

/// Node of the first graph to node of the second, and back.
pub struct Matching {
    /// By node of the first graph.
    pub there: Vec<Option<usize>>,
    /// By node of the second.
    pub back: Vec<Option<usize>>,
}

/// What agreement counts: a weight identifies more than a neighbour does.
const WEIGHT: i32 = 3;
const NEIGHBOUR: i32 = 2;
const CONTRADICTION: i32 = -1;

/// What nodes of different ops must agree in to be taken for each other: two neighbours, seen from both sides.
const OTHER_OP: i32 = 2 * 2 * NEIGHBOUR;

/// How far two nodes agree.
#[derive(Clone, Copy)]
struct Score {
    /// In what they read.
    read: i32,
    /// In what reads them.
    readers: i32,
}

/// Whether two nodes agree enough to be taken for each other.
type Fits = dyn Fn(&Node, &Node, Score) -> bool;

impl Score {
    fn sum(self) -> i32 {
        self.read + self.readers
    }
}

/// Matches two graphs; `namesakes` says which nodes have one name, which decides where all else is equal.
pub fn matching(a: &Wiring, b: &Wiring, namesakes: &dyn Fn(usize, usize) -> bool) -> Matching {
    let mut found = Matching { there: vec![None; a.nodes.len()], back: vec![None; b.nodes.len()] };
    let spread = |found: &mut Matching, fits: &Fits| found.spread(a, b, namesakes, fits);
    found.anchor(a, b);
    found.alone(a, b, namesakes);
    spread(&mut found, &|x, y, score| x.op == y.op && score.sum() > 0);
    // What stands beside something inserted or left out agrees on one side only.
    spread(&mut found, &|x, y, score| x.op == y.op && score.read.max(score.readers) > 0);
    spread(&mut found, &|_, _, score| score.read > 0 && score.readers > 0 && score.sum() >= OTHER_OP);
    found
}

impl Matching {
    fn set(&mut self, x: usize, y: usize) {
        (self.there[x], self.back[y]) = (Some(y), Some(x));
    }

    /// Nodes that are the only ones of their op to read a weight, and both last nodes.
    fn anchor(&mut self, a: &Wiring, b: &Wiring) {
        let keyed = |wiring: &Wiring| {
            let mut keys: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
            for (place, node) in wiring.nodes.iter().enumerate() {
                for weight in node.weights() {
                    keys.entry((weight.to_owned(), node.op.name().to_owned())).or_default().push(place);
                }
            }
            keys
        };
        let (first, second) = (keyed(a), keyed(b));
        for (key, places) in &first {
            if let ([x], Some([y])) = (places.as_slice(), second.get(key).map(Vec::as_slice))
                && self.there[*x].is_none()
                && self.back[*y].is_none()
            {
                self.set(*x, *y);
            }
        }
        if let (Some(x), Some(y)) = (a.nodes.len().checked_sub(1), b.nodes.len().checked_sub(1))
            && self.there[x].is_none()
            && self.back[y].is_none()
            && a.nodes[x].op == b.nodes[y].op
        {
            self.set(x, y);
        }
    }

    /// Nodes that stand alone, such as the one that clears a recurrent state in place before anything reads it: they have
    /// no neighbours to be told by, so their names tell. Of as many with one name the first is the first.
    fn alone(&mut self, a: &Wiring, b: &Wiring, namesakes: &dyn Fn(usize, usize) -> bool) {
        let lone = |wiring: &Wiring, taken: &[Option<usize>]| -> Vec<usize> {
            let nodes = wiring.nodes.iter().enumerate();
            let lone = nodes.filter(|(place, node)| taken[*place].is_none() && node.stands_alone());
            lone.map(|(place, _)| place).collect()
        };
        let others = lone(b, &self.back);
        for x in lone(a, &self.there) {
            let is_it =
                |&&y: &&usize| self.back[y].is_none() && a.nodes[x].op == b.nodes[y].op && namesakes(x, y);
            if let Some(&y) = others.iter().find(is_it) {
                self.set(x, y);
            }
        }
    }

    /// Matches neighbours of what is matched until nothing is found any more: first what agrees in most, since every
    /// match tells more of those beside it.
    fn spread(&mut self, a: &Wiring, b: &Wiring, namesakes: &dyn Fn(usize, usize) -> bool, fits: &Fits) {
        loop {
            let mut scores: BTreeMap<(usize, usize), (i32, bool)> = BTreeMap::new();
            for (x, y) in self.candidates(a, b) {
                let score = self.score(a, b, x, y);
                if fits(&a.nodes[x], &b.nodes[y], score) {
                    scores.insert((x, y), (score.sum(), namesakes(x, y)));
                }
            }
            let Some(most) = scores.values().max().copied() else { return };
            let best: Vec<(usize, usize)> =
                scores.into_iter().filter(|(_, score)| *score == most).map(|(pair, _)| pair).collect();
            let (mut of_a, mut of_b) = (BTreeMap::new(), BTreeMap::new());
            for (x, y) in &best {
                *of_a.entry(*x).or_insert(0) += 1;
                *of_b.entry(*y).or_insert(0) += 1;
            }
            let mut clear: Vec<(usize, usize)> =
                best.iter().filter(|(x, y)| of_a[x] == 1 && of_b[y] == 1).copied().collect();
            if clear.is_empty() {
                // Alike in all that is known: those that stand first.
                clear = vec![best[0]];
            }
            for (x, y) in clear {
                self.set(x, y);
            }
        }
    }

    /// Unmatched neighbours of matched pairs.
    fn candidates(&self, a: &Wiring, b: &Wiring) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for (x, y) in self.there.iter().enumerate().filter_map(|(x, y)| y.map(|y| (x, y))) {
            let free = |nodes: Vec<usize>, taken: &[Option<usize>]| -> Vec<usize> {
                nodes.into_iter().filter(|&node| taken[node].is_none()).collect()
            };
            for neighbours in [sources_of, readers_of] {
                let there = free(neighbours(&b.nodes[y]), &self.back);
                for one in free(neighbours(&a.nodes[x]), &self.there) {
                    pairs.extend(there.iter().map(|&other| (one, other)));
                }
            }
        }
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// What agrees and what contradicts, seen from both sides.
    fn score(&self, a: &Wiring, b: &Wiring, x: usize, y: usize) -> Score {
        let (there, back) = (half(a, b, &self.there, x, y), half(b, a, &self.back, y, x));
        Score { read: there.read + back.read, readers: there.readers + back.readers }
    }

    /// Whether two sources are the same weight, or the same part of matched nodes.
    pub fn same(&self, one: &Source, other: &Source) -> bool {
        same(&self.there, one, other)
    }
}

fn same(there: &[Option<usize>], one: &Source, other: &Source) -> bool {
    let from = match (&one.from, &other.from) {
        (From::Node(x), From::Node(y)) => there[*x] == Some(*y),
        (From::Weight(x), From::Weight(y)) => x == y,
        _ => false,
    };
    from && one.parts == other.parts
}

/// How far what is known of node `x` is found in node `y` of the other graph; `there` leads from the first to the
/// second.
fn half(a: &Wiring, b: &Wiring, there: &[Option<usize>], x: usize, y: usize) -> Score {
    let (one, other) = (&a.nodes[x], &b.nodes[y]);
    let mut score = Score { read: 0, readers: 0 };
    for &(reader, slot) in &one.readers {
        if let Some(there) = there[reader] {
            let any = a.nodes[reader].commutes();
            let agrees = other.readers.iter().any(|&(node, at)| node == there && (any || at == slot));
            score.readers += if agrees { NEIGHBOUR } else { CONTRADICTION };
        }
    }
    for (slot, source) in one.sources.iter().enumerate() {
        let Some(source) = source else { continue };
        let mut others = other.sources.iter().enumerate();
        let agrees = others.any(|(at, found)| {
            (at == slot || one.commutes()) && found.as_ref().is_some_and(|found| same(there, source, found))
        });
        score.read += match (&source.from, agrees) {
            (From::Weight(_), true) => WEIGHT,
            (From::Weight(_), false) => CONTRADICTION,
            (From::Node(_), true) => NEIGHBOUR,
            (From::Node(node), false) if there[*node].is_some() => CONTRADICTION,
            _ => 0,
        };
    }
    score
}

fn sources_of(node: &Node) -> Vec<usize> {
    let nodes = node.sources.iter().flatten().filter_map(|source| match source.from {
        From::Node(node) => Some(node),
        _ => None,
    });
    nodes.collect()
}

fn readers_of(node: &Node) -> Vec<usize> {
    node.readers.iter().map(|(reader, _)| *reader).collect()
}
