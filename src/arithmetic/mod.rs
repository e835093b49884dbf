//! In which arithmetic a node is computed: hypotheses as data.
//!
//! What a producer rounds on purpose (activations to the type that its integer kernels read, a table of GELU in
//! f16) is followed exactly; what it rounds because its numbers are finite is a bound's business.

mod attention;
pub mod backend;
pub mod cache_blocks;
pub mod cuda_blocks;
pub mod narrow;
mod packed;
pub mod product;
pub mod round;
mod softmax;

pub use backend::Hypothesis;
pub use packed::{CACHES, Cached, Packed, both, bounded_by, name_of};
pub use softmax::{Scale, Softmax};

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
    /// Softmax, by itself and within attention without further roundings.
    pub softmax: Softmax,
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
    /// What they are kept as where that is no type of single numbers.
    pub packed: Cached,
    /// Which of them are read before they are kept.
    pub fresh: Fresh,
    /// What becomes of values on their way to the type that they are kept in.
    pub storing: Storing,
    /// What values were rounded to only when they were recorded: the producer went on with better ones.
    pub recorded: Option<Storage>,
    /// In how many parts products with weights are summed (by ranks, or columns side by side): each part, and each sum of
    /// parts, is rounded to the type that values are kept in.
    pub parts: usize,
    /// What each step of decoding the blocks of a table is rounded to.
    pub decoded: Storage,
}

/// What the two sides of a matrix product are rounded to before they meet, and what their sums are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operands {
    /// Not at all; sums in f32.
    Exact,
    /// As llama.cpp on the CPU: activations to the `vec_dot_type` of the other operand's type; sums in f32.
    VecDot,
    /// As candle on a CPU: blocks like llama.cpp's, of another largest quant; sums in f32.
    Candle,
    /// Rows of activations to whole numbers of eight bits, a scale each; sums in f32.
    Rows,
    /// Both sides to this, sums in f32: the matrix units of GPUs.
    Both(Narrow),
    /// One side to this, the other as it is; sums in f32.
    One(Operand, Narrow),
    /// CUDA's kernels on integers (MMQ, MMVQ); sums in f32.
    Blocks(Integers),
    /// Both sides to f16, sums in f16.
    Half(HalfSums),
    /// The same in an order that nobody knows: what it rounds is bounded.
    Unordered,
}

/// A side of a product with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// Values that a model file has.
    Weights,
    /// What meets them.
    Activations,
}

/// A type with fewer bits than f32 that single values are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Narrow {
    /// To the nearest f16.
    F16,
    /// To the nearest bf16.
    Bf16,
    /// To the nearest of 11 significant bits, with the exponents of f32.
    Tf32,
    /// The same with halves away from zero (`cvt.rna.tf32.f32` of CUDA, as CUTLASS and Triton convert).
    Tf32Away,
    /// To 11 significant bits towards zero: the other bits are not looked at.
    Tf32Cut,
    /// To the sum of two bf16, the nearest and what is left of it: a product of two such sums is three of bf16, since that of
    /// the lesser parts is left out (XLA's `HIGH`, oneMKL's `float_to_bf16x3`).
    Pair,
}

/// Which kernels on integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Integers {
    /// CUDA's MMQ: many rows of activations, matrix units.
    Many,
    /// CUDA's MMVQ: few rows.
    Few,
    /// Vulkan's, on devices with packed integer dot products.
    Packed,
}

