//! Kernel calls as values: name, launch shape and arguments of every kernel in `kernels/`.
//!
//! The engine launches them on a GPU, the tests run the same values on the host. The argument structs
//! mirror those of the `.cu` files; pointers are device addresses (host addresses in the tests).

use std::borrow::Cow;
use std::mem::{MaybeUninit, size_of};

use rayon::prelude::*;

use crate::engine::fused::graph::{Glu, NormStyle};
use crate::gguf::DType;
use crate::numerics::Storage;

mod attention;
mod linear;
mod next;
mod rope;
mod stats;
mod unpack;

pub use attention::{AttentionData, AttentionKernel, attention, attention_room, has_attention};
pub use linear::{
    Follow, LinearData, LinearKernel, LinearPart, NORM_COLUMNS_MAX, NormFirst, PAIRS_OUTPUTS, PARTS_MAX,
    Pairs, TensorCores, TensorMap, linear, linear_in_every_shape, together,
};
pub use next::{NEXT_ROOM, next_token};
pub use rope::{RopeData, RopePart, rope};
pub use stats::{STATS_PAIRS_MAX, StatsPair, stats};
pub use unpack::{unpack, unpacked};

/// An address in the memory that the kernel sees.
pub type Address = u64;

/// Token rows up to which a matrix product takes a warp per output instead of tiles.
pub const ROWS_MAX_UNTILED: usize = 8;
/// Token rows up to which the fast matrix products read each weight once for few rows instead of in tiles.
pub const ROWS_MAX_FEW: usize = 32;
/// Compute capability, its first number, from which on tensor cores multiply TF32.
pub const TF32_SINCE: i32 = 8;
/// Threads of a block.
const THREADS: u32 = 256;

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Call {
    /// Name of the kernel.
    pub kernel: String,
    /// Blocks: x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block, at most: a GPU may have less, which its kernels know.
    pub shared: u32,
    /// How many [`TensorMap`]s its arguments begin with.
    pub maps: usize,
    args: Args,
    args_size: usize,
}

/// The argument struct of a call, aligned as any of them is.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Args([MaybeUninit<u64>; Args::MAX / 8]);

impl Args {
    const MAX: usize = 1024;

    /// First byte.
    pub fn start(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    /// First byte, to be written.
    pub fn start_mut(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

impl Call {
    fn new<A: Copy>(kernel: String, grid: [usize; 3], threads: u32, args: A) -> Call {
        const { assert!(size_of::<A>() <= Args::MAX && align_of::<A>() <= align_of::<Args>()) };
        let mut call = Call {
            kernel,
            grid: grid.map(|n| u32::try_from(n).expect("a grid has fewer than 2^32 blocks")),
            threads,
            shared: 0,
            maps: 0,
            args: Args([MaybeUninit::uninit(); Args::MAX / 8]),
            args_size: size_of::<A>(),
        };
        // SAFETY: the buffer is large and aligned enough for an A, by the assertion above.
        unsafe { call.args.start_mut().cast::<A>().write(args) };
        call
    }

    /// The call with so much dynamic shared memory.
    fn sized(self, shared: u32) -> Call {
        Call { shared, ..self }
    }

    /// The call whose arguments begin with so many tensor maps.
    fn mapped(self, maps: usize) -> Call {
        Call { maps, ..self }
    }

    /// A kernel over `n` elements, `each` of them per thread.
    fn elementwise<A: Copy>(kernel: String, n: usize, args: A) -> Call {
        Call::new(kernel, [n.div_ceil(THREADS as usize), 1, 1], THREADS, args)
    }

    /// The argument struct, and its size in bytes.
    pub fn args(&self) -> (&Args, usize) {
        (&self.args, self.args_size)
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
        (self.columns / self.dtype.block_len() * block_bytes(self.dtype)) as i64
    }

    /// Bytes of the whole.
    pub fn bytes(&self) -> usize {
        self.outputs * self.row_bytes() as usize
    }

    fn format(&self) -> String {
        self.dtype.name().to_lowercase()
    }
}

/// Bytes from one block to the next in device memory, where blocks of Q6_K begin at multiples of 16.
pub fn block_bytes(dtype: DType) -> usize {
    if dtype == DType::Q6_K { dtype.block_bytes().next_multiple_of(16) } else { dtype.block_bytes() }
}

/// Blocks that one thread copies at a time.
const COPIED_AT_ONCE: usize = 1 << 12;

/// The blocks of a matrix as they lie in device memory.
pub fn on_device(stored: &[u8], dtype: DType) -> Cow<'_, [u8]> {
    let (from, to) = (dtype.block_bytes(), block_bytes(dtype));
    if from == to {
        return Cow::Borrowed(stored);
    }
    let mut blocks = vec![0; stored.len() / from * to];
    let parts = blocks.par_chunks_mut(COPIED_AT_ONCE * to).zip(stored.par_chunks(COPIED_AT_ONCE * from));
    parts.for_each(|(blocks, stored)| {
        for (block, stored) in blocks.chunks_exact_mut(to).zip(stored.chunks_exact(from)) {
            block[..from].copy_from_slice(stored);
        }
    });
    Cow::Owned(blocks)
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
    /// See [`norm_style`].
    pub style: i32,
}

/// The number of a norm's variant that the kernel is told; `None` of what it does not compute.
pub fn norm_style(style: NormStyle) -> Option<i32> {
    match (style.centred, style.offset, style.times) {
        (false, 0.0, 1) => Some(0),
        (false, _, 0) => Some(1),
        (false, 0.0, 2) => Some(2),
        (true, 0.0, 1) => Some(3),
        (false, 1.0, 1) => Some(4),
        _ => None,
    }
}

/// out (groups, width) = norm of x (groups, width) times `weight` (width,) in f32.
pub fn norm(x: Address, weight: Address, out: Address, shape: NormShape, storage: Storage) -> Call {
    let args = NormArgs { x, weight, out, width: shape.width as i32, eps: shape.eps, style: shape.style };
    let threads = (shape.width.div_ceil(32) * 32).min(THREADS as usize) as u32;
    Call::new(format!("norm_{}", name_of(storage)), [shape.groups, 1, 1], threads, args)
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

/// The number of the form that the kernel is told: act(gate)·up, gate·act(up), act(gate); `None` of what it does not
/// compute.
pub fn glu_form(glu: Glu) -> Option<i32> {
    match (glu.swapped, glu.gated) {
        (false, true) => Some(0),
        (true, true) => Some(1),
        (false, false) => Some(2),
        (true, false) => None,
    }
}

/// out = act(gate)·up over n elements; `None` where no kernel computes it.
pub fn glu(glu: Glu, [gate, up, out]: [Address; 3], n: usize, storage: Storage) -> Option<Call> {
    let (activation, form) = (glu.activation as i32, glu_form(glu)?);
    let args = GluArgs { gate, up, out, n: n as i64, activation, form };
    Some(Call::elementwise(format!("glu_{}", name_of(storage)), n.div_ceil(8), args))
}
