//! What differs between graphs, in words: the only place that knows them.

use std::fmt;

use super::names::{Name, list};
use super::{Diff, Difference, Parameter};

/// Whose graph it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The one recording's that is looked at.
    Recorded,
    /// The candidate's.
    Candidate,
    /// The reference's.
    Reference,
    /// The one that the model file asks for.
    File,
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Whose::Recorded => "the graph",
            Whose::Candidate => "the candidate",
            Whose::Reference => "the reference",
            Whose::File => "the file",
        })
    }
}

/// In what a node differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Aspect {
    /// A number that fixes what it computes.
    Number(Parameter),
    /// What it computes.
    Op,
    /// What it reads in a slot.
    Source(usize),
    /// Whether it is there; its op by ggml's name.
    Node(String),
    /// Which cells of the cache its mask shows to the token at a position.
    Mask(u32),
    /// Which cells it shows to a row, whose key stands here, and the mistake that this is.
    Cells(String, &'static str),
    /// Which state a row, whose key stands here, goes on from, and whether that is the newest.
    State(String, bool),
}

impl Aspect {
    /// Whether it decides between two recordings by itself: other ops and nodes may be another form of the same.
    pub fn decides(&self) -> bool {
        matches!(self, Aspect::Number(_) | Aspect::Source(_))
    }

    /// The catalogue's name for it.
    pub fn fault(&self) -> Option<&'static str> {
        match self {
            Aspect::Number(parameter) => parameter.fault,
            Aspect::Cells(_, fault) => Some(fault),
            Aspect::State(_, true) => Some("state.no_rollback"),
            _ => None,
        }
    }
}

/// What each of several sides has there; `None` where nothing.
pub type Has = Vec<(Whose, Option<String>)>;

impl Difference {
    /// The node.
    pub fn node(&self) -> &Name {
        match self {
            Difference::Number { node, .. }
            | Difference::Op { node, .. }
            | Difference::Source { node, .. }
            | Difference::Missing { node, .. }
            | Difference::Extra { node, .. } => node,
        }
    }

    /// In what it differs.
    pub fn aspect(&self) -> Aspect {
        match self {
            Difference::Number { parameter, .. } => Aspect::Number(*parameter),
            Difference::Op { .. } => Aspect::Op,
            Difference::Source { slot, .. } => Aspect::Source(*slot),
            Difference::Missing { op, .. } | Difference::Extra { op, .. } => Aspect::Node(op.clone()),
        }
    }

    /// What the recorded and the built graph have there.
    pub fn has(&self) -> [Option<String>; 2] {
        match self {
            Difference::Number { recorded, built, .. } => [recorded, built].map(|it| Some(it.to_string())),
            Difference::Op { recorded, built, .. } => [recorded, built].map(|it| Some(it.clone())),
            Difference::Source { recorded, built, .. } => [recorded.clone(), built.clone()],
            Difference::Missing { op, .. } => [None, Some(op.clone())],
            Difference::Extra { op, .. } => [Some(op.clone()), None],
        }
    }
}

/// What a side has, and what it should have.
fn beside_file(has: &[(Whose, Option<String>)]) -> [Option<&str>; 2] {
    let of = |file: bool| has.iter().find(|(side, _)| (*side == Whose::File) == file);
    [of(false), of(true)].map(|found| found.and_then(|(_, value)| value.as_deref()))
}

/// One sentence of a node, which stands before it: what each side has. Sides that have the same are named together.
pub fn sentence(aspect: &Aspect, has: &[(Whose, Option<String>)]) -> String {
    let mut groups: Vec<(Option<&str>, Vec<Whose>)> = Vec::new();
    for (side, value) in has {
        match groups.iter_mut().find(|(known, _)| *known == value.as_deref()) {
            Some((_, sides)) => sides.push(*side),
            None => groups.push((value.as_deref(), vec![*side])),
        }
    }
    // What is not the file's comes first.
    groups.sort_by_key(|(_, sides)| sides.contains(&Whose::File));
    let of_group = |(value, sides): &(Option<&str>, Vec<Whose>)| {
        let sides: Vec<String> = sides.iter().map(ToString::to_string).collect();
        format!("{} in {}", value.unwrap_or("nothing"), sides.join(" and in "))
    };
    let told = || groups.iter().map(of_group).collect::<Vec<_>>().join(", ");
    match aspect {
        Aspect::Number(parameter) => format!("{} {}", parameter.words, told()),
        Aspect::Op => format!("is {}", told()),
        Aspect::Source(_) => format!("reads {}", told()),
        Aspect::Mask(position) => format!("shows position {position} {}", told()),
        Aspect::Cells(row, _) => {
            let [seen, held] = beside_file(has);
            format!(
                "shows position {row} {}, and its sequence holds {}",
                seen.unwrap_or("nothing"),
                held.unwrap_or("nothing")
            )
        }
        Aspect::State(row, _) => {
            let [read, kept] = beside_file(has).map(|found| found.unwrap_or("none"));
            format!("goes on at position {row} from {read}, and what its sequence went back to is {kept}")
        }
        Aspect::Node(op) => {
            let those = |there: bool| {
                let sides =
                    has.iter().filter(|(side, value)| *side != Whose::File && value.is_some() == there);
                sides.map(|(side, _)| side.to_string()).collect::<Vec<_>>().join(" and in ")
            };
            match has.iter().find(|(side, _)| *side == Whose::File) {
                Some((_, Some(_))) => format!("({op}) is missing in {}: the file asks for it", those(false)),
                Some((_, None)) => {
                    format!("({op}) is extra in {}: the file does not ask for it", those(true))
                }
                None => format!("({op}) is in {} and not in {}", those(true), those(false)),
            }
        }
    }
}

/// What differs in the same way in several nodes.
#[derive(Clone, Debug)]
pub struct Group {
    /// Which nodes, in order.
    pub nodes: Vec<Name>,
    /// In what.
    pub aspect: Aspect,
    /// What each side has there.
    pub has: Has,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_layer = matches!(&self.aspect, Aspect::Number(parameter) if parameter.of_layer);
        let colon = if matches!(self.aspect, Aspect::Number(_)) { ":" } else { "" };
        write!(f, "{}{colon} {}", list(&self.nodes, of_layer), sentence(&self.aspect, &self.has))
    }
}

/// What differs, each thing said once.
pub fn grouped(differences: impl Iterator<Item = (Name, Aspect, Has)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (node, aspect, has) in differences {
        match groups.iter_mut().find(|known| known.aspect == aspect && known.has == has) {
            Some(known) if known.nodes.contains(&node) => {}
            Some(known) => known.nodes.push(node),
            None => groups.push(Group { nodes: vec![node], aspect, has }),
        }
    }
    groups
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
        let of = |difference: &Difference| {
            let [recorded, built] = difference.has();
            let has = vec![(Whose::Recorded, recorded), (Whose::File, built)];
            (difference.node().clone(), difference.aspect(), has)
        };
        grouped(self.differences.iter().map(of)).iter().map(ToString::to_string).collect()
    }
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentences().join("\n"))
    }
}
