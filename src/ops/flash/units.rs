//! Attention on CUDA's matrix units (ggml-cuda/fattn-mma-f16.cuh, fattn-common.cuh).
//!
//! q' = h(h(scale)·h(q)). Positions come in batches; within one the warps take 16 at a time in turn. Each warp keeps the
//! largest of its scores so far, plus an offset, and p = e^(s - max); the weights are summed as they are, the values
//! times h(p): 16 products are added to the sum at once, which is rounded to f16. All batches of all tiles of queries
//! and heads lie in one line that the blocks of threads share evenly ("stream-k"), so that a row is cut where a block
//! ends. What warps and blocks have is joined in f32.

use super::row::{Attention, QueryRow};
use super::sums::{OFFSET, Off, Outcome, Sums, Weight};
use crate::arithmetic::Units;
use crate::scalar::Scalar;

/// Positions that a matrix unit adds up at a time.
const GROUP: usize = 16;
/// Factors below are 0: `SOFTMAX_FTZ_THRESHOLD` is e^-20.
const LEAST: f64 = 2.061_153_622_438_558e-9;

impl<S: Scalar> Attention<'_, '_, S> {
    /// A row; how far scores and values may be `off`, where between what it may be is wanted.
    pub fn on_units(&self, row: &QueryRow, units: Units, off: Option<Off<'_>>) -> Outcome {
        let width = self.v.shape()[3];
        let mut parts: Vec<Sums> = Vec::new();
        for (first, last) in self.cuts(row.at, units) {
            for warp in 0..units.warps {
                let sums = self.warp(row, units, off, first..last, warp);
                if !sums.is_empty() {
                    parts.push(sums);
                }
            }
        }
        Outcome::joined(&parts, row.sink, width)
    }

    /// The batches of a row, cut where a block ends: first and one behind the last.
    fn cuts(&self, [b, h, n]: [usize; 3], units: Units) -> Vec<(usize, usize)> {
        let batches = self.k.shape()[2].div_ceil(units.batch);
        let Some(blocks) = units.blocks else { return (0..batches).map(|at| (at, at + 1)).collect() };
        let (sequences, heads) = (self.shape[0], self.shape[1]);
        let (n, queries) = self.place(n);
        let kv = self.k.shape()[1];
        let (tiles, groups) = (queries.div_ceil(units.queries), (heads / kv).div_ceil(units.heads));
        let tile = ((b * kv + h / (heads / kv)) * groups + h % (heads / kv) / units.heads) * tiles
            + n / units.queries;
        let (start, total) = (tile * batches, sequences * kv * groups * tiles * batches);
        let mut cuts: Vec<usize> = (0..=blocks)
            .map(|block| block * total / blocks.max(1))
            .filter(|cut| (start..=start + batches).contains(cut))
            .map(|cut| cut - start)
            .chain([0, batches])
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }

    /// The sums of a warp over some batches.
    fn warp(
        &self,
        row: &QueryRow,
        units: Units,
        off: Option<Off<'_>>,
        batches: std::ops::Range<usize>,
        warp: usize,
    ) -> Sums {
        let error = |seen: usize| off.map_or(0.0, |off| off.scores[seen]);
        let first = |position: usize| row.seen.partition_point(|seen| seen.position < position);
        let mut sums = Sums::new(self.v.shape()[3]);
        for batch in batches {
            let start = batch * units.batch;
            let range = first(start)..first(start + units.batch);
            let group = |seen: usize| (row.seen[seen].position - start) / GROUP;
            let own = || range.clone().filter(|&seen| group(seen) % units.warps == warp);
            let Some(top) = own().max_by(|&a, &b| row.seen[a].z.total_cmp(&row.seen[b].z)) else { continue };
            sums.raise(row.seen[top].z + OFFSET, error(top), LEAST);
            let mut open: Vec<(Weight, Vec<f64>, Vec<f64>)> = Vec::with_capacity(GROUP);
            let mut at = None;
            for seen in own() {
                if at.replace(group(seen)).is_some_and(|before| before != group(seen)) {
                    sums.add_group(&open);
                    open.clear();
                }
                let p = Weight::of(row.seen[seen].z, sums.max, error(seen) + sums.of_max);
                sums.total += p.value;
                sums.error += p.off();
                let position = row.seen[seen].position;
                let v = self.value(row.at, position).iter().map(|v| v.to_f64()).collect();
                open.push((p.half(), v, off.map_or_else(Vec::new, |off| (off.values)(position))));
            }
            sums.add_group(&open);
        }
        sums
    }
}
