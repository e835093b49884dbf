//! FLASH_ATTN_EXT: attention with scale, soft cap, ALiBi, mask and sinks, `out = Σ_m softmax(z)_m · v_m`.
//!
//! s0 Q (B, H, N, DK), s1 K (B', Hk, M, DK), s2 V (B'', Hv, M, DV), s3 mask (b, h, >=N, M) or nothing, s4 sinks (H) or
//! nothing. The result is (B, N, H, DV): heads and tokens are exchanged. Words: scale, max_bias, softcap.
//! `z = scale·q·k`, or with a cap `cap·tanh(scale/cap·q·k)`, plus slope(h)·mask; heads of K and V are shared by
//! division, the mask repeats modulo; what is masked by -inf is not read, and a row of nothing else gives 0; a sink
//! is one more score without a value.
//!
//! The CPU (ggml-cpu/ops.cpp) has three kernels, see [`Flash`]. Two of them round Q to the `vec_dot_type` of K and, where
//! V is F16, keep the sum of the output in f16: that is followed position by position. All else is f32. The kernels of
//! Vulkan and CUDA that keep sums in f16, or multiply keys as integers, are followed too: see `lanes.rs`, `units.rs` and
//! `vector.rs`.

mod carry;
mod common;
mod explain;
mod lanes;
mod moved;
mod narrow;
mod row;
mod rows;
mod running;
mod scaled;
mod shared;
mod signed;
mod sums;
mod units;
mod vector;

use parity_graph::Op;
use rayon::prelude::*;

pub use self::common::{InCommon, in_common};
pub use self::shared::KeyProducts;
pub use self::signed::{SUMS, Signed};

use self::row::Attention;
use super::{Args, Check, Rule};
use crate::error::Result;
use crate::scalar::Scalar;

/// Scale, soft cap, ALiBi, mask and sinks.
pub const RULE: Rule = Rule {
    op: Op::FlashAttn,
    formula: "attention: softmax(scale·q·kᵀ + mask)·v for each head, with a soft cap, sinks or ALiBi where \
        the model has them",
    explained: "the error of each score by its share of the weights (the product's, all terms in \
        quadrature, the scale's, the exponential's) and that of the sum of values; where a kernel rounds \
        queries, weights or sums to f16, that is followed, or bounded step by step",
    single: compute::<f32>,
    double: compute::<f64>,
    check: Check::Bound(explain::bound),
    carry: carry::carry,
};

/// Multiplications up to which one thread computes alone: to hand over so little takes as long.
const ALONE_MAX: usize = 1 << 18;

fn compute<S: Scalar>(args: &Args<'_, S>) -> Result<Vec<S>> {
    with_products(args, None)
}

/// Attention with products of its queries and keys, where they are known.
///
/// # Errors
/// Sources whose shapes do not fit.
pub fn with_products<S: Scalar>(args: &Args<'_, S>, known: Option<&KeyProducts>) -> Result<Vec<S>> {
    let attention = Attention::new(args)?.with(known);
    let [_, n, heads, width] = args.shape;
    let mut out = vec![S::ZERO; args.elements()];
    let each = |(index, out): (usize, &mut [S])| {
        let row = attention.row(index / heads / n, index % heads, index / heads % n);
        let exact = attention.output(&row);
        out.iter_mut().zip(exact).for_each(|(out, y)| *out = S::from_f64(y));
    };
    match args.elements().saturating_mul(attention.k.shape()[2]) {
        ..=ALONE_MAX => out.chunks_mut(width.max(1)).enumerate().for_each(each),
        _ => out.par_chunks_mut(width.max(1)).enumerate().for_each(each),
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
