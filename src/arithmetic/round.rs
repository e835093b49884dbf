//! How producers round the activations of a matrix product, exactly as they do it.
//!
//! llama.cpp on the CPU converts activations to the `vec_dot_type` of the weight's type (ggml-cpu.c,
//! `type_traits_cpu`) before it multiplies. Once the activations are rounded in the same way, the exact
//! product explains its output to f32 rounding; without it, a healthy Q4_K product stands 1e-2 from exact.

use half::{bf16, f16};

use super::Narrow;
pub use super::attention::AttentionRounding;
use super::cuda_blocks::{self, Blocks};
use crate::gguf::DType;
use crate::numerics::{Products, Storage};
use crate::scalar::{Scalar, each, vectorized};
use crate::tensor::{Matrix, View};

/// What activations are rounded to before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Not at all.
    None,
    /// To the nearest f16.
    F16,
    /// To the nearest bf16.
    Bf16,
    /// Blocks of 32: x ≈ d·q, d = f16(max|x| / 127).
    Q8_0,
    /// As Q8_0, and the block's sum, which meets the weight's minimum, is f16(d·Σq) with d in f32.
    Q8_1,
    /// Blocks of 256: x ≈ d·q with d in f32.
    Q8K,
    /// As Q8_K in candle: the largest value is -128 of d, and what has the other sign is 127 at most.
    CandleQ8K,
    /// Whole rows: x ≈ d·q, d = max|x| / 127 in f32.
    Q8Row,
    /// To 11 significant bits, the nearest ones.
    Tf32,
    /// The same, halves away from zero.
    Tf32Away,
    /// To 11 significant bits, towards zero.
    Tf32Cut,
    /// To the sum of two bf16.
    Pair,
    /// As a kernel of CUDA on integers does it.
    Cuda(Blocks),
}

/// Values in a block of Q8_0 and Q8_1 (`QK8_0`).
const SMALL_BLOCK: usize = 32;
/// Values in a block of Q8_K (`QK_K`).
const LARGE_BLOCK: usize = 256;
/// Largest quant.
pub const QUANT_MAX: f32 = 127.0;
/// Largest quant of candle's Q8_K, on one side (candle-core/src/quantized/k_quants.rs).
const CANDLE_MAX: f32 = 128.0;
/// x·(127/max) is rounded three times (the quotient, the product, and once more where a compiler did not
/// fuse the product with the rounding): kernels agree on the quant unless it lies this many u·|quant| from
/// the middle between two.
const TIE_ROUNDINGS: f32 = 4.0;

impl Rounding {
    /// What a producer rounds the activations to that meet a weight of type `dtype`.
    pub fn of(products: Products, dtype: DType) -> Rounding {
        use DType::*;
        match products {
            Products::F32 | Products::F64 => Rounding::None,
            Products::F16 => Rounding::F16,
            Products::Bf16 => Rounding::Bf16,
            Products::LlamaCpu => match dtype {
                F16 => Rounding::F16,
                BF16 => Rounding::Bf16,
                Q4_0 | Q5_0 | Q8_0 | IQ4_NL | MXFP4 | NVFP4 | Q1_0 | Q2_0 => Rounding::Q8_0,
                Q4_1 | Q5_1 => Rounding::Q8_1,
                Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS
                | IQ3_S | IQ4_XS | TQ1_0 | TQ2_0 => Rounding::Q8K,
                _ => Rounding::None,
            },
            // ggml-cuda/quantize.cu: blocks of 32 whatever the weight; its kernels keep d in f16 or in f32,
            // so that this is followed by a bound and not step by step.
            Products::LlamaCuda | Products::LlamaVulkan => Rounding::None,
        }
    }

    /// What candle's CPU kernels round the activations to that meet a weight of type `dtype`: blocks as llama.cpp's, nothing
    /// where the weight is none.
    pub fn of_candle(dtype: DType) -> Rounding {
        match Rounding::of(Products::LlamaCpu, dtype) {
            Rounding::Q8K => Rounding::CandleQ8K,
            blocks @ (Rounding::Q8_0 | Rounding::Q8_1) => blocks,
            _ => Rounding::None,
        }
    }

