//! The matrix product kernels.

mod few;
mod warpgroup;

pub use few::{few_chunk, together};
pub use warpgroup::TensorMap;

use super::{Address, Call, ROWS_MAX_FEW, ROWS_MAX_UNTILED, THREADS, Weight, name_of};
use crate::engine::fused::graph::Pairing;
use crate::numerics::Storage;

/// Weights that one launch multiplies with.
pub const PARTS_MAX: usize = 3;
/// Warps that keep enough of the weights under way for the memory of a large GPU.
const WARPS_ENOUGH: usize = 8192;

/// Columns of x up to which `linear_few` norms a row.
pub const NORM_COLUMNS_MAX: usize = 8192;
/// What divides a head that `linear_few` turns: the outputs of a tile.
pub const PAIRS_OUTPUTS: usize = FEW_OUTPUTS;
/// Outputs of a tile of `linear_few` and `linear_one`.
const FEW_OUTPUTS: usize = 16;
/// Outputs up to which tiles of exact products are so few that two groups of threads share one.
const TILE_SHARED_MAX: usize = 2048;
/// Threads of `linear_split`, and its shared memory in bytes: two groups, SPLIT_GROUP and SplitMemory of the kernel.
const SPLIT_THREADS: u32 = 2 * 128;
const SPLIT_SHARED: u32 = 2 * 2 * 2 * 64 * 40 * size_of::<f32>() as u32;
/// Tiles of `linear_wide`: the number in the kernel's name, token rows, outputs; the largest first.
const WIDE_TILES: [[usize; 3]; 2] = [[256, 128, 128], [128, 128, 64]];
const WIDE_SMALLEST: [usize; 3] = [64, 64, 64];
/// Its shared memory in bytes: WIDE_BYTES of kernels/linear_wide.cu.
const WIDE_SHARED: u32 = 96 << 10;
/// Multiprocessors of a large GPU: `linear_few` and `linear_one` have as many blocks as they hold at once.
const MULTIPROCESSORS: usize = 132;
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
    /// What follows from two outputs.
    pub pairs: Pairs,
}

/// What is computed from pairs of outputs, by `linear_few` alone.
#[derive(Clone, Copy, Debug, Default)]
pub enum Pairs {
    /// Nothing.
    #[default]
    Alone,
    /// The rotary embedding of whole heads, into (T, O).
    Rotated {
        /// (positions, E/2, 2): cosine, sine.
        angles: Address,
        /// E, a multiple of 16.
        head_width: usize,
        /// Which columns go together.
        pairing: Pairing,
        /// (T, O)
        out: Address,
    },
    /// silu(gate)·up, of the outputs of the first weight and the second, into (T, O).
    GateUp {
        /// (T, O)
        out: Address,
    },
}

/// A norm that comes before the products of a single row: by the weight, of x, which is stored as well.
#[derive(Clone, Copy, Debug)]
pub struct NormFirst {
    /// (I,) in f32
    pub weight: Address,
    /// (1, I)
    pub out: Address,
    /// Added to the mean square.
    pub eps: f64,
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
    /// What x is put through first; for [`LinearKernel::Few`] and one row.
    pub norm: Option<NormFirst>,
    /// Address and bytes, a multiple of 16, of weights that a later launch reads: [`LinearKernel::Few`] brings them
    /// nearer.
    pub next: (Address, usize),
    /// Bytes of shared memory that a block may have: [`LinearKernel::One`] fills it.
    pub shared_max: usize,
    /// Whether the weights are the model's own, and not decoded by a launch before this one.
    pub constant: bool,
}

/// Which kernel computes a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearKernel {
    /// Warps per output: few token rows.
    Row,
    /// Tiles: f32 arithmetic, or tensor cores where values are stored in f16.
    Tile,
    /// Tiles of f32 arithmetic on tensor cores, where they take TF32.
    Split,
    /// Tensor cores for few token rows of values that are stored in f16.
    Few,
    /// The same for a single one, with quants as they are and scales in f32; as [`LinearKernel::Few`] in other formats.
    One,
    /// Tensor cores for many, with weights in f16.
    Wide,
    /// The same with warpgroups.
    Warpgroup,
}

/// What tensor cores can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorCores {
    /// Multiply TF32.
    pub tf32: bool,
    /// Multiply for a whole warpgroup, with operands in shared memory: Hopper's.
    pub warpgroups: bool,
}

impl LinearKernel {
    /// The kernel for a step of `rows` token rows. Of the logits the last row alone may be computed, with the same
    /// bits: they have the same kernel in any step of several rows.
    pub fn for_step(rows: usize, storage: Storage, logits: bool, cores: TensorCores) -> LinearKernel {
        match storage {
            Storage::F16 if rows == 1 => LinearKernel::One,
            Storage::F16 if logits || rows <= ROWS_MAX_FEW => LinearKernel::Few,
            Storage::F16 if cores.warpgroups => LinearKernel::Warpgroup,
            Storage::F16 => LinearKernel::Wide,
            Storage::F32 if rows <= ROWS_MAX_UNTILED => LinearKernel::Row,
            Storage::F32 if cores.tf32 => LinearKernel::Split,
            _ => LinearKernel::Tile,
        }
    }