/// The order in which sums of products are kept in f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HalfSums {
    /// Vulkan's mul_mm without matrix units: one term after the other, each rounded, by itself first unless it is
    /// fused with the sum. Pairs are taken from the second to the first, and fours likewise where the weight is F16.
    Running {
        /// Whether product and sum are rounded once.
        fused: bool,
    },
    /// One column after the other, as a loop with an accumulator in f16 has them.
    Plain {
        /// Whether product and sum are rounded once.
        fused: bool,
    },
    /// CUDA's mmvf: so many threads, each with a sum over even and one over odd columns; the rest in f32.
    Threads(usize),
    /// Matrix units: groups of 16 columns are added to the sum and rounded. The columns may be cut into equal parts,
    /// which are added up in f16 or in f32; the result is rounded to f16.
    Groups {
        /// How many parts.
        parts: usize,
        /// Whether the parts are added up in f16.
        narrow: bool,
    },
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
    /// Vulkan's kernel without matrix units, see [`Lanes`].
    Lanes(Lanes),
    /// CUDA's kernel on matrix units, see [`Units`].
    Units(Units),
    /// An engine that is not llama.cpp: its products round operands to this; sums in f32.
    Rounded(Narrow, OfAttention, Scaled),
    /// CUDA's kernel for few queries over a cache that is kept in blocks, see [`Vector`].
    Vector(Vector),
    /// The same one row after the other on a CPU that multiplies and adds in f16 (AVX512-FP16, ARM), in lanes that
    /// cannot be followed: Q is rounded, all else is bounded.
    NativeF16,
}

/// Which operands of its two products an attention rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OfAttention {
    /// Queries, keys and values.
    pub read: [bool; 3],
    /// The weights of the softmax.
    pub weights: Weights,
}

impl OfAttention {
    /// Whether all that is read is, as where each product is a node of its own.
    pub fn is_whole(self) -> bool {
        self.read == [true; 3]
    }

    /// Queries, keys and values, and weights when.
    pub const fn all(weights: Weights) -> OfAttention {
        OfAttention { read: [true; 3], weights }
    }
}

/// When the weights of a softmax are rounded, that are to be divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weights {
    /// Once they are.
    Divided,
    /// Before that: the result of the product is divided.
    Undivided,
    /// Never.
    Kept,
}

/// What attention that rounds its operands multiplies by its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaled {
    /// The product of what was rounded.
    Scores,
    /// Queries, before they are rounded.
    Queries,
    /// Queries and keys by its root, before they are rounded: PyTorch's attention in plain operations.
    Both,
}

/// Attention on Vulkan without matrix units (`flash_attn.comp`): queries are scaled and rounded to f16. Every so many
/// threads share a row, each takes every so manyth position and has a maximum and an f16 sum of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lanes {
    /// Threads of a row.
    pub threads: usize,
    /// Threads of a row that are neighbours: their sums are added up first, in pairs.
    pub neighbours: usize,
    /// Positions after which the maximum is looked at.
    pub block: usize,
    /// Positions of a part, where the row is split; the parts are joined in f32.
    pub part: Option<usize>,
}

/// Attention on CUDA's matrix units (`fattn-mma-f16.cuh`): queries and scale are rounded to f16, values are added up 16
/// positions at a time in f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Units {
    /// Positions of a batch, after which the maximum is looked at.
    pub batch: usize,
    /// Warps that share a batch, 16 positions at a time in turn, each with a maximum and sums of its own.
    pub warps: usize,
    /// Queries of a tile.
    pub queries: usize,
    /// Heads of a tile, which share their keys and values.
    pub heads: usize,
    /// Blocks of threads that share all batches of all tiles evenly; each has sums of its own. `None`: one for each
    /// batch.
    pub blocks: Option<usize>,
}

/// Attention of one or two queries on CUDA (`fattn-vec.cuh`) over keys or values in blocks: sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vector {
    /// Keys are multiplied as integers: scaled queries are rounded to blocks of 8 bits. Values are as they decode.
    Integers,
    /// No kernel was built for these types: keys and values are converted to f16 first.
    Converted,
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
    /// Sine and cosine are rounded to a narrow type.
    Coarse {
        /// Which.
        kept: Storage,
        /// Whether positions, frequencies and angles are rounded to it too.
        throughout: bool,
    },
    /// The frequencies alone are rounded to this type.
    OfFrequencies(Storage),
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

