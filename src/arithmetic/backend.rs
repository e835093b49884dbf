//! What llama.cpp's backends compute a node in, by type, shape and pass: the kernel that its sources choose stands first,
//! and others of the same backend follow, since what is chosen depends on the device and on what was built.

mod attention;

pub use attention::{Queries, VECTOR_ROWS};

use super::{Arithmetic, Flash, Functions, HalfSums, Integers, Narrow, Operand, Operands, Softmax, Vector};
use crate::gguf::DType;
use crate::numerics::{Products, Storage};

/// An arithmetic with what it is called in a report.
#[derive(Clone, Copy, Debug)]
pub struct Hypothesis {
    /// In a few words.
    pub name: &'static str,
    /// Which roundings are followed.
    pub arithmetic: Arithmetic,
}

impl Hypothesis {
    /// Whether a signed sum of the outputs of attention shows what it does not explain: rows must be computed one by one,
    /// with a softmax in f32.
    pub fn is_screened(&self) -> bool {
        !self.arithmetic.flash.is_of_a_device() && self.arithmetic.softmax == Softmax::F32
    }

    /// Whether sums of products are followed step by step, which costs many times as much as to bound them.
    pub fn is_followed_by_steps(&self) -> bool {
        matches!(self.arithmetic.operands, Operands::Half(_))
    }

    /// Whether sums of products are bounded in whatever order.
    pub fn is_unordered(&self) -> bool {
        self.arithmetic.operands == Operands::Unordered
    }
}

/// A backend other than the CPU whose kernels are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backend {
    /// NVIDIA's cards, and AMD's by the same sources (HIP).
    Cuda,
    /// Vulkan.
    Vulkan,
}

/// A product of matrices.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Type of the matrix.
    pub weight: DType,
    /// Rows that meet it.
    pub rows: usize,
    /// Whether there are several matrices, each with rows of its own.
    pub batched: bool,
    /// Terms of each sum.
    pub width: usize,
    /// Whether llama.cpp asks for f32.
    pub precise: bool,
}

/// Rows up to which Vulkan's vector kernels multiply (`mul_mat_vec_max_cols`).
pub const VULKAN_FEW: usize = 8;
/// Rows up to which CUDA's MMVQ multiplies (`MMVQ_MAX_BATCH_SIZE`).
const CUDA_FEW: usize = 8;
/// Rows up to which CUDA's mmf multiplies.
const CUDA_SOME: usize = 16;
/// Rows up to which mmvf multiplies by F32 weights.
const CUDA_F32_FEW: usize = 3;
/// Parts that cuBLAS may cut the columns into: that depends on shape and card.
const PARTS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
/// Threads that mmvf takes at most, and the step between its choices.
const THREADS: (usize, usize) = (256, 32);
/// Backends of which there is no recording, and what their nodes are judged by.
const UNTESTED: [(&str, &str); 7] = [
    ("ROCm", "CUDA's kernels"),
    ("MUSA", BY_CPU),
    ("SYCL", BY_CPU),
    ("Metal", BY_CPU),
    ("MTL", BY_CPU),
    ("CANN", BY_CPU),
    ("OpenCL", BY_CPU),
];
/// What nodes are said to be computed in whose sums are bounded in any order.
const IN_ANY_ORDER: &str = "f16 operands, f16 sums in any order";
/// What nodes of a backend are judged by whose kernels are not followed.
const BY_CPU: &str = "llama.cpp's CPU kernels and f32";

