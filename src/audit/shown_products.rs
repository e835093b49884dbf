//! What the recorded products of an engine show its products to be computed in, so that others, which were not recorded, are
//! held to the same.

use super::node::{IN_F32, ON_CPU};
use super::storage_types::{CANDLE, IN_BETTER, ON_CANDLE, PRODUCTS};
use super::{Findings, Labelled};
use crate::arithmetic::round::Rounding;
use crate::arithmetic::{Arithmetic, Operands};
use crate::engine::op_by_op::dtype;
use crate::numerics::Products;

/// What the products are computed in that were recorded with all that they read; `None` where there are none, or where they
/// show different ones. Of weights that no kernel rounds activations for nothing is learnt.
pub fn operands(findings: &Findings, graphs: &[(usize, &Labelled)]) -> Option<Operands> {
    let mut shown = None;
    for labelled in graphs.iter().map(|(_, labelled)| labelled) {
        let graph = &labelled.program.graph;
        for (id, checkpoint) in labelled.products() {
            let weight = graph.src(id, 0).and_then(|weight| dtype(graph.get(weight)));
            let is_told =
                weight.is_some_and(|dtype| Rounding::of(Products::LlamaCpu, dtype) != Rounding::None);
            let Some(found) = findings.nodes.get(&checkpoint).filter(|_| is_told) else { continue };
            if found.judged == 0 || !found.is_healthy() || !found.bridged.is_empty() {
                continue;
            }
            for name in &found.computed_in {
                let operands = of_name(name)?;
                if *shown.get_or_insert(operands) != operands {
                    return None;
                }
            }
        }
    }
    shown
}

/// What an arithmetic rounds the operands of products to, by its name; `None` of one that rounds more than that.
fn of_name(name: &str) -> Option<Operands> {
    let narrow = PRODUCTS.into_iter().map(|(name, narrow)| (name, Operands::Both(narrow)));
    let plain = [IN_BETTER, IN_F32].map(|name| (name, Arithmetic::EXACT.operands));
    let blocks = [(ON_CPU, Arithmetic::LLAMA_CPU.operands), (ON_CANDLE, CANDLE.operands)];
    narrow.chain(plain).chain(blocks).find(|(known, _)| *known == name).map(|(_, operands)| operands)
}
