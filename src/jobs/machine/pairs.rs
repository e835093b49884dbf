//! The rows of a node beside the reference's.

use std::borrow::Cow;
use std::collections::HashMap;

use parity_dump::Dump;
use parity_record::map::Capture;

use crate::checkpoint::Checkpoint;
use crate::compare::{Accumulator, Comparison, Status, Tolerances};
use crate::dump::Recording;

/// The values of a node as a dump has them: token rows first, attention matrices as (H, T, S).
pub struct Rows<'a> {
    /// Which node.
    pub id: Checkpoint,
    /// Position of each row.
    pub positions: &'a [u32],
    /// Slowest axis first.
    pub shape: &'a [usize],
    /// In that shape.
    pub values: &'a [f32],
}

impl<'a> Rows<'a> {
    /// Of a node that is shown as `capture` says.
    pub fn new(id: Checkpoint, capture: &'a Capture, positions: &'a [u32], values: &'a [f32]) -> Rows<'a> {
        Rows { id, positions, shape: &capture.shape, values }
    }

    /// Where the elements of a row begin, and how many lie there: of a matrix (H, T, S) one piece for each head, cut to
    /// the positions that the row's token can see.
    fn pieces(&self, row: usize) -> Vec<std::ops::Range<usize>> {
        let piece = |start: usize, width: usize| start..start + width;
        match (self.id.kind().is_optional(), self.shape) {
            (true, &[heads, rows, cached]) => {
                let seen = cached.min(self.positions[row] as usize + 1);
                (0..heads).map(|head| piece((head * rows + row) * cached, seen)).collect()
            }
            _ => {
                let width = self.values.len() / self.positions.len().max(1);
                vec![piece(row * width, width)]
            }
        }
    }

    /// The elements of a row.
    fn row(&self, row: usize) -> Cow<'a, [f32]> {
        match &self.pieces(row)[..] {
            [whole] => Cow::Borrowed(&self.values[whole.clone()]),
            pieces => pieces.iter().flat_map(|piece| &self.values[piece.clone()]).copied().collect(),
        }
    }

    /// The last row of what is no matrix.
    pub fn last(&self) -> Option<&'a [f32]> {
        let width = self.values.len() / self.positions.len().max(1);
        self.values.get(self.values.len().checked_sub(width)?..)
    }

    /// Both sides of every row at a position below `common` that the reference has.
    pub fn each_beside(&self, dump: &Dump, common: u32, mut see: impl FnMut(u32, &[f32], &[f32])) {
        let mut buffer = Vec::new();
        for (row, &position) in self.positions.iter().enumerate().filter(|(_, position)| **position < common)
        {
            if let Some(theirs) = Recording::row(dump, self.id, position, &mut buffer) {
                see(position, &self.row(row), theirs);
            }
        }
    }

    /// Puts the reference's rows into `theirs`, laid out as these, and 1 into `known` wherever one stands.
    pub fn take(&self, dump: &Dump, common: u32, theirs: &mut [f32], known: &mut [f32]) {
        let mut buffer = Vec::new();
        for (row, &position) in self.positions.iter().enumerate().filter(|(_, position)| **position < common)
        {
            let Some(values) = Recording::row(dump, self.id, position, &mut buffer) else { continue };
            let pieces = self.pieces(row);
            if values.len() != pieces.iter().map(ExactSizeIterator::len).sum::<usize>() {
                continue;
            }
            let mut rest = values;
            for piece in pieces {
                let (first, after) = rest.split_at(piece.len());
                theirs[piece.clone()].copy_from_slice(first);
                known[piece].fill(1.0);
                rest = after;
            }
        }
    }
}

/// Both sides of all nodes.
#[derive(Default)]
pub struct Pairs {
    by_id: HashMap<Checkpoint, Pair>,
}

/// The two sides of one node.
struct Pair {
    sums: Accumulator,
    row_shape: Vec<usize>,
    tolerated: bool,
    /// Token rows of the candidate at positions that the reference has the tokens of.
    expected: u64,
    /// Whether a row of the reference has another number of elements.
    misshapen: bool,
}

impl Pairs {
    /// Compares rows; whether the reference has any of them.
    pub fn compare(&mut self, dump: &Dump, common: u32, tolerances: &Tolerances, rows: &Rows<'_>) -> bool {
        let tolerance = tolerances.of(rows.id);
        let pair = self.by_id.entry(rows.id).or_insert_with(|| Pair {
            sums: Accumulator::new(tolerance),
            row_shape: rows.shape.get(1..).unwrap_or_default().to_vec(),
            tolerated: !tolerance.is_empty(),
            expected: 0,
            misshapen: false,
        });
        pair.expected += rows.positions.iter().filter(|position| **position < common).count() as u64;
        let mut there = false;
        rows.each_beside(dump, common, |position, ours, theirs| {
            there = true;
            match ours.len() == theirs.len() {
                true => pair.sums.row(position, ours, theirs),
                false => pair.misshapen = true,
            }
        });
        there
    }

    /// The comparisons; none where there is no reference.
    pub fn finish(self, reference: Option<&Dump>) -> HashMap<Checkpoint, Comparison> {
        let Some(reference) = reference else { return HashMap::new() };
        let finished = self.by_id.into_iter().map(|(id, pair)| {
            let rows_compared = pair.sums.n_rows() as u64;
            let status = match pair.misshapen {
                true => Status::Shape(pair.row_shape.clone(), Recording::row_shape(reference, id)),
                false if rows_compared == 0 => Status::MissingReference,
                false => Status::Compared,
            };
            let within = (pair.tolerated && rows_compared > 0).then(|| pair.sums.within_tolerance());
            let comparison = Comparison {
                checkpoint: id,
                status,
                numbers: pair.sums.numbers(&pair.row_shape),
                within_tolerance: within,
                row_shape: pair.row_shape,
                rows_compared,
                rows_expected: pair.expected,
                seen: None,
            };
            (id, comparison)
        });
        finished.collect()
    }
}
