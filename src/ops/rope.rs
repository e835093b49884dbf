//! ROPE: pairs of channels rotated by an angle that grows with the position (Su et al., arXiv 2104.09864):
//! `y0 = x0·c - x1·s`, `y1 = x0·s + x1·c`, with c and s the cosine and sine of the pair's angle, times attn_factor.
//!
//! s0 (B, T, H, E); s1 positions I32 (T,), or (4T,) in four planes where the mode has bit 8; s2 frequency factors
//! (>= n_dims/2,), or none. The result has s0's shape; channels of no pair are copied. Words: n_dims, mode (0 rotates
//! neighbours, 2 halves, 8 and 40 halves with sections, 24 vision), n_ctx_orig, freq_base, freq_scale, ext_factor,
//! attn_factor, beta_fast, beta_slow, section0..3, offset (of the first rotated channel). The angles of the CPU
//! are in f32 throughout: see `rope_angles.rs`; then `cosf` and `sinf` (ggml-cpu/ops.cpp).

use parity_graph::Op;

use super::bound::{
    ANGLE_ROUNDINGS, FAST_TRIG, ROPE_ROUNDINGS, SINCOS_ROUNDINGS, TINY_F32, UNIT_F32, finite, storage,
};
use super::convert::convert;
use super::rope_angles::{PLANES, Rope, Rotation, stored};
use super::source::rows;
use super::{Args, Check, Rule};
use crate::arithmetic::{Angles, Functions};
use crate::error::Result;
use crate::scalar::Scalar;

pub const RULE: Rule = Rule {
    op: Op::Rope,
    formula: "pairs of channels (x0, x1) of each head rotated by an angle that grows with the position: y0 \
        = x0·cos a - x1·sin a, y1 = x0·sin a + x1·cos a, with a = position · base^(-2i/n) for pair i of n/2",
    explained: "8·u·(|x0| + |x1|), u = 2^-24, for sine, cosine, the products and their sum; and, but for \
        llama.cpp's CPU, whose steps are followed, (4 + 2i)·u·a for the angle",
    single: |args| compute(args, 1.0),
    double: |args| compute(args, 1.0),
    check: Check::Bound(bound),
    carry,
};

/// Steps of YaRN in f32 that a compiler may fuse: two products and their sum.
const MIX_ROUNDINGS: f64 = 3.0;
/// The factor of the length, its logarithm and product.
const LENGTH_ROUNDINGS: f64 = 3.0;

/// What all rows of one token have in common.
pub(super) struct Tokens {
    pub rope: Rope,
    /// By token.
    pub rotations: Vec<Vec<Rotation>>,
}

impl Tokens {
    pub(super) fn of<S: Scalar>(args: &Args<'_, S>) -> Result<Tokens> {
        let rope = Rope::of(args)?;
        let tokens = args.shape[1];
        let positions = args.source(1)?.values();
        let factors: Vec<f64> = args
            .get(2)
            .map_or_else(Vec::new, |factors| factors.values().iter().map(|factor| factor.to_f64()).collect());
        if args.source(0)?.shape() != args.shape
            // A mode without planes reads the first of those that are there.
            || (positions.len() != rope.positions(tokens) && positions.len() != PLANES * tokens)
            || (!factors.is_empty() && factors.len() < rope.pairs())
        {
            return Err(
                args.misfit("(B, T, H, E), a position for each token, a factor for each pair or none")
            );
        }
        let rotations = (0..tokens)
            .map(|t| {
                let plane = |plane: usize| positions.get(plane * tokens + t).map_or(0.0, |p| p.to_f64());
                rope.rotations(args.arithmetic, std::array::from_fn(plane), &factors)
            })
            .collect();
        Ok(Tokens { rope, rotations })
    }
}

/// The channels of each pair.
pub(super) fn pairs(args: &Args<'_, f64>) -> Option<Vec<[usize; 2]>> {
    let rope = Rope::of(args).ok()?;
    Some((0..rope.pairs()).map(|i| rope.pair(i)).map(|pair| [pair.first, pair.second]).collect())
}

