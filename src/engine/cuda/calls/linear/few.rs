//! The launches of the kernels for few token rows, and for one.

use super::{FEW_OUTPUTS, LinearArgs, LinearData, LinearPart, MULTIPROCESSORS, Pairs, PartArgs};
use crate::engine::cuda::calls::{Call, Weight, block_bytes};
use crate::gguf::DType;

/// Token rows of the kernels `linear_few`, and warps of a block.
const FEW_ROWS: [usize; 3] = [1, 8, 16];
const FEW_WARPS_MAX: usize = 12;
/// Warps of `linear_few` that a multiprocessor holds at once, by their registers.
const FEW_WARPS_AT_ONCE: usize = 20;
/// Of `linear_one`: tiles of a group between two barriers, at most, and warps that share a row, at most (ONE_BATCH and
/// ONE_SQUARES of the kernel); bytes of what a thread stores and of what is known of a weight (OneItem and LinearPart).
const ONE_BATCH: usize = 4;
const ONE_SQUARES: usize = 20;
const ONE_ITEM: usize = 32;
const ONE_PART: usize = size_of::<PartArgs>();

/// Whether gate and up are multiplied at once.
pub fn is_gate_up(parts: &[LinearPart]) -> bool {
    matches!(parts[0].pairs, Pairs::GateUp { .. })
}

/// Tiles of the weight that has the most of them, and weights that have tiles of their own: gate and up share theirs.
fn tiles(parts: &[LinearPart]) -> (usize, usize) {
    let (tile, depth) = if is_gate_up(parts) { (FEW_OUTPUTS / 2, 1) } else { (FEW_OUTPUTS, parts.len()) };
    let tiles = parts.iter().map(|part| part.weight.outputs.div_ceil(tile)).max().unwrap_or(1);
    (tiles.max(1), depth)
}

/// The launch of `linear_few`: no more blocks than the GPU holds at once, each with as many tiles as any other.
pub fn few(parts: &[LinearPart], data: LinearData, args: LinearArgs) -> Call {
    let weight = parts[0].weight;
    debug_assert!(parts.iter().all(|part| part.weight.dtype == weight.dtype), "one format");
    let rows = FEW_ROWS.into_iter().find(|rows| data.rows <= *rows).unwrap_or(FEW_ROWS[2]);
    let (tiles, depth) = tiles(parts);
    let chunk = few_chunk(weight.dtype);
    let warps = few_warps(&weight);
    let held = MULTIPROCESSORS * (FEW_WARPS_AT_ONCE / warps).max(1);
    let blocks = tiles.div_ceil(tiles.div_ceil(held));
    // The sums of all warps, twice; the one row, of which what lies 128 bytes apart is moved by 16; and what of the
    // norm's weight the warps need first.
    let sums = 2 * warps * FEW_OUTPUTS * rows * size_of::<f32>();
    let row = if rows == 1 { (weight.columns + weight.columns / 64 * 8).next_multiple_of(8) * 2 } else { 0 };
    let norm = if data.norm.is_some() { warps * chunk * size_of::<f32>() } else { 0 };
    let grid = [blocks, data.rows.div_ceil(rows), depth];
    Call::new(format!("linear_few{rows}_{}", weight.format()), grid, 32 * warps as u32, args)
        .sized((sums + row + norm) as u32)
}

/// What `linear_one` needs to know of a format.
#[derive(Clone, Copy)]
struct OneFormat {
    /// Bytes of a chunk of sixteen rows, columns of it, chunks on their way: STAGE, CHUNK and DEPTH of kernels/pieces.cuh.
    stage: usize,
    chunk: usize,
    depth: usize,
    /// Warps that share a tile at most: what is left of a multiprocessor is for the next kernel.
    split_max: usize,
    /// Warps of a block: more would have too few registers.
    warps_max: usize,
}

fn one_format(dtype: DType) -> Option<OneFormat> {
    let quants =
        OneFormat { stage: 16 * block_bytes(dtype), chunk: 256, depth: 2, split_max: 12, warps_max: 18 };
    match dtype {
        DType::F16 => {
            Some(OneFormat { stage: 16 * 256, chunk: 128, depth: 3, split_max: ONE_SQUARES, warps_max: 20 })
        }
        DType::Q4_K | DType::Q5_K | DType::Q6_K => Some(quants),
        _ => None,
    }
}

/// Warps of a block where weights of two formats are multiplied with.
const ONE_WARPS_MIXED: usize = 16;

/// Whether there is a kernel `linear_one` for these products: of whole chunks, and a tile of outputs at least, and with
/// gate and up so near to each other that it can count the pieces of 16 bytes between them.
pub fn takes_one(parts: &[LinearPart], shared_max: usize) -> bool {
    let weight = &parts[0].weight;
    if let [gate, up, ..] = parts
        && is_gate_up(parts)
    {
        let rows = (FEW_OUTPUTS as i64) * weight.row_bytes();
        let apart = gate.weight.address.abs_diff(up.weight.address).saturating_add(rows.unsigned_abs());
        if apart / 16 > i32::MAX as u64 {
            return false;
        }
    }
    let least = parts.iter().map(|part| part.weight.outputs).min().unwrap_or(0);
    one_format(weight.dtype).is_some_and(|format| {
        let whole = weight.columns > 0 && weight.columns.is_multiple_of(format.chunk);
        whole
            && least >= FEW_OUTPUTS
            && OneBlock { split: 1, groups: 1, turns: 1 }.shared(format) <= shared_max
    })
}

