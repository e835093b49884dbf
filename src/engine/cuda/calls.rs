//! Kernel calls as values: name, launch shape and arguments of every kernel in `kernels/`.
//!
//! The engine launches them on a GPU, the tests run the same values on the host. The argument structs
//! mirror those of the `.cu` files; pointers are device addresses (host addresses in the tests).

use std::mem::{MaybeUninit, size_of};

use crate::gguf::DType;
use crate::model::graph::{Attention, Glu, KvMap, Mask, NormStyle, Pairing, Rope, RopePosition};
use crate::numerics::Storage;

/// An address in the memory that the kernel sees.
pub type Address = u64;

/// Token rows up to which a matrix product takes a warp per output instead of tiles.
pub const ROWS_MAX_UNTILED: usize = 8;
/// Head widths up to which the attention kernels are built.
const HEAD_WIDTHS: [usize; 3] = [32, 64, 128];
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of a comparison; the last step merges their results.
pub const STATS_PARTS: usize = 256;

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Call {
    /// Name of the kernel.
    pub kernel: String,
    /// Blocks: x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    args: [MaybeUninit<u64>; Call::ARGS_MAX / 8],
    args_size: usize,
}

impl Call {
    const ARGS_MAX: usize = 128;

    fn new<A: Copy>(kernel: String, grid: [usize; 3], threads: u32, args: A) -> Call {
        const { assert!(size_of::<A>() <= Call::ARGS_MAX && align_of::<A>() <= 8) };
        let mut call = Call {
            kernel,
            grid: grid.map(|n| u32::try_from(n).expect("a grid has fewer than 2^32 blocks")),
            threads,
            args: [MaybeUninit::uninit(); Call::ARGS_MAX / 8],
            args_size: size_of::<A>(),
        };
        // SAFETY: the buffer is large and aligned enough for an A, by the assertion above.
        unsafe { call.args.as_mut_ptr().cast::<A>().write(args) };
        call
    }

    /// A kernel over `n` elements, `each` of them per thread.
    fn elementwise<A: Copy>(kernel: String, n: usize, args: A) -> Call {
        Call::new(kernel, [n.div_ceil(THREADS as usize), 1, 1], THREADS, args)
    }

    /// The argument struct, and its size in bytes.
    pub fn args(&self) -> (*const u8, usize) {
        (self.args.as_ptr().cast(), self.args_size)
    }
}

/// A matrix in device memory, in the form of the model file.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// (outputs, columns) blocks of `dtype`.
    pub address: Address,
    /// Type of the blocks.
    pub dtype: DType,
    /// O
    pub outputs: usize,
    /// I, a multiple of 8.
    pub columns: usize,
}

impl Weight {
    fn row_bytes(&self) -> i64 {
        (self.columns / self.dtype.block_len() * self.dtype.block_bytes()) as i64
    }

    fn format(&self) -> String {
        self.dtype.name().to_lowercase()
    }
}

