//! In which arithmetic a node is computed: hypotheses as data.
//!
//! What a producer rounds on purpose (activations to the type that its integer kernels read, a table of GELU in
//! f16) is followed exactly; what it rounds because its numbers are finite is a bound's business.

pub mod product;
pub mod round;

use crate::numerics::Storage;

/// Which roundings of a producer are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// Operands of matrix products.
    pub operands: Operands,
    /// Attention tile by tile.
    pub flash: Flash,
    /// GELU.
    pub gelu: Gelu,
    /// Angles of rotary position embedding.
    pub angles: Angles,
    /// log(1 + e^x)
    pub softplus: Softplus,
    /// Sums over a row that are not products: norms, softmax, sums of rows.
    pub sums: Sums,
    /// Exponentials, sines and their like.
    pub functions: Functions,
    /// What values between nodes are kept in, and weights are read in.
    pub narrow: Storage,
    /// What keys and values are kept in, where a graph does not say it.
    pub cache: Storage,
    /// What values were rounded to only when they were recorded: the producer went on with better ones.
    pub recorded: Option<Storage>,
}

/// What the activations of a matrix product are rounded to before they meet the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operands {
    /// Not at all.
    Exact,
    /// As llama.cpp on the CPU: to the `vec_dot_type` of the other operand's type.
    VecDot,
}

/// How FLASH_ATTN_EXT computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flash {
    /// No rounding followed.
    Exact,
    /// llama.cpp's CPU kernel for one row after the other: Q rounded to K's `vec_dot_type`; with an F16 V the sum
    /// of the output is kept in f16 and rounded after every cached position.
    ByRow,
    /// The same, split over the cached positions into this many parts, which are joined in f32.
    Split(usize),
    /// The same one row after the other on a CPU that multiplies and adds in f16 (AVX512-FP16, ARM), in lanes that
    /// cannot be followed: Q is rounded, all else is bounded.
    NativeF16,
}

/// How GELU is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// In the precision of the arithmetic.
    Exact,
    /// From a table: f16(gelu(f16(x))) for |x| < 10.
    F16Table,
}

/// How the angle of pair i is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Angles {
    /// position · base^(-2i/n), exactly.
    Exact,
    /// position multiplied by base^(-2/n) in f32 from pair to pair.
    F32Recurrence,
}

/// How log(1 + e^x) is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Softplus {
    /// Without cancellation.
    Exact,
    /// The sum 1 + e^x is rounded to f32 before its logarithm is taken.
    RoundedSum,
}

/// What a sum over a row is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// f32, one term after the other or in any tree.
    Single,
    /// f64, rounded once; groups of up to 16 terms may be added in f32 first.
    Double,
}

/// How elementary functions are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Functions {
    /// To one or two units in the last place.
    Library,
    /// By the hardware's approximations, as CUDA's `-use_fast_math` has them.
    FastMath,
}

impl Arithmetic {
    /// Nobody's rounding is followed.
    pub const EXACT: Arithmetic = Arithmetic {
        operands: Operands::Exact,
        flash: Flash::Exact,
        gelu: Gelu::Exact,
        angles: Angles::Exact,
        softplus: Softplus::Exact,
        sums: Sums::Single,
        functions: Functions::Library,
        narrow: Storage::F32,
        cache: Storage::F32,
        recorded: None,
    };

    /// llama.cpp on the CPU.
    pub const LLAMA_CPU: Arithmetic = Arithmetic {
        operands: Operands::VecDot,
        flash: Flash::ByRow,
        gelu: Gelu::F16Table,
        angles: Angles::F32Recurrence,
        softplus: Softplus::RoundedSum,
        sums: Sums::Double,
        functions: Functions::Library,
        narrow: Storage::F32,
        cache: Storage::F32,
        recorded: None,
    };
}