/// How a block of `linear_one` shares its tiles among its warps.
#[derive(Clone, Copy)]
struct OneBlock {
    /// Warps that share a tile.
    split: usize,
    /// Tiles that are computed at once.
    groups: usize,
    /// How often that is done.
    turns: usize,
}

impl OneBlock {
    /// The one whose warps have the fewest chunks one after another; of several the one with the fewest of a row, whose
    /// columns of x stay in registers, and of those the one with the fewest warps.
    fn new(chunks: usize, tiles: usize, format: OneFormat, shared_max: usize) -> OneBlock {
        let of_all = tiles.div_ceil(MULTIPROCESSORS);
        let splits = 1..=chunks.min(format.split_max).min(format.warps_max);
        let blocks = splits.flat_map(|split| {
            let groups = 1..=(format.warps_max / split).min(of_all);
            groups.map(move |groups| OneBlock { split, groups, turns: of_all.div_ceil(groups) })
        });
        let fits = |block: &OneBlock| block.shared(format) <= shared_max;
        let least = OneBlock { split: 1, groups: 1, turns: of_all };
        let cost = |block: &OneBlock| {
            let of_row = chunks.div_ceil(block.split);
            (block.turns * of_row, of_row, block.split * block.groups)
        };
        blocks.filter(fits).min_by_key(cost).unwrap_or(least)
    }

    /// Bytes of shared memory: `OneMemory` of the kernel.
    fn shared(self, format: OneFormat) -> usize {
        let row = (format.chunk + format.chunk / 64 * 8) * size_of::<u16>();
        let items = ONE_BATCH.min(2 * self.split) * self.groups * FEW_OUTPUTS;
        let sums = (2 * items * self.split.next_multiple_of(4) + ONE_SQUARES) * size_of::<f32>();
        let warp = format.depth * format.stage + row;
        self.split * self.groups * warp + sums + 2 * ONE_PART + items * ONE_ITEM
    }
}

/// Whether [`LinearKernel::One`](super::LinearKernel::One) multiplies with weights of another format, and of so many
/// outputs, in one launch with those of the first.
pub fn together(first: Weight, other: Weight) -> bool {
    let formats = matches!(first.dtype, DType::Q4_K | DType::Q5_K) && other.dtype == DType::Q6_K;
    formats && first.outputs.min(other.outputs) >= FEW_OUTPUTS
}

/// The launch of `linear_one`.
pub fn one(parts: &[LinearPart], data: &LinearData, mut args: LinearArgs) -> Call {
    let weight = parts[0].weight;
    let formats = parts.iter().filter_map(|part| one_format(part.weight.dtype));
    let mut format = formats.max_by_key(|format| format.stage).expect("a format of the kernel");
    let other = parts.iter().find(|part| part.weight.dtype != weight.dtype);
    if other.is_some() {
        format.warps_max = ONE_WARPS_MIXED;
    }
    let (tiles, depth) = tiles(parts);
    let chunks = weight.columns / format.chunk;
    let block @ OneBlock { split, groups, turns } = OneBlock::new(chunks, tiles, format, data.shared_max);
    (args.split, args.groups, args.turns) = (split as i32, groups as i32, turns as i32);
    // What divides a warp's number, and that of a pair of outputs.
    args.split_inverse = (1u32 << 16).div_ceil(split as u32);
    args.head_inverse = match args.head_width / 2 {
        0 => 0,
        half => (1u64 << 32).div_ceil(half as u64) as u32,
    };
    let mut name = weight.format();
    for (args, part) in args.parts.iter_mut().zip(parts) {
        args.other_format = i32::from(part.weight.dtype != weight.dtype);
    }
    if let Some(other) = other {
        name = format!("{name}_{}", other.weight.format());
    }
    let grid = [tiles.div_ceil(groups * turns), 1, depth];
    Call::new(format!("linear_one_{name}"), grid, 32 * (split * groups) as u32, args)
        .sized(block.shared(format) as u32)
}

/// Columns that a warp of `linear_few` takes at once: CHUNK of kernels/lanes.cuh.
pub fn few_chunk(dtype: DType) -> usize {
    if matches!(dtype, DType::Q4_K | DType::Q5_K | DType::Q6_K) { 256 } else { 128 }
}

/// Warps of a block of `linear_few`: as few as take their chunks of a row in the fewest rounds.
fn few_warps(weight: &Weight) -> usize {
    // THREADS of kernels/lanes.cuh
    let most = match weight.dtype {
        DType::Q4_K | DType::Q5_K | DType::Q6_K => 9,
        DType::F16 | DType::Q8_0 | DType::Q4_0 => 10,
        _ => FEW_WARPS_MAX,
    };
    let chunks = weight.columns.div_ceil(few_chunk(weight.dtype));
    chunks.div_ceil(chunks.div_ceil(most))
}
