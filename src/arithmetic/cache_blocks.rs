//! Values as block-quantised memory keeps them: caches of keys and values in Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL.
//!
//! ggml quantises row by row while it writes (`quantize_row_*_ref` in ggml-quants.c; Q8_0 by ggml-cpu/arch/x86/quants.c,
//! which divides before it multiplies), in f32: a scale for each 32 values, kept in f16, and whole numbers. That is
//! repeated here. Kernels differ in the last bit of a scale, a product or a sum, and on devices more: where a value, or a
//! scale, lies so near the middle between two numbers that this decides, what it comes to is said as an error of it.

use crate::gguf::DType;
use crate::scalar::{Scalar, half};

/// Values of a block, of all these types.
pub const BLOCK: usize = 32;
/// Roundings of f32 between a value and its place among the quants: the scale, its inverse, the product, the sum with
/// the half; a product and a sum of the mean that IQ4_NL takes are in it.
const ROUNDINGS: f64 = 6.0;
const UNIT: f64 = f32::EPSILON as f64 / 2.0;
/// The places of IQ4_NL (`kvalues_iq4nl`).
const PLACES: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
/// Below this a block of IQ4_NL is zeros (`GROUP_MAX_EPS`).
const LEAST: f32 = 1e-15;

/// Whether memory of a type is quantised so.
pub fn is_kept(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | IQ4_NL)
}

/// Scale and offset of a block of decoded values as a kernel has them that multiplies raw quants: value = scale·q +
/// offset with q >= 0. They are in the values: quant 0 is the least value, or that of the largest magnitude, and the
/// largest quant is taken wherever there is a minimum. Both are 0 of types whose quants have no offset.
pub fn group<S: Scalar>(dtype: DType, block: &[S]) -> (f64, f64) {
    let values = || block.iter().map(|value| value.to_f64());
    let largest = || {
        values().fold(0.0, |largest: f64, value| if value.abs() > largest.abs() { value } else { largest })
    };
    let least = || values().fold(f64::INFINITY, f64::min);
    let range = || values().fold(f64::NEG_INFINITY, f64::max) - least();
    match dtype {
        DType::Q4_0 => (-largest() / 8.0, largest()),
        DType::Q5_0 => (-largest() / 16.0, largest()),
        DType::Q4_1 => (range() / 15.0, least()),
        DType::Q5_1 => (range() / 31.0, least()),
        _ => (0.0, 0.0),
    }
}

/// What rounding decides of one block.
struct Kept {
    /// By how much two neighbouring quants differ.
    step: f64,
    /// Scale and least value as f16 keeps them, and how far each may be off that.
    scale: [f64; 2],
    least: [f64; 2],
    /// Quant of each value, and to which quant it may have been rounded instead.
    quants: [[f64; 2]; BLOCK],
}

/// Replaces values, rows of whole blocks, by what memory of a type holds of them; `error` says how far each was from what
/// its producer wrote, and becomes how far it may be from what that holds.
pub fn keep<S: Scalar>(dtype: DType, values: &mut [S], error: &mut [f64]) {
    for (values, error) in values.chunks_mut(BLOCK).zip(error.chunks_mut(BLOCK)) {
        let mut x = [0f32; BLOCK];
        x.iter_mut().zip(values.iter()).for_each(|(x, value)| *x = value.to_f32());
        if !x.iter().all(|x| x.is_finite()) {
            values.iter_mut().for_each(|value| *value = S::from_f64(f64::NAN));
            continue;
        }
        let off = error.iter().copied().fold(0.0, f64::max);
        // What was never written.
        if off == 0.0 && x.iter().all(|x| *x == 0.0) {
            continue;
        }
        let kept = block(dtype, &x);
        for ((value, error), [quant, other]) in values.iter_mut().zip(error.iter_mut()).zip(kept.quants) {
            let own = quant * kept.scale[0] + kept.least[0];
            let tie = (other - quant).abs() * kept.scale[0].abs();
            let scaled = quant.abs() * kept.scale[1] + kept.least[1];
            // Two blocks that differ by `off` are quantised apart: half a step of each, and what the scales differ by.
            let apart = if off > 0.0 { 2.0 * (kept.step + off) } else { 0.0 };
            *error += tie + scaled + apart;
            *value = S::from_f64(own);
        }
    }
}

/// A number in f16, and how far the neighbour is that it may have been rounded to.
fn in_half(value: f64) -> [f64; 2] {
    let own = half(value);
    let near = ROUNDINGS * UNIT;
    let [low, high] = [half(value * (1.0 - near)), half(value * (1.0 + near))];
    [own, (low - own).abs().max((high - own).abs())]
}

/// The nearest whole number from `scaled`, and the other one where both are as near; halves go up. What kernels cut off to
/// a whole number is `shift` larger, and a sum in f32.
fn nearest(scaled: f64, shift: f64, limits: [f64; 2]) -> [f64; 2] {
    let near = UNIT * (ROUNDINGS * (scaled.abs() + 1.0) + (scaled + shift).abs());
    let round = |value: f64| (value + 0.5).floor().clamp(limits[0], limits[1]);
    let own = round(scaled);
    let other = [round(scaled - near), round(scaled + near)].into_iter().find(|other| *other != own);
    [own, other.unwrap_or(own)]
}

