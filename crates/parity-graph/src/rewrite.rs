//! A mistake as a small rewrite of one node: another parameter, another source, an edit of what goes in or comes out.
//!
//! The same rewrite is injected into a graph that our own engine executes, tried on a node whose recorded output is
//! wrong, and written into llama.cpp's own graph before it computes.

use crate::graph::{Graph, Id};
use crate::op::Op;

/// One node computed differently.
#[derive(Clone, Debug, PartialEq)]
pub struct Rewrite {
    /// The node.
    pub node: Id,
    /// What is different about it.
    pub change: Change,
}

/// What is different about a node.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Other words of `op_params`: (word, bits).
    Words(Vec<(usize, u32)>),
    /// Another op on the same sources, with these words.
    Op(Op, Vec<(usize, u32)>),
    /// Another source in a slot, or none.
    Source {
        /// Which.
        slot: usize,
        /// What is read instead.
        with: Option<Id>,
    },
    /// Two sources exchanged.
    Exchange(usize, usize),
    /// The values of a source are edited before they are read.
    SourceEdit {
        /// Which.
        slot: usize,
        /// How.
        edit: Edit,
    },
    /// The values of a source are passed on as the result.
    Bypass {
        /// Which.
        slot: usize,
    },
    /// The result is edited.
    ResultEdit(Edit),
}

/// A change of the values of a tensor, element by element or row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edit {
    /// x + a
    Add(f32),
    /// x · a
    Multiply(f32),
    /// x²
    Square,
    /// (x + a) mod n: indices.
    AddModulo(i32, i32),
    /// a for b and b for a: indices.
    Exchange(i32, i32),
    /// b for a: indices.
    Replace(i32, i32),
    /// 1/x
    Reciprocal,
    /// Every value is replaced by a.
    Set(f32),
    /// Elements moved by this many places along the fastest axis, round the end of each row.
    Rotate(i32),
    /// The first n elements of each row move one place on: the last of them is lost, the first becomes zero.
    Lag(usize),
    /// The first n elements of each row are a.
    SetFirst(usize, f32),
    /// The last element of each row is a.
    SetLast(f32),
    /// Rows of a mask (0 where a position is seen, -inf where not): a window is wider by one position, or narrower.
    Window {
        /// Whether it is wider.
        wider: bool,
    },
}

impl Edit {
    /// Applies the edit to rows of `width` elements.
    pub fn apply(self, width: usize, values: &mut [f64]) {
        match self {
            Edit::Add(a) => values.iter_mut().for_each(|x| *x += f64::from(a)),
            Edit::Multiply(a) => values.iter_mut().for_each(|x| *x *= f64::from(a)),
            Edit::Square => values.iter_mut().for_each(|x| *x *= *x),
            Edit::AddModulo(a, n) => {
                let n = f64::from(n.max(1));
                values.iter_mut().for_each(|x| *x = (*x + f64::from(a)).rem_euclid(n));
            }
            Edit::Exchange(a, b) => {
                let (a, b) = (f64::from(a), f64::from(b));
                values.iter_mut().for_each(|x| {
                    *x = if *x == a {
                        b
                    } else if *x == b {
                        a
                    } else {
                        *x
                    }
                });
            }
            Edit::Replace(a, b) => {
                let (a, b) = (f64::from(a), f64::from(b));
                values.iter_mut().filter(|x| **x == a).for_each(|x| *x = b);
            }
            Edit::Reciprocal => values.iter_mut().for_each(|x| *x = x.recip()),
            Edit::Set(a) => values.fill(f64::from(a)),
            Edit::Rotate(by) => {
                for row in values.chunks_mut(width.max(1)) {
                    let by = usize::try_from(i64::from(by).rem_euclid(row.len() as i64)).unwrap_or(0);
                    row.rotate_right(by);
                }
            }
            Edit::Lag(n) => {
                for row in values.chunks_mut(width.max(1)) {
                    let moved = n.min(row.len());
                    row[..moved].rotate_right(moved.min(1));
                    row.iter_mut().take(moved.min(1)).for_each(|first| *first = 0.0);
                }
            }
            Edit::SetFirst(n, a) => {
                for row in values.chunks_mut(width.max(1)) {
                    row.iter_mut().take(n).for_each(|value| *value = f64::from(a));
                }
            }
            Edit::SetLast(a) => {
                for row in values.chunks_mut(width.max(1)) {
                    row.last_mut().into_iter().for_each(|last| *last = f64::from(a));
                }
            }
            Edit::Window { wider } => window(width, values, wider),
        }
    }
}

