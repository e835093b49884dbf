//! How coarse an arithmetic is, by its name: what a report and a baseline keep of it.

use super::attentions::{ATTENTIONS, LLAMA_ATTENTION, name_of_cache};
use super::node::{IN_F32, ON_CPU};
use super::operands::{IN_BLOCKS, IN_ROWS, IN_TILES, ON_CANDLE, narrow, of_name};
use super::storage_types::{IN_BETTER, IN_HALF, name_of_copies, readings};
use crate::numerics::Storage;
use crate::ops::bound::{UNIT_BF16, UNIT_F16, UNIT_F32, storage_unit, unit_of};

/// Unit roundoff of the narrowest type that an arithmetic rounds to; `None` of kernels of devices, which round what their
/// weights ask for.
pub fn coarseness(name: &str) -> Option<f64> {
    let of_attention = || ATTENTIONS.into_iter().find(|(known, _)| *known == name).map(|(_, narrow)| narrow);
    let narrow = of_name(name).and_then(narrow).or_else(of_attention);
    let caches = [Storage::F32, Storage::F16, Storage::Bf16];
    let cache = || {
        let is_it = |kept: &Storage| [name_of_cache(*kept), name_of_copies(*kept)].contains(&name);
        caches.into_iter().find(is_it).map(storage_unit)
    };
    narrow.map(unit_of).or_else(cache).or_else(|| match name {
        IN_F32 | IN_BETTER => Some(UNIT_F32),
        // Operands that meet weights of f16 are rounded to that, others to blocks of eight bits.
        ON_CPU | ON_CANDLE | LLAMA_ATTENTION | IN_HALF => Some(UNIT_F16),
        "values and weights in f16" | "values rounded to f16 when they were recorded" => Some(UNIT_F16),
        "values and weights in bf16" | "values rounded to bf16 when they were recorded" => {
            Some(storage_unit(Storage::Bf16))
        }
        // A row's scale is that of its largest value.
        name if name == IN_ROWS.0 => Some(UNIT_BF16),
        name if [IN_BLOCKS.0, IN_TILES.0].contains(&name) => Some(UNIT_F16),
        _ => None,
    })
}

/// Whether an arithmetic, by its name, is f32's but for what values were rounded to when they were recorded.
pub fn is_of_recording(name: &str) -> bool {
    [Storage::F16, Storage::Bf16].into_iter().filter_map(readings).any(|[_, rounded]| rounded == name)
}

/// The coarsest of several, by name.
pub fn coarsest<'a>(names: impl Iterator<Item = &'a str>) -> Option<(&'a str, f64)> {
    names.filter_map(|name| Some((name, coarseness(name)?))).max_by(|a, b| a.1.total_cmp(&b.1))
}
