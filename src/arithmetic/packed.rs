//! Keys and values as caches hold them whose numbers are of eight bits, or of f16 at a scale: of attention of an engine that
//! brings no graph, whose keys and values were recorded before they were kept.
//!
//! A scale that each head of a token has for itself is its largest value over the largest number of the type, in f32, so that
//! what the cache holds is known but for values that lie in the middle between two numbers. Of a scale that nobody recorded
//! the rounding is bounded.

use half::{bf16, f16};

use super::cache_blocks;
use super::narrow::nearest_of;
use crate::gguf::DType;
use crate::numerics::{EightBits, Storage};
use crate::scalar::half;

/// What keys and values are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packed {
    /// Numbers of eight bits with an exponent, see [`Float`]; whether each head of a token has a scale.
    Float(Float, bool),
    /// Whole numbers to ±127, each head of a token with a scale.
    Whole,
    /// So many steps from the least value of each head of a token to its largest; whether both and the step are kept in f16.
    Range(u8, bool),
    /// Blocks of 32 as llama.cpp has them.
    Blocks(DType),
    /// Numbers of a narrow type, after a scale.
    Scaled(Storage),
    /// Eight bits of any kind: half a step of the coarsest.
    Eight,
    /// Four bits of any kind.
    Four,
}

/// Numbers of eight bits with an exponent (OCP 8-bit floating point, 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// Four bits of exponent, three of mantissa, up to 448.
    E4m3,
    /// Five of exponent, two of mantissa, up to 57344.
    E5m2,
}

impl Float {
    /// Bits of the mantissa, the exponent of the least normal number, and the largest number.
    fn form(self) -> (i32, i32, f64) {
        match self {
            Float::E4m3 => (3, -6, 448.0),
            Float::E5m2 => (2, -14, 57_344.0),
        }
    }
}

/// What the exponent of 1 is kept as in f64.
const EXPONENT_OF_ONE: i32 = f64::MAX_EXP - 1;
/// Half a step of f32 beside 1.
const UNIT: f64 = f32::EPSILON as f64 / 2.0;
/// Largest whole number of eight bits that scales are made for.
const WHOLE_MAX: f64 = 127.0;
/// The same of four bits; between the least and the largest value of a group there are fifteen steps, which are no larger.
const WHOLE_OF_FOUR: f64 = 7.0;
/// Half a step of numbers of eight bits, of two of mantissa (e5m2), over the least number that has that step.
const EIGHT_BITS: f64 = 1.0 / 8.0;
/// Half a step of the least numbers of e4m3, which a value that is kept without a scale is off by, however small it is.
const LEAST: f64 = 1.0 / 1024.0;
/// Half a step of numbers of four bits (e2m1: 0, ½, 1, 1½, 2, 3, 4, 6) over the number in the middle, 2½ or 5.
const FOUR_BITS: f64 = 1.0 / 5.0;
/// Roundings of f32 between a value and its place among the numbers: the scale, its inverse, the product.
const ROUNDINGS: f64 = 4.0;

/// What a cache keeps of keys and of values; `None` where it keeps them as an engine keeps all that it computes.
pub type Cached = [Option<Packed>; 2];

