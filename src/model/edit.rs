//! Planted mistakes in data: what a node reads or writes, changed on the way.

use crate::model::graph::{Rope, WeightRef};
use crate::numerics::Storage;

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
    /// For a cached input: the rows of a step after the first are not yet in the cache, which holds zeros.
    UnwrittenStep,
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
            Change::UnwrittenStep => Reach::Start,
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
            | Change::Overflow(Limit::Above(_))
            | Change::Round(_)
            | Change::Reinterpret { .. } => Reach::Row,
        }
    }
}
