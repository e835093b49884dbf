//! Mistakes that people make, as rewrites of a node: what is injected into a graph, and what is tried on a node
//! whose output is wrong.
//!
//! A mistake is one [`Entry`]: what people are told of it, the node rewritten for a value, and how the value is found
//! from the recorded numbers of a wrong node. Where it fits is found from the graph alone: the node's op, its parameters,
//! where its sources come from. A new mistake is one entry in the table of its family.

mod attention;
mod cache;
mod data;
mod embed;
mod engines;
mod evidence;
mod feed_forward;
mod heads;
mod linear;
mod lora;
mod mask;
mod moe;
mod norm;
mod precision;
mod quant;
mod ranks;
mod residual;
mod rope;
mod scaling;
mod site;
mod state;
mod wanted;

pub use engines::fix_in;
pub use evidence::Evidence;
pub use moe::experts;
pub use site::Scene;
pub use wanted::{Place, Wanted};

use std::fmt;

use evidence::{COARSE, FINE, fitted};

use crate::graph::{Graph, Id};
use crate::op::Op;
use crate::rewrite::{Change, Rewrite};

pub(crate) use site::Site;

/// One mistake at one node.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Its name in the catalogue, e.g. `rope.base`.
    pub name: &'static str,
    /// With which value, as `--inject` takes it.
    pub argument: Argument,
    /// What is wrong, in a sentence: `RoPE base is 10000, the graph says 1000000`.
    pub text: String,
    /// The node computed wrongly.
    pub rewrite: Rewrite,
}

/// The value of a mistake.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// It has none, or none was given.
    None,
    /// A number.
    Number(f64),
    /// A tensor of the file, a checkpoint, one of several forms.
    Name(String),
    /// Place i takes what place `order[i]` held.
    Order(Vec<u32>),
}

impl Argument {
    /// As a user writes it.
    pub fn parse(text: &str) -> Argument {
        if let Some(number) = text.parse().ok().filter(|number: &f64| number.is_finite()) {
            return Argument::Number(number);
        }
        let order: Option<Vec<u32>> = text.split(',').map(|part| part.parse().ok()).collect();
        match order {
            Some(order) if order.len() > 1 => Argument::Order(order),
            _ => Argument::Name(text.to_owned()),
        }
    }

    fn name(text: &str) -> Argument {
        Argument::Name(text.to_owned())
    }

    fn numbers(numbers: impl IntoIterator<Item = f64>) -> Vec<Argument> {
        numbers.into_iter().map(Argument::Number).collect()
    }

    /// The number, where it is one.
    pub fn number(&self) -> Option<f64> {
        if let Argument::Number(number) = self { Some(*number) } else { None }
    }

    /// The number as a whole number, where it is one.
    fn integer(&self) -> Option<i32> {
        let whole = self.number().filter(|n| n.fract() == 0.0 && n.abs() <= f64::from(i32::MAX));
        whole.map(|n| n as i32)
    }

    fn text(&self) -> Option<&str> {
        if let Argument::Name(name) = self { Some(name) } else { None }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Argument::None => Ok(()),
            Argument::Number(number) => f.write_str(&spell(*number)),
            Argument::Name(name) => f.write_str(name),
            Argument::Order(order) => f.write_str(&spell_order(order)),
        }
    }
}

impl Fault {
    /// As `--inject` takes it, without a place.
    pub fn spelling(&self) -> String {
        match &self.argument {
            Argument::None => self.name.to_owned(),
            argument => format!("{}={argument}", self.name),
        }
    }
}

/// What a mistake makes of a node, and a sentence that says so; nothing where the node has no place for it.
type Made = Option<(Change, String)>;

