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
    /// How an engine's attention rounds, for a row of a step of one row.
    ///
    /// llama.cpp's CPU flash attention (ggml-cpu/ops.cpp) casts the cache to f16, if it is not bf16, converts the queries
    /// to the type of the keys and, where that is f16, sums in f16. Without flash attention both products convert to the
    /// type of the cache and sum in f32.
    pub fn of(numerics: &Numerics) -> AttentionRounding {
        let plain = Storage::F32;
        let cast = |to| AttentionRounding { q: to, kv: numerics.kv, probs: to, sums: plain };
        match numerics.products {
            Products::LlamaCpu if numerics.flash => {
                let kv = if numerics.kv == Storage::F32 { Storage::F16 } else { numerics.kv };
                let sums = if kv == Storage::F16 { Storage::F16 } else { plain };
                AttentionRounding { q: kv, kv, probs: plain, sums }
            }
            Products::LlamaCpu | Products::LlamaCuda | Products::LlamaVulkan => cast(numerics.kv),
            Products::F16 | Products::Bf16 | Products::F32 | Products::F64 => cast(plain),
        }
    }
}