/// The backend of a buffer's name without the number of its device, such as `CUDA`.
fn stem(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// Of the backend of a buffer's name that there is no recording of: what it is called, and what its nodes are judged by.
pub fn untested(name: &str) -> Option<(&'static str, &'static str)> {
    UNTESTED.into_iter().find(|(known, _)| *known == stem(name))
}

impl Backend {
    /// The name of a buffer of the backend that a producer declares.
    pub fn declared(products: Products) -> Option<&'static str> {
        match products {
            Products::LlamaCuda => Some("CUDA0"),
            Products::LlamaVulkan => Some("Vulkan0"),
            _ => None,
        }
    }

    /// The backend of a buffer's name, such as `CUDA0`; `None` of the CPU and of what is not followed.
    pub fn of(name: &str) -> Option<Backend> {
        match stem(name) {
            "CUDA" | "ROCm" => Some(Backend::Cuda),
            "Vulkan" => Some(Backend::Vulkan),
            _ => None,
        }
    }

    /// Sums in f16 in whatever order, of products or of attention.
    pub fn any_order(attention: bool) -> Hypothesis {
        let (operands, flash) = match attention {
            true => (Operands::Exact, Flash::NativeF16),
            false => (Operands::Unordered, Flash::Exact),
        };
        let functions = Functions::FastMath;
        Hypothesis {
            name: IN_ANY_ORDER,
            arithmetic: Arithmetic { operands, flash, functions, ..Arithmetic::EXACT },
        }
    }

    /// Anything else with an error as of values in f16, for a backend of which nobody knows what it rounds.
    pub fn any_function() -> Hypothesis {
        let functions = Functions::FastMath;
        let arithmetic = Arithmetic { recorded: Some(Storage::F16), functions, ..Arithmetic::EXACT };
        Hypothesis { name: "anything within what f16 rounds", arithmetic }
    }

    /// What elementwise operations, norms and rotations are computed in.
    pub fn others(self) -> Vec<Hypothesis> {
        let single = Hypothesis { name: "all else in f32", arithmetic: Arithmetic::EXACT };
        let fast = Arithmetic { functions: Functions::FastMath, ..Arithmetic::EXACT };
        match self {
            Backend::Cuda => vec![
                single,
                Hypothesis { name: "all else in f32, with fast exponentials and sines", arithmetic: fast },
            ],
            Backend::Vulkan => {
                let arithmetic = Arithmetic { functions: Functions::Exponential, ..Arithmetic::EXACT };
                vec![single, Hypothesis { name: "all else in f32, with tanh by an exponential", arithmetic }]
            }
        }
    }

    /// What a product may be computed in.
    pub fn products(self, product: &Product) -> Vec<Hypothesis> {
        let all = match self {
            Backend::Vulkan => vulkan(product),
            Backend::Cuda => cuda(product),
        };
        let named = |operands: Operands| Hypothesis {
            name: name(operands),
            arithmetic: Arithmetic { operands, ..Arithmetic::EXACT },
        };
        all.into_iter().map(named).collect()
    }

    /// What an attention may be computed in.
    pub fn attention(self, queries: &Queries) -> Vec<Hypothesis> {
        let named = |flash: Flash| {
            let name = match flash {
                Flash::Lanes(_) | Flash::Units(_) => "attention with f16 queries, weights and sums",
                Flash::Vector(Vector::Integers) => "attention with Q8_1 queries, f32 sums",
                Flash::Vector(Vector::Converted) => "attention in f32 over a cache converted to f16",
                _ => "attention in f32",
            };
            let functions = if self == Backend::Cuda { Functions::FastMath } else { Functions::Library };
            Hypothesis { name, arithmetic: Arithmetic { flash, functions, ..Arithmetic::EXACT } }
        };
        let all = match self {
            Backend::Vulkan => attention::lanes(queries),
            Backend::Cuda => attention::few_and_many(queries),
        };
        all.into_iter().map(named).collect()
    }
}