/// All caches that are tried, the most exact first, each by what it is called; engines that keep keys alone or values alone in
/// eight bits are rare.
pub const CACHES: [(&str, Cached); 23] = [
    ("keys and values in fp8 (e4m3)", both(E4M3)),
    ("keys and values in fp8 (e5m2)", both(E5M2)),
    ("keys and values in fp8 (e4m3), a scale for each head and token", both(E4M3_SCALED)),
    ("keys and values in fp8 (e5m2), a scale for each head and token", both(E5M2_SCALED)),
    ("keys and values in int8, a scale for each head and token", both(Packed::Whole)),
    ("keys and values in blocks of eight bits (Q8_0)", both(Packed::Blocks(DType::Q8_0))),
    ("keys and values in blocks of four bits (Q4_0)", both(Packed::Blocks(DType::Q4_0))),
    ("keys and values in uint8, a scale and a zero for each head and token", both(Packed::Range(255, false))),
    (
        "keys and values in uint8, a scale and a zero in f16 for each head and token",
        both(Packed::Range(255, true)),
    ),
    ("keys and values in uint4, a scale and a zero for each head and token", both(Packed::Range(15, false))),
    (
        "keys and values in uint4, a scale and a zero in f16 for each head and token",
        both(Packed::Range(15, true)),
    ),
    ("keys in fp8 (e4m3)", [Some(E4M3), None]),
    ("keys in fp8 (e5m2)", [Some(E5M2), None]),
    ("keys in fp8 (e4m3), a scale for each head and token", [Some(E4M3_SCALED), None]),
    ("keys in fp8 (e5m2), a scale for each head and token", [Some(E5M2_SCALED), None]),
    ("keys in int8, a scale for each head and token", [Some(Packed::Whole), None]),
    ("values in fp8 (e4m3)", [None, Some(E4M3)]),
    ("values in fp8 (e5m2)", [None, Some(E5M2)]),
    ("values in fp8 (e4m3), a scale for each head and token", [None, Some(E4M3_SCALED)]),
    ("values in fp8 (e5m2), a scale for each head and token", [None, Some(E5M2_SCALED)]),
    ("values in int8, a scale for each head and token", [None, Some(Packed::Whole)]),
    ("keys and values rounded to f16 at another scale", both(Packed::Scaled(Storage::F16))),
    ("keys and values rounded to bf16 at another scale", both(Packed::Scaled(Storage::Bf16))),
];

const E4M3: Packed = Packed::Float(Float::E4m3, false);
const E4M3_SCALED: Packed = Packed::Float(Float::E4m3, true);
const E5M2: Packed = Packed::Float(Float::E5m2, false);
const E5M2_SCALED: Packed = Packed::Float(Float::E5m2, true);

/// Keys and values kept alike.
pub const fn both(packed: Packed) -> Cached {
    [Some(packed), Some(packed)]
}

/// What a cache is called; `None` where it is none of [`CACHES`].
pub fn name_of(cached: Cached) -> Option<&'static str> {
    CACHES.into_iter().find(|(_, one)| *one == cached).map(|(name, _)| name)
}

/// How far a value of a cache may be from its own at most, relative to it but for a scale, where that is bounded and not followed.
pub fn bounded_by(cached: Cached) -> Option<f64> {
    cached.into_iter().flatten().find_map(Packed::bounded_by)
}

impl Packed {
    /// Whether it may be what a producer declares of its cache.
    pub fn may_be(self, declared: Option<EightBits>) -> bool {
        match declared {
            None => true,
            Some(EightBits::Fp8) => matches!(self, Packed::Float(..)),
            Some(EightBits::Int8) => {
                matches!(self, Packed::Whole | Packed::Range(255, _) | Packed::Blocks(DType::Q8_0))
            }
        }
    }

    fn bounded_by(self) -> Option<f64> {
        match self {
            Packed::Float(..) | Packed::Whole | Packed::Range(..) | Packed::Blocks(_) => None,
            Packed::Scaled(kept) => {
                let digits = if kept == Storage::F16 { f16::MANTISSA_DIGITS } else { bf16::MANTISSA_DIGITS };
                Some(1.0 / f64::from(1 << digits))
            }
            Packed::Eight => Some(EIGHT_BITS),
            Packed::Four => Some(FOUR_BITS),
        }
    }

    /// The largest whole number on either side of none that a bounded kind of whole numbers has at least.
    fn levels(self) -> Option<f64> {
        match self {
            Packed::Eight => Some(WHOLE_MAX),
            Packed::Four => Some(WHOLE_OF_FOUR),
            _ => None,
        }
    }

    /// Replaces values (..., T, D) by what the cache holds of them; `error` says how far each may be from what its producer kept,
    /// and becomes how far it may be from what that holds.
    pub fn keep(self, [.., tokens, width]: [usize; 4], values: &mut [f64], error: &mut [f64]) {
        let width = width.max(1);
        if let Some(unit) = self.bounded_by() {
            let head = tokens.max(1) * width;
            for (values, error) in values.chunks(head).zip(error.chunks_mut(head)) {
                self.bound((width, unit), values, error);
            }
            return;
        }
        if let Packed::Blocks(dtype) = self {
            return cache_blocks::keep(dtype, values, error);
        }
        for (values, error) in values.chunks_mut(width).zip(error.chunks_mut(width)) {
            let largest = values.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            // What was never written is kept as it is: most rows of a cache that begins with room for many.
            if !largest.is_finite() || largest == 0.0 && error.iter().all(|error| *error == 0.0) {
                continue;
            }
            match self {
                Packed::Float(float, false) => each(values, error, (1.0, 0.0), |x| in_float(float, x)),
                Packed::Float(float, true) => {
                    each(values, error, (largest / float.form().2, 0.0), |x| in_float(float, x));
                }
                Packed::Whole => {
                    each(values, error, (largest / WHOLE_MAX, 0.0), |x| {
                        (nearest_of(x, 1.0).clamp(-WHOLE_MAX, WHOLE_MAX), 1.0)
                    });
                }
                Packed::Range(steps, in_half) => range((f64::from(steps), in_half), values, error),
                Packed::Blocks(_) | Packed::Scaled(_) | Packed::Eight | Packed::Four => {}
            }
        }
    }