    /// Values of a row of `width` that share one scale, 1 where each is rounded alone.
    pub fn block(self, width: usize) -> usize {
        match self {
            Rounding::None | Rounding::F16 | Rounding::Bf16 => 1,
            Rounding::Tf32 | Rounding::Tf32Away | Rounding::Tf32Cut | Rounding::Pair => 1,
            Rounding::Q8_0 | Rounding::Q8_1 => SMALL_BLOCK,
            Rounding::Q8K | Rounding::CandleQ8K => LARGE_BLOCK,
            Rounding::Q8Row => width.max(1),
            Rounding::Cuda(blocks) => blocks.columns(),
        }
    }
}

/// Activations as the product sees them.
pub struct Rounded<S> {
    /// (T, I) d·q: what the weights are multiplied by.
    pub values: Matrix<S>,
    /// (T, I/32) of Q8_1: what the stored block sum has over the sum of the values. It meets the minima of
    /// the weight's blocks. Empty for the other kinds.
    pub sums: Matrix<S>,
    /// Values that another kernel of the same producer may have rounded to the other side.
    pub ties: Vec<Tie>,
    /// Scales of blocks of which the same holds.
    pub scale_ties: Vec<ScaleTie>,
}

/// The scale of a block that lies in the middle between two f16 numbers but for rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleTie {
    /// Row of the matrix.
    pub row: usize,
    /// First column of the block.
    pub col: usize,
    /// What [`Rounded::values`] change by where it is rounded to the other side, from `col` on.
    pub values: Vec<f64>,
}

/// A value that lies in the middle between two quants but for rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tie {
    /// Row of the matrix.
    pub row: usize,
    /// Column of the matrix.
    pub col: usize,
    /// What [`Rounded::values`] changes by where it is rounded to the other side.
    pub value: f64,
    /// What [`Rounded::sums`] changes by.
    pub sum: f64,
}

/// Rounds activations x (T, I). A width that is no whole number of blocks is left as it is: ggml has no
/// such product.
pub fn activations<S: Scalar>(rounding: Rounding, x: View<'_, S>) -> Rounded<S> {
    let block = rounding.block(x.cols);
    let blocks = if rounding == Rounding::Q8_1 { x.cols / block } else { 0 };
    let mut rounded = Rounded {
        values: x.to_matrix(),
        sums: Matrix::zeros(x.rows, blocks),
        ties: Vec::new(),
        scale_ties: Vec::new(),
    };
    if !x.cols.is_multiple_of(block) {
        return rounded;
    }
    match rounding {
        Rounding::None => {}
        Rounding::F16 => Storage::F16.store(&mut rounded.values.data),
        Rounding::Bf16 => Storage::Bf16.store(&mut rounded.values.data),
        Rounding::Tf32 => Narrow::Tf32.store(&mut rounded.values.data),
        Rounding::Tf32Away => Narrow::Tf32Away.store(&mut rounded.values.data),
        Rounding::Tf32Cut => Narrow::Tf32Cut.store(&mut rounded.values.data),
        Rounding::Pair => Narrow::Pair.store(&mut rounded.values.data),
        Rounding::Cuda(blocks) => return cuda_blocks::activations(blocks, x),
        Rounding::Q8_0 | Rounding::Q8_1 | Rounding::Q8K | Rounding::CandleQ8K | Rounding::Q8Row => {
            vectorized(
                #[inline(always)]
                || {
                    for row in 0..x.rows {
                        for b in 0..x.cols / block {
                            quantize(rounding, row, b, &mut rounded);
                        }
                    }
                },
            )
        }
    }
    rounded
}

/// Ties of one row that are tried: more would be a degenerate row, such as one of equal values.
const TIES_MAX: usize = 64;

/// The ties of rows that have few of them.
pub fn few_per_row(ties: &[Tie], rows: usize) -> Vec<&Tie> {
    let mut counts = vec![0usize; rows];
    ties.iter().for_each(|tie| counts[tie.row] += 1);
    ties.iter().filter(|tie| counts[tie.row] <= TIES_MAX).collect()
}

/// To the nearest f16 and back; what is too large becomes infinite.
#[inline]
pub fn to_f16<S: Scalar>(value: S) -> S {
    S::from_f32(f16::from_f32(value.to_f32()).to_f32())
}

