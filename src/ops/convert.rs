//! Conversion of a value to the type of a result, as ggml's kernels convert f32.

use crate::arithmetic::round::{to_bf16, to_f16};
use crate::gguf::DType;
use crate::scalar::Scalar;

/// Whether a result can be of this type: a block-quantised one is made by no op that moves or maps values.
pub fn is_convertible(dtype: DType) -> bool {
    use DType::*;
    matches!(dtype, F64 | F32 | F16 | BF16 | I8 | I16 | I32 | I64)
}

/// The value as `dtype` holds it: F16 and BF16 to the nearest, halves to even, from f32; whole numbers towards
/// zero. F32 is left in the precision of `S`, but what is too large for it is infinite.
pub fn convert<S: Scalar>(dtype: DType, value: S) -> S {
    match dtype {
        DType::F16 => to_f16(value),
        DType::BF16 => to_bf16(value),
        DType::F32 if value.to_f32().is_infinite() => S::from_f32(value.to_f32()),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => S::from_f64(value.to_f64().trunc()),
        _ => value,
    }
}

/// How far an error of up to `error` of `value` moves the converted value.
pub fn spread(dtype: DType, value: f64, error: f64) -> f64 {
    if error == 0.0 || matches!(dtype, DType::F32 | DType::F64) {
        return error;
    }
    let own = convert(dtype, value);
    let moved = |value: f64| {
        let moved = (convert(dtype, value) - own).abs();
        if moved.is_nan() { 0.0 } else { moved }
    };
    moved(value + error).max(moved(value - error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_converted_as_ggml_converts_them() {
        assert_eq!((convert(DType::I32, 2.7), convert(DType::I32, -2.7)), (2.0, -2.0));
        // Halfway between 2048 and 2050, and between 2050 and 2052: to the even one.
        assert_eq!((convert(DType::F16, 2049.0), convert(DType::F16, 2051.0)), (2048.0, 2052.0));
        assert_eq!((convert(DType::BF16, 257.0), convert(DType::BF16, 259.0)), (256.0, 260.0));
        assert_eq!(convert(DType::F16, 70000.0), f64::INFINITY);
        assert_eq!(convert(DType::F32, -1e39), f64::NEG_INFINITY);
        assert_eq!(convert(DType::F32, 0.1), 0.1);
    }

    #[test]
    fn an_error_crosses_a_rounding_or_vanishes_in_it() {
        assert_eq!(spread(DType::F16, 2048.0, 0.5), 0.0);
        assert_eq!(spread(DType::F16, 2048.9, 0.2), 2.0);
        assert_eq!(spread(DType::I32, 2.9, 0.2), 1.0);
        assert_eq!(spread(DType::F32, 2.9, 0.2), 0.2);
        assert_eq!(spread(DType::F16, f64::NEG_INFINITY, 1.0), 0.0);
    }
}
