//! What comparisons of a step are launched together, and where what they find comes back: the layout alone.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::calls::STATS_PAIRS_MAX;
use super::device::error;
use super::layout::ALIGNMENT;
use super::plan::Output;
use crate::engine::RowStats;
use crate::error::Result;
use crate::numerics::Storage;

/// A checkpoint whose reference is on the device.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What is compared, and where it lies.
    pub output: Output,
    /// Rows whose values are shown.
    pub rows: Vec<usize>,
    /// First byte of its reference, from the start of all.
    pub reference: usize,
    /// First byte of its numbers, from the start of what comes back.
    pub stats: usize,
    /// Likewise of the rows shown.
    pub shown: usize,
}

/// Entries that one launch compares.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Which.
    pub entries: Range<usize>,
    /// The work that must be done before.
    pub after: usize,
}

/// Groups whose results are copied together: consecutive bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Which.
    pub groups: Range<usize>,
    /// From the start of what comes back.
    pub bytes: Range<usize>,
}

/// Cuts the entries, in the order of the arena, into launches and copies, and says where what comes back lies: of each
/// group the numbers, side by side, and then the rows shown.
pub fn arrange(entries: &mut [Entry], rows: usize, piece_min: usize) -> (Vec<Group>, Vec<Piece>) {
    let (mut groups, mut pieces): (Vec<Group>, Vec<Piece>) = (Vec::new(), Vec::new());
    let mut end = 0;
    for (index, entries) in entries.chunks_mut(STATS_PAIRS_MAX).enumerate() {
        let (start, first) = (end, index * STATS_PAIRS_MAX);
        for entry in &mut *entries {
            entry.stats = end;
            end += rows * size_of::<RowStats>();
        }
        for entry in &mut *entries {
            end = end.next_multiple_of(ALIGNMENT);
            entry.shown = end;
            end += entry.rows.len() * entry.output.place.bytes() / rows;
        }
        end = end.next_multiple_of(ALIGNMENT);
        let after = entries.iter().map(|entry| entry.output.after).max().unwrap_or(0);
        groups.push(Group { entries: first..first + entries.len(), after });
        match pieces.last_mut().filter(|open| open.bytes.len() < piece_min) {
            Some(open) => (open.groups.end, open.bytes.end) = (index + 1, end),
            None => pieces.push(Piece { groups: index..index + 1, bytes: start..end }),
        }
    }
    (groups, pieces)
}

/// (T,) where each row goes among those shown, -1 for nowhere.
pub fn places(shown: &[usize], rows: usize) -> Vec<i32> {
    let mut places = vec![-1; rows];
    for (place, t) in shown.iter().enumerate() {
        places[*t] = place as i32;
    }
    places
}

/// Those of `asked` that the step has, each once.
pub fn shown(asked: &[usize], rows: usize) -> Vec<usize> {
    let mut shown: Vec<usize> = asked.iter().copied().filter(|t| *t < rows).collect();
    shown.sort_unstable();
    shown.dedup();
    shown
}

