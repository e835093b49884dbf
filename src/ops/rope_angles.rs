//! The angles that ROPE and ROPE_BACK rotate by, one per pair of channels and position.
//!
//! `angle = position · base^(-2i/n)`, divided by a frequency factor, times freq_scale, or between the two by YaRN (Peng
//! et al., arXiv 2309.00071); multimodal models take the position from one of four planes by sections of the pairs.
//! The CPU multiplies the position by `powf(base, -2/n)` from pair to pair in f32, all other steps in f32 too
//! (ggml-cpu/ops.cpp, `ggml_rope_cache_init`, `ggml_mrope_cache_init`, `rope_yarn`). That recurrence is repeated here
//! step by step where the arithmetic says so: each step is one operation of f32 numbers in f64, rounded to f32.

use parity_graph::Params;

use super::Args;
use crate::arithmetic::{Angles, Arithmetic};
use crate::error::Result;
use crate::numerics::Storage;
use crate::scalar::Scalar;

/// Modes: 0 rotates neighbours; all others halves.
const NEOX: i32 = 2;
/// Bit of the modes that have four planes of positions.
const MULTIMODAL: i32 = 8;
/// Sections counted from 0, n_dims pairs of channels that are n_dims apart.
const VISION: i32 = 24;
/// Sections in turn.
const INTERLEAVED: i32 = 40;
/// Planes of positions.
pub(super) const PLANES: usize = 4;

/// The words of the op, see `parity_graph::params`.
pub(super) struct Rope {
    n_dims: usize,
    mode: i32,
    n_ctx_orig: f64,
    base: f32,
    freq_scale: f32,
    ext_factor: f32,
    attn_factor: f32,
    beta_fast: f64,
    beta_slow: f64,
    sections: [usize; PLANES],
    offset: usize,
}

/// One pair of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pair {
    pub first: usize,
    pub second: usize,
}

/// How far one pair is rotated, and by what its length is multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation {
    pub angle: f64,
    pub length: f64,
    /// Whether the angle is a mean of two, with a rounding that a compiler may leave out.
    pub mixed: bool,
}

impl Rope {
    /// Reads the words.
    ///
    /// # Errors
    /// Where they do not fit heads of `width` channels.
    pub(super) fn of<S: Scalar>(args: &Args<'_, S>) -> Result<Rope> {
        let (params, width) = (args.params, args.shape[3]);
        let size = |word: usize| usize::try_from(params.int(word)).ok();
        let (Some(n_dims), Some(offset)) = (size(1), size(15)) else {
            return Err(args.misfit("words n_dims and offset that are not negative"));
        };
        let rope = Rope::read(params, n_dims, offset);
        let channels = if rope.mode == VISION { 2 * n_dims } else { n_dims };
        if n_dims == 0 || n_dims % 2 != 0 || channels + offset > width {
            return Err(
                args.misfit(format!("rows of at least {} channels, an even number", channels + offset))
            );
        }
        if rope.is_multimodal() && rope.sections.iter().sum::<usize>() == 0 {
            return Err(args.misfit("sections that are not all empty, as its mode has sections"));
        }
        Ok(rope)
    }

    fn read(params: &Params, n_dims: usize, offset: usize) -> Rope {
        Rope {
            n_dims,
            mode: params.int(2),
            n_ctx_orig: f64::from(params.int(4)),
            base: params.float(5),
            freq_scale: params.float(6),
            ext_factor: params.float(7),
            attn_factor: params.float(8),
            beta_fast: f64::from(params.float(9)),
            beta_slow: f64::from(params.float(10)),
            sections: std::array::from_fn(|i| usize::try_from(params.int(11 + i)).unwrap_or(0)),
            offset,
        }
    }

    /// Whether positions come in four planes.
    pub(super) fn is_multimodal(&self) -> bool {
        self.mode & MULTIMODAL != 0
    }

    /// Positions that `tokens` rows need.
    pub(super) fn positions(&self, tokens: usize) -> usize {
        if self.is_multimodal() { PLANES * tokens } else { tokens }
    }

    /// Number of pairs.
    pub(super) fn pairs(&self) -> usize {
        if self.mode == VISION { self.n_dims } else { self.n_dims / 2 }
    }

    /// The channels of pair `i`.
    pub(super) fn pair(&self, i: usize) -> Pair {
        let o = self.offset;
        match self.mode {
            VISION => Pair { first: i, second: i + self.n_dims },
            mode if mode & (NEOX | MULTIMODAL) != 0 => Pair { first: o + i, second: o + i + self.n_dims / 2 },
            _ => Pair { first: o + 2 * i, second: o + 2 * i + 1 },
        }
    }