    /// Whether it multiplies with weights in f16 alone: others are decoded before.
    pub fn takes_halves(self) -> bool {
        matches!(self, LinearKernel::Wide | LinearKernel::Warpgroup)
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
    turned: Address,
    scale: [f32; 2],
    outputs: i32,
    follow: i32,
    pairs: i32,
    other_format: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LinearArgs {
    parts: [PartArgs; PARTS_MAX],
    x: Address,
    first: Address,
    angles: Address,
    norm_weight: Address,
    normed: Address,
    eps: f64,
    next: Address,
    next_bytes: i64,
    rows: i32,
    columns: i32,
    out_f32: i32,
    cache_f16: i32,
    split: i32,
    head_width: i32,
    groups: i32,
    turns: i32,
    split_inverse: u32,
    head_inverse: u32,
}

impl PartArgs {
    fn new(part: &LinearPart) -> PartArgs {
        let (follow, other, then, scale) = match part.follow {
            Follow::Nothing => (0, 0, 0, [0.0; 2]),
            Follow::Bias { bias, times, then } => (1, bias, then, [f64::from(times), 0.0]),
            Follow::Residual { residual, scale, then } => (2, residual, then, scale),
        };
        let (pairs, turned) = match part.pairs {
            Pairs::Alone => (0, 0),
            Pairs::Rotated { pairing: Pairing::Half, out, .. } => (1, out),
            Pairs::Rotated { pairing: Pairing::Interleaved, out, .. } => (2, out),
            Pairs::GateUp { out } => (3, out),
        };
        PartArgs {
            weight: part.weight.address,
            row_bytes: part.weight.row_bytes(),
            out: part.out,
            other,
            then,
            cache: part.cache,
            turned,
            scale: scale.map(|s| s as f32),
            outputs: part.weight.outputs as i32,
            follow,
            pairs,
            other_format: 0,
        }
    }
}

/// What all kernels of products are told.
fn args_of(parts: &[LinearPart], data: &LinearData) -> LinearArgs {
    let weight = parts[0].weight;
    let mut all = [PartArgs::default(); PARTS_MAX];
    for (args, part) in all.iter_mut().zip(parts) {
        *args = PartArgs::new(part);
    }
    let split = split(parts);
    let turned = parts.iter().find_map(|part| match part.pairs {
        Pairs::Rotated { angles, head_width, .. } => Some((angles, head_width)),
        _ => None,
    });
    let (angles, head_width) = turned.unwrap_or_default();
    let (norm_weight, normed, eps) = data.norm.map_or((0, 0, 0.0), |norm| (norm.weight, norm.out, norm.eps));
    LinearArgs {
        parts: all,
        x: data.x,
        first: data.first,
        angles,
        norm_weight,
        normed,
        eps,
        next: data.next.0,
        next_bytes: data.next.1 as i64,
        rows: data.rows as i32,
        columns: weight.columns as i32,
        out_f32: i32::from(data.out_f32),
        cache_f16: i32::from(data.kv != Storage::F32),
        split: split as i32,
        head_width: head_width as i32,
        groups: 0,
        turns: 0,
        split_inverse: 0,
        head_inverse: 0,
    }
}

/// Products of one x (T, I) with up to three weights of one width and format, or of formats that [`together`] has: out
/// (T, O) = x · weight transposed.
pub fn linear(parts: &[LinearPart], data: LinearData) -> Call {
    let args = args_of(parts, &data);
    let weight = parts[0].weight;
    let format = weight.format();
    let outputs = parts.iter().map(|part| part.weight.outputs).max().unwrap_or(0);
    let tiles = [outputs.div_ceil(64), data.rows.div_ceil(64), parts.len()];
    match (data.kernel, data.storage) {
        (LinearKernel::Row, storage) => {
            let grid = [outputs.div_ceil(8 / split(parts)), data.rows, parts.len()];
            Call::new(format!("linear_row_{format}_{}", name_of(storage)), grid, THREADS, args)
        }
        (LinearKernel::One, _) if few::takes_one(parts, data.shared_max) => few::one(parts, &data, args),
        (LinearKernel::Few | LinearKernel::One, _) => few::few(parts, data, args),
        (LinearKernel::Warpgroup, _) => warpgroup::warpgroup(parts, &data, args),
        (LinearKernel::Wide, _) => {
            // Larger tiles where there are enough of them.
            let blocks = |rows: usize, wide: usize| -> usize {
                let of = |part: &LinearPart| part.weight.outputs.div_ceil(wide) * data.rows.div_ceil(rows);
                parts.iter().map(of).sum()
            };
            let [name, rows, wide] = WIDE_TILES
                .into_iter()
                .find(|[_, rows, wide]| blocks(*rows, *wide) >= MULTIPROCESSORS)
                .unwrap_or(WIDE_SMALLEST);
            let grid = [outputs.div_ceil(wide), data.rows.div_ceil(rows), parts.len()];
            Call::new(format!("linear_wide_{name}"), grid, THREADS, args).sized(WIDE_SHARED)
        }
        (LinearKernel::Split, _) => {
            Call::new(format!("linear_split_{format}"), tiles, SPLIT_THREADS, args).sized(SPLIT_SHARED)
        }
        (LinearKernel::Tile, Storage::F32) => {
            let groups = if outputs <= TILE_SHARED_MAX && parts.len() == 1 { 2 } else { 1 };
            let name = if groups == 2 { "linear_tile2" } else { "linear_tile" };
            Call::new(format!("{name}_{format}"), tiles, groups * THREADS, args)
        }
        (LinearKernel::Tile, _) => Call::new(format!("linear_mma_{format}"), tiles, THREADS / 2, args),
    }
}

/// The same by warpgroups, in every shape that they have: all give these products.
pub fn linear_in_every_shape(parts: &[LinearPart], data: LinearData) -> Vec<Call> {
    warpgroup::in_every_shape(parts, &data, args_of(parts, &data))
}

/// Warps that share an output of the row kernel: as many as rows are long enough for and the GPU has use for.
fn split(parts: &[LinearPart]) -> usize {
    let columns = parts[0].weight.columns.next_multiple_of(256);
    let outputs: usize = parts.iter().map(|part| part.weight.outputs).sum();
    let fits = |split: &usize| 256 * split <= columns && outputs * split <= WARPS_ENOUGH;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}