/// To the nearest bf16 and back.
#[inline]
pub fn to_bf16<S: Scalar>(value: S) -> S {
    S::from_f32(bf16::from_f32(value.to_f32()).to_f32())
}

/// The least normal number of f16.
pub const NORMAL_F16: f64 = 1.0 / 16_384.0;

/// What numbers of f16 become where those that are not normal are 0.
pub fn flush<S: Scalar>(values: &mut [S]) {
    each(values, |value| if value.abs() < NORMAL_F16 { 0.0 } else { value });
}

/// The type that a producer stores decoded weights in before it multiplies: with f16 or bf16 products, whose matrix
/// units take both sides in that type, it is theirs. llama.cpp on the CPU multiplies what is stored.
pub fn weight_storage(products: Products) -> Storage {
    match products {
        Products::F16 => Storage::F16,
        Products::Bf16 => Storage::Bf16,
        _ => Storage::F32,
    }
}

/// Block `b` of one row in place: `quantize_row_q8_0`, `_q8_1` (ggml-cpu/arch/x86/quants.c) and
/// `quantize_row_q8_K_ref` (ggml-quants.c). The reference versions of the first two round halves away from
/// zero and divide by d; both differences, like a fused multiply-add in the third, show only at ties. The
/// sign that Q8_K gives to its scale cancels.
#[inline(always)]
fn quantize<S: Scalar>(rounding: Rounding, row: usize, b: usize, out: &mut Rounded<S>) {
    let block = rounding.block(out.values.cols);
    let x = &mut out.values.row_mut(row)[b * block..(b + 1) * block];
    let max = x.iter().fold(0f32, |max, x| max.max_nan(x.to_f32().abs()));
    if max == 0.0 {
        return;
    }
    let is_candle = rounding == Rounding::CandleQ8K;
    let inverse = if is_candle { CANDLE_MAX } else { QUANT_MAX } / max;
    // The first of the largest values says of which sign the longer side is.
    let is_up = is_candle && x.iter().find(|x| x.to_f32().abs() == max).is_some_and(|x| x.to_f32() > 0.0);
    let (low, high) = match (is_candle, is_up) {
        (false, _) => (f32::MIN, f32::MAX),
        (true, true) => (-QUANT_MAX, CANDLE_MAX),
        (true, false) => (-CANDLE_MAX, QUANT_MAX),
    };
    let (scale, exact_scale) = match rounding {
        Rounding::Q8K | Rounding::CandleQ8K | Rounding::Q8Row => (1.0 / inverse, 1.0 / inverse),
        _ => (to_f16(max / QUANT_MAX), max / QUANT_MAX),
    };
    let mut sum = 0f32;
    let first_tie = out.ties.len();
    for (i, x) in x.iter_mut().enumerate() {
        let scaled = x.to_f32() * inverse;
        let quant = nearest(scaled).clamp(low, high);
        let off = scaled - quant;
        let unit = f32::EPSILON / 2.0;
        if 0.5 - off.abs() <= TIE_ROUNDINGS * unit * scaled.abs() {
            let value = f64::from(scale.copysign(off));
            out.ties.push(Tie { row, col: b * block + i, value, sum: 0.0 });
        }
        sum += quant;
        *x = S::from_f32(scale) * S::from_f32(quant);
    }
    if rounding == Rounding::Q8_1 {
        let excess = |sum: f32| f64::from(to_f16(exact_scale * sum)) - f64::from(scale) * f64::from(sum);
        out.sums.row_mut(row)[b] = S::from_f64(excess(sum));
        for tie in &mut out.ties[first_tie..] {
            tie.sum = excess(sum + 1f32.copysign(tie.value as f32)) - excess(sum);
        }
    }
}

/// To the nearest whole number, halves to the even one, of magnitudes below 2^22: past 2^23 the numbers that an
/// f32 can hold are whole. A baseline x86-64 has no instruction for it.
#[inline(always)]
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5·2^23
    (value + SHIFT) - SHIFT
}

