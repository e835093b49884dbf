//! Injected mistakes in data: what a node reads or writes, changed on the way, and how the bytes of a weight are read.

pub use parity_graph::rewrite::Misreading;

use crate::model::graph::{Rope, WeightRef};
use crate::numerics::Storage;

/// How the elements of a weight matrix (R, C) are found in its buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reading {
    /// w[r, c] = buffer[r·C + c].
    AsStored,
    /// w[r, c] = buffer[c·R + r]: the buffer taken for (C, R).
    Transposed,
    /// w[r, c] = buffer[(r + k)·C + c], rows counted round the end.
    RowShift(i64),
    /// The rows of every head of `width` rows in another order: halves (i, i + width/2) where the file has
    /// pairs (2i, 2i + 1), or the reverse.
    HeadRows {
        /// Rows of one head.
        width: usize,
        /// Whether pairs are taken for halves, or halves for pairs.
        pairs_for_halves: bool,
    },
    /// The memory was never filled: zeros.
    Unfilled,
    /// Its blocks are decoded wrongly.
    Misread(Misreading),
}

/// A change of what goes into a node or comes out of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Edit {
    /// Input `index` of the node is changed before the op reads it; other readers see it unchanged.
    Input {
        /// Index into the node's inputs.
        index: usize,
        /// The change.
        change: Change,
    },
    /// The output is changed, for every later reader.
    Output(Change),
}

impl Edit {
    /// Whether the edit is on the output.
    pub fn is_output(&self) -> bool {
        matches!(self, Edit::Output(_))
    }
}

/// A change of a matrix (rows, width) whose rows are the token positions of one step.
///
/// Some changes mix the rows of a step ([`Change::reach`]): a judge that looks at several steps applies them
/// step by step.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Every value times a factor.
    Scale(f64),
    /// Every value plus a constant.
    Offset(f64),
    /// Every value replaced.
    Fill(f64),
    /// A weight vector (width,) added to every row.
    AddVector {
        /// (width,)
        vector: WeightRef,
        /// How often it is added.
        times: f64,
    },
    /// Every head turned.
    Rope(Rope),
    /// Column c takes what column `from[c]` held.
    Columns(Vec<u32>),
    /// Column c is what column `from[c]` held; the row is as wide as the list.
    Gathered(Vec<u32>),
    /// Columns of this range are zeros.
    Without(std::ops::Range<usize>),
    /// Row r takes what row r - k held; the first k rows stay.
    RowsBehind(usize),
    /// Every row takes what the first row held.
    FirstRow,
    /// The buffer (H, T, E) read as (T, H, E): a transposition left out.
    HeadsFirst {
        /// H
        heads: usize,
    },
    /// Rows lie `stride` values apart in the buffer but are read as if they lay side by side. The gap
    /// holds zeros; where the stride is below the width, a row starts within the one before.
    Stride(usize),
    /// One value of the last row is NaN: the one in column width/2.
    Nan,
    /// Values beyond the limit are infinite.
    Overflow(Limit),
    /// The last row holds what lay in memory: numbers of any size.
    Garbage,
    /// Rounded to a narrower type and back.
    Round(Storage),
    /// Written as one 16-bit type, read as another.
    Reinterpret {
        /// The type it is written in.
        from: Storage,
        /// The type it is read as.
        to: Storage,
    },
    /// For a cached input: the rows of a step after the first are not yet in the cache.
    UnwrittenStep {
        /// Whether their slots hold the row before the step, or zeros.
        held: bool,
    },
}

/// Beyond which magnitude a value overflows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A magnitude.
    Above(f64),
    /// The largest magnitude of the matrix: what overflows first.
    Largest,
}

/// Which rows of its step decide a row's new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Its own.
    Row,
    /// Its own, and where the step starts.
    Start,
    /// Those up to its own.
    Before,
    /// All.
    Step,
}

impl Change {
    /// Which rows of its step decide a row's new value.
    pub fn reach(&self) -> Reach {
        match self {
            Change::UnwrittenStep { .. } => Reach::Start,
            Change::RowsBehind(_) | Change::FirstRow | Change::Stride(_) => Reach::Before,
            Change::HeadsFirst { .. } | Change::Nan | Change::Overflow(Limit::Largest) | Change::Garbage => {
                Reach::Step
            }
            Change::Scale(_)
            | Change::Offset(_)
            | Change::Fill(_)
            | Change::AddVector { .. }
            | Change::Rope(_)
            | Change::Columns(_)
            | Change::Gathered(_)
            | Change::Without(_)
            | Change::Overflow(Limit::Above(_))
            | Change::Round(_)
            | Change::Reinterpret { .. } => Reach::Row,
        }
    }
}