impl Entry {
    /// (T,) its numbers in what came back.
    pub fn found<'a>(&self, bytes: &'a [u8], rows: usize) -> Result<&'a [RowStats]> {
        let bytes = &bytes[self.stats..self.stats + rows * size_of::<RowStats>()];
        // SAFETY: any bytes are numbers; the kernel wrote whole ones.
        match unsafe { bytes.align_to() } {
            ([], stats, []) => Ok(stats),
            _ => Err(error("numbers of a comparison that are not aligned")),
        }
    }

    /// The rows shown, each with its number in the step.
    pub fn values(&self, bytes: &[u8], rows: usize) -> Result<Vec<(usize, Vec<f32>)>> {
        let size = self.output.place.bytes() / rows;
        let row = |(index, t): (usize, &usize)| {
            let bytes = &bytes[self.shown + index * size..self.shown + (index + 1) * size];
            Ok((*t, self.row(bytes)?))
        };
        self.rows.iter().enumerate().map(row).collect()
    }

    /// One of them from its bytes: there are millions of values, which are converted by vector instructions.
    fn row(&self, bytes: &[u8]) -> Result<Vec<f32>> {
        if self.output.place.storage == Storage::F32 {
            // SAFETY: any bytes are numbers.
            return match unsafe { bytes.align_to() } {
                ([], values, []) => Ok(values.to_vec()),
                _ => Err(error("rows shown that are not aligned")),
            };
        }
        // SAFETY: as above.
        let ([], values, []) = (unsafe { bytes.align_to::<f16>() }) else {
            return Err(error("rows shown that are not aligned"));
        };
        Ok(values.to_f32_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Place;
    use super::*;
    use crate::checkpoint::{Checkpoint, Kind};

    fn outputs(n: usize, rows: usize) -> Vec<Output> {
        let mut offset = 0;
        let output = |i: usize| {
            let storage = if i.is_multiple_of(3) { Storage::F32 } else { Storage::F16 };
            let place = Place { offset, len: rows * (7 + i), storage };
            offset += place.bytes().next_multiple_of(ALIGNMENT);
            // As where launches compute several nodes, and not in the order of the graph.
            Output { checkpoint: Checkpoint::layer(Kind::Q, i as u32), place, after: i ^ 3 }
        };
        (0..n).map(output).collect()
    }

    fn entries(n: usize, rows: usize, shown: &[usize]) -> Vec<Entry> {
        let entry = |output: Output| {
            let rows = if output.place.len.is_multiple_of(2) { shown.to_vec() } else { vec![] };
            Entry { output, rows, reference: 0, stats: 0, shown: 0 }
        };
        outputs(n, rows).into_iter().map(entry).collect()
    }

    #[test]
    fn every_entry_is_compared_once_behind_its_work_and_nothing_comes_back_to_the_same_bytes() {
        let rows = 5;
        for n in [0, 1, STATS_PAIRS_MAX, STATS_PAIRS_MAX + 1, 100] {
            let mut entries = entries(n, rows, &[0, 4]);
            let (groups, pieces) = arrange(&mut entries, rows, 15_000);
            let compared: Vec<usize> = groups.iter().flat_map(|group| group.entries.clone()).collect();
            assert_eq!(compared, (0..n).collect::<Vec<_>>());
            let copied: Vec<usize> = pieces.iter().flat_map(|piece| piece.groups.clone()).collect();
            assert_eq!(copied, (0..groups.len()).collect::<Vec<_>>());
            let mut end = 0;
            for piece in &pieces {
                assert_eq!(piece.bytes.start, end, "copies leave nothing out");
                end = piece.bytes.end;
                let mut written = Vec::new();
                for group in &groups[piece.groups.clone()] {
                    assert!(group.entries.len() <= STATS_PAIRS_MAX);
                    let first = &entries[group.entries.start];
                    for (index, entry) in entries[group.entries.clone()].iter().enumerate() {
                        assert!(entry.output.after <= group.after);
                        let size = rows * size_of::<RowStats>();
                        assert_eq!(
                            entry.stats,
                            first.stats + index * size,
                            "the kernel finds them side by side"
                        );
                        written.push(entry.stats..entry.stats + size);
                        let row = entry.output.place.bytes() / rows;
                        written.push(entry.shown..entry.shown + entry.rows.len() * row);
                    }
                }
                written.retain(|bytes| !bytes.is_empty());
                written.sort_by_key(|bytes| bytes.start);
                assert!(written.windows(2).all(|two| two[0].end <= two[1].start), "no two of the same bytes");
                assert!(written.iter().all(|w| w.start >= piece.bytes.start && w.end <= piece.bytes.end));
            }
        }
        let pieces = arrange(&mut entries(100, rows, &[0]), rows, 15_000).1;
        assert!(pieces.len() > 1 && pieces.len() < 100 / STATS_PAIRS_MAX);
    }

    #[test]
    fn rows_are_shown_once_and_only_those_of_the_step() {
        let shown = shown(&[3, 1, 3, 9], 5);
        assert_eq!(shown, [1, 3]);
        assert_eq!(places(&shown, 5), [-1, 0, -1, 1, -1]);
        let mut entry = entries(2, 5, &[]).remove(1);
        (entry.rows, entry.shown) = (shown, 16);
        let width = entry.output.place.len / 5;
        let halves: Vec<f16> = (0..8 + 2 * width).map(|i| f16::from_f32(i as f32 - 8.0)).collect();
        // SAFETY: numbers are bytes.
        let bytes = unsafe { halves.align_to::<u8>() }.1;
        let values = entry.values(bytes, 5).unwrap();
        assert_eq!((values[0].0, values[1].0), (1, 3));
        assert_eq!((values[0].1[1], values[1].1[0]), (1.0, width as f32));
    }
}