fn name_of(storage: Storage) -> &'static str {
    match storage {
        Storage::F32 => "f32",
        Storage::F16 | Storage::Bf16 => "f16",
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArgs {
    table: Address,
    row_bytes: i64,
    tokens: Address,
    out: Address,
    width: i32,
}

/// out (T, D) = rows of `table` (V, D) at `tokens` (T,).
pub fn embed(table: &Weight, tokens: Address, out: Address, rows: usize, storage: Storage) -> Call {
    let args = EmbedArgs {
        table: table.address,
        row_bytes: table.row_bytes(),
        tokens,
        out,
        width: table.columns as i32,
    };
    let kernel = format!("embed_{}_{}", table.format(), name_of(storage));
    Call::new(kernel, [table.columns.div_ceil(8 * THREADS as usize), rows, 1], THREADS, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgs {
    x: Address,
    weight: Address,
    out: Address,
    eps: f64,
    width: i32,
    style: i32,
}

/// What a norm kernel is told beside its data.
#[derive(Clone, Copy, Debug)]
pub struct NormShape {
    /// Groups of columns, each with a mean of its own.
    pub groups: usize,
    /// Columns of a group.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// Variant.
    pub style: NormStyle,
}

/// out (groups, width) = norm of x (groups, width) times `weight` (width,) in f32.
pub fn norm(x: Address, weight: Address, out: Address, shape: NormShape, storage: Storage) -> Call {
    let args =
        NormArgs { x, weight, out, width: shape.width as i32, eps: shape.eps, style: shape.style as i32 };
    let threads = (shape.width.div_ceil(32) * 32).min(THREADS as usize) as u32;
    Call::new(format!("norm_{}", name_of(storage)), [shape.groups, 1, 1], threads, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LinearArgs {
    weight: Address,
    row_bytes: i64,
    x: Address,
    out: Address,
    rows: i32,
    columns: i32,
    outputs: i32,
    out_f32: i32,
}

/// Which kernel computes a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearKernel {
    /// A warp per output: few token rows.
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

/// out (T, O) = x (T, I) · weight (O, I) transposed; out in f32 if `out_f32`, else in `storage` as x is.
pub fn linear(
    kernel: LinearKernel,
    weight: &Weight,
    [x, out]: [Address; 2],
    rows: usize,
    storage: Storage,
    out_f32: bool,
) -> Call {
    let args = LinearArgs {
        weight: weight.address,
        row_bytes: weight.row_bytes(),
        x,
        out,
        rows: rows as i32,
        columns: weight.columns as i32,
        outputs: weight.outputs as i32,
        out_f32: i32::from(out_f32 || storage == Storage::F32),
    };
    let format = weight.format();
    let tiles = [weight.outputs.div_ceil(64), rows.div_ceil(64), 1];
    match (kernel, storage) {
        (LinearKernel::Row, _) => {
            let name = format!("linear_row_{format}_{}", name_of(storage));
            Call::new(name, [weight.outputs.div_ceil(8), rows, 1], THREADS, args)
        }
        (LinearKernel::Tile, Storage::F32) => {
            Call::new(format!("linear_tile_{format}"), tiles, THREADS, args)
        }
        (LinearKernel::Tile, _) => Call::new(format!("linear_mma_{format}"), tiles, THREADS / 2, args),
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BiasArgs {
    x: Address,
    bias: Address,
    out: Address,
    n: i64,
    width: i32,
    times: f32,
}

/// out = x + times·bias for x (T, width); a bias at address 0 is none.
pub fn bias(
    x: Address,
    bias: Address,
    out: Address,
    [rows, width]: [usize; 2],
    times: u32,
    storage: Storage,
) -> Call {
    let n = rows * width;
    let args = BiasArgs { x, bias, out, n: n as i64, width: width as i32, times: times as f32 };
    Call::elementwise(format!("bias_{}", name_of(storage)), n, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    x: Address,
    table: Address,
    first: Address,
    out: Address,
    rows: i32,
    heads: i32,
    head_width: i32,
    dims: i32,
    interleaved: i32,
    times: i32,
    in_step: i32,
}

/// Turns x (T, heads, E) by the angles of `table` (positions, dims/2, 2).
pub fn rope(
    rope: &Rope,
    [x, table, first, out]: [Address; 4],
    [rows, heads]: [usize; 2],
    storage: Storage,
) -> Call {
    let args = RopeArgs {
        x,
        table,
        first,
        out,
        rows: rows as i32,
        heads: heads as i32,
        head_width: rope.head_width as i32,
        dims: rope.dims as i32,
        interleaved: i32::from(rope.pairing == Pairing::Interleaved),
        times: rope.times as i32,
        in_step: i32::from(rope.position == RopePosition::InStep),
    };
    let pairs = rows * heads * rope.head_width.div_ceil(2);
    Call::elementwise(format!("rope_{}", name_of(storage)), pairs, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CacheArgs {
    x: Address,
    cache: Address,
    first: Address,
    n: i64,
    width: i32,
}

/// Appends x (T, width) to the cache at the position that `first` points to.
pub fn cache(
    [x, cache, first]: [Address; 3],
    [rows, width]: [usize; 2],
    storage: Storage,
    kv: Storage,
) -> Call {
    let args = CacheArgs { x, cache, first, n: (rows * width) as i64, width: width as i32 };
    Call::elementwise(format!("cache_{}_{}", name_of(storage), name_of(kv)), rows * width, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionArgs {
    q: Address,
    k: Address,
    v: Address,
    out: Address,
    scores: Address,
    probs: Address,
    first: Address,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    head_width: i32,
    kv_modulo: i32,
    see_from_step: i32,
    see_shift: i32,
    softmax: i32,
    scale: f32,
}

/// Where an attention reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionData {
    /// (T, H, E)
    pub q: Address,
    /// (S, K, E), the cache
    pub k: Address,
    /// (S, K, E), the cache
    pub v: Address,
    /// (T, H, E)
    pub out: Address,
    /// (H, T, S) in f32, or 0
    pub scores: Address,
    /// (H, T, S) in f32, or 0; needs `scores`
    pub probs: Address,
    /// (1,) position of row 0 as i32
    pub first: Address,
}

/// Whether there is a kernel for this attention.
pub fn has_attention(a: &Attention) -> bool {
    a.head_width <= HEAD_WIDTHS[HEAD_WIDTHS.len() - 1] && a.heads.is_multiple_of(a.kv_heads)
}

/// Scores, softmax and context as one. `None` where no kernel is wide enough: see [`has_attention`].
pub fn attention(
    a: &Attention,
    data: AttentionData,
    rows: usize,
    storage: Storage,
    kv: Storage,
) -> Option<Call> {
    let width = HEAD_WIDTHS.iter().find(|&&width| a.head_width <= width).filter(|_| has_attention(a))?;
    // Far beyond every position, and far from overflow when one is added.
    let everything = 1 << 30;
    let (see_from_step, see_shift) = match a.mask {
        Mask::Causal => (0, 0),
        Mask::None => (0, everything),
        Mask::Shift(shift) => (0, shift.clamp(-i64::from(everything), everything.into()) as i32),
        Mask::StepOnly => (1, 0),
    };
    let args = AttentionArgs {
        q: data.q,
        k: data.k,
        v: data.v,
        out: data.out,
        scores: data.scores,
        probs: data.probs,
        first: data.first,
        rows: rows as i32,
        heads: a.heads as i32,
        kv_heads: a.kv_heads as i32,
        head_width: a.head_width as i32,
        kv_modulo: i32::from(a.kv_map == KvMap::Modulo),
        see_from_step,
        see_shift,
        softmax: i32::from(a.softmax),
        scale: a.scale as f32,
    };
    let (form, rows_per_block) = if rows <= ROWS_MAX_UNTILED { ("row", 1) } else { ("tile", 4) };
    let kernel = format!("attention_{form}_{}_{}_{width}", name_of(storage), name_of(kv));
    Some(Call::new(kernel, [rows.div_ceil(rows_per_block), a.heads, 1], THREADS, args))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddArgs {
    branch: Address,
    residual: Address,
    out: Address,
    n: i64,
    scale: [f32; 2],
}

/// out = scale[0]·branch + scale[1]·residual over n elements.
pub fn add([branch, residual, out]: [Address; 3], n: usize, scale: [f64; 2], storage: Storage) -> Call {
    let args = AddArgs { branch, residual, out, n: n as i64, scale: scale.map(|s| s as f32) };
    Call::elementwise(format!("add_{}", name_of(storage)), n, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GluArgs {
    gate: Address,
    up: Address,
    out: Address,
    n: i64,
    activation: i32,
    form: i32,
}

/// out = activation(gate)·up over n elements.
pub fn glu(glu: Glu, [gate, up, out]: [Address; 3], n: usize, storage: Storage) -> Call {
    let (activation, form) = (glu.activation as i32, glu.form as i32);
    let args = GluArgs { gate, up, out, n: n as i64, activation, form };
    Call::elementwise(format!("glu_{}", name_of(storage)), n, args)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StatsArgs {
    a: Address,
    b: Address,
    parts: Address,
    out: Address,
    n: i64,
    count: i32,
    a_f16: i32,
}

/// What a comparison on the device comes to. Sums and the maximum leave out pairs that are not two
/// finite numbers; `worst` is the lowest index with the maximum, which is -1 where no pair is finite.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// max |a - b|
    pub abs_err_max: f64,
    /// Σ (a - b)²
    pub squared_error: f64,
    /// Σ a²
    pub squared_a: f64,
    /// Σ b²
    pub squared_b: f64,
    /// Σ a·b
    pub product: f64,
    /// Σ |a - b|
    pub abs_error: f64,
    /// Flat index of the maximum.
    pub worst: i64,
    /// How often a > b.
    pub positive: i64,
    /// NaN and infinite values of a.
    pub nonfinite_a: i64,
    /// NaN and infinite values of b.
    pub nonfinite_b: i64,
}

/// Compares `a` (n,) in `storage` with `b` (n,) in f32: two launches, the [`Stats`] at `out`.
/// `parts` has room for [`STATS_PARTS`] of them.
pub fn stats([a, b, parts, out]: [Address; 4], n: usize, storage: Storage) -> [Call; 2] {
    let count = n.div_ceil(THREADS as usize).clamp(1, STATS_PARTS);
    let a_f16 = i32::from(storage != Storage::F32);
    let args = StatsArgs { a, b, parts, out, n: n as i64, count: count as i32, a_f16 };
    [
        Call::new("stats_part".into(), [count, 1, 1], THREADS, args),
        Call::new("stats_merge".into(), [1, 1, 1], THREADS, args),
    ]
}