/// `ggml_vk_mul_mat`: vector kernels in f32, `mul_mm.comp` with f16 operands, and f16 sums unless the weights are F32 or
/// BF16, or f32 is asked for; on devices with integer dot products both kinds by quantised weights with Q8_1 activations, where
/// the shapes are large enough for the vendor's card.
fn vulkan(product: &Product) -> Vec<Operands> {
    let half = |fused| Operands::Half(HalfSums::Running { fused });
    let narrow = if product.weight == DType::BF16 { Narrow::Bf16 } else { Narrow::F16 };
    let wide = matches!(product.weight, DType::F32 | DType::BF16) || product.precise;
    let is_few = product.rows <= if product.batched { 1 } else { VULKAN_FEW };
    let is_quantised = product.weight.block_len() > 1 && !product.batched;
    let integers = (is_quantised && (is_few || !wide)).then_some(Operands::Blocks(Integers::Packed));
    let sums = if wide { vec![] } else { vec![half(false), half(true)] };
    let sums = sums.into_iter().chain([Operands::Both(narrow)]);
    let unordered = if wide { None } else { in_any_order(product) };
    let exact = [Operands::Exact];
    match is_few {
        true => exact.into_iter().chain(integers).chain(sums).chain(unordered).collect(),
        false => sums.chain(integers).chain(unordered).chain(exact).collect(),
    }
}

/// Sums in f16 in whatever order, of products with weights. Those of attention, of which each head is a matrix, are short
/// enough for the orders that are known: a bound in any order would hide single values of them.
fn in_any_order(product: &Product) -> Option<Operands> {
    (!product.batched).then_some(Operands::Unordered)
}

/// `ggml_cuda_mul_mat`. Of what may go to cuBLAS nobody knows the order: it is not followed but bounded where none of those
/// that are known fits.
fn cuda(product: &Product) -> Vec<Operands> {
    let (few, many) = (Operands::Blocks(Integers::Few), Operands::Blocks(Integers::Many));
    let exact = Operands::Exact;
    let rows = product.rows;
    match product.weight {
        DType::F32 if rows <= CUDA_F32_FEW => {
            vec![exact, Operands::Both(Narrow::Tf32), Operands::Both(Narrow::Tf32Cut)]
        }
        DType::F32 if rows <= CUDA_SOME => {
            vec![Operands::Both(Narrow::Tf32Cut), Operands::Both(Narrow::Tf32), exact]
        }
        DType::F32 => vec![Operands::Both(Narrow::Tf32), Operands::Both(Narrow::Tf32Cut), exact],
        DType::BF16 if rows == 1 => vec![exact, Operands::Both(Narrow::Bf16)],
        DType::BF16 => vec![Operands::Both(Narrow::Bf16), exact],
        DType::F16 => {
            let vector = Operands::Half(HalfSums::Threads(threads(product.width)));
            let matrix = Operands::Both(Narrow::F16);
            let (tf32, cut) = (Operands::Both(Narrow::Tf32), Operands::Both(Narrow::Tf32Cut));
            let mut out = match (rows, product.precise) {
                (1, true) => vec![exact, tf32],
                (_, true) => vec![tf32, matrix, cut, exact],
                (1, false) => [vector, exact, matrix].into_iter().chain(in_any_order(product)).collect(),
                (..=CUDA_SOME, false) => vec![matrix],
                _ => Vec::new(),
            };
            if rows > 1 && !product.precise {
                out.extend(parts());
                out.extend((rows > CUDA_SOME).then_some(matrix));
                out.extend(std::iter::once(exact).chain(in_any_order(product)));
            }
            out
        }
        _ if rows <= CUDA_FEW => vec![few, many, exact],
        _ => {
            let others = [Operands::Both(Narrow::F16), exact].into_iter().chain(in_any_order(product));
            [many, few].into_iter().chain(parts()).chain(others).collect()
        }
    }
}

/// cuBLAS in f16, by the number of parts and how they are joined.
fn parts() -> impl Iterator<Item = Operands> {
    let joined = |parts| [true, false].map(|narrow| Operands::Half(HalfSums::Groups { parts, narrow }));
    PARTS.into_iter().flat_map(joined).skip(1)
}

/// Threads that mmvf takes for a row: the fewest that need the fewest rounds over pairs of columns.
fn threads(width: usize) -> usize {
    let rounds = |threads: usize| width.div_ceil(2 * threads);
    let choices = (1..=THREADS.0 / THREADS.1).map(|n| n * THREADS.1);
    choices.min_by_key(|threads| rounds(*threads)).unwrap_or(THREADS.0)
}

