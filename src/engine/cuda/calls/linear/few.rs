//! The launches of the kernels for few token rows, and for one.

use super::{FEW_OUTPUTS, LinearArgs, LinearData, LinearPart, MULTIPROCESSORS, Pairs};
use crate::engine::cuda::calls::{Call, Weight, block_bytes};
use crate::gguf::DType;

/// Token rows of the kernels `linear_few`, and warps of a block.
const FEW_ROWS: [usize; 3] = [1, 8, 16];
const FEW_WARPS_MAX: usize = 12;
/// Warps of `linear_few` that a multiprocessor holds at once, by their registers.
const FEW_WARPS_AT_ONCE: usize = 20;
/// Warps of a block of `linear_one` that computes several tiles at once, if two a tile are not more: what is left of a
/// multiprocessor is for the next kernel.
const ONE_WARPS_SHARED: usize = 10;
/// Tiles that a block of `linear_one` computes at once, at most.
const ONE_GROUPS_MAX: usize = 9;
/// Its chunks on their way, and the zeros it keeps in shared memory: DEPTH of kernels/pieces.cuh, ONE_ZEROS of the kernel.
const ONE_DEPTH: usize = 2;
const ONE_ZEROS: usize = 128;

/// The launch of `linear_few`: no more blocks than the GPU holds at once, each with as many tiles as any other.
pub fn few(parts: &[LinearPart], data: LinearData, args: LinearArgs) -> Call {
    let weight = parts[0].weight;
    let rows = FEW_ROWS.into_iter().find(|rows| data.rows <= *rows).unwrap_or(FEW_ROWS[2]);
    let gate_up = matches!(parts[0].pairs, Pairs::GateUp { .. });
    let (tile, depth) = if gate_up { (FEW_OUTPUTS / 2, 1) } else { (FEW_OUTPUTS, parts.len()) };
    let chunk = few_chunk(weight.dtype);
    let warps = few_warps(&weight);
    let held = MULTIPROCESSORS * (FEW_WARPS_AT_ONCE / warps).max(1);
    let tiles = parts.iter().map(|part| part.weight.outputs.div_ceil(tile)).max().unwrap_or(1).max(1);
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
struct OneFormat {
    /// Bytes of a chunk of sixteen rows, columns of it: STAGE and CHUNK of kernels/pieces.cuh.
    stage: usize,
    chunk: usize,
    /// Warps that share a tile at most, and warps of a block: more would have too few registers.
    split_max: usize,
    warps_max: usize,
}

/// Whether there is a kernel `linear_one` for these products: of very many outputs in f16 `linear_few`, which gives the
/// same, keeps memory busier.
pub fn takes_one(parts: &[LinearPart], shared_max: usize) -> bool {
    let weight = &parts[0].weight;
    let many = weight.outputs > FEW_OUTPUTS * MULTIPROCESSORS * ONE_GROUPS_MAX;
    let fits = |format: OneFormat| one_row(weight, format.chunk) + one_warp(format.stage) <= shared_max;
    one_format(weight.dtype).is_some_and(fits) && !(many && weight.dtype == DType::F16)
}

/// Bytes of shared memory for the row, of which what lies 128 bytes apart is moved by 16, its zeros, and its sums over
/// sub-blocks of 32.
fn one_row(weight: &Weight, chunk: usize) -> usize {
    let columns = weight.columns + chunk;
    2 * (ONE_ZEROS + (columns + columns / 64 * 8).next_multiple_of(8)) + 32 * weight.columns.div_ceil(chunk)
}

/// Bytes of shared memory for a warp.
fn one_warp(stage: usize) -> usize {
    ONE_DEPTH * stage + 2 * FEW_OUTPUTS * size_of::<f32>()
}

fn one_format(dtype: DType) -> Option<OneFormat> {
    let quants = |row: usize| OneFormat { stage: 16 * row, chunk: 256, split_max: 12, warps_max: 18 };
    match dtype {
        DType::F16 => Some(OneFormat { stage: 16 * 256, chunk: 128, split_max: 20, warps_max: 20 }),
        DType::Q4_K | DType::Q5_K | DType::Q6_K => Some(quants(block_bytes(dtype))),
        _ => None,
    }
}

/// Whether [`LinearKernel::One`](super::LinearKernel::One) multiplies with weights of another format in one launch with
/// those of the first.
pub fn together(first: DType, other: DType) -> bool {
    first == other || (matches!(first, DType::Q4_K | DType::Q5_K) && other == DType::Q6_K)
}

/// The launch of `linear_one`: the warps of a block share a tile where there are few, and compute several at once where
/// every multiprocessor has several.
pub fn one(parts: &[LinearPart], data: &LinearData, mut args: LinearArgs) -> Call {
    let weight = parts[0].weight;
    let formats = parts.iter().filter_map(|part| one_format(part.weight.dtype));
    let stage = formats.map(|format| format.stage).max().unwrap_or(0);
    let gate_up = matches!(parts[0].pairs, Pairs::GateUp { .. });
    let (tile, depth) = if gate_up { (FEW_OUTPUTS / 2, 1) } else { (FEW_OUTPUTS, parts.len()) };
    let tiles = parts.iter().map(|part| part.weight.outputs.div_ceil(tile)).max().unwrap_or(1).max(1);

    let OneFormat { chunk, split_max, warps_max, .. } =
        one_format(weight.dtype).expect("a format of the kernel");
    let chunks = weight.columns.div_ceil(chunk);
    let (row, warp) = (one_row(&weight, chunk), one_warp(stage));
    let warps_max = (data.shared_max.saturating_sub(row) / warp).clamp(1, warps_max);

    let groups = tiles.div_ceil(MULTIPROCESSORS).min(ONE_GROUPS_MAX).min(warps_max);
    let most = if groups == 1 { split_max } else { 2.max(ONE_WARPS_SHARED / groups) };
    let most = most.min(warps_max / groups);
    let split = chunks.div_ceil(chunks.div_ceil(most));
    let turns = tiles.div_ceil(groups).div_ceil(MULTIPROCESSORS);
    let blocks = tiles.div_ceil(groups).div_ceil(turns);
    args.split = split as i32;
    let mut format = weight.format();
    for (args, part) in args.parts.iter_mut().zip(parts) {
        args.other_format = i32::from(part.weight.dtype != weight.dtype);
    }
    if let Some(other) = parts.iter().find(|part| part.weight.dtype != weight.dtype) {
        format = format!("{format}_{}", other.weight.format());
    }
    let threads = 32 * (split * groups) as u32;
    Call::new(format!("linear_one_{format}"), [blocks, 1, depth], threads, args)
        .sized((split * groups * warp + row) as u32)
}

/// Columns that a warp of `linear_few` takes at once: CHUNK of kernels/lanes.cuh.
fn few_chunk(dtype: DType) -> usize {
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
