//! Kernels of attention on devices, by shape, type of the cache and device.

use super::super::{Flash, Lanes, Units, Vector};
use crate::gguf::DType;

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
    /// What keys and values are cached in.
    pub cached: [DType; 2],
}

impl Queries {
    /// Groups of up to so many heads that share their keys.
    fn groups(&self, heads: usize) -> usize {
        self.keys * self.heads.div_ceil(heads)
    }

    /// Whether keys or values are in blocks.
    fn in_blocks(&self) -> bool {
        self.cached.iter().any(|dtype| dtype.block_len() > 1)
    }
}

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
/// Queries up to which a kernel in f32 is taken, where keys or values are in blocks.
pub const VECTOR_ROWS: usize = 2;
/// Channels of heads that this kernel is built for.
const VECTOR_HEADS: [usize; 3] = [64, 128, 256];
/// Per cent of the blocks that may be left out.
const UNIT_LOSS_MAX: usize = 5;
/// Multiprocessors of cards: H100 and H200, H100 PCIe, A100, RTX 4090, L40, RTX 5090, B200, RTX A6000 and 3090 Ti, RTX
/// 3090, RTX 4080.
const MULTIPROCESSORS: [usize; 10] = [132, 114, 108, 128, 142, 170, 148, 84, 82, 76];

/// `ggml_vk_flash_attn`: how many threads share a row depends on the head's width and on the device, and a row of few
/// queries is split.
pub fn lanes(queries: &Queries) -> Vec<Flash> {
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

/// `ggml_cuda_flash_attn_ext_vec`: which kernels for few queries are built is chosen by pairs of types
/// (`GGML_CUDA_FA_QUANTS`), those of the default first. Without one the cache is converted.
fn vector(queries: &Queries) -> Vec<Flash> {
    let [integers, converted] = [Vector::Integers, Vector::Converted].map(Flash::Vector);
    match (queries.rows, queries.cached) {
        _ if queries.in_blocks() && !VECTOR_HEADS.contains(&queries.width) => Vec::new(),
        (1..=VECTOR_ROWS, [DType::Q8_0, DType::Q8_0] | [DType::Q4_0, DType::Q4_0]) => {
            vec![integers, converted]
        }
        (1..=VECTOR_ROWS, [keys, _]) if keys.block_len() > 1 => vec![converted, integers],
        (1..=VECTOR_ROWS, [_, values]) if values.block_len() > 1 => vec![converted, Flash::Exact],
        (1, _) => vec![Flash::Exact],
        _ => Vec::new(),
    }
}

/// `ggml_cuda_get_best_fattn_kernel`, `ggml_cuda_flash_attn_ext_mma_f16`: few queries may go to a kernel in f32. Otherwise
/// heads that share keys are grouped, and the first width of columns that holds all queries of a group is taken.
pub fn few_and_many(queries: &Queries) -> Vec<Flash> {
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
    let mut out = vector(queries);
    out.push(apart);
    out.extend(cut);
    // No part of a row is apart.
    out.push(of(Some(tiles)));
    // Cards that compute slowly in f16 have a kernel in f32.
    if queries.in_blocks() {
        out.push(Flash::Vector(Vector::Converted));
    }
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