/// What is said of a product.
fn name(operands: Operands) -> &'static str {
    match operands {
        Operands::Exact => "matmuls in f32",
        Operands::Candle => "matmuls with activations as candle rounds them, f32 sums",
        Operands::VecDot => "matmuls with activations as on the CPU, f32 sums",
        Operands::Rows => "matmuls with activations in int8, f32 sums",
        Operands::Both(Narrow::F16) => "matmuls with f16 operands, f32 sums",
        Operands::Both(Narrow::Bf16) => "matmuls with bf16 operands, f32 sums",
        Operands::Both(Narrow::Tf32 | Narrow::Tf32Away) => "matmuls with TF32 operands, f32 sums",
        Operands::Both(Narrow::Tf32Cut) => "matmuls with operands cut off to TF32, f32 sums",
        Operands::Both(Narrow::Pair) => "matmuls as three products of bf16, f32 sums",
        Operands::One(Operand::Activations, _) => "matmuls with rounded activations, f32 sums",
        Operands::One(Operand::Weights, _) => "matmuls with rounded weights, f32 sums",
        Operands::Blocks(_) => "matmuls with Q8_1 activations, f32 sums",
        Operands::Half(_) => "matmuls with f16 operands, f16 sums",
        Operands::Unordered => IN_ANY_ORDER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(backend: Backend, weight: DType, rows: usize) -> Operands {
        backend.products(&Product { weight, rows, batched: false, width: 256, precise: false })[0]
            .arithmetic
            .operands
    }

    #[test]
    fn the_kernel_that_the_sources_choose_stands_first() {
        let half = Operands::Half(HalfSums::Running { fused: false });
        assert_eq!(first(Backend::Vulkan, DType::Q4_K, 8), Operands::Exact);
        assert_eq!(first(Backend::Vulkan, DType::Q4_K, 9), half);
        assert_eq!(first(Backend::Vulkan, DType::F32, 9), Operands::Both(Narrow::F16));
        assert_eq!(first(Backend::Cuda, DType::Q4_K, 8), Operands::Blocks(Integers::Few));
        assert_eq!(first(Backend::Cuda, DType::Q4_K, 9), Operands::Blocks(Integers::Many));
        assert_eq!(first(Backend::Cuda, DType::F32, 9), Operands::Both(Narrow::Tf32Cut));
        assert_eq!(first(Backend::Cuda, DType::F16, 1), Operands::Half(HalfSums::Threads(128)));
    }

    #[test]
    fn attention_over_blocks_is_of_the_kernel_that_was_built_for_their_types() {
        let first = |rows, width, cached| {
            let queries = Queries { rows, heads: 4, keys: 2, width, positions: 256, cached };
            Backend::Cuda.attention(&queries)[0].arithmetic.flash
        };
        let [integers, converted] = [Vector::Integers, Vector::Converted].map(Flash::Vector);
        assert_eq!(first(2, 128, [DType::Q8_0, DType::Q8_0]), integers);
        assert_eq!(first(1, 64, [DType::Q4_0, DType::Q4_0]), integers);
        assert_eq!(first(1, 64, [DType::Q5_1, DType::Q5_1]), converted);
        assert_eq!(first(2, 64, [DType::F16, DType::Q8_0]), converted);
        assert_eq!(first(1, 64, [DType::F16, DType::F16]), Flash::Exact);
        assert!(matches!(first(3, 64, [DType::Q8_0, DType::Q8_0]), Flash::Units(_)));
        assert!(matches!(first(1, 96, [DType::Q8_0, DType::Q8_0]), Flash::Units(_)));
    }

    #[test]
    fn threads_are_the_fewest_with_the_fewest_rounds() {
        assert_eq!([256, 768, 2048, 64, 4096].map(threads), [128, 192, 256, 32, 256]);
    }

    #[test]
    fn backends_are_known_by_the_names_of_their_buffers() {
        assert_eq!(Backend::of("CUDA0"), Some(Backend::Cuda));
        assert_eq!(Backend::of("Vulkan1"), Some(Backend::Vulkan));
        assert_eq!(Backend::of("CPU"), None);
    }
}
