//! The types that tensors are stored in: their numbers in the file, names and block sizes.

use std::fmt;

/// How the values of a tensor are stored. The variants are named as in ggml.
#[allow(non_camel_case_types)]
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

/// One line of the table of types.
struct TypeRow {
    dtype: DType,
    /// `enum ggml_type` in ggml.h.
    number: u32,
    name: &'static str,
    /// Values in one block, and its bytes: the `block_*` structs of ggml-common.h.
    block: (usize, usize),
}

macro_rules! table {
    ($($dtype:ident = $number:literal, $len:literal values in $bytes:literal bytes;)*) => {
        [$(TypeRow { dtype: DType::$dtype, number: $number, name: stringify!($dtype), block: ($len, $bytes) }),*]
    };
}

/// In the order of the enum.
const TABLE: [TypeRow; 35] = table! {
    F32 = 0, 1 values in 4 bytes;
    F16 = 1, 1 values in 2 bytes;
    Q4_0 = 2, 32 values in 18 bytes;
    Q4_1 = 3, 32 values in 20 bytes;
    Q5_0 = 6, 32 values in 22 bytes;
    Q5_1 = 7, 32 values in 24 bytes;
    Q8_0 = 8, 32 values in 34 bytes;
    Q8_1 = 9, 32 values in 36 bytes;
    Q2_K = 10, 256 values in 84 bytes;
    Q3_K = 11, 256 values in 110 bytes;
    Q4_K = 12, 256 values in 144 bytes;
    Q5_K = 13, 256 values in 176 bytes;
    Q6_K = 14, 256 values in 210 bytes;
    Q8_K = 15, 256 values in 292 bytes;
    IQ2_XXS = 16, 256 values in 66 bytes;
    IQ2_XS = 17, 256 values in 74 bytes;
    IQ3_XXS = 18, 256 values in 98 bytes;
    IQ1_S = 19, 256 values in 50 bytes;
    IQ4_NL = 20, 32 values in 18 bytes;
    IQ3_S = 21, 256 values in 110 bytes;
    IQ2_S = 22, 256 values in 82 bytes;
    IQ4_XS = 23, 256 values in 136 bytes;
    I8 = 24, 1 values in 1 bytes;
    I16 = 25, 1 values in 2 bytes;
    I32 = 26, 1 values in 4 bytes;
    I64 = 27, 1 values in 8 bytes;
    F64 = 28, 1 values in 8 bytes;
    IQ1_M = 29, 256 values in 56 bytes;
    BF16 = 30, 1 values in 2 bytes;
    TQ1_0 = 34, 256 values in 54 bytes;
    TQ2_0 = 35, 256 values in 66 bytes;
    MXFP4 = 39, 32 values in 17 bytes;
    NVFP4 = 40, 64 values in 36 bytes;
    Q1_0 = 41, 128 values in 18 bytes;
    Q2_0 = 42, 64 values in 18 bytes;
};

impl DType {
    /// The type with this number in `enum ggml_type`; `None` where it is unknown or was withdrawn.
    pub fn from_number(number: u32) -> Option<DType> {
        TABLE.iter().find(|row| row.number == number).map(|row| row.dtype)
    }

    /// The number in `enum ggml_type`.
    pub fn number(self) -> u32 {
        TABLE[self as usize].number
    }

    /// The name in ggml, in capitals, e.g. `Q4_K`.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].name
    }

    /// Values in one block: rows are whole blocks.
    pub fn block_len(self) -> usize {
        TABLE[self as usize].block.0
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        TABLE[self as usize].block.1
    }

    /// Bits that one value takes, scales included.
    pub fn bits_per_value(self) -> f64 {
        8.0 * self.block_bytes() as f64 / self.block_len() as f64
    }

    /// Whether [`super::decode`] knows the type.
    pub fn is_decodable(self) -> bool {
        use DType::*;
        matches!(
            self,
            F32 | F16
                | BF16
                | Q4_0
                | Q4_1
                | Q5_0
                | Q5_1
                | Q8_0
                | Q2_K
                | Q3_K
                | Q4_K
                | Q5_K
                | Q6_K
                | IQ4_NL
                | IQ4_XS
        )
    }

    /// All types, in the order of their numbers within ggml but for gaps.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.dtype)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.dtype as usize, index, "{}", row.name);
            assert_eq!(DType::from_number(row.number), Some(row.dtype));
        }
        assert_eq!(DType::from_number(4), None);
    }
}
