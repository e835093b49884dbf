//! Everything that may have happened to an engine whose output is seen: one list.

use std::collections::{BTreeMap, HashMap, HashSet};

use parity_graph::Id;
use parity_graph::fault::{Argument, Entry, Fault, Scene, entries, find};
use rayon::prelude::*;
use serde::Serialize;

use super::ways::{EXACT, Way};
use crate::audit::Labelled;
use crate::checkpoint::{Checkpoint, Kind};
use crate::faults::diagnosis::OVERFLOW;
use crate::faults::injected::Injected;
use crate::gguf::Gguf;
use crate::ops::bound::{CONFIDENCE, UNIT_F32};

/// Values of one mistake that are tried, the likeliest first.
const VALUES_MAX: usize = 6;

/// In which layers a mistake is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    /// Wherever it has a place.
    All,
    /// In the first alone.
    First,
    /// In the last alone.
    Last,
    /// In the second, the fourth and so on: layers of two kinds in turn.
    Odd,
    /// In the first, the third and so on.
    Even,
    /// In this one alone.
    One(u32),
}

impl Layers {
    /// Whether a node is in one of them, of so many layers; nodes that are in no layer are not.
    fn holds(self, node: Checkpoint, layers: u32) -> bool {
        let Some(layer) = node.layer_index() else { return self == Layers::All };
        match self {
            Layers::All => true,
            Layers::First => layer == 0,
            Layers::Last => layer + 1 == layers,
            Layers::Odd => layer % 2 == 1,
            Layers::Even => layer % 2 == 0,
            Layers::One(one) => layer == one,
        }
    }
}

/// Which token rows a mistake is made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// All.
    All,
    /// Those of the prompt: the prefill.
    Prefill,
    /// Those behind it: decode steps.
    Decode,
}

/// One thing that may have happened.
pub struct Hypothesis {
    /// Of the catalogue, `healthy`, or `tokens.*`.
    pub name: String,
    /// As `--inject` takes it, where it is a mistake.
    pub spelling: Option<String>,
    /// Other names of the same thing on this model.
    pub aliases: Vec<String>,
    /// Where it is made.
    pub layers: Layers,
    /// In which rows.
    pub rows: Rows,
    /// What is wrong, in a sentence.
    pub text: String,
    /// What it changes.
    pub change: Change,
    /// The arithmetic of the rest.
    pub way: Way,
    /// Whether it is tried on a prompt with single steps behind it.
    pub stepwise: bool,
    /// Which mistake of the catalogue, with which of its values: the same in every graph of a model.
    pub key: String,
}

/// What a hypothesis changes.
pub enum Change {
    /// Nothing but rounding.
    Healthy,
    /// Nodes of the graph.
    Nodes(BTreeMap<Id, Vec<Injected>>),
    /// The tokens of the prompt.
    Tokens(Vec<u32>),
    /// The weights are those of another file, of this number.
    Weights(usize),
    /// What this layer gives goes through it once more.
    Repeated(u32),
}

impl Hypothesis {
    /// A healthy engine.
    pub fn healthy(way: Way) -> Hypothesis {
        Hypothesis {
            name: HEALTHY.to_owned(),
            spelling: None,
            aliases: Vec::new(),
            layers: Layers::All,
            rows: Rows::All,
            text: format!("nothing is wrong; the arithmetic is {}", way.name),
            change: Change::Healthy,
            way,
            stepwise: false,
            key: String::new(),
        }
    }

    /// Nothing is wrong but that values are kept in a type that cannot hold them.
    pub fn overflow(way: Way, text: String) -> Hypothesis {
        Hypothesis { name: OVERFLOW.to_owned(), text, ..Hypothesis::healthy(way) }
    }

    /// Other tokens than the prompt's.
    pub fn tokens(name: &str, text: String, tokens: Vec<u32>) -> Hypothesis {
        let change = Change::Tokens(tokens);
        Hypothesis { name: name.to_owned(), text, change, ..Hypothesis::healthy(EXACT) }
    }

    /// Another file in place of the model's, of the same vocabulary.
    pub fn weights(number: usize, file: &Gguf) -> Hypothesis {
        let text = format!("the weights are those of {}", file.path().display());
        let change = Change::Weights(number);
        Hypothesis { name: "weights.other_file".to_owned(), text, change, ..Hypothesis::healthy(EXACT) }
    }

    /// The tokens that it has in place of `given` ones.
    pub fn prompt<'a>(&'a self, given: &'a [u32]) -> &'a [u32] {
        if let Change::Tokens(other) = &self.change { other } else { given }
    }

    /// The same in an arithmetic.
    pub fn in_way(&self, way: Way) -> Option<Hypothesis> {
        Some(Hypothesis { way, ..all_of(self)? })
    }

