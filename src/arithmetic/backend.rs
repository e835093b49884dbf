//! What llama.cpp's backends compute a node in, by type, shape and pass: the kernel that its sources choose stands first,
//! and others of the same backend follow, since what is chosen depends on the device and on what was built.

use super::{Arithmetic, Flash, Functions, HalfSums, Integers, Lanes, Narrow, Operands, Softmax, Units};
use crate::gguf::DType;

/// An arithmetic with what it is called in a report.
#[derive(Clone, Copy, Debug)]
pub struct Hypothesis {
    /// In a few words.
    pub name: &'static str,
    /// Which roundings are followed.
    pub arithmetic: Arithmetic,
}

impl Hypothesis {
    /// Whether a signed sum of outputs shows what it does not explain: of a product sums must be of decoded weights and
    /// in f32, of attention rows must be computed one by one, with a softmax in f32.
    pub fn is_screened(&self) -> bool {
        let Arithmetic { operands, flash, softmax, .. } = &self.arithmetic;
        matches!(operands, Operands::Exact | Operands::VecDot | Operands::Candle)
            && !matches!(flash, Flash::Lanes(_) | Flash::Units(_))
            && *softmax == Softmax::F32
    }
}

/// A backend other than the CPU whose kernels are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

/// An attention.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// Queries of a head.
    pub rows: usize,
    /// Heads that share one of keys and values.
    pub heads: usize,
    /// Heads of keys, in all sequences.
    pub keys: usize,
    /// Channels of a head.
    pub width: usize,
    /// Cached positions.
    pub positions: usize,
}

impl Queries {
    /// Groups of up to so many heads that share their keys.
    fn groups(&self, heads: usize) -> usize {
        self.keys * self.heads.div_ceil(heads)
    }
}

/// Rows up to which Vulkan's vector kernels multiply (`mul_mat_vec_max_cols`).
const VULKAN_FEW: usize = 8;
/// Rows up to which CUDA's MMVQ multiplies (`MMVQ_MAX_BATCH_SIZE`).
const CUDA_FEW: usize = 8;
/// Rows up to which CUDA's mmf multiplies.
const CUDA_SOME: usize = 16;
/// Rows up to which mmvf multiplies by F32 weights.
const CUDA_F32_FEW: usize = 3;
/// Parts that cuBLAS may cut the columns into: that depends on shape and card.
const PARTS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
/// Threads that share a row of Vulkan's attention, how many of them are neighbours, and positions of a block, by device
/// and width of the heads.
const LANES: [(usize, usize, usize); 10] = [
    (4, 1, 32),
    (1, 1, 32),
    (8, 2, 32),
    (2, 1, 32),
    (4, 1, 64),
    (1, 1, 64),
    (8, 2, 64),
    (16, 4, 32),
    (32, 8, 32),
    (8, 1, 32),
];
/// Positions that parts of a row are multiples of.
const LANES_BLOCK: usize = 32;
/// Parts of a row at most.
const LANES_PARTS_MAX: usize = 32;
/// Queries up to which rows are split first of all.
const LANES_SPLIT_ROWS: usize = 8;
/// Columns of CUDA's attention on matrix units.
const UNIT_COLUMNS: [usize; 4] = [8, 16, 32, 64];
/// Warps of a block.
const UNIT_WARPS: usize = 4;
/// Channels of the widest heads that are narrow to it.
const UNIT_NARROW_HEAD: usize = 128;
/// Per cent of the blocks that may be left out.
const UNIT_LOSS_MAX: usize = 5;
/// Multiprocessors of cards: H100 and H200, H100 PCIe, A100, RTX 4090, L40, RTX 5090, B200, RTX A6000 and 3090 Ti, RTX
/// 3090, RTX 4080.
const MULTIPROCESSORS: [usize; 10] = [132, 114, 108, 128, 142, 170, 148, 84, 82, 76];
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
            false => (Operands::Half(HalfSums::Any), Flash::Exact),
        };
        let functions = Functions::FastMath;
        Hypothesis {
            name: "sums in f16 in any order",
            arithmetic: Arithmetic { operands, flash, functions, ..Arithmetic::EXACT },
        }
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
                _ => "attention in f32",
            };
            let functions = if self == Backend::Cuda { Functions::FastMath } else { Functions::Library };
            Hypothesis { name, arithmetic: Arithmetic { flash, functions, ..Arithmetic::EXACT } }
        };
        let all = match self {
            Backend::Vulkan => lanes(queries),
            Backend::Cuda => units(queries),
        };
        all.into_iter().map(named).collect()
    }
}

