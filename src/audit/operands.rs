//! What an engine that is not llama.cpp may round the operands of its products with weights to.

use super::node::{Hypothesis, IN_F32, ON_CPU};
use super::storage_types::IN_BETTER;
use crate::arithmetic::{Arithmetic, Narrow, Operand, Operands};
use crate::numerics::{Numerics, Products};
use crate::ops::Args;

/// Types that matrix units take both sides in, whatever values are kept in.
pub const PRODUCTS: [(&str, Narrow); 6] = [
    ("matmuls with f16 operands", Narrow::F16),
    ("matmuls with bf16 operands", Narrow::Bf16),
    ("matmuls with TF32 operands", Narrow::Tf32),
    ("matmuls with TF32 operands", Narrow::Tf32Away),
    ("matmuls with TF32 operands, cut", Narrow::Tf32Cut),
    ("matmuls as three products of bf16", Narrow::Pair),
];

/// Products of which one side alone is rounded, with a weight that has more bits than the type: a kernel that decodes weights to f32
/// and reads activations in a narrow type, or the other way round.
pub const ONE_SIDED: [(&str, Operand, Narrow); 4] = [
    ("matmuls with activations in f16", Operand::Activations, Narrow::F16),
    ("matmuls with activations in bf16", Operand::Activations, Narrow::Bf16),
    ("matmuls with weights in f16", Operand::Weights, Narrow::F16),
    ("matmuls with weights in bf16", Operand::Weights, Narrow::Bf16),
];

/// Of these types those that an engine may round the operands of its products to.
pub fn operands(declared: Option<Numerics>) -> Vec<(&'static str, Narrow)> {
    let may = |narrow: Narrow| match declared.map(|numerics| numerics.products) {
        None => true,
        Some(Products::F16 | Products::LlamaCuda | Products::LlamaVulkan) => narrow == Narrow::F16,
        Some(Products::Bf16) => narrow == Narrow::Bf16,
        // Three products of bf16 stand for one of f32.
        Some(Products::F32) => narrow == Narrow::Pair,
        Some(Products::LlamaCpu | Products::F64) => false,
    };
    PRODUCTS.into_iter().filter(|(_, narrow)| may(*narrow)).collect()
}

/// What products of [`CANDLE`] are called.
pub const ON_CANDLE: &str = "candle's CPU kernels";

/// Products as candle computes them on a CPU, which rounds activations to blocks of its own.
pub const CANDLE: Arithmetic = Arithmetic { operands: Operands::Candle, ..Arithmetic::EXACT };

/// Products whose activations are quantised as they come, each row with a scale (W8A8 engines, with weights as the file has
/// them).
pub const IN_ROWS: (&str, Operands) =
    ("matmuls with activations in int8, a scale for each row", Operands::Rows);

/// f32 but for the operands of products, attention as one node left out.
pub fn products(narrow: Narrow) -> Arithmetic {
    Arithmetic { operands: Operands::Both(narrow), ..Arithmetic::EXACT }
}

/// A product with one side rounded, where that is another than both sides are: of a weight that is no number of the type.
fn one_sided(args: &Args<'_, f64>) -> impl Iterator<Item = Hypothesis> {
    let weight = args.get(0).map(|source| source.dtype);
    let differs =
        move |(.., narrow): &(&str, Operand, Narrow)| weight.is_some_and(|weight| !narrow.holds(weight));
    ONE_SIDED.into_iter().filter(differs).map(|(name, side, narrow)| Hypothesis {
        name,
        arithmetic: Arithmetic { operands: Operands::One(side, narrow), ..Arithmetic::EXACT },
    })
}

/// What the engine of a product may have computed it in besides its own type; what was `declared` holds.
pub fn hypotheses(args: &Args<'_, f64>, declared: Option<Numerics>) -> Vec<Hypothesis> {
    let is_open = declared.is_none();
    let of = |(name, operands)| Hypothesis { name, arithmetic: Arithmetic { operands, ..Arithmetic::EXACT } };
    let candle = is_open.then_some(Hypothesis { name: ON_CANDLE, arithmetic: CANDLE });
    let all = operands(declared).into_iter().map(|(name, narrow)| of((name, Operands::Both(narrow))));
    let in_rows = is_open.then(|| of(IN_ROWS));
    let one_sided = one_sided(args).filter(|_| is_open);
    candle.into_iter().chain(all).chain(in_rows).chain(one_sided).collect()
}

/// What an arithmetic rounds the operands of products to, by its name; `None` of one that rounds more than that.
pub fn of_name(name: &str) -> Option<Operands> {
    let narrow = PRODUCTS.into_iter().map(|(name, narrow)| (name, Operands::Both(narrow)));
    let plain = [IN_BETTER, IN_F32].map(|name| (name, Arithmetic::EXACT.operands));
    let blocks = [(ON_CPU, Arithmetic::LLAMA_CPU.operands), (ON_CANDLE, CANDLE.operands)];
    let one_sided = ONE_SIDED.into_iter().map(|(name, side, narrow)| (name, Operands::One(side, narrow)));
    let all = narrow.chain(plain).chain(blocks).chain([IN_ROWS]).chain(one_sided);
    all.into_iter().find(|(known, _)| *known == name).map(|(_, operands)| operands)
}