/// Rotates; `sign` -1 rotates back.
pub(super) fn compute<S: Scalar>(args: &Args<'_, S>, sign: f64) -> Result<Vec<S>> {
    let tokens = Tokens::of(args)?;
    let x = args.source(0)?;
    let mut out = Vec::with_capacity(args.elements());
    for t in rows(args.shape) {
        let rotations = &tokens.rotations[t[1]];
        let start = out.len();
        out.extend_from_slice(&x.row(t));
        let row = &mut out[start..];
        for (i, Rotation { angle, length, .. }) in rotations.iter().enumerate() {
            let pair = tokens.rope.pair(i);
            let (sin, cos) = angle.sin_cos();
            let (mut sin, mut cos) = (sign * length * sin, length * cos);
            if let Angles::Coarse { kept, .. } = args.arithmetic.angles {
                (sin, cos) = (stored(kept, sin), stored(kept, cos));
            }
            let (sin, cos) = (S::from_f64(sin), S::from_f64(cos));
            let (a, b) = (row[pair.first], row[pair.second]);
            row[pair.first] = a * cos - b * sin;
            row[pair.second] = a * sin + b * cos;
        }
        row.iter_mut().for_each(|value| *value = convert(args.dtype, *value));
    }
    Ok(out)
}

/// The error of a rotation, relative to the two channels: sine and cosine, the product of each with the length, the
/// two products and their sum; and the angle's own error where its steps are not repeated one by one: it grows with
/// the position, and with the index of the pair where it was multiplied on from pair to pair.
fn rotation_error(args: &Args<'_, f64>, rope: &Rope, i: usize, rotation: Rotation) -> f64 {
    let angle = rotation.angle.abs();
    let mixed = if rotation.mixed { 1.0 } else { 0.0 };
    let longer = if rope.is_yarn() { LENGTH_ROUNDINGS } else { 0.0 };
    let followed = match args.arithmetic.angles {
        Angles::F32Recurrence => 0.0,
        Angles::Exact | Angles::Coarse { .. } | Angles::OfFrequencies(_) => ANGLE_ROUNDINGS + 2.0 * i as f64,
    };
    let mut off = (followed + mixed * MIX_ROUNDINGS) * UNIT_F32 * angle;
    if args.arithmetic.functions == Functions::FastMath {
        off += FAST_TRIG + ANGLE_ROUNDINGS * UNIT_F32 * angle;
    }
    let products = SINCOS_ROUNDINGS + ROPE_ROUNDINGS + 1.0 + longer;
    (products * UNIT_F32 + off.min(2.0)) * rotation.length.abs()
}

pub(super) fn bound(args: &Args<'_, f64>, exact: &[f64]) -> Vec<f64> {
    let (Ok(tokens), Some(x)) = (Tokens::of(args), args.get(0)) else { return vec![0.0; exact.len()] };
    let width = args.shape[3].max(1);
    let mut out = vec![0.0; exact.len()];
    for ((at, y), out) in rows(args.shape).zip(exact.chunks(width)).zip(out.chunks_mut(width)) {
        let x = x.row(at);
        for (i, &rotation) in tokens.rotations[at[1]].iter().enumerate() {
            let pair = tokens.rope.pair(i);
            let error = rotation_error(args, &tokens.rope, i, rotation);
            let bound = error * (x[pair.first].abs() + x[pair.second].abs()) + TINY_F32;
            (out[pair.first], out[pair.second]) = (bound, bound);
        }
        out.iter_mut().zip(y).for_each(|(out, &y)| *out = finite(y, *out + storage(args.dtype, y)));
    }
    out
}

/// Errors of the channels rotate with them: |c|·e0 + |s|·e1. Positions and factors are given, not computed; an error of
/// them may rotate anything anywhere.
pub(super) fn carry(args: &Args<'_, f64>, exact: &[f64], slot: usize, error: &[f64]) -> Vec<f64> {
    let (Ok(tokens), Some(x)) = (Tokens::of(args), args.get(0)) else { return vec![0.0; exact.len()] };
    let width = args.shape[3].max(1);
    let anywhere = slot > 0 && error.iter().any(|&e| e > 0.0);
    let mut out = if slot == 0 { error.to_vec() } else { vec![0.0; exact.len()] };
    for (at, out) in rows(args.shape).zip(out.chunks_mut(width)) {
        let x = x.row(at);
        for (i, rotation) in tokens.rotations[at[1]].iter().enumerate() {
            let pair = tokens.rope.pair(i);
            let length = rotation.length.abs();
            let (sin, cos) = rotation.angle.sin_cos();
            let (sin, cos) = (length * sin.abs(), length * cos.abs());
            let (a, b) = (out[pair.first], out[pair.second]);
            (out[pair.first], out[pair.second]) = (cos * a + sin * b, sin * a + cos * b);
            if anywhere {
                let all = 2.0 * length * (x[pair.first].abs() + x[pair.second].abs());
                (out[pair.first], out[pair.second]) = (all, all);
            }
        }
    }
    out
}
