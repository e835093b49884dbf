//! How llama.cpp's kernels on integers quantise activations and what they make of weights: CUDA's (ggml-cuda/quantize.cu,
//! mmq-vec-dot.cuh, vecdotq.cuh), and Vulkan's on devices with packed integer dot products (quantize_q8_1.comp,
//! mul_mat_vecq_funcs.glsl).
//!
//! x ≈ d·q per block of 32 values, q rounded with halves away from zero. Where a weight has a minimum or an offset, many
//! kernels multiply the weight's raw quants and add minimum·s, with s the sum of the block's values *before* they
//! were quantised, in f16. What the quantisation costs is then multiplied by raw quants, so that it has to be done
//! in the same way. Vulkan adds up what was quantised.

use super::Integers;
use super::round::{QUANT_MAX, Rounded, ScaleTie, Tie};
use crate::gguf::DType;
use crate::scalar::{Scalar, half};
use crate::tensor::{Matrix, View};

/// How blocks of activations are quantised for a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// By which kernel.
    pub kernel: Integers,
    /// What meets the weights' minima.
    pub sums: Sums,
    /// Whether d is rounded to f16.
    pub half_scale: bool,
    /// Whether two blocks of 32 share one d.
    pub wide: bool,
}

/// What meets the minima of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// The weight is multiplied as it decodes.
    None,
    /// h(Σx) of each block of 32.
    Blocks,
    /// h(d·Σq) of each block of 32.
    Quants,
    /// h(Σx) of each group of 16, but d·Σq in the last two of eight.
    Halves,
    /// What Σx of each block of 32, in f32, has over d·Σq: keys are multiplied as they decode, and this meets what
    /// their blocks have in common.
    Excess,
}

/// How a weight of some type is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Columns that share one minimum or offset, which is kept apart; `None` where it is not.
    pub group: Option<usize>,
    /// Whether scale and minimum of a group are rounded to f16.
    pub half: bool,
    /// Whether the product of the weight's and the activations' scale, and that of minimum and sum, are rounded to f16.
    pub half_products: bool,
}

/// Scaled queries where attention multiplies keys as integers (`quantize_q8_1_to_shared`).
pub const QUERIES: Blocks =
    Blocks { kernel: Integers::Few, sums: Sums::Excess, half_scale: false, wide: false };
/// As the weight decodes.
const PLAIN: Form = Form { group: None, half: false, half_products: false };

impl Blocks {
    /// How activations are quantised by `kernel` for a weight of type `dtype`, and how the weight is multiplied; `None`
    /// where the kernel does not multiply this type.
    pub fn of(kernel: Integers, dtype: DType) -> Option<(Blocks, Form)> {
        use DType::*;
        let blocks = |half_scale, sums| Blocks { kernel, sums, half_scale, wide: false };
        let apart = |group, half| Form { group: Some(group), half, half_products: false };
        Some(match (kernel, dtype) {
            (Integers::Many, Q4_0) => (blocks(true, Sums::None), PLAIN),
            (Integers::Many, Q4_1 | Q5_1) => (blocks(true, Sums::Blocks), apart(32, false)),
            (Integers::Many, Q4_K | Q5_K) => (blocks(true, Sums::Blocks), apart(32, true)),
            (Integers::Many, Q2_K) => (Blocks { wide: true, ..blocks(true, Sums::Halves) }, apart(16, true)),
            (
                Integers::Many,
                Q5_0 | Q8_0 | Q3_K | Q6_K | IQ4_NL | IQ4_XS | MXFP4 | IQ2_XXS | IQ2_XS | IQ2_S,
            )
            | (Integers::Many, IQ3_XXS | IQ3_S) => (blocks(false, Sums::None), PLAIN),
            (Integers::Few, Q4_0 | Q5_0) => (blocks(true, Sums::Blocks), apart(32, false)),
            (Integers::Few, Q4_1 | Q5_1) => {
                (blocks(true, Sums::Blocks), Form { half_products: true, ..apart(32, false) })
            }
            (Integers::Few, Q8_0 | IQ4_NL | MXFP4 | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS)
            | (Integers::Few, IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S) => {
                (blocks(true, Sums::None), PLAIN)
            }
            (Integers::Packed, Q4_0 | Q5_0 | Q4_1 | Q5_1 | Q4_K | Q5_K) => {
                (blocks(true, Sums::Quants), apart(32, false))
            }
            (Integers::Packed, Q8_0 | MXFP4 | Q2_K | Q3_K | Q6_K | IQ4_NL | IQ4_XS)
            | (Integers::Packed, IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S) => {
                (blocks(true, Sums::None), PLAIN)
            }
            _ => return None,
        })
    }

    /// Columns that share one scale.
    pub fn columns(self) -> usize {
        if self.wide { 2 * BLOCK } else { BLOCK }
    }
}

/// Values in a block (`QK8_1`).
const BLOCK: usize = 32;
/// Values that one thread of MMQ's quantiser holds.
const OWN: usize = 4;
/// Divisions are approximate (2 ulp), and a quotient is rounded: values that are this near to the middle between two
/// quants, and scales between two f16 numbers, relative to themselves, are ties. An ulp is up to 2u.
const TIE_ROUNDINGS: f64 = 6.0;