/// Moves the far end of a window by one position. Where rows begin to see is where the window ends, if that is not the
/// first column; a row that sees as many positions as such a row is as wide as the window, wherever it begins.
fn window(width: usize, values: &mut [f64], wider: bool) {
    let seen = |row: &[f64]| {
        let first = row.iter().position(|value| *value == 0.0)?;
        Some((first, row.iter().filter(|value| **value == 0.0).count()))
    };
    let rows = values.chunks(width.max(1)).filter_map(seen);
    let Some(size) = rows.filter(|(first, _)| *first > 0).map(|(_, count)| count).max() else { return };
    for row in values.chunks_mut(width.max(1)) {
        match seen(row) {
            Some((first, _)) if wider && first > 0 => row[first - 1] = 0.0,
            Some((first, count)) if !wider && count == size && size > 1 => row[first] = f64::NEG_INFINITY,
            _ => {}
        }
    }
}

impl Rewrite {
    /// The graph with the rewrite in it, where it is one of parameters and sources alone; edits of values are the
    /// business of who executes the node.
    #[must_use]
    pub fn applied(&self, graph: &Graph) -> Graph {
        let mut graph = graph.clone();
        let tensor = &mut graph.tensors[self.node];
        match &self.change {
            Change::Words(words) => words.iter().for_each(|&(word, bits)| tensor.params.0[word] = bits),
            Change::Op(op, words) => {
                tensor.op = op.clone();
                words.iter().for_each(|&(word, bits)| tensor.params.0[word] = bits);
            }
            Change::Source { slot, with } => {
                if tensor.srcs.len() <= *slot {
                    tensor.srcs.resize(slot + 1, None);
                }
                tensor.srcs[*slot] = *with;
                while tensor.srcs.last() == Some(&None) {
                    tensor.srcs.pop();
                }
            }
            Change::Exchange(a, b) if tensor.srcs.len() > *a.max(b) => tensor.srcs.swap(*a, *b),
            Change::Exchange(..)
            | Change::SourceEdit { .. }
            | Change::Bypass { .. }
            | Change::ResultEdit(_) => {}
        }
        graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_made_row_by_row() {
        let mut values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        Edit::Rotate(1).apply(3, &mut values);
        assert_eq!(values, [3.0, 1.0, 2.0, 6.0, 4.0, 5.0]);
        let mut ids = [3.0, 1.0, 2.0, 1.0];
        Edit::Exchange(1, 3).apply(2, &mut ids);
        Edit::Replace(2, 1).apply(2, &mut ids);
        assert_eq!(ids, [1.0, 3.0, 1.0, 3.0]);
        Edit::AddModulo(1, 4).apply(3, &mut values);
        assert_eq!(values, [0.0, 2.0, 3.0, 3.0, 1.0, 2.0]);
        Edit::SetLast(9.0).apply(3, &mut values);
        assert_eq!(values, [0.0, 2.0, 9.0, 3.0, 1.0, 9.0]);
        Edit::Square.apply(3, &mut values);
        assert_eq!(values, [0.0, 4.0, 81.0, 9.0, 1.0, 81.0]);
        Edit::Lag(2).apply(3, &mut values);
        assert_eq!(values, [0.0, 0.0, 81.0, 0.0, 9.0, 81.0]);
        Edit::SetFirst(2, 4.0).apply(3, &mut values);
        Edit::Reciprocal.apply(3, &mut values);
        assert_eq!(values, [0.25, 0.25, 1.0 / 81.0, 0.25, 0.25, 1.0 / 81.0]);
    }

    #[test]
    fn a_window_grows_and_shrinks_at_its_far_end() {
        const X: f64 = f64::NEG_INFINITY;
        // A window of two positions over four tokens, and a row that sees nothing.
        let mask = [0.0, X, X, X, 0.0, 0.0, X, X, X, 0.0, 0.0, X, X, X, 0.0, 0.0, X, X, X, X];
        let (mut wide, mut narrow) = (mask, mask);
        Edit::Window { wider: true }.apply(4, &mut wide);
        assert_eq!(wide, [0.0, X, X, X, 0.0, 0.0, X, X, 0.0, 0.0, 0.0, X, X, 0.0, 0.0, 0.0, X, X, X, X]);
        Edit::Window { wider: false }.apply(4, &mut narrow);
        assert_eq!(narrow, [0.0, X, X, X, X, 0.0, X, X, X, X, 0.0, X, X, X, X, 0.0, X, X, X, X]);
        // Without a window nothing changes.
        let whole = [0.0, X, X, 0.0, 0.0, X, 0.0, 0.0, 0.0];
        let mut same = whole;
        Edit::Window { wider: false }.apply(3, &mut same);
        Edit::Window { wider: true }.apply(3, &mut same);
        assert_eq!(same, whole);
    }
}