/// `ggml_vk_flash_attn`: how many threads share a row depends on the head's width and on the device, and a row of few
/// queries is split.
fn lanes(queries: &Queries) -> Vec<Flash> {
    let mut parts: Vec<Option<usize>> = (2..=LANES_PARTS_MAX)
        .map(|parts| Some(queries.positions.div_ceil(parts).next_multiple_of(LANES_BLOCK)))
        .collect();
    parts.dedup();
    // The smallest first: as many parts as there are.
    let parts = parts.into_iter().rev();
    let parts: Vec<Option<usize>> = match queries.rows {
        1..=LANES_SPLIT_ROWS => parts.chain([None]).collect(),
        _ => [None].into_iter().chain(parts).collect(),
    };
    let kinds = LANES.iter().flat_map(|&(threads, neighbours, block)| {
        parts.iter().map(move |&part| Flash::Lanes(Lanes { threads, neighbours, block, part }))
    });
    kinds.chain([Flash::Exact]).collect()
}

/// `ggml_cuda_get_best_fattn_kernel`, `ggml_cuda_flash_attn_ext_mma_f16`: one query may go to a kernel in f32. Otherwise
/// heads that share keys are grouped, and the first width of columns that holds all queries of a group is taken.
fn units(queries: &Queries) -> Vec<Flash> {
    let heads = match queries.heads {
        5.. => 8,
        3..=4 => 4,
        2 => 2,
        _ => 1,
    };
    let columns = UNIT_COLUMNS.into_iter().find(|columns| queries.rows * heads <= *columns);
    let columns = columns.unwrap_or(UNIT_COLUMNS[UNIT_COLUMNS.len() - 1]);
    let warps = (UNIT_COLUMNS[UNIT_COLUMNS.len() - 1] / columns).min(UNIT_WARPS);
    let batch = match (queries.width, columns) {
        (..=UNIT_NARROW_HEAD, 8) => 128,
        (..=UNIT_NARROW_HEAD, _) | (_, ..=16) => 64,
        _ => 32,
    };
    let batches = queries.positions.div_ceil(batch);
    let tile = columns / heads;
    let tiles = queries.rows.div_ceil(tile.max(1)) * queries.groups(heads);
    let of = |blocks| Flash::Units(Units { batch, warps, queries: tile.max(1), heads, blocks });
    let apart = of(None);
    let cut = MULTIPROCESSORS
        .into_iter()
        .flat_map(|count| [2, 1].map(|at_once| at_once * count))
        .filter(|blocks| *blocks < tiles * batches)
        .map(|blocks| of(Some(even(blocks, tiles))));
    let mut out: Vec<Flash> = if queries.rows == 1 { vec![Flash::Exact] } else { Vec::new() };
    out.push(apart);
    out.extend(cut);
    // No part of a row is apart.
    out.push(of(Some(tiles)));
    out.push(Flash::Exact);
    out.dedup();
    out
}

/// Blocks are cut down to the same number for each tile where that leaves few of them idle.
fn even(blocks: usize, tiles: usize) -> usize {
    let rounded = blocks / tiles * tiles;
    let lost = if rounded > 0 { 100 * (blocks - rounded) / blocks } else { 100 };
    if lost <= UNIT_LOSS_MAX { rounded } else { blocks }
}

/// `ggml_vk_mul_mat`: vector kernels in f32, `mul_mm.comp` with f16 operands, and f16 sums unless the weights are F32 or
/// BF16, or f32 is asked for.
fn vulkan(product: &Product) -> Vec<Operands> {
    let half = |fused| Operands::Half(HalfSums::Running { fused });
    let narrow = if product.weight == DType::BF16 { Narrow::Bf16 } else { Narrow::F16 };
    let wide = matches!(product.weight, DType::F32 | DType::BF16) || product.precise;
    let many = if wide {
        vec![Operands::Both(narrow)]
    } else {
        vec![half(false), half(true), Operands::Both(narrow)]
    };
    let few = if product.batched { 1 } else { VULKAN_FEW };
    match product.rows <= few {
        true => [Operands::Exact].into_iter().chain(many).collect(),
        false => many.into_iter().chain([Operands::Exact]).collect(),
    }
}

/// `ggml_cuda_mul_mat`
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
                (1, false) => vec![vector, exact, matrix],
                (..=CUDA_SOME, false) => vec![matrix],
                _ => Vec::new(),
            };
            if rows > 1 && !product.precise {
                out.extend(parts());
                out.extend((rows > CUDA_SOME).then_some(matrix));
                out.push(exact);
            }
            out
        }
        _ if rows <= CUDA_FEW => vec![few, many, exact],
        _ => [many, few].into_iter().chain(parts()).chain([Operands::Both(Narrow::F16), exact]).collect(),
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
        Operands::Both(Narrow::F16) => "matmuls with f16 operands, f32 sums",
        Operands::Both(Narrow::Bf16) => "matmuls with bf16 operands, f32 sums",
        Operands::Both(Narrow::Tf32) => "matmuls with TF32 operands, f32 sums",
        Operands::Both(Narrow::Tf32Cut) => "matmuls with operands cut off to TF32, f32 sums",
        Operands::Blocks(_) => "matmuls with Q8_1 activations, f32 sums",
        Operands::Half(_) => "matmuls with f16 operands, f16 sums",
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
