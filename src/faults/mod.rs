//! Mistakes that people make in LLM engines: a catalogue, injection into an engine, and diagnosis.
//!
//! A fault is a small change of one node of the graph, so that the same entry both injects the mistake in a
//! running engine and predicts, from a failing node's recorded inputs, what that mistake would have given.

use std::collections::HashSet;
use std::fmt;

use crate::checkpoint::{Checkpoint, Kind};
use crate::model::Model;
use crate::model::graph::{Node, Rope};
use crate::report::Tried;

pub mod between;
pub mod catalogue;
mod described;
pub mod diagnose;
pub mod diagnosis;
mod guessed;
pub mod inject;
pub mod injected;
mod precision;
mod ranks;
pub mod rewritten;
mod sample;
pub mod tokens;

/// One mistake that people make.
pub struct Fault {
    /// E.g. `rope.base`.
    pub name: &'static str,
    /// What goes wrong, one line.
    pub summary: &'static str,
    /// Where in an engine people make it.
    pub place: &'static str,
    /// How to mend it.
    pub fix: &'static str,
    /// What it can be told.
    pub parameter: Option<Parameter>,
    /// The nodes of a layer (or of the model) that it sits in unless one is named.
    pub home: Home,
    /// Why it may leave no trace in a run, where that can be.
    pub silent: Option<&'static str>,
    /// Makes the mistake in one node; `None` where the node has no place for it.
    pub change: fn(&Site<'_>, &mut Node, &Argument) -> Option<()>,
    /// The argument where none is given; `None` where the node has no place for the fault.
    pub default: fn(&Site<'_>, &Node) -> Option<Argument>,
    /// Arguments to try on a failing node, the likeliest first; the default alone where absent.
    pub guess: Option<Guess>,
    /// One sentence for a report, from the healthy node and the argument.
    pub sentence: fn(&Site<'_>, &Node, &Argument) -> String,
}

/// Faults that a report lists where none explains the error.
const TRIED_MAX: usize = 12;

/// What a report lists of the faults that were tried: each once, with the largest share of the error that it accounts for
/// in any form, the likeliest first. One that makes things worse accounts for nothing; one that gives NaN where numbers
/// were recorded says nothing.
fn nearest(mut tried: Vec<Tried>) -> Vec<Tried> {
    tried.retain(|tried| tried.explains.is_finite());
    tried.iter_mut().for_each(|tried| tried.explains = tried.explains.max(0.0));
    tried.sort_by(|a, b| b.explains.total_cmp(&a.explains));
    let mut told = HashSet::new();
    tried.retain(|tried| told.insert(tried.fault.clone()));
    tried.truncate(TRIED_MAX);
    tried
}

/// Proposes arguments for the node of a base, from its recorded output.
pub type Guess = fn(&diagnose::Lab<'_>, &diagnose::Base) -> Vec<Argument>;

/// What a fault can be told: `rope.base=10000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// What it is, e.g. `base`.
    pub name: &'static str,
    /// Whether it is a number or a name.
    pub kind: ParameterKind,
}

/// What an argument is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// Any finite number.
    Number,
    /// A whole number.
    Integer,
    /// A tensor name or checkpoint id.
    Name,
}

/// A fault's parameter as given, or as fitted.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// The fault has none.
    None,
    /// A number.
    Number(f64),
    /// A tensor of the file, by its GGUF name.
    Tensor(String),
    /// Another checkpoint.
    Checkpoint(Checkpoint),
    /// Column c takes what column `order[c]` held.
    Order(Vec<u32>),
}

impl Argument {
    /// The number, where it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Argument::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The number as a whole number, where it is one.
    pub fn integer(&self) -> Option<i64> {
        self.number().filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map(|n| n as i64)
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Argument::None => Ok(()),
            Argument::Number(number) => f.write_str(&spell(*number)),
            Argument::Tensor(name) => f.write_str(name),
            Argument::Checkpoint(checkpoint) => write!(f, "{checkpoint}"),
            Argument::Order(order) => write!(f, "{} columns reordered", order.len()),
        }
    }
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

/// The nodes that a fault sits in unless one is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// All of these: the code that is wrong serves all of them.
    All(&'static [Kind]),
    /// The first of these that has a place for it.
    First(&'static [Kind]),
}

impl Home {
    /// The kinds, in order of preference.
    pub fn kinds(self) -> &'static [Kind] {
        match self {
            Home::All(kinds) | Home::First(kinds) => kinds,
        }
    }
}

/// The model that a fault is made in.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// File, configuration, healthy graph.
    pub model: &'a Model,
}

impl Site<'_> {
    /// The rotation of the model's queries in a layer.
    pub fn rope(&self, layer: Option<u32>) -> Option<Rope> {
        let node = self.model.graph.node(Checkpoint::layer(Kind::QRope, layer?))?;
        match &node.op {
            crate::model::graph::Op::Rope(rope) => Some(rope.clone()),
            _ => None,
        }
    }

    /// Number of layers.
    pub fn layers(&self) -> u32 {
        self.model.config.dims.layers as u32
    }

    /// Shape of a tensor, slowest axis first.
    pub fn shape(&self, tensor: &str) -> Option<&[usize]> {
        Some(&self.model.gguf.tensor(tensor)?.info.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_told_once_and_never_below_nothing() {
        let tried = [("a", -0.5), ("b", 0.25), ("a", 0.125), ("c", f64::NAN), ("d", -3.0), ("b", 0.75)];
        let tried = tried.map(|(fault, explains)| Tried { fault: fault.to_owned(), explains });
        let told: Vec<(String, f64)> =
            nearest(tried.into()).into_iter().map(|tried| (tried.fault, tried.explains)).collect();
        assert_eq!(told, [("b".to_owned(), 0.75), ("a".to_owned(), 0.125), ("d".to_owned(), 0.0)]);
        let many = (0..40).map(|i| Tried { fault: i.to_string(), explains: 0.5 }).collect();
        assert_eq!(nearest(many).len(), TRIED_MAX);
    }
}