    /// Pair i's plane of positions, and its place in its section where exponents start anew.
    fn plane(&self, i: usize) -> (usize, usize) {
        if !self.is_multimodal() {
            return (0, i);
        }
        let [t, h, w, e] = self.sections;
        let sector = i % (t + h + w + e);
        if self.mode == INTERLEAVED {
            let own = sector % 3;
            let plane = if sector < 3 * self.sections[own] { own } else { 3 };
            return (plane, i);
        }
        let starts = [0, t, t + h, t + h + w];
        let plane = starts.iter().rposition(|&start| sector >= start).unwrap_or(0);
        (plane, if self.mode == VISION { sector - starts[plane] } else { i })
    }

    /// The pairs from which on YaRN leaves the extrapolated angles, and up to which it does not, (low, high).
    fn corrections(&self) -> (f64, f64) {
        let n = self.n_dims as f64;
        let at = |beta: f64| {
            n * (self.n_ctx_orig / (beta * 2.0 * std::f64::consts::PI)).ln()
                / (2.0 * f64::from(self.base).ln())
        };
        (at(self.beta_fast).floor().max(0.0), at(self.beta_slow).ceil().min(n - 1.0))
    }

    /// How pair 0, 1, … is rotated at a token whose positions in the four planes are given (or the one, first).
    /// `factors` are the frequency factors, or empty.
    pub(super) fn rotations(
        &self,
        arithmetic: &Arithmetic,
        positions: [f64; PLANES],
        factors: &[f64],
    ) -> Vec<Rotation> {
        let in_f32 = arithmetic.angles == Angles::F32Recurrence;
        let round = |value: f64| if in_f32 { f64::from(value as f32) } else { value };
        let coarse = |value: f64| match arithmetic.angles {
            Angles::Coarse { kept, throughout: true } => stored(kept, value),
            _ => value,
        };
        let frequency = |value: f64| match arithmetic.angles {
            Angles::OfFrequencies(kept) => stored(kept, value),
            _ => coarse(value),
        };
        let exponent = f64::from(-2.0f32 / self.n_dims as f32);
        let exact = |place: usize| f64::from(self.base).powf(-2.0 * place as f64 / self.n_dims as f64);
        let ratio = round(f64::from(self.base).powf(exponent));
        // position · ratio^place, multiplied on from pair to pair.
        let places = self.pairs();
        let mut powers: Vec<Vec<f64>> = Vec::new();
        if in_f32 {
            powers = positions.iter().map(|&start| recurrence(start, ratio, places)).collect();
        }
        let (low, high) = self.corrections();
        let length = f64::from(self.attn_factor);
        (0..places)
            .map(|i| {
                let (plane, place) = self.plane(i);
                let theta = match in_f32 {
                    true => powers[plane][place],
                    false => coarse(coarse(positions[plane]) * frequency(exact(place))),
                };
                let extrapolated = round(theta / factors.get(i).copied().unwrap_or(1.0));
                let interpolated = round(f64::from(self.freq_scale) * extrapolated);
                if self.ext_factor == 0.0 {
                    return Rotation { angle: interpolated, length, mixed: false };
                }
                let ramp = round(round(i as f64 - low) / (high - low).max(f64::from(0.001f32)));
                let mix = round(round(1.0 - ramp.clamp(0.0, 1.0)) * f64::from(self.ext_factor));
                let angle = round(round(interpolated * round(1.0 - mix)) + round(extrapolated * mix));
                let longer = 1.0 + 0.1 * (1.0 / f64::from(self.freq_scale)).ln();
                Rotation { angle, length: round(length * round(longer)), mixed: mix != 0.0 && mix != 1.0 }
            })
            .collect()
    }

    /// Whether YaRN is on.
    pub(super) fn is_yarn(&self) -> bool {
        self.ext_factor != 0.0
    }
}

/// A value as a narrow type keeps it.
pub(super) fn stored(kept: Storage, value: f64) -> f64 {
    let mut values = [value];
    kept.store(&mut values);
    values[0]
}

/// start · ratio^i for i in 0..count, rounded to f32 at every step.
fn recurrence(start: f64, ratio: f64, count: usize) -> Vec<f64> {
    let mut theta = start as f32;
    let next = |_| {
        let own = theta;
        theta *= ratio as f32;
        f64::from(own)
    };
    (0..count).map(next).collect()
}
