//! The matrix product kernels.

use super::{Address, Call, ROWS_MAX_UNTILED, THREADS, Weight, name_of};
use crate::numerics::Storage;

/// Weights that one launch multiplies with.
pub const PARTS_MAX: usize = 3;
/// Warps that keep enough of the weights under way for the memory of a large GPU.
const WARPS_ENOUGH: usize = 8192;

/// What follows a product within the same launch; the product itself is stored as well.
#[derive(Clone, Copy, Debug, Default)]
pub enum Follow {
    /// Nothing.
    #[default]
    Nothing,
    /// then = out + times·bias
    Bias {
        /// (O,) in f32
        bias: Address,
        /// How often.
        times: u32,
        /// (T, O)
        then: Address,
    },
    /// then = scale[0]·out + scale[1]·residual
    Residual {
        /// (T, O)
        residual: Address,
        /// Factors.
        scale: [f64; 2],
        /// (T, O)
        then: Address,
    },
}

/// One product.
#[derive(Clone, Copy, Debug)]
pub struct LinearPart {
    /// (O, I)
    pub weight: Weight,
    /// (T, O)
    pub out: Address,
    /// What follows.
    pub follow: Follow,
    /// (S, O) that the last result is appended to, or 0.
    pub cache: Address,
}

/// What the products of one launch have in common.
#[derive(Clone, Copy, Debug)]
pub struct LinearData {
    /// Which kernel.
    pub kernel: LinearKernel,
    /// (T, I)
    pub x: Address,
    /// (1,) position of row 0 as i32; read where there is a cache
    pub first: Address,
    /// T
    pub rows: usize,
    /// What values are stored as.
    pub storage: Storage,
    /// What the cache holds.
    pub kv: Storage,
    /// Whether the products are stored in f32 in any case.
    pub out_f32: bool,
}

/// Which kernel computes a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearKernel {
    /// Warps per output: few token rows.
    Row,
    /// Tiles: f32 arithmetic, or tensor cores where values are stored in f16.
    Tile,
}

impl LinearKernel {
    /// The kernel for a step of `rows` token rows.
    pub fn for_step(rows: usize) -> LinearKernel {
        if rows <= ROWS_MAX_UNTILED { LinearKernel::Row } else { LinearKernel::Tile }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PartArgs {
    weight: Address,
    row_bytes: i64,
    out: Address,
    other: Address,
    then: Address,
    cache: Address,
    scale: [f32; 2],
    outputs: i32,
    follow: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LinearArgs {
    parts: [PartArgs; PARTS_MAX],
    x: Address,
    first: Address,
    rows: i32,
    columns: i32,
    out_f32: i32,
    cache_f16: i32,
    split: i32,
}

impl PartArgs {
    fn new(part: &LinearPart) -> PartArgs {
        let (follow, other, then, scale) = match part.follow {
            Follow::Nothing => (0, 0, 0, [0.0; 2]),
            Follow::Bias { bias, times, then } => (1, bias, then, [f64::from(times), 0.0]),
            Follow::Residual { residual, scale, then } => (2, residual, then, scale),
        };
        PartArgs {
            weight: part.weight.address,
            row_bytes: part.weight.row_bytes(),
            out: part.out,
            other,
            then,
            cache: part.cache,
            scale: scale.map(|s| s as f32),
            outputs: part.weight.outputs as i32,
            follow,
        }
    }
}

/// Products of one x (T, I) with up to three weights of one format and width: out (T, O) = x · weight transposed.
pub fn linear(parts: &[LinearPart], data: LinearData) -> Call {
    let weight = parts[0].weight;
    let mut all = [PartArgs::default(); PARTS_MAX];
    for (args, part) in all.iter_mut().zip(parts) {
        *args = PartArgs::new(part);
    }
    let split = split(parts);
    let args = LinearArgs {
        parts: all,
        x: data.x,
        first: data.first,
        rows: data.rows as i32,
        columns: weight.columns as i32,
        out_f32: i32::from(data.out_f32),
        cache_f16: i32::from(data.kv != Storage::F32),
        split: split as i32,
    };
    let format = weight.format();
    let outputs = parts.iter().map(|part| part.weight.outputs).max().unwrap_or(0);
    let tiles = [outputs.div_ceil(64), data.rows.div_ceil(64), parts.len()];
    match (data.kernel, data.storage) {
        (LinearKernel::Row, storage) => {
            let grid = [outputs.div_ceil(8 / split), data.rows, parts.len()];
            Call::new(format!("linear_row_{format}_{}", name_of(storage)), grid, THREADS, args)
        }
        (LinearKernel::Tile, Storage::F32) => {
            Call::new(format!("linear_tile_{format}"), tiles, THREADS, args)
        }
        (LinearKernel::Tile, _) => Call::new(format!("linear_mma_{format}"), tiles, THREADS / 2, args),
    }
}

/// Warps that share an output of the row kernel: as many as rows are long enough for and the GPU has use for.
fn split(parts: &[LinearPart]) -> usize {
    let columns = parts[0].weight.columns.next_multiple_of(256);
    let outputs: usize = parts.iter().map(|part| part.weight.outputs).sum();
    let fits = |split: &usize| 256 * split <= columns && outputs * split <= WARPS_ENOUGH;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}