/// One mistake that people make.
pub struct Entry {
    /// E.g. `rope.base`.
    pub name: &'static str,
    /// What goes wrong, one line.
    pub summary: &'static str,
    /// Where in an engine people make it.
    pub place: &'static str,
    /// How to mend it.
    pub fix: &'static str,
    /// What its value is, where it takes one.
    pub parameter: Option<&'static str>,
    /// Why it may leave no trace in a run, where that can be.
    pub silent: Option<&'static str>,
    /// Whether it leaves the first step as it is.
    pub later: bool,
    /// Whether it stays in a state that is not recorded: then later steps are wrong by what it left there.
    pub stays: bool,
    /// Whether it is only recognised, and never injected.
    pub recognised: bool,
    /// Whether it is nothing but a rounding, which other arithmetic than the mistake's may be too.
    pub rounds: bool,
    /// The ops that may have a place for it; any where there are none.
    pub ops: &'static [Op],
    /// The values that are tried without having looked at any number, the likeliest first: the first that fits is what is
    /// injected where none is given.
    values: fn(Site<'_>) -> Vec<Argument>,
    /// The node rewritten for a value.
    make: fn(Site<'_>, &Argument) -> Made,
    /// The values that the numbers of a wrong node speak for, the likeliest first.
    guess: Option<Guess>,
    /// A value that is searched for by how near it brings the node, or one behind it, to what was recorded.
    searched: Option<Searched>,
}

type Guess = fn(Site<'_>, &Evidence<'_>) -> Vec<Argument>;

/// A number that is searched for.
struct Searched {
    /// What it is near to; `None` where the node has no place for it.
    around: fn(Site<'_>) -> Option<f64>,
    /// The values that are told for what was found, the likeliest first.
    told: fn(f64) -> Vec<Argument>,
}

/// How far what was recorded is from a node with a mistake of this value: squares. Or anything that is more than a limit,
/// where it is.
pub type Distance<'a> = &'a dyn Fn(&Argument, f64) -> f64;

/// What most entries have in common.
const PLAIN: Entry = Entry {
    name: "",
    summary: "",
    place: "",
    fix: "",
    parameter: None,
    silent: None,
    later: false,
    stays: false,
    recognised: false,
    rounds: false,
    ops: &[],
    values: |_| vec![Argument::None],
    make: |_, _| None,
    guess: None,
    searched: None,
};

/// An entry without a value.
const fn plain(
    name: &'static str,
    ops: &'static [Op],
    [summary, place, fix]: [&'static str; 3],
    make: fn(Site<'_>, &Argument) -> Made,
) -> Entry {
    Entry { name, summary, place, fix, ops, make, ..PLAIN }
}

impl Entry {
    /// The mistake at a node; `None` where the node has no place for it with this value.
    pub fn at(&self, scene: &Scene<'_>, id: Id, argument: &Argument) -> Option<Fault> {
        let site = scene.site(id)?;
        if !(self.ops.is_empty() || self.ops.contains(site.op())) {
            return None;
        }
        match argument {
            // The first that is not what the model has.
            Argument::None => (self.values)(site).into_iter().find_map(|value| self.of(site, value)),
            given => self.of(site, given.clone()),
        }
    }

    /// The mistake at a node with each of the values that are tried without having looked at any number.
    pub fn all_at(&self, scene: &Scene<'_>, id: Id) -> Vec<Fault> {
        match scene.site(id).filter(|site| self.ops.is_empty() || self.ops.contains(site.op())) {
            Some(site) => self.made((self.values)(site), site),
            None => Vec::new(),
        }
    }

    /// The mistake at a wrong node with each of the values that its numbers speak for.
    pub fn guessed(&self, scene: &Scene<'_>, id: Id, evidence: &Evidence<'_>) -> Vec<Fault> {
        let site = scene.site(id).filter(|site| self.ops.is_empty() || self.ops.contains(site.op()));
        let Some(site) = site else { return Vec::new() };
        let distance = |argument: &Argument, limit: f64| {
            let made = (self.make)(site, argument);
            made.map_or(f64::INFINITY, |(change, _)| (evidence.within)(&change, limit))
        };
        match self.guess {
            Some(guess) => self.made(guess(site, evidence), site),
            None => self.made(self.found(site, FINE, &distance), site),
        }
    }

    /// Values of the mistake at a node that nobody recorded, by how far what was recorded behind it is from it with each; none
    /// of mistakes whose value is no number that can be searched for.
    pub fn searched(&self, scene: &Scene<'_>, id: Id, distance: Distance<'_>) -> Vec<Argument> {
        let site = scene.site(id).filter(|site| self.ops.contains(site.op()));
        site.map_or_else(Vec::new, |site| self.found(site, COARSE, distance))
    }

    /// Whether its value is a number that can be searched for.
    pub fn is_searched(&self) -> bool {
        self.searched.is_some()
    }

    fn found(&self, site: Site<'_>, steps: i32, distance: Distance<'_>) -> Vec<Argument> {
        let Some(Searched { around, told }) = &self.searched else { return Vec::new() };
        let within = |number: f64, limit: f64| distance(&Argument::Number(number), limit);
        around(site).and_then(|around| fitted(around, steps, within)).map_or_else(Vec::new, told)
    }

    fn made(&self, arguments: Vec<Argument>, site: Site<'_>) -> Vec<Fault> {
        let mut out: Vec<Fault> = Vec::new();
        for fault in arguments.into_iter().filter_map(|argument| self.of(site, argument)) {
            if out.iter().all(|known| known.rewrite != fault.rewrite) {
                out.push(fault);
            }
        }
        out
    }

    fn of(&self, site: Site<'_>, argument: Argument) -> Option<Fault> {
        let (change, text) = (self.make)(site, &argument)?;
        // What has no name of its own nobody keeps.
        let origins = change.others().into_iter().map(|id| site.graph.origin(id));
        let mut kept = origins.map(|id| site.graph.is_leaf(id) || site.graph.is_arithmetic(id));
        kept.all(|kept| kept).then_some(Fault {
            name: self.name,
            argument,
            text,
            rewrite: Rewrite { node: site.id, change },
        })
    }
}

/// Other names of entries: mistakes that are one and the same rewrite of a graph.
pub const ALIASES: [(&str, &str); 2] = [("rope.no_freqs", "rope.factors"), ("ffn.act_on_up", "ffn.swapped")];

/// The catalogue, by part of the model; of what comes to the same the more specific one first.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    [
        norm::ENTRIES,
        linear::ENTRIES,
        lora::ENTRIES,
        quant::ENTRIES,
        embed::ENTRIES,
        cache::ENTRIES,
        rope::ENTRIES,
        scaling::ENTRIES,
        attention::ENTRIES,
        heads::ENTRIES,
        mask::ENTRIES,
        moe::ENTRIES,
        feed_forward::ENTRIES,
        residual::ENTRIES,
        state::ENTRIES,
        ranks::ENTRIES,
        data::ENTRIES,
        precision::ENTRIES,
    ]
    .into_iter()
    .flatten()
}

/// The entry of a name, or of what it is another name of.
pub fn find(name: &str) -> Option<&'static Entry> {
    let own = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, own)| own);
    entries().find(|entry| entry.name == own)
}

/// The mistakes that can be made at a node, with the values that are tried without having looked at any number.
pub fn at(graph: &Graph, id: Id) -> Vec<Fault> {
    at_node(&Scene::new(graph), id)
}

/// [`at`], for several nodes of one graph.
pub fn at_node(scene: &Scene<'_>, id: Id) -> Vec<Fault> {
    entries().flat_map(|entry| entry.all_at(scene, id)).collect()
}

/// A number as people write it: `10000`, `0.08838835`, `1e-5`.
pub fn spell(number: f64) -> String {
    let magnitude = number.abs();
    if number == number.trunc() && magnitude < 1e9 {
        return format!("{number:.0}");
    }
    if (1e-3..1e6).contains(&magnitude) {
        // Seven significant digits: what an f32 holds.
        let decimals = (6 - magnitude.log10().floor() as i32).max(0) as usize;
        let text = format!("{number:.decimals$}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let text = format!("{number:.6e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        None => text,
    }
}

fn spell_order(order: &[u32]) -> String {
    order.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// `one position`, `3 positions`.
fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn when(holds: bool) -> Option<()> {
    holds.then_some(())
}
