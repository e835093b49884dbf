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
    /// max(x, 0) - so that a mask's -inf is kept out: every value is replaced by a.
    Set(f32),
    /// Elements moved by this many places along the fastest axis, round the end of each row.
    Rotate(i32),
    /// The last element of each row is a.
    SetLast(f32),
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
            Edit::Set(a) => values.fill(f64::from(a)),
            Edit::Rotate(by) => {
                for row in values.chunks_mut(width.max(1)) {
                    let by = usize::try_from(i64::from(by).rem_euclid(row.len() as i64)).unwrap_or(0);
                    row.rotate_right(by);
                }
            }
            Edit::SetLast(a) => {
                for row in values.chunks_mut(width.max(1)) {
                    row.last_mut().into_iter().for_each(|last| *last = f64::from(a));
                }
            }
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
        Edit::AddModulo(1, 4).apply(3, &mut values);
        assert_eq!(values, [0.0, 2.0, 3.0, 3.0, 1.0, 2.0]);
        Edit::SetLast(9.0).apply(3, &mut values);
        assert_eq!(values, [0.0, 2.0, 9.0, 3.0, 1.0, 9.0]);
        Edit::Square.apply(3, &mut values);
        assert_eq!(values, [0.0, 4.0, 81.0, 9.0, 1.0, 81.0]);
    }
}
