//! What an engine that is not llama.cpp may round the operands of its products with weights to.

use super::node::{Hypothesis, IN_F32, ON_CPU};
use super::storage_types::IN_BETTER;
use crate::arithmetic::cuda_blocks::Blocks;
use crate::arithmetic::{Arithmetic, Integers, Narrow, Operand, Operands};
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
const ONE_SIDED: [(&str, Operands); 4] = [
    ("matmuls with activations in f16", Operands::One(Operand::Activations, Narrow::F16)),
    ("matmuls with activations in bf16", Operands::One(Operand::Activations, Narrow::Bf16)),
    ("matmuls with weights in f16", Operands::One(Operand::Weights, Narrow::F16)),
    ("matmuls with weights in bf16", Operands::One(Operand::Weights, Narrow::Bf16)),
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

/// Products of quantised weights by the kernels for a few rows that engines took from llama.cpp for CUDA (vLLM, SGLang, candle,
/// mistral.rs).
pub const IN_BLOCKS: (&str, Operands) =
    ("matmuls with activations in blocks of Q8_1", Operands::Blocks(Integers::Few));

/// The same by those for many rows, which keep the sum of a block before it is rounded, or its scale in f32.
pub const IN_TILES: (&str, Operands) =
    ("matmuls with activations in blocks of Q8_1, in tiles", Operands::Blocks(Integers::Many));

/// Products whose activations are rounded to eight bits, in forms that no list of types has.
pub const IN_EIGHT_BITS: [&str; 4] = [IN_ROWS.0, IN_BLOCKS.0, IN_TILES.0, ON_CANDLE];

/// f32 but for the operands of products, attention as one node left out.
pub fn products(narrow: Narrow) -> Arithmetic {
    Arithmetic { operands: Operands::Both(narrow), ..Arithmetic::EXACT }
}

/// All that an engine may round the operands of its products to, by name; what was `declared` holds.
pub fn rounded(declared: Option<Numerics>) -> impl Iterator<Item = (&'static str, Operands)> {
    let both = operands(declared).into_iter().map(|(name, narrow)| (name, Operands::Both(narrow)));
    both.chain(
        [IN_ROWS, IN_BLOCKS, IN_TILES].into_iter().chain(ONE_SIDED).filter(move |_| declared.is_none()),
    )
}

/// The type that both sides of a product are rounded to, or the one that is.
pub fn narrow(operands: Operands) -> Option<Narrow> {
    match operands {
        Operands::Both(narrow) | Operands::One(_, narrow) => Some(narrow),
        _ => None,
    }
}

/// What the engine of a product may have computed it in besides its own type; what was `declared` holds.
pub fn hypotheses(args: &Args<'_, f64>, declared: Option<Numerics>) -> Vec<Hypothesis> {
    let candle = declared.is_none().then_some((ON_CANDLE, CANDLE.operands));
    let all = candle.into_iter().chain(rounded(declared)).filter(|(_, one)| meets(*one, args));
    let of = |(name, operands)| Hypothesis { name, arithmetic: Arithmetic { operands, ..Arithmetic::EXACT } };
    all.map(of).collect()
}

/// The same of activations in eight bits in an engine that keeps its values, and weights, in a `narrow` type; blocks meet the blocks
/// of a weight as the file has them, and what they come to is `stored`.
pub fn in_narrow(
    args: &Args<'_, f64>,
    [narrow, stored]: [Arithmetic; 2],
) -> impl Iterator<Item = Hypothesis> {
    let all = [(IN_ROWS, narrow), (IN_BLOCKS, stored), (IN_TILES, stored)].into_iter();
    let all = all.filter(|((_, one), _)| meets(*one, args));
    all.map(|((name, operands), kept)| Hypothesis { name, arithmetic: Arithmetic { operands, ..kept } })
}

/// Whether the weight of a product is one that such an arithmetic is another for: one side alone is another than both sides of a
/// weight that is no number of the type.
fn meets(operands: Operands, args: &Args<'_, f64>) -> bool {
    let weight = args.get(0).map(|source| source.dtype);
    match operands {
        Operands::One(_, narrow) => weight.is_some_and(|weight| !narrow.holds(weight)),
        Operands::Blocks(kernel) => weight.is_some_and(|weight| Blocks::of(kernel, weight).is_some()),
        _ => true,
    }
}

/// What an arithmetic rounds the operands of products to, by its name; `None` of one that rounds more than that.
pub fn of_name(name: &str) -> Option<Operands> {
    let plain = [IN_BETTER, IN_F32].map(|name| (name, Arithmetic::EXACT.operands));
    let blocks = [(ON_CPU, Arithmetic::LLAMA_CPU.operands), (ON_CANDLE, CANDLE.operands)];
    let mut all = rounded(None).chain(plain).chain(blocks);
    all.find(|(known, _)| *known == name).map(|(_, operands)| operands)
}
