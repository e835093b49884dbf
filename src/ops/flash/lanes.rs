//! Attention on Vulkan without matrix units (ggml-vulkan/vulkan-shaders/flash_attn.comp).
//!
//! q' = h(scale·q). The threads of a row take its positions in turn, block by block. Each keeps the largest of its
//! scores so far, plus an offset, and p = h(e^(s - max)); the weights are summed in f32, O = h(O + h(p·v)) in f16. At the
//! end the threads are brought to one maximum and added up in f16, neighbours first, then in order, and divided: h(O·h(1/L)). Where the
//! positions are split, the parts are joined in f32 instead (flash_attn_split_k_reduce.comp).

use std::ops::Range;

use super::row::{Attention, QueryRow};
use super::sums::{OFFSET, Off, Outcome, Sums, Weight};
use crate::arithmetic::Lanes;
use crate::scalar::Scalar;

impl<S: Scalar> Attention<'_, '_, S> {
    /// A row; how far scores and values may be `off`, where between what it may be is wanted.
    pub fn on_lanes(&self, row: &QueryRow, lanes: Lanes, off: Option<Off<'_>>) -> Outcome {
        let width = self.v.shape()[3];
        let Some(part) = lanes.part else {
            let mut sums = self.part_on_lanes(row, lanes, off, 0..row.seen.len(), 0);
            if let Some(sink) = row.sink.filter(|_| !sums.is_empty()) {
                sums.raise(sink, 0.0, 0.0);
                let weight = Weight::of(sink, sums.max, sums.of_max);
                sums.total += weight.value;
                sums.error += weight.off();
            }
            return Outcome::in_half(sums);
        };
        let positions = self.k.shape()[2];
        let first = |position: usize| row.seen.partition_point(|seen| seen.position < position);
        let parts: Vec<Sums> = (0..positions)
            .step_by(part.max(1))
            .map(|start| self.part_on_lanes(row, lanes, off, first(start)..first(start + part), start))
            .collect();
        Outcome::joined(&parts, row.sink, width)
    }

    /// The seen positions of a range, of a part that begins at position `start`.
    fn part_on_lanes(
        &self,
        row: &QueryRow,
        lanes: Lanes,
        off: Option<Off<'_>>,
        range: Range<usize>,
        start: usize,
    ) -> Sums {
        let width = self.v.shape()[3];
        let error = |seen: usize| off.map_or(0.0, |off| off.scores[seen]);
        let mut threads = vec![Sums::new(width); lanes.threads];
        let mut from = range.start;
        while from < range.end {
            let block = (row.seen[from].position - start) / lanes.block;
            let end = start + (block + 1) * lanes.block;
            let to = from + row.seen[from..range.end].partition_point(|seen| seen.position < end);
            for (t, sums) in threads.iter_mut().enumerate() {
                let own = || (from..to).filter(|&i| (row.seen[i].position - start) % lanes.threads == t);
                let Some(top) = own().max_by(|&a, &b| row.seen[a].z.total_cmp(&row.seen[b].z)) else {
                    continue;
                };
                sums.raise(row.seen[top].z + OFFSET, error(top), 0.0);
                for i in own() {
                    let p = Weight::of(row.seen[i].z, sums.max, error(i) + sums.of_max).half();
                    sums.total += p.value;
                    sums.error += p.off();
                    let position = row.seen[i].position;
                    let v: Vec<f64> = self.value(row.at, position).iter().map(|v| v.to_f64()).collect();
                    sums.add(p, &v, &off.map_or_else(Vec::new, |off| (off.values)(position)));
                }
            }
            from = to;
        }
        let seen = threads.iter().filter(|sums| !sums.is_empty());
        let Some(top) = seen.max_by(|a, b| a.max.total_cmp(&b.max)).map(|top| (top.max, top.of_max)) else {
            return Sums::new(width);
        };
        threads.iter_mut().for_each(|sums| sums.raise(top.0, top.1, 0.0));
        // Neighbours exchange what they have with the thread twice as far away each time.
        let mut far = 1;
        while far < lanes.neighbours.min(lanes.threads) {
            let before = threads.clone();
            for (t, sums) in threads.iter_mut().enumerate() {
                before.get(t ^ far).into_iter().for_each(|other| sums.join(other));
            }
            far *= 2;
        }
        let mut first = threads.into_iter().step_by(lanes.neighbours);
        let mut out = first.next().unwrap_or_else(|| Sums::new(width));
        first.for_each(|sums| out.join(&sums));
        (out.max, out.of_max) = top;
        out
    }
}