    /// How far the values of one head (T, D) may be from what a bounded kind holds of them: half a step of a number, or of whole
    /// numbers at the scale of a token, or of a column.
    fn bound(self, (width, unit): (usize, f64), values: &[f64], error: &mut [f64]) {
        let least = if self == Packed::Eight { LEAST } else { 0.0 };
        // A row of an infinite value has no scale, and gives a column none.
        let is_finite = |row: &[f64]| row.iter().all(|x| !x.is_infinite());
        let mut columns = vec![0.0f64; width];
        for row in values.chunks(width).filter(|row| is_finite(row)) {
            columns.iter_mut().zip(row).for_each(|(max, x)| *max = max.max(x.abs()));
        }
        let rows = values.chunks(width).zip(error.chunks_mut(width));
        for (row, error) in rows.filter(|(row, _)| is_finite(row)) {
            let largest = row.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            for ((x, column), error) in row.iter().zip(&columns).zip(error) {
                let of_whole = self.levels().map_or(0.0, |levels| largest.max(*column) / levels / 2.0);
                *error += (unit * x.abs()).max(of_whole).max(least);
            }
        }
    }
}

/// The number that is nearest to a value, halves to the even one, and how far the next one is.
fn in_float(float: Float, value: f64) -> (f64, f64) {
    let (mantissa, least, largest) = float.form();
    // Of the bits of both: logarithms and powers took a third of an audit.
    let exponent = (value.to_bits() << 1 >> f64::MANTISSA_DIGITS) as i32 - EXPONENT_OF_ONE;
    let exponent = if value.is_finite() { exponent.max(least) } else { least };
    let step = f64::from_bits(((exponent - mantissa + EXPONENT_OF_ONE) as u64) << (f64::MANTISSA_DIGITS - 1));
    (nearest_of(value, step).clamp(-largest, largest), step)
}

/// Rounds the values of a head to so many steps from its least to its largest, which are known to f32, or kept in f16.
fn range((steps, in_half): (f64, bool), values: &mut [f64], error: &mut [f64]) {
    let kept = |x: f64| if in_half { half(x) } else { x };
    let (least, largest) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, largest), x| (least.min(*x), largest.max(*x)));
    let (least, step) = (kept(least), kept((largest - least) / steps));
    values.iter_mut().for_each(|value| *value -= least);
    // Some round x/step and the place of zero each, and then what they come to.
    let size = least.abs().max(largest.abs()) / step;
    each(values, error, (step, size), |x| (nearest_of(x, 1.0).clamp(0.0, steps), 1.0));
    values.iter_mut().for_each(|value| *value += least);
}