/// Rounds activations x (T, I). A width that is no whole number of blocks is left as it is: ggml has no such product.
pub fn activations<S: Scalar>(blocks: Blocks, x: View<'_, S>) -> Rounded<S> {
    let per_row = match blocks.sums {
        Sums::None => 0,
        Sums::Blocks | Sums::Quants | Sums::Excess => x.cols / BLOCK,
        Sums::Halves => x.cols / (BLOCK / 2),
    };
    let mut out = Rounded {
        values: x.to_matrix(),
        sums: Matrix::zeros(x.rows, per_row),
        ties: Vec::new(),
        scale_ties: Vec::new(),
    };
    for row in 0..x.rows {
        let single: Vec<f32> = x.row(row).iter().map(|x| x.to_f32()).collect();
        for (b, values) in single.chunks_exact(blocks.columns()).enumerate() {
            quantize(blocks, row, b, values, &mut out);
        }
        sums(blocks, row, &single, &mut out);
    }
    out
}

/// Values of one scale.
fn quantize<S: Scalar>(blocks: Blocks, row: usize, b: usize, values: &[f32], out: &mut Rounded<S>) {
    let largest = values.iter().fold(0f32, |max, x| max.max_nan(x.abs()));
    let start = b * values.len();
    if largest == 0.0 {
        return;
    }
    // MMQ multiplies by 127/max and takes its inverse, MMVQ divides by max/127, Vulkan multiplies by the inverse of that.
    let (inverse, scale) = match blocks.kernel {
        Integers::Many => (QUANT_MAX / largest, 1.0 / (QUANT_MAX / largest)),
        Integers::Few => (0.0, largest / QUANT_MAX),
        Integers::Packed => (1.0 / (largest / QUANT_MAX), largest / QUANT_MAX),
    };
    let unit = f64::from(f32::EPSILON) / 2.0;
    let stored = if blocks.half_scale { half(f64::from(scale)) } else { f64::from(scale) };
    let (mut quants, first) = (Vec::with_capacity(values.len()), out.ties.len());
    for (i, &x) in values.iter().enumerate() {
        let scaled = if blocks.kernel == Integers::Few { x / scale } else { x * inverse };
        let quant = scaled.round();
        let off = f64::from(scaled) - f64::from(quant);
        if 0.5 - off.abs() <= TIE_ROUNDINGS * unit * f64::from(scaled.abs()) {
            // At the very middle it was rounded away from zero.
            let value = stored.copysign(off);
            let sum = if blocks.sums == Sums::Excess { -value } else { 0.0 };
            out.ties.push(Tie { row, col: start + i, value, sum });
        }
        out.values.row_mut(row)[start + i] = S::from_f64(stored * f64::from(quant));
        quants.push(f64::from(quant));
    }
    if blocks.sums == Sums::Quants {
        let all: f64 = quants.iter().sum();
        let met = |sum: f64| half(f64::from(sum as f32 * scale));
        out.sums.row_mut(row)[b] = S::from_f64(met(all));
        for tie in &mut out.ties[first..] {
            tie.sum = met(all + tie.value.signum()) - met(all);
        }
    }
    if blocks.half_scale {
        let near = TIE_ROUNDINGS * unit;
        let sides = [1.0 - near, 1.0 + near].map(|by| half(f64::from(scale) * by));
        if let Some(other) = sides.into_iter().find(|side| *side != stored) {
            let values = quants.iter().map(|quant| quant * (other - stored)).collect();
            out.scale_ties.push(ScaleTie { row, col: start, values });
        }
    }
}

/// What meets the minima, in the order in which threads add it up.
fn sums<S: Scalar>(blocks: Blocks, row: usize, values: &[f32], out: &mut Rounded<S>) {
    match blocks.sums {
        Sums::None | Sums::Quants => {}
        Sums::Blocks => {
            for (b, values) in values.chunks_exact(BLOCK).enumerate() {
                let sum = match blocks.kernel {
                    Integers::Many => butterfly(&quads(values)),
                    Integers::Few | Integers::Packed => butterfly(values),
                };
                out.sums.row_mut(row)[b] = S::from_f64(half(f64::from(sum)));
            }
        }
        Sums::Excess => {
            for (b, values) in values.chunks_exact(BLOCK).enumerate() {
                let quants = &out.values.row(row)[b * BLOCK..(b + 1) * BLOCK];
                let kept: f64 = quants.iter().map(|quant| quant.to_f64()).sum();
                let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
                out.sums.row_mut(row)[b] = S::from_f64(sum - kept);
            }
        }
        Sums::Halves => {
            for (b, values) in values.chunks_exact(BLOCK / 2).enumerate() {
                let met = if b % 8 < 6 {
                    half(f64::from(butterfly(&quads(values))))
                } else {
                    let start = b * BLOCK / 2;
                    out.values.row(row)[start..start + BLOCK / 2].iter().map(|x| x.to_f64()).sum()
                };
                out.sums.row_mut(row)[b] = S::from_f64(met);
            }
        }
    }
}

/// The sums of four neighbours.
fn quads(values: &[f32]) -> Vec<f32> {
    values.chunks_exact(OWN).map(|x| x[0] + x[1] + x[2] + x[3]).collect()
}

/// The sum over threads that exchange what they have with the thread half as far away each time.
fn butterfly(values: &[f32]) -> f32 {
    let mut sums = values.to_vec();
    while sums.len() > 1 {
        let half = sums.len() / 2;
        sums = (0..half).map(|i| sums[i] + sums[i + half]).collect();
    }
    sums.first().copied().unwrap_or_default()
}
