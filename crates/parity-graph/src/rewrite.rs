//! A mistake as a small rewrite of one node: another parameter, another source, an edit of what goes in or comes out.
//!
//! The same rewrite is injected into a graph that our own engine executes, tried on a node whose recorded output is
//! wrong, and written into llama.cpp's own graph before it computes.

use std::ops::Range;

pub use crate::edit::{Edit, Narrow};
use crate::graph::{Graph, Id, Tensor};
use crate::op::Op;
use crate::params::Params;

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
    /// The blocks of a weight are decoded wrongly.
    Misread {
        /// Which source it is.
        slot: usize,
        /// How.
        how: Misreading,
    },
    /// Keys or values of the step, where it is not the first, are read before they are written. Which ones they are is told
    /// by the mask.
    Unwritten {
        /// The cached sources.
        slots: Vec<usize>,
        /// The mask.
        mask: usize,
        /// Whether their places hold the row before the step, or zeros.
        held: bool,
    },
    /// The rows of a state that a node before it picks, and that reach it through what only moves them, are other ones.
    Picked {
        /// The node that picks them.
        by: Id,
        /// What becomes of its indices.
        edit: Edit,
    },
    /// The values of a source are passed on as the result.
    Bypass {
        /// Which.
        slot: usize,
    },
    /// The values of another tensor are passed on as the result.
    Pass(Id),
    /// The result is edited.
    ResultEdit(Edit),
    /// The result goes through one more op before anybody reads it.
    After {
        /// Which.
        op: Op,
        /// Its words.
        params: Params,
        /// The extents in which it sees the result, fastest axis first.
        ne: [usize; 4],
        /// Its other sources, from slot 1 on.
        srcs: Vec<Option<Id>>,
    },
    /// Scores are changed between their scale and their mask.
    Scores(Scores),
    /// Only some columns of each token's row are computed so.
    Part {
        /// Elements of a row.
        row: usize,
        /// Which.
        columns: Range<usize>,
        /// How.
        change: Box<Change>,
    },
    /// Several at once.
    All(Vec<Change>),
}

/// What happens to scaled scores inside of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// They are weights as they are.
    NoSoftmax,
    /// They are cut off at ± a limit.
    Clamp(f32),
}

/// Mistakes in decoding the blocks of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Misreading {
    /// Low and high nibble of every byte exchanged.
    NibblesSwapped,
    /// Byte i taken for values 2i and 2i + 1.
    NibblesInSequence,
    /// Minimum (or the constant offset of the quants) left out.
    NoMinimum,
    /// The scale of the following block used.
    NeighbourScale,
    /// The two high bits of the packed 6-bit scales and minima left out.
    LowScaleBits,
    /// F16 bits taken for BF16, or the reverse.
    OtherHalf,
}

impl Change {
    /// The tensors that are read and are no sources of the node.
    pub fn others(&self) -> Vec<Id> {
        match self {
            Change::Source { with, .. } => with.iter().copied().collect(),
            Change::Pass(with) => vec![*with],
            Change::After { srcs, .. } => srcs.iter().flatten().copied().collect(),
            Change::Part { change, .. } => change.others(),
            Change::All(changes) => changes.iter().flat_map(Change::others).collect(),
            _ => Vec::new(),
        }
    }

    /// Whether nothing but the result is changed, when it is there.
    pub fn is_of_result(&self) -> bool {
        match self {
            Change::ResultEdit(_) => true,
            Change::All(changes) => !changes.is_empty() && changes.iter().all(Change::is_of_result),
            _ => false,
        }
    }
}

/// The slot of the indices in a node that picks rows.
const INDICES: usize = 1;

impl Rewrite {
    /// The same where it is made: in the node that is computed otherwise, which may be one before that which shows it.
    #[must_use]
    pub fn where_made(self) -> Rewrite {
        match self.change {
            Change::Picked { by, edit } => {
                Rewrite { node: by, change: Change::SourceEdit { slot: INDICES, edit } }
            }
            _ => self,
        }
    }

    /// The graph with the rewrite in it, where it is one of parameters and sources alone; edits of values are the
    /// business of who executes the node.
    #[must_use]
    pub fn applied(&self, graph: &Graph) -> Graph {
        let mut graph = graph.clone();
        apply(&self.change, &mut graph.tensors[self.node]);
        graph
    }
}

fn apply(change: &Change, tensor: &mut Tensor) {
    match change {
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
        Change::All(changes) => changes.iter().for_each(|change| apply(change, tensor)),
        _ => {}
    }
}
