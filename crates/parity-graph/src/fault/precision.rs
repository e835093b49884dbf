//! Nodes that are computed in a coarser type than the rest of their engine: what people are told of them. They are
//! recognised from arithmetic, and never injected.

use super::{Entry, PLAIN};
use crate::op::Op;

const PRODUCTS: &[Op] = &[Op::MulMat, Op::MulMatId, Op::FlashAttn];
const SUMS: &[Op] = &[Op::MulMat, Op::MulMatId];
const ROPE: &[Op] = &[Op::Rope];
const ATTENTION: &[Op] = &[Op::FlashAttn, Op::SoftMax];
const NORMS: &[Op] = &[Op::RmsNorm, Op::Mul];
const COARSE_ANGLES: &str = "a table of sines and cosines in the type of the activations";
const IN_F32: &str =
    "compute positions, frequencies, angles, sines and cosines in f32, and round the rotated values";
const COARSE_FREQUENCIES: &str = "a buffer of frequencies (inv_freq) that was converted with the weights: model.to(torch.bfloat16), model.half()";
const FREQUENCIES_IN_F32: &str =
    "keep the frequencies in f32 where weights are converted, or make them again in f32 afterwards";
const COARSE_SOFTMAX: &str = "a softmax in the type of the scores (dtype=torch.float32 left out)";
const SOFTMAX_IN_F32: &str = "take scores, exponentials and their sum in f32";
const COARSE_NORM: &str =
    "a norm that is not taken out of autocast, or that squares in the type of its input";
const NORM_IN_F32: &str = "square, average and divide in f32, and round the result";

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "precision.tf32",
        PRODUCTS,
        "a product rounds both sides to TF32, or to f16: 11 significant bits",
        "torch.backends.cuda.matmul.allow_tf32, or cuBLAS' default of a framework, that is silently on",
        "NVIDIA_TF32_OVERRIDE=0, or the switch of the framework",
    ),
    entry(
        "precision.f16_operands",
        PRODUCTS,
        "a product rounds both sides to f16",
        "autocast, or a cast in front of one product that was meant for all or none",
        "leave the operands in f32, or declare the arithmetic: --numerics f16",
    ),
    entry(
        "precision.bf16_operands",
        PRODUCTS,
        "a product rounds both sides to bf16",
        "autocast, or a cast in front of one product that was meant for all or none",
        "leave the operands in f32, or declare the arithmetic: --numerics bf16",
    ),
    entry(
        "precision.f16_sum",
        SUMS,
        "the sums of a matmul are kept in f16",
        "an accumulator of the type of the operands: half += half * half",
        "accumulate in f32",
    ),
    entry(
        "precision.bf16_angles",
        ROPE,
        "sines and cosines of RoPE are rounded to bf16",
        COARSE_ANGLES,
        IN_F32,
    ),
    entry(
        "precision.f16_angles",
        ROPE,
        "sines and cosines of RoPE are rounded to f16",
        COARSE_ANGLES,
        IN_F32,
    ),
    entry(
        "precision.bf16_frequencies",
        ROPE,
        "the frequencies of RoPE are rounded to bf16",
        COARSE_FREQUENCIES,
        FREQUENCIES_IN_F32,
    ),
    entry(
        "precision.f16_frequencies",
        ROPE,
        "the frequencies of RoPE are rounded to f16",
        COARSE_FREQUENCIES,
        FREQUENCIES_IN_F32,
    ),
    entry(
        "precision.bf16_softmax",
        ATTENTION,
        "the softmax is computed in bf16",
        COARSE_SOFTMAX,
        SOFTMAX_IN_F32,
    ),
    entry(
        "precision.f16_softmax",
        ATTENTION,
        "the softmax is computed in f16",
        COARSE_SOFTMAX,
        SOFTMAX_IN_F32,
    ),
    entry("precision.bf16_norm", NORMS, "the norm is computed in bf16", COARSE_NORM, NORM_IN_F32),
    entry("precision.f16_norm", NORMS, "the norm is computed in f16", COARSE_NORM, NORM_IN_F32),
];

const fn entry(
    name: &'static str,
    ops: &'static [Op],
    summary: &'static str,
    place: &'static str,
    fix: &'static str,
) -> Entry {
    Entry { name, summary, place, fix, ops, recognised: true, rounds: true, values: |_| Vec::new(), ..PLAIN }
}
