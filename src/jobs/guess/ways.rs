//! The arithmetics that a healthy engine may have.

use std::collections::HashMap;

use parity_graph::{Graph, Id, Op};

use crate::arithmetic::cache_blocks;
use crate::arithmetic::{Arithmetic, Operands};
use crate::gguf::DType;
use crate::numerics::Storage;
use crate::ops::bound::{CONFIDENCE, UNIT_F32};
use crate::random;

/// An arithmetic that a healthy engine may have.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// As a reader knows it.
    pub name: &'static str,
    /// What is followed of it.
    pub arithmetic: Arithmetic,
    /// What every value between nodes is rounded to.
    pub kept: Storage,
    /// What keys and values are rounded to before they are cached.
    pub cache: DType,
    /// Whether single roundings are simulated: of an arithmetic that differs from ours in nothing but its order.
    pub disturbed: bool,
}

const PLAIN: Way = Way {
    name: "f32",
    arithmetic: Arithmetic::EXACT,
    kept: Storage::F32,
    cache: DType::F32,
    disturbed: false,
};

/// What a node has to do with a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// It is written there.
    Written,
    /// It meets what is read from there: the queries.
    Met,
}

impl Cached {
    /// The nodes of a graph that have to do with a cache.
    pub fn of(graph: &Graph) -> HashMap<Id, Cached> {
        let of = |id: Id| match graph.get(id).op {
            Op::SetRows => Some((graph.origin(graph.src(id, 0)?), Cached::Written)),
            Op::FlashAttn => Some((graph.origin(graph.src(id, 0)?), Cached::Met)),
            _ => None,
        };
        graph.computed().filter_map(of).collect()
    }
}

impl Way {
    /// Whether nothing is rounded but in f32.
    pub fn is_exact(&self) -> bool {
        self.name == EXACT.name && !self.disturbed
    }

    /// Whether its cache holds quants.
    pub fn is_in_blocks(&self) -> bool {
        self.cache.block_len() > 1
    }

    /// What it keeps of the values of a node, which may be `cached`.
    pub fn keep(&self, id: Id, cached: Option<Cached>, values: &mut [f32]) {
        self.kept.store(values);
        match cached {
            Some(Cached::Written) => in_cache(self.cache, values),
            // What meets quants is brought to quants of 8 bits.
            Some(Cached::Met) if self.is_in_blocks() => in_cache(DType::Q8_0, values),
            _ => {}
        }
        if self.disturbed {
            let size = (values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
                / values.len().max(1) as f64)
                .sqrt();
            // As far as any order of a sum may move it: a bound of section 1 of docs/bounds.md, of its usual size.
            let unit = CONFIDENCE * UNIT_F32 * size;
            let seed = random::mixed(id as u64 + 1);
            for (i, value) in values.iter_mut().enumerate().filter(|(_, value)| value.is_finite()) {
                let draw =
                    random::unit(random::mixed(seed.wrapping_add((i as u64).wrapping_mul(random::GAMMA))));
                *value += (unit * draw) as f32;
            }
        }
    }
}

/// What everything is compared with.
pub const EXACT: Way = PLAIN;

/// Those whose distance from [`EXACT`] says how far rounding moves logits, the sharpest first.
pub const WAYS: [Way; 4] = [
    Way { disturbed: true, ..PLAIN },
    Way {
        name: "f16",
        arithmetic: Arithmetic { operands: Operands::Exact, narrow: Storage::F16, ..Arithmetic::EXACT },
        kept: Storage::F16,
        cache: DType::F16,
        disturbed: false,
    },
    Way { name: "llama.cpp's", arithmetic: Arithmetic::LLAMA_CPU, cache: DType::F16, ..PLAIN },
    Way {
        name: "bf16",
        arithmetic: Arithmetic { operands: Operands::Exact, narrow: Storage::Bf16, ..Arithmetic::EXACT },
        kept: Storage::Bf16,
        cache: DType::BF16,
        disturbed: false,
    },
];

/// llama.cpp's with caches in blocks: what a healthy engine has where it is told to.
pub const CACHES: [Way; 6] = [
    in_blocks("llama.cpp's, with a cache of Q8_0", DType::Q8_0),
    in_blocks("llama.cpp's, with a cache of Q5_1", DType::Q5_1),
    in_blocks("llama.cpp's, with a cache of Q5_0", DType::Q5_0),
    in_blocks("llama.cpp's, with a cache of Q4_1", DType::Q4_1),
    in_blocks("llama.cpp's, with a cache of Q4_0", DType::Q4_0),
    in_blocks("llama.cpp's, with a cache of IQ4_NL", DType::IQ4_NL),
];

const fn in_blocks(name: &'static str, cache: DType) -> Way {
    Way { name, arithmetic: Arithmetic::LLAMA_CPU, cache, ..PLAIN }
}

/// What a cache keeps of rows of whole heads.
fn in_cache(kept: DType, values: &mut [f32]) {
    match kept {
        DType::F16 => Storage::F16.store(values),
        DType::BF16 => Storage::Bf16.store(values),
        kept if cache_blocks::is_kept(kept) && values.len().is_multiple_of(cache_blocks::BLOCK) => {
            cache_blocks::keep(kept, values, &mut vec![0.0; values.len()]);
        }
        _ => {}
    }
}
