//! Every block type against the Python package `gguf`, on random blocks.
//!
//! `scripts/check-dequant.py --write-blocks` makes the file: for each type a tensor of random bytes, and
//! under its name with `.f32` the values that the package decodes them to.

use std::path::Path;

use half::f16;
use parity::gguf::{DType, Gguf, TensorRef, decode};

fn blocks() -> Gguf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/dequant-blocks.gguf");
    Gguf::open(&path).unwrap()
}

/// Every type with its tensor and the expected values.
fn cases(gguf: &Gguf) -> Vec<(DType, TensorRef<'_>, Vec<f32>)> {
    let case = |dtype: DType| {
        let name = dtype.name();
        let stored = gguf.tensor(name).unwrap_or_else(|| panic!("the file lacks {name}"));
        assert_eq!(stored.info.dtype, dtype);
        let expected = gguf.tensor(&format!("{name}.f32")).unwrap().bytes.as_chunks::<4>().0;
        (dtype, stored, expected.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    DType::all().filter(|dtype| dtype.is_decodable()).map(case).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn values_are_those_of_the_reference_bit_for_bit() {
    let gguf = blocks();
    for (dtype, stored, expected) in cases(&gguf) {
        let values = stored.decode::<f32>();
        assert_eq!(values.len(), expected.len());
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert!(same(*value, *expected), "{dtype} [{index}]: {value:e}, expected {expected:e}");
        }
    }
}

#[test]
fn rows_are_parts_of_the_whole() {
    let gguf = blocks();
    for (dtype, stored, expected) in cases(&gguf) {
        let mut row = vec![0f32; stored.cols()];
        stored.decode_rows(1..2, &mut row);
        let expected = &expected[stored.cols()..];
        assert!(row.iter().zip(expected).all(|(a, b)| same(*a, *b)), "{dtype}");
        assert_eq!(stored.row_bytes(1..2), &stored.bytes[stored.bytes.len() / 2..]);
    }
}

/// Where the f16 scales of a block lie.
fn scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

/// The stored bytes of `tensor` with every f16 scale replaced.
fn with_scales(tensor: TensorRef<'_>, scale: impl Fn(u16) -> u16) -> Vec<u8> {
    let dtype = tensor.info.dtype;
    let mut bytes = tensor.bytes.to_vec();
    for block in bytes.chunks_mut(dtype.block_bytes()) {
        for &at in scales(dtype) {
            let stored = u16::from_le_bytes([block[at], block[at + 1]]);
            block[at..at + 2].copy_from_slice(&scale(stored).to_le_bytes());
        }
    }
    bytes
}

/// Scales with a 5-bit significand and exponent 0 make every product and difference exact in f32: at most
/// 5 (scale) + 6 (scale of the scale) + 8 (quant) = 19 significant bits, and a bit for the difference.
/// So both number types have to agree exactly.
#[test]
fn f64_is_f32_where_f32_does_not_round() {
    let gguf = blocks();
    for (dtype, stored, expected) in cases(&gguf) {
        let bytes = with_scales(stored, |bits| (bits & 0x83c0) | f16::ONE.to_bits());
        let (mut single, mut double) = (vec![0f32; expected.len()], vec![0f64; expected.len()]);
        decode(dtype, &bytes, &mut single);
        decode(dtype, &bytes, &mut double);
        for (index, (single, double)) in single.iter().zip(&double).enumerate() {
            let equal = f64::from(*single) == *double || (single.is_nan() && double.is_nan());
            assert!(equal, "{dtype} [{index}]: {single:e} in f32, {double:e} in f64");
        }
    }
}

/// Scales and minima with all 11 bits of an f16 and far apart in size: the difference of two products has
/// more than 24 bits, and f64 keeps what f32 rounds away. A single product has at most 11 (scale) + 7 (scale
/// of the scale) + 6 (quant) bits in any type: the types without minima are exact in f32 already.
#[test]
fn f64_is_not_rounded_to_f32() {
    let gguf = blocks();
    for (dtype, stored, expected) in cases(&gguf) {
        let rounds = matches!(dtype, DType::Q4_1 | DType::Q5_1 | DType::Q2_K | DType::Q4_K | DType::Q5_K);
        let exponents = [f16::ONE.to_bits(), f16::from_f32(2f32.powi(-14)).to_bits()];
        let bytes = with_scales(stored, |bits| (bits & 0x83ff) | 1 | exponents[bits as usize % 2]);
        let mut double = vec![0f64; expected.len()];
        decode(dtype, &bytes, &mut double);
        let finer = double.iter().any(|value| f64::from(*value as f32) != *value && value.is_finite());
        assert_eq!(finer, rounds, "{dtype}");
    }
}

#[test]
fn slices_of_the_wrong_length_are_refused() {
    let wrong = std::panic::catch_unwind(|| decode(DType::Q8_0, &[0; 33], &mut [0f32; 32]));
    assert!(wrong.is_err());
    let undecodable = std::panic::catch_unwind(|| decode(DType::Q8_K, &[0; 292], &mut [0f32; 256]));
    assert!(undecodable.is_err());
}