    /// The mistakes at nodes.
    pub fn nodes(&self) -> Option<&BTreeMap<Id, Vec<Injected>>> {
        if let Change::Nodes(nodes) = &self.change { Some(nodes) } else { None }
    }

    /// As `--inject` takes it, with the layer or the node that it is in; `None` where that cannot be said so.
    pub fn injected(&self) -> Option<String> {
        let (spelling, nodes) = (self.spelling.as_ref()?, self.nodes()?);
        let mut places = nodes.values().flatten().map(|one| one.checkpoint);
        let first = places.next().filter(|_| self.rows == Rows::All)?;
        match self.layers {
            Layers::All => Some(spelling.clone()),
            Layers::Odd | Layers::Even => None,
            _ if places.next().is_none() => Some(format!("{spelling}@{first}")),
            Layers::First | Layers::Last | Layers::One(_) => {
                Some(format!("{spelling}@{}", first.layer_index()?))
            }
        }
    }

    /// The layer that is run twice.
    pub fn repeats(&self) -> Option<u32> {
        if let Change::Repeated(layer) = self.change { Some(layer) } else { None }
    }

    /// Whether it does the same as another one.
    fn is_same(&self, other: &Hypothesis) -> bool {
        let (Some(a), Some(b)) = (self.nodes(), other.nodes()) else { return false };
        let alike = |a: &[Injected], b: &[Injected]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.fault.rewrite == b.fault.rewrite)
        };
        self.rows == other.rows
            && a.len() == b.len()
            && a.iter().zip(b).all(|((x, a), (y, b))| x == y && alike(a, b))
    }
}

/// The name of no mistake.
pub const HEALTHY: &str = "healthy";

/// The catalogue's mistakes in a graph, each with its values, in all layers; those that are the same rewrites are one.
pub fn everywhere(labelled: &Labelled) -> Vec<Hypothesis> {
    // What leaves the first step as it is needs several.
    merged(unmerged(labelled, |entry| !entry.later))
}

/// The same of some entries of the catalogue, each by itself.
pub fn unmerged(labelled: &Labelled, some: impl Fn(&Entry) -> bool) -> Vec<Hypothesis> {
    let scene = Scene::new(&labelled.program.graph);
    // Roundings are a matter of arithmetic.
    let kinds = entries().filter(|entry| !(entry.recognised || entry.rounds) && some(entry));
    let kinds: Vec<&Entry> = kinds.collect();
    kinds.into_par_iter().flat_map_iter(|entry| of_entry(entry, &scene, labelled)).collect()
}

/// One mistake with each of its values, wherever it has a place.
fn of_entry(entry: &'static Entry, scene: &Scene<'_>, labelled: &Labelled) -> Vec<Hypothesis> {
    let mut by_value: Vec<BTreeMap<Id, Vec<Injected>>> = Vec::new();
    for (id, checkpoint) in labelled.nodes() {
        for (value, fault) in entry.all_at(scene, id).into_iter().take(VALUES_MAX).enumerate() {
            if by_value.len() <= value {
                by_value.resize_with(value + 1, BTreeMap::new);
            }
            by_value[value].insert(id, vec![Injected { spec: 0, checkpoint, fault }]);
        }
    }
    let all = by_value.into_iter().enumerate();
    let made = all.filter_map(|(value, nodes)| {
        of_nodes(nodes, Layers::All, Rows::All, format!("{} {value}", entry.name))
    });
    made.collect()
}

/// The name of the mistake that a key begins with.
pub fn mistake(key: &str) -> &str {
    key.split(' ').next().unwrap_or_default()
}

/// Mistakes at nodes as one hypothesis; none where there are no nodes.
pub fn of_nodes(
    nodes: BTreeMap<Id, Vec<Injected>>,
    layers: Layers,
    rows: Rows,
    key: String,
) -> Option<Hypothesis> {
    let first: &Fault = &nodes.values().next()?.first()?.fault;
    Some(Hypothesis {
        name: first.name.to_owned(),
        spelling: Some(first.spelling()).filter(|text| text.len() <= SPELLING_MAX),
        aliases: Vec::new(),
        layers,
        rows,
        text: first.text.clone(),
        change: Change::Nodes(nodes),
        way: EXACT,
        stepwise: false,
        key,
    })
}

/// Orders of columns are longer than anybody reads.
const SPELLING_MAX: usize = 80;

/// Hypotheses that do the same as one, in their order.
pub fn merged(all: Vec<Hypothesis>) -> Vec<Hypothesis> {
    let mut out: Vec<Hypothesis> = Vec::with_capacity(all.len());
    for one in all {
        match out.iter_mut().find(|known| known.is_same(&one)) {
            Some(known) if known.name != one.name && !known.aliases.contains(&one.name) => {
                known.aliases.push(one.name);
            }
            Some(_) => {}
            None => out.push(one),
        }
    }
    out
}

