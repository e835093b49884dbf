//! What the recorded products of an engine show its products to be computed in, so that others, which were not recorded, are
//! held to the same.

use indexmap::{IndexMap, IndexSet};

use super::node::ON_CPU;
use super::operands::of_name;
use super::{Finding, Findings, Labelled};
use crate::arithmetic::round::Rounding;
use crate::arithmetic::{Arithmetic, Narrow, Operands};
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::dtype;
use crate::gguf::DType;
use crate::numerics::Products;

/// What products round their operands to.
#[derive(Clone, Copy)]
pub struct Shown {
    /// What explains those that were recorded.
    pub operands: Operands,
    /// Whether they have 11 significant bits: which way halves are rounded shows in those rows alone that have one.
    of_eleven_bits: bool,
}

impl Shown {
    /// Whether products that were not recorded may be computed so.
    pub fn allows(self, operands: Operands) -> bool {
        operands == self.operands || self.of_eleven_bits && operands == Operands::Both(Narrow::Tf32Away)
    }
}

/// What the products are computed in that were recorded with all that they read; `None` where there are none, or where they
/// show different ones. Of weights that no kernel rounds activations for nothing is learnt.
pub fn operands(findings: &Findings, graphs: &[(usize, &Labelled)]) -> Option<Shown> {
    let (mut shown, mut in_f16) = (None, false);
    for (name, weight) in recorded(findings, graphs).filter(|(_, weight)| rounding(*weight) != Rounding::None)
    {
        if is_as_f16(name, weight) {
            in_f16 = true;
            continue;
        }
        let operands = of_name(name)?;
        if *shown.get_or_insert(operands) != operands {
            return None;
        }
    }
    let is_narrow = matches!(shown, Some(Operands::Both(Narrow::F16 | Narrow::Tf32)));
    let operands = match shown {
        _ if !in_f16 => shown?,
        None => Arithmetic::LLAMA_CPU.operands,
        // Where none of them lies in the middle between two numbers all units of 11 significant bits round operands alike.
        Some(Operands::VecDot) => Operands::VecDot,
        Some(operands) if is_narrow => operands,
        Some(_) => return None,
    };
    Some(Shown { operands, of_eleven_bits: is_narrow || in_f16 && shown.is_none() })
}

/// What explains most of the products that were recorded with all that they read, by its name.
pub fn usual(findings: &Findings, graphs: &[(usize, &Labelled)]) -> Option<&'static str> {
    let mut counts: IndexMap<&str, usize> = IndexMap::new();
    recorded(findings, graphs).for_each(|(name, _)| *counts.entry(name).or_default() += 1);
    let most = counts.values().copied().max()?;
    counts.into_iter().find(|(_, count)| *count == most).map(|(name, _)| name)
}

/// Whether any of them shows operands of 11 significant bits, those of f16 and of TF32.
pub fn are_of_eleven_bits(findings: &Findings, graphs: &[(usize, &Labelled)]) -> bool {
    let is_narrow = |name| matches!(of_name(name), Some(Operands::Both(Narrow::F16 | Narrow::Tf32)));
    recorded(findings, graphs).any(|(name, weight)| is_as_f16(name, weight) || is_narrow(name))
}

/// Products that must be wrong by themselves for them to be the engine's arithmetic, and what share of those recorded.
const WRONG_MIN: usize = 4;
const MOST: [usize; 2] = [3, 4];

/// Whether nothing explains most of the products that were recorded with all that they read, nor has a mistake in them a name.
pub fn are_unexplained(findings: &Findings, graphs: &[(usize, &Labelled)]) -> bool {
    let all: IndexSet<Checkpoint> =
        graphs.iter().flat_map(|(_, labelled)| labelled.products()).map(|(_, id)| id).collect();
    let found = all.iter().filter_map(|id| findings.nodes.get(id));
    let judged: Vec<&Finding> = found.filter(|one| one.judged > 0 && one.bridged.is_empty()).collect();
    let wrong = judged.iter().filter(|found| found.is_wrong()).count();
    let is_named = judged.iter().any(|found| !found.diagnosis().0.is_empty());
    !is_named && wrong >= WRONG_MIN && MOST[1] * wrong >= MOST[0] * judged.len()
}

/// What explains the products that were recorded with all that they read, by its name, and the type of their weight.
fn recorded<'a>(
    findings: &'a Findings,
    graphs: &'a [(usize, &'a Labelled)],
) -> impl Iterator<Item = (&'static str, Option<DType>)> + 'a {
    let labelled = graphs.iter().map(|(_, labelled)| *labelled);
    let products = labelled.flat_map(|labelled| labelled.products().map(move |product| (labelled, product)));
    products.flat_map(|(labelled, (id, checkpoint))| {
        let graph = &labelled.program.graph;
        let weight = graph.src(id, 0).and_then(|weight| dtype(graph.get(weight)));
        let is = |found: &&Finding| found.judged > 0 && found.is_healthy() && found.bridged.is_empty();
        let found = findings.nodes.get(&checkpoint).filter(is);
        found.into_iter().flat_map(move |found| found.computed_in.iter().map(move |name| (*name, weight)))
    })
}

/// What llama.cpp's CPU kernels round activations to for a weight.
fn rounding(weight: Option<DType>) -> Rounding {
    weight.map_or(Rounding::None, |dtype| Rounding::of(Products::LlamaCpu, dtype))
}

/// Whether an arithmetic of a product is, by its name, one that rounds operands to f16 for what their weight is.
pub fn is_as_f16(name: &str, weight: Option<DType>) -> bool {
    name == ON_CPU && rounding(weight) == Rounding::F16
}