/// What becomes of a value that is stored in a narrow type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Storing {
    /// The nearest number.
    #[default]
    Nearest,
    /// The bits that the type lacks are cut off: the next number towards zero.
    Cut,
    /// The nearest number, or 0 where that is no normal one of f16.
    Flushed,
}

/// In which steps attention reads the keys and values of the step's own tokens as they were computed, before they are kept in a
/// narrower type: those of tokens before it come from the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fresh {
    /// In none: what is kept is all that is read.
    #[default]
    Never,
    /// In those with no tokens before them.
    First,
    /// In those of several tokens.
    Several,
    /// In all.
    Always,
}

impl Fresh {
    /// Those that differ from [`Fresh::Never`].
    pub const KINDS: [Fresh; 3] = [Fresh::First, Fresh::Several, Fresh::Always];

    /// Whether a step of so many `own` tokens behind so many `older` ones is one of these.
    pub fn is_in(self, own: usize, older: usize) -> bool {
        match self {
            Fresh::Never => false,
            Fresh::First => older == 0,
            Fresh::Several => own > 1,
            Fresh::Always => true,
        }
    }
}

/// How elementary functions are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Functions {
    /// To one or two units in the last place.
    Library,
    /// By the hardware's approximations, as CUDA's `-use_fast_math` has them.
    FastMath,
    /// To a few units in the last place, and tanh as 1 - 2/(e^2z + 1).
    Exponential,
    /// tanh as a ratio of polynomials, and sigmoids as ½ + ½·tanh(x/2): Eigen, XLA.
    Rational,
}

impl Flash {
    /// Whether it is a kernel of CUDA or Vulkan.
    pub fn is_of_a_device(self) -> bool {
        matches!(self, Flash::Lanes(_) | Flash::Units(_) | Flash::Vector(_))
    }
}

impl Arithmetic {
    /// Nobody's rounding is followed.
    pub const EXACT: Arithmetic = Arithmetic {
        operands: Operands::Exact,
        flash: Flash::Exact,
        gelu: Gelu::Exact,
        angles: Angles::Exact,
        softmax: Softmax::F32,
        softplus: Softplus::Exact,
        sums: Sums::Single,
        functions: Functions::Library,
        narrow: Storage::F32,
        cache: Storage::F32,
        packed: [None; 2],
        fresh: Fresh::Never,
        storing: Storing::Nearest,
        recorded: None,
        parts: 1,
        decoded: Storage::F32,
    };

    /// llama.cpp on the CPU.
    pub const LLAMA_CPU: Arithmetic = Arithmetic {
        operands: Operands::VecDot,
        flash: Flash::ByRow,
        gelu: Gelu::F16Table,
        angles: Angles::F32Recurrence,
        softmax: Softmax::F32,
        softplus: Softplus::RoundedSum,
        sums: Sums::Double,
        functions: Functions::Library,
        narrow: Storage::F32,
        cache: Storage::F32,
        packed: [None; 2],
        fresh: Fresh::Never,
        storing: Storing::Nearest,
        recorded: None,
        parts: 1,
        decoded: Storage::F32,
    };

    /// Whether attention rounds keys, and values, as it reads them: not those of f32 that a cache of eight bits is decoded to.
    pub fn rounds_cache(&self) -> [bool; 2] {
        match self.flash {
            Flash::Rounded(_, OfAttention { read: [_, keys, values], .. }, _)
                if self.packed == [None; 2] || self.cache != Storage::F32 =>
            {
                [keys, values]
            }
            _ => [false; 2],
        }
    }

    /// Whether a device's roundings are followed.
    pub fn is_of_a_device(&self) -> bool {
        !matches!(self.operands, Operands::Exact | Operands::VecDot | Operands::Candle | Operands::Rows)
            || self.flash.is_of_a_device()
            || matches!(self.flash, Flash::Rounded(..))
    }
}