/// What mistakes are called that are made in decode steps alone.
const IN_DECODE: [(&str, &str); 2] =
    [("rope.position_shift", "rope.decode_shift"), ("rope.position_zero", "rope.position_in_step")];

/// A mistake in some of its layers, or in some rows, alone; none where that is all of it, or nothing.
pub fn part(whole: &Hypothesis, layers: Layers, rows: Rows, n_layers: u32) -> Option<Hypothesis> {
    let nodes = whole.nodes()?;
    let of_part = nodes_of(whole, &|_, here| here.iter().all(|one| layers.holds(one.checkpoint, n_layers)));
    if rows == Rows::All && of_part.len() == nodes.len() {
        return None;
    }
    let made = of_nodes(of_part, layers, rows, whole.key.clone())?;
    let mut aliases = whole.aliases.clone();
    if rows == Rows::Decode {
        let same = IN_DECODE.iter().filter(|(name, _)| *name == whole.name);
        aliases.extend(same.map(|(_, other)| (*other).to_owned()));
    }
    Some(Hypothesis { aliases, ..made })
}

/// A mistake at those of its nodes that are wanted, which are of one layer where that is known; none where it has none.
pub fn kept(whole: &Hypothesis, wants: &dyn Fn(Id) -> bool, layer: Option<u32>) -> Option<Hypothesis> {
    let nodes = nodes_of(whole, &|id, _| wants(id));
    let made = of_nodes(nodes, layer.map_or(Layers::All, Layers::One), whole.rows, whole.key.clone())?;
    Some(Hypothesis { aliases: whole.aliases.clone(), ..made })
}

/// A mistake in one kind of its nodes alone, in all layers and in each, where these are of several kinds.
pub fn by_kind(whole: &Hypothesis, layers: u32) -> Vec<Hypothesis> {
    let Some(nodes) = whole.nodes() else { return Vec::new() };
    let place = |id: Id| nodes.get(&id).and_then(|here| here.first()).map(|one| one.checkpoint);
    let mut kinds: Vec<Kind> = nodes.keys().filter_map(|id| Some(place(*id)?.kind())).collect();
    let mut seen = HashSet::new();
    kinds.retain(|kind| seen.insert(*kind));
    if kinds.len() < 2 {
        return Vec::new();
    }
    // A weight and its bias are one module.
    let module = |kind: Kind| kind.name().trim_end_matches(PRODUCT);
    let is_product = |kind: &&Kind| kind.name().ends_with(PRODUCT);
    let pair = |one: &Kind| Some([*one, *kinds.iter().find(|kind| kind.name() == module(*one))?]);
    let pairs: Vec<[Kind; 2]> = kinds.iter().filter(is_product).filter_map(pair).collect();
    let places = kinds.into_iter().map(|kind| [kind; 2]).chain(pairs);
    let layers = || std::iter::once(None).chain((0..layers).map(Some).filter(|_| layers > 1));
    let made = places.flat_map(|kinds| layers().map(move |at| (kinds, at))).filter_map(|(kinds, layer)| {
        let is_at = |at: Checkpoint| layer.is_none() || at.layer_index() == layer;
        let is_it = |at: Checkpoint| kinds.contains(&at.kind()) && is_at(at);
        let one = kept(whole, &|id| place(id).is_some_and(is_it), layer)?;
        // In other graphs the key finds the mistake in all of its nodes.
        Some(Hypothesis {
            key: format!("{} of {} and {}", whole.key, kinds[0].name(), kinds[1].name()),
            ..one
        })
    });
    made.collect()
}

/// How products are called that a bias is added to.
const PRODUCT: &str = "_proj";

/// The mistakes at some of the nodes of a hypothesis, once more.
fn nodes_of(whole: &Hypothesis, wants: &dyn Fn(Id, &[Injected]) -> bool) -> BTreeMap<Id, Vec<Injected>> {
    let all = whole.nodes().into_iter().flatten();
    all.filter(|(id, here)| wants(**id, here))
        .map(|(id, here)| (*id, here.iter().map(copied).collect()))
        .collect()
}

