//! The catalogue: one entry per mistake, by the part of the model that it sits in.
//!
//! Of the fused nodes: the catalogue of graphs is `parity_graph::fault`.

use super::{Argument, Fault, Home, Parameter, ParameterKind, Site, diagnose};
use crate::model::edit::{Change, Edit};
use crate::model::graph::Node;

mod attention;
mod attention_limits;
mod data;
mod embed;
mod feed_forward;
mod linear;
mod logits;
mod norm;
mod quant;
mod ranks;
mod residual;
mod rope;

pub use attention::head_columns;
pub use attention_limits::window;
pub use feed_forward::swapped as swapped_gate;
pub use linear::{in_layer, same_shape};
pub use ranks::{DIVIDED, SUMMED, columns as part_columns, part_counts, parts, rank_counts, rank_of};
pub use residual::sources as residual_sources;
pub use rope::shifted;

/// All faults, by part of the model.
pub fn all() -> impl Iterator<Item = &'static Fault> {
    [
        embed::FAULTS,
        norm::FAULTS,
        linear::FAULTS,
        quant::FAULTS,
        rope::FAULTS,
        attention::FAULTS,
        attention_limits::FAULTS,
        residual::FAULTS,
        feed_forward::FAULTS,
        logits::FAULTS,
        ranks::FAULTS,
        data::FAULTS,
    ]
    .into_iter()
    .flatten()
}

/// The fault of a name.
pub fn find(name: &str) -> Option<&'static Fault> {
    all().find(|fault| fault.name == name)
}

/// What most entries have in common; every entry gives its own name, texts, home, change and sentence.
const PLAIN: Fault = Fault {
    name: "",
    summary: "",
    place: "",
    fix: "",
    parameter: None,
    home: Home::First(&[]),
    silent: None,
    change: |_, _, _| None,
    default: |_, _| Some(Argument::None),
    guess: None,
    sentence: |_, _, _| String::new(),
};

const fn number(name: &'static str) -> Option<Parameter> {
    Some(Parameter { name, kind: ParameterKind::Number })
}

const fn integer(name: &'static str) -> Option<Parameter> {
    Some(Parameter { name, kind: ParameterKind::Integer })
}

const fn named(name: &'static str) -> Option<Parameter> {
    Some(Parameter { name, kind: ParameterKind::Name })
}

/// Changes what a node gives.
fn output(node: &mut Node, change: Change) -> Option<()> {
    node.edits.push(Edit::Output(change));
    Some(())
}

/// Changes what a node reads.
fn input(node: &mut Node, index: usize, change: Change) -> Option<()> {
    node.edits.push(Edit::Input { index, change });
    Some(())
}

/// The name of the tensor that a node reads.
fn weight_name(node: &Node) -> &str {
    node.op.weight().map_or("", |weight| &weight.name)
}

/// `node` where `holds`.
fn when(holds: bool) -> Option<()> {
    holds.then_some(())
}