/// Half a rounding step at each value, (T, I): how far its rounding may move it.
pub fn half_steps(rounding: Rounding, x: &Matrix<f64>) -> Matrix<f64> {
    let mut out = x.clone();
    match rounding {
        Rounding::None => out.data.fill(0.0),
        Rounding::F16 => {
            out.data.iter_mut().for_each(|x| *x = x.abs() / f64::from(1 << f16::MANTISSA_DIGITS))
        }
        Rounding::Bf16 => {
            out.data.iter_mut().for_each(|x| *x = x.abs() / f64::from(1 << bf16::MANTISSA_DIGITS))
        }
        Rounding::Pair => {
            out.data.iter_mut().for_each(|x| *x = x.abs() / f64::from(1 << (2 * bf16::MANTISSA_DIGITS)))
        }
        // As wide as f16; cut off, a step is a whole one.
        Rounding::Tf32 | Rounding::Tf32Away | Rounding::Tf32Cut => {
            let steps = if rounding == Rounding::Tf32Cut { 2.0 } else { 1.0 };
            let unit = steps / f64::from(1 << f16::MANTISSA_DIGITS);
            out.data.iter_mut().for_each(|x| *x = x.abs() * unit);
        }
        Rounding::Q8_0
        | Rounding::Q8_1
        | Rounding::Q8K
        | Rounding::CandleQ8K
        | Rounding::Q8Row
        | Rounding::Cuda(_) => {
            for block in out.data.chunks_mut(rounding.block(x.cols)) {
                let max = block.iter().fold(0f64, |max, x| max.max_nan(x.abs()));
                // Half a quant, and what d loses in f16.
                let step = max / f64::from(QUANT_MAX) / 2.0;
                block.iter_mut().for_each(|x| *x = step + x.abs() / f64::from(1 << f16::MANTISSA_DIGITS));
            }
        }
    }
    out
}

/// A matrix stored in another type.
pub fn stored<S: Scalar>(storage: Storage, x: View<'_, S>) -> Matrix<S> {
    let mut out = x.to_matrix();
    storage.store(&mut out.data);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(rounding: Rounding, x: &[f32]) -> Rounded<f64> {
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        activations(rounding, View::new(1, x.len(), &x))
    }

    #[test]
    fn a_quant_is_within_half_a_step() {
        let x: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013).collect();
        for rounding in [Rounding::Q8_0, Rounding::Q8_1, Rounding::Q8K, Rounding::Q8Row] {
            for (block, values) in x
                .chunks(rounding.block(256))
                .zip(rounded(rounding, &x).values.data.chunks(rounding.block(256)))
            {
                let step = f64::from(block.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0);
                for (x, value) in block.iter().zip(values) {
                    // d in f16 moves every value by up to 2^-11 of itself.
                    let limit = step / 2.0 + f64::from(x.abs()) * f64::powi(2.0, -11);
                    assert!((f64::from(*x) - value).abs() <= limit, "{rounding:?}: {x} became {value}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_a_nan_is_not_lost() {
        assert_eq!(rounded(Rounding::Q8K, &[0.0; 256]).values.data, [0.0; 256]);
        let mut x = [1.0f32; 32];
        x[5] = f32::NAN;
        assert!(rounded(Rounding::Q8_0, &x).values.data.iter().any(|v| v.is_nan()));
    }

    #[test]
    fn a_value_between_two_quants_is_a_tie() {
        let mut x = [0f32; 32];
        (x[0], x[3]) = (127.0, 2.5);
        let rounded = rounded(Rounding::Q8_0, &x);
        assert_eq!(rounded.values.data[3], 2.0);
        assert_eq!(rounded.ties, [Tie { row: 0, col: 3, value: 1.0, sum: 0.0 }]);
    }

    #[test]
    fn the_block_sum_of_q8_1_is_rounded_to_f16() {
        let x: Vec<f32> = (0..32).map(|i| 0.1 + i as f32).collect();
        let rounded = rounded(Rounding::Q8_1, &x);
        let sum: f64 = rounded.values.data.iter().sum::<f64>() + rounded.sums.data[0];
        assert_eq!(sum, f64::from(to_f16(sum as f32)));
        assert_ne!(rounded.sums.data[0], 0.0);
    }
}