/// The same hypotheses in another graph of the same model, whose nodes are others; `None` where one has no place in it.
pub fn again(labelled: &Labelled, layers: u32, which: &[&Hypothesis]) -> Vec<Option<Hypothesis>> {
    let names: HashSet<&str> = which.iter().map(|one| mistake(&one.key)).collect();
    let all = unmerged(labelled, |entry| names.contains(entry.name)).into_iter().chain(skipped(labelled));
    let known: HashMap<String, Hypothesis> = all.map(|one| (one.key.clone(), one)).collect();
    let one = |one: &&Hypothesis| {
        if let Some(layer) = one.repeats() {
            return repeated(layers).nth(layer as usize);
        }
        let Some(same) = known.get(&one.key) else { return relocated(labelled, one) };
        match (one.layers == same.layers, one.rows) {
            (true, Rows::All) => all_of(same),
            (_, rows) => part(same, one.layers, rows, layers),
        }
    };
    which.iter().map(one).collect()
}

/// A mistake at nodes of the same names in another graph.
fn relocated(labelled: &Labelled, one: &Hypothesis) -> Option<Hypothesis> {
    let scene = Scene::new(&labelled.program.graph);
    let mistakes: Vec<&Injected> = one.nodes()?.values().flatten().collect();
    let here = labelled.nodes().filter_map(|(id, label)| {
        let known = mistakes.iter().find(|known| known.checkpoint == label)?;
        let fault = find(known.fault.name)?.at(&scene, id, &known.fault.argument)?;
        Some((id, vec![Injected { spec: known.spec, checkpoint: label, fault }]))
    });
    of_nodes(here.collect(), one.layers, one.rows, one.key.clone())
}

/// How far roundings of logits leave a fitted factor from a number of few digits: each of many is off by less than that.
const FITTED: f64 = CONFIDENCE * UNIT_F32;

/// All logits multiplied by a number.
pub fn scaled(labelled: &Labelled, factor: f64) -> Option<Hypothesis> {
    let (scene, entry) = (Scene::new(&labelled.program.graph), find("data.scaled")?);
    let (id, checkpoint) = labelled.nodes().filter(|(_, label)| label.kind() == Kind::Logits).last()?;
    let short: f64 = format!("{factor:.3e}").parse().ok()?;
    let factor = if (short / factor - 1.0).abs() <= FITTED { short } else { factor };
    let fault = entry.at(&scene, id, &Argument::Number(factor))?;
    let nodes = BTreeMap::from([(id, vec![Injected { spec: 0, checkpoint, fault }])]);
    of_nodes(nodes, Layers::All, Rows::All, format!("{} of logits", entry.name))
}

/// Each layer not run: what it adds to the row that goes through all layers is nothing.
pub fn skipped(labelled: &Labelled) -> Vec<Hypothesis> {
    let scene = Scene::new(&labelled.program.graph);
    let Some(zero) = find(ZERO) else { return Vec::new() };
    let mut by_layer: BTreeMap<u32, BTreeMap<Id, Vec<Injected>>> = BTreeMap::new();
    for (id, checkpoint) in labelled.nodes() {
        let adds = [Kind::AttnOut, Kind::FfnOut].contains(&checkpoint.kind());
        if let (true, Some(layer), Some(fault)) =
            (adds, checkpoint.layer_index(), zero.at(&scene, id, &Argument::None))
        {
            let nodes = by_layer.entry(layer).or_default();
            nodes.insert(id, vec![Injected { spec: 0, checkpoint, fault }]);
        }
    }
    // Where one of the two is a node of another name, nothing is skipped.
    let whole = by_layer.into_iter().filter(|(_, nodes)| nodes.len() == 2);
    let made = whole.filter_map(|(layer, nodes)| {
        let one = of_nodes(nodes, Layers::One(layer), Rows::All, format!("{SKIPPED} of {layer}"))?;
        Some(Hypothesis {
            name: SKIPPED.to_owned(),
            spelling: None,
            text: format!("layer {layer} is not run"),
            ..one
        })
    });
    made.collect()
}

/// Each layer run twice.
pub fn repeated(layers: u32) -> impl Iterator<Item = Hypothesis> {
    (0..layers).map(|layer| Hypothesis {
        name: "layer.repeated".to_owned(),
        text: format!("layer {layer} is run twice"),
        change: Change::Repeated(layer),
        layers: Layers::One(layer),
        ..Hypothesis::healthy(EXACT)
    })
}

/// The mistake that makes nothing of a node's output.
const ZERO: &str = "data.zero";
/// A layer that is not run.
const SKIPPED: &str = "layer.skipped";

/// All of a mistake, once more.
fn all_of(whole: &Hypothesis) -> Option<Hypothesis> {
    let made = of_nodes(nodes_of(whole, &|_, _| true), whole.layers, whole.rows, whole.key.clone())?;
    let (name, spelling, text) = (whole.name.clone(), whole.spelling.clone(), whole.text.clone());
    Some(Hypothesis { name, spelling, text, ..made })
}

fn copied(one: &Injected) -> Injected {
    Injected { spec: one.spec, checkpoint: one.checkpoint, fault: one.fault.clone() }
}
