//! Planted mistakes in data: what a node reads or writes, changed on the way.

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

/// A change of a matrix whose rows are token positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Every value times a factor.
    Scale(f64),
}
