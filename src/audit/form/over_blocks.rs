//! Keys and values in quantised blocks, of dumps that bring no graph: which types these are shows in attention alone.

use std::collections::{BTreeSet, HashSet};

use parity_dump::Dump;

use super::super::{Exact, Graphs, exact};
use super::{Form, ROWS};
use crate::arithmetic::cache_blocks;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::{DType, Gguf};
use crate::model::builders::{self, Cache, Kept, Shape};

impl Graphs {
    /// The graphs over keys and values in the quantised blocks that explain attention in one of the first layers at least of
    /// which plain ones leave rows unexplained, so many in each. Only where keys and values were recorded: of what is computed again nobody knows into which block it fell,
    /// and any mistake might be that. llama.cpp has attention as one node then.
    pub(super) fn over_blocks(
        dump: &Dump,
        gguf: &Gguf,
        ids: &HashSet<Checkpoint>,
        (form, plain): (Form, &[usize]),
    ) -> Result<Option<Graphs>> {
        let attention: HashSet<Checkpoint> =
            ids.iter().copied().filter(|id| id.kind() == Kind::AttnCtx).collect();
        let held = Recording::checkpoints(dump);
        let has = |layer, kind| held.iter().any(|id| id.kind() == kind && id.layer_index() == layer);
        let reads = |id: &Checkpoint| has(id.layer_index(), Kind::KRope) && has(id.layer_index(), Kind::V);
        if !attention.iter().all(reads) {
            return Ok(None);
        }
        let head_width = builders::build(gguf, Shape::step(0, 1, 1, true, Cache::F32))?.facts.head_width;
        if !head_width.is_multiple_of(cache_blocks::BLOCK) {
            return Ok(None);
        }
        let form = Form { flash: true, ..form };
        for id in held.iter().filter(|id| attention.contains(id)) {
            let cache = Graphs::nearest_blocks(dump, gguf, *id, (form, head_width))?;
            let Some(form) = cache.map(|cache| Form { cache, ..form }) else { continue };
            if let Some((left, graphs)) = Graphs::unexplained(dump, gguf, &attention, form)?
                && plain.iter().zip(&left).any(|(plain, left)| *plain > 0 && *left == 0)
            {
                return Ok(Some(graphs.saying(form.words(&Form::declared(dump)))));
            }
        }
        Ok(None)
    }

    /// The types of keys and values with which exact arithmetic comes nearest to a node of attention, where one of them
    /// at least is quantised: values first, then keys beside them, and values once more, whose error no longer drowns in
    /// that of keys.
    fn nearest_blocks(
        dump: &Dump,
        gguf: &Gguf,
        id: Checkpoint,
        (form, head_width): (Form, usize),
    ) -> Result<Option<Cache>> {
        let positions = Recording::positions(dump, id);
        let positions: BTreeSet<u32> = positions.iter().rev().take(ROWS).copied().collect();
        let distance = |cache: Cache| -> Result<f64> {
            let graphs = Graphs::built_in(dump, gguf, Form { cache, ..form })?;
            let found = exact(&graphs.in_own_memory(dump), &graphs.steps(), gguf, id, &positions)?;
            let squares = |found: Exact| -> f64 {
                let pairs = found.exact.data.iter().zip(&found.recorded.data);
                pairs.map(|(exact, recorded)| (exact - recorded).powi(2)).sum()
            };
            Ok(found.map_or(f64::INFINITY, squares))
        };
        let kept = DType::all().filter(|dtype| cache_blocks::is_kept(*dtype)).map(Kept::plain);
        let kept: Vec<Kept> = [Cache::F16.keys, Cache::F32.keys].into_iter().chain(kept).collect();
        let mut best = (distance(Cache::F16)?, Cache::F16);
        for of_keys in [false, true, false] {
            let with = |kept: Kept| {
                if of_keys { Cache { keys: kept, ..best.1 } } else { Cache { values: kept, ..best.1 } }
            };
            let mut tried: Vec<Cache> =
                kept.iter().flat_map(|kept| [with(*kept), with(*kept).rotated(head_width)]).collect();
            // Plain types, and heads of no multiple of 64, are not rotated; the nearest so far is known.
            tried.dedup();
            tried.retain(|cache| *cache != best.1);
            for cache in tried {
                let distance = distance(cache)?;
                if distance < best.0 {
                    best = (distance, cache);
                }
            }
        }
        Ok(Some(best.1).filter(Cache::is_in_blocks))
    }
}
