//! What attention rounds, by the arithmetic that its producer declares.

use crate::numerics::{Numerics, Products, Storage};

/// What an attention rounds its operands to, and what it keeps its sums in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionRounding {
    /// Queries, before the product with the keys.
    pub q: Storage,
    /// Keys and values in the cache.
    pub kv: Storage,
    /// Probabilities, before the product with the values.
    pub probs: Storage,
    /// The running sum of values.
    pub sums: Storage,
}

impl AttentionRounding {
    /// The first of [`AttentionRounding::all`], for a step of one row.
    pub fn of(numerics: &Numerics) -> AttentionRounding {
        AttentionRounding::all(numerics, 1)[0]
    }

    /// The ways in which a producer's attention may round, for a row of a step of `step_rows` rows.
    ///
    /// llama.cpp's CPU flash attention (ggml-cpu/ops.cpp) casts the cache to f16, if it is not bf16. Steps of
    /// a whole tile of queries keep the queries and the sums in f32, others convert the queries to the type
    /// of the keys and, where that is f16, sum in f16. Without flash attention both products convert to the
    /// type of the cache and sum in f32.
    pub fn all(numerics: &Numerics, step_rows: usize) -> Vec<AttentionRounding> {
        let plain = Storage::F32;
        let cast = |to| AttentionRounding { q: to, kv: numerics.kv, probs: to, sums: plain };
        let uncast = cast(plain);
        match numerics.products {
            Products::LlamaCpu if numerics.flash => {
                let kv = if numerics.kv == Storage::F32 { Storage::F16 } else { numerics.kv };
                let sums = if kv == Storage::F16 { Storage::F16 } else { plain };
                let one_by_one = AttentionRounding { q: kv, kv, probs: plain, sums };
                let tiled = AttentionRounding { q: plain, kv, probs: plain, sums: plain };
                if step_rows < FLASH_TILE { vec![one_by_one] } else { vec![tiled, one_by_one] }
            }
            Products::LlamaCpu => vec![cast(numerics.kv)],
            // Its kernels differ in what they convert; all sum in f32 but for f16 accumulators on request.
            Products::LlamaCuda | Products::LlamaVulkan => vec![cast(numerics.kv), uncast],
            Products::F16 => vec![uncast, cast(Storage::F16)],
            Products::Bf16 => vec![uncast, cast(Storage::Bf16)],
            Products::F32 | Products::F64 => vec![uncast],
        }
    }
}

/// Queries in a tile of llama.cpp's CPU flash attention (`GGML_FA_TILE_Q`).
const FLASH_TILE: usize = 64;