fn block(dtype: DType, x: &[f32; BLOCK]) -> Kept {
    let largest = x.iter().fold(0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    match dtype {
        DType::Q8_0 => uniform(x, largest.abs() / 127.0, 0.0, 0.0, [-127.0, 127.0]),
        DType::Q4_0 => uniform(x, largest / -8.0, 0.0, 8.0, [-8.0, 7.0]),
        DType::Q5_0 => uniform(x, largest / -16.0, 0.0, 16.0, [-16.0, 15.0]),
        DType::IQ4_NL => placed(x, largest),
        _ => {
            let levels = if dtype == DType::Q4_1 { 15.0 } else { 31.0 };
            let min = x.iter().copied().fold(f32::MAX, f32::min);
            let max = x.iter().copied().fold(f32::MIN, f32::max);
            uniform(x, (max - min) / levels, min, 0.0, [0.0, f64::from(levels)])
        }
    }
}

/// x ≈ quant·scale + least, quants evenly apart.
fn uniform(x: &[f32; BLOCK], scale: f32, least: f32, shift: f64, limits: [f64; 2]) -> Kept {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / f64::from(scale) };
    let quants = x.map(|x| nearest((f64::from(x) - f64::from(least)) * inverse, shift, limits));
    // The least value is one of the block: nothing was rounded before it is kept.
    let least = [half(f64::from(least)), 0.0];
    let scale = in_half(f64::from(scale));
    Kept { step: scale[0].abs(), scale, least, quants }
}

/// IQ4_NL: quants are the nearest of 16 places, the scale is the mean that leaves least.
fn placed(x: &[f32; BLOCK], largest: f32) -> Kept {
    if largest.abs() < LEAST {
        return Kept { step: 0.0, scale: [0.0; 2], least: [0.0; 2], quants: [[0.0; 2]; BLOCK] };
    }
    let inverse = f64::from(PLACES[0]) / f64::from(largest);
    let quants = x.map(|x| place(f64::from(x) * inverse));
    // The mean is weighted by the squares of the values.
    let mean = |side: usize| {
        let sums = x.iter().zip(&quants).fold([0.0; 2], |[along, square], (x, quant)| {
            let (x, q) = (f64::from(*x), quant[side]);
            [along + x * x * q * x, square + x * x * q * q]
        });
        if sums[1] > 0.0 { sums[0] / sums[1] } else { 0.0 }
    };
    let [scale, tie] = in_half(mean(0));
    // Another choice of quants moves the mean as well.
    let [other, _] = in_half(mean(1));
    let may = tie + (other - scale).abs();
    let widest = PLACES.windows(2).map(|pair| f64::from(pair[1] - pair[0])).fold(0.0, f64::max);
    Kept { step: scale.abs() * widest, scale: [scale, may], least: [0.0; 2], quants }
}

/// The nearest place, and the other one where both are as near; of two the upper.
fn place(scaled: f64) -> [f64; 2] {
    let near = ROUNDINGS * UNIT * scaled.abs();
    let of = |value: f64| {
        let upper =
            PLACES.iter().position(|place| value < f64::from(*place)).unwrap_or(PLACES.len() - 1).max(1);
        let [low, high] = [f64::from(PLACES[upper - 1]), f64::from(PLACES[upper])];
        if value - low < high - value { low } else { high }
    };
    let own = of(scaled);
    let other = [of(scaled - near), of(scaled + near)].into_iter().find(|other| *other != own);
    [own, other.unwrap_or(own)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four blocks (about 2, about 0.02, about 75, zeros) as llama.cpp 0.5.0 keeps them on the CPU, bit by bit: first the
    /// values, then a line for each type.
    const RECORDED: &str = include_str!("../../tests/data/cache-blocks.txt");

    fn line(text: &str) -> (&str, Vec<f64>) {
        let (name, values) = text.split_once(' ').unwrap();
        let value = |word: &str| f64::from(f32::from_bits(u32::from_str_radix(word, 16).unwrap()));
        (name, values.split(' ').map(value).collect())
    }

    #[test]
    fn blocks_are_kept_as_llama_cpp_keeps_them() {
        let mut lines = RECORDED.lines().map(line);
        let (_, given) = lines.next().unwrap();
        let mut types = 0;
        for (name, expected) in lines {
            let dtype = DType::all().find(|dtype| dtype.name().eq_ignore_ascii_case(name)).unwrap();
            assert!(is_kept(dtype), "{name}");
            let (mut values, mut error) = (given.clone(), vec![0.0; given.len()]);
            keep(dtype, &mut values, &mut error);
            let mut unsure = 0;
            for (i, (own, expected)) in values.iter().zip(&expected).enumerate() {
                // ggml multiplies and adds in f32.
                let off = error[i] + 2.0 * UNIT * expected.abs();
                assert!((own - expected).abs() <= off, "{name} {i}: {own} for {expected}, {off}");
                unsure += usize::from(error[i] > 0.0);
            }
            // What the values of a block have in common is found among them.
            for block in expected.chunks(BLOCK) {
                let (scale, offset) = group(dtype, block);
                if scale == 0.0 {
                    continue;
                }
                for value in block {
                    let quant = (value - offset) / scale;
                    // ggml multiplies and adds in f32.
                    let off = 4.0 * UNIT * (offset.abs() + value.abs()) / scale.abs();
                    assert!((quant - quant.round()).abs() <= off && quant > -0.5, "{name}: {quant}");
                }
            }
            assert!(unsure <= 2, "{name}: {unsure}");
            types += 1;
        }
        assert_eq!(types, 6);
    }

    #[test]
    fn what_rounding_decides_is_said() {
        // A scale of 1: halves lie in the middle.
        let mut values = vec![0.0f64; BLOCK];
        (values[0], values[1], values[2]) = (127.0, 2.5, 3.25);
        let mut error = vec![0.0; BLOCK];
        keep(DType::Q8_0, &mut values, &mut error);
        assert_eq!((values[2], error[0], error[1], error[2]), (3.0, 0.0, 1.0, 0.0));
        // What is not a number is not one afterwards.
        values[5] = f64::NAN;
        keep(DType::Q4_1, &mut values, &mut error);
        assert!(values.iter().all(|value| value.is_nan()));
    }
}