/// Rounds each value over `scale`; what lies in the middle between two numbers but for roundings of f32, of numbers up to `size` on the
/// way, and for how far the value may be off, may be either.
fn each(values: &mut [f64], error: &mut [f64], (scale, size): (f64, f64), round: impl Fn(f64) -> (f64, f64)) {
    if scale == 0.0 {
        return;
    }
    for (value, error) in values.iter_mut().zip(error) {
        let scaled = *value / scale;
        // Without a scale nothing is rounded before.
        let rounded = if scale == 1.0 { 0.0 } else { ROUNDINGS * UNIT * scaled.abs().max(size) };
        let near = rounded + *error / scale;
        let (own, step) = round(scaled);
        let others = || [round(scaled - near).0, round(scaled + near).0];
        let apart = || others().into_iter().map(|other| (other - own).abs()).fold(0.0, f64::max);
        let apart = if near == 0.0 { 0.0 } else { apart() };
        *error = if *error > 0.0 { (apart + step) * scale } else { apart * scale };
        if scale != 1.0 {
            *error += ROUNDINGS * UNIT * own.abs().max(size) * scale;
        }
        *value = own * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(packed: Packed, given: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut values, mut error) = (given.to_vec(), vec![0.0; given.len()]);
        packed.keep([1, 1, 1, given.len()], &mut values, &mut error);
        (values, error)
    }

    #[test]
    fn numbers_of_eight_bits_are_the_nearest() {
        let (values, error) =
            kept(Packed::Float(Float::E4m3, false), &[1.07, -1.0625, 300.0, 1000.0, 0.0011, 0.0]);
        assert_eq!(values, [1.125, -1.0, 288.0, 448.0, 0.001953125, 0.0]);
        assert_eq!(error, [0.0; 6]);
        // Half way between two numbers it may be either where a scale was rounded before; elsewhere f32 alone rounds.
        let (_, error) = kept(Packed::Float(Float::E4m3, true), &[224.0, -0.53125, 0.535]);
        assert!(error[1] >= 0.0625 && error[2] < 1e-6, "{error:?}");
        let (values, _) = kept(Packed::Float(Float::E5m2, false), &[1.07, 1.2, -7.0]);
        assert_eq!(values, [1.0, 1.25, -7.0]);
        let (values, _) = kept(Packed::Float(Float::E4m3, true), &[896.0, 2.14]);
        assert_eq!(values, [896.0, 2.25]);
        let (values, _) = kept(Packed::Whole, &[254.0, -3.3, 2.9]);
        assert_eq!(values, [254.0, -4.0, 2.0]);
    }

    #[test]
    fn whole_numbers_may_have_a_zero() {
        let given = [-1.0, 0.1, 0.6, 14.0];
        let (values, error) = kept(Packed::Range(15, false), &given);
        assert_eq!(values, [-1.0, 0.0, 1.0, 14.0]);
        assert!(error.iter().all(|error| *error < 1e-5), "{error:?}");
        let (values, _) = kept(Packed::Range(15, true), &[0.1, 0.4, 0.3]);
        let [least, step] = [0.1, 0.3 / 15.0].map(half);
        assert_eq!(values, [least, least + 15.0 * step, least + 10.0 * step]);
        // A place of zero of 127.5 and -117 are rounded each before their sum is: ten and a half, but for 4e-6, may be either.
        let (_, error) = kept(Packed::Range(255, false), &[-1.0, 1.0, -1.0 + (10.5 + 4e-6) * 2.0 / 255.0]);
        assert!(error[2] >= 2.0 / 255.0, "{error:?}");
        let (values, _) = kept(Packed::Range(255, false), &[3.0, 3.0]);
        assert_eq!(values, [3.0, 3.0]);
    }

    #[test]
    fn what_nobody_knows_is_bounded() {
        let (values, error) = kept(Packed::Scaled(Storage::F16), &[2.0, -0.5]);
        assert_eq!((values, error), (vec![2.0, -0.5], vec![2.0 / 2048.0, 0.5 / 2048.0]));
        let (_, error) = kept(Packed::Eight, &[25.4, 0.01]);
        assert!((error[0] - 25.4 / 8.0).abs() < 1e-12 && (error[1] - 0.1).abs() < 1e-12, "{error:?}");
        // Without a scale nothing is nearer than the least numbers are to each other.
        let (_, error) = kept(Packed::Eight, &[1e-4]);
        assert_eq!(error, [1.0 / 1024.0]);
        // Of four bits whole numbers at the scale of a row, or of a column.
        let mut error = vec![0.0; 4];
        Packed::Four.keep([1, 1, 2, 2], &mut [14.0, 0.1, 0.7, 0.1], &mut error);
        assert!((error[2] - 1.0).abs() < 1e-12 && (error[3] - 0.05).abs() < 1e-12, "{error:?}");
        // An infinite value hides nothing.
        let mut error = vec![0.0; 4];
        Packed::Eight.keep([1, 1, 2, 2], &mut [f64::INFINITY, 1.0, 0.8, 0.8], &mut error);
        assert_eq!(error, [0.0, 0.0, 0.1, 0.1]);
        let mut error = vec![0.001];
        Packed::Float(Float::E4m3, false).keep([1; 4], &mut [1.07], &mut error);
        assert!(error[0] >= 0.125, "{error:?}");
    }
}
