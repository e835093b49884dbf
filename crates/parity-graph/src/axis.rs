//! Along which axis of a tensor the token rows lie.
//!
//! The axis is followed from the rows of the embedding, and from positions and masks, through every op: reshapes by
//! the elements that lie between two tokens, windows by their strides. Where an op mixes tokens (a convolution's
//! state, a scan's), there is none.

use crate::graph::{Graph, Id};
use crate::known::{Known, find};
use crate::label::is_pointwise;
use crate::op::Op;
use crate::params::Params;

/// For each tensor the axis along which token rows lie, as an index into [`crate::Tensor::shape`]; `None` of a state,
/// of what is made from weights alone, and where tokens are mixed.
pub fn token_axes(graph: &Graph) -> Vec<Option<usize>> {
    token_axes_of(graph, &find(graph))
}

/// [`token_axes`] where the fixed ids have been found already.
pub fn token_axes_of(graph: &Graph, known: &Known) -> Vec<Option<usize>> {
    let mut axes = Axes { graph, rows: known.rows, of: vec![None; graph.tensors.len()] };
    axes.leaves(known);
    for id in 0..graph.nodes {
        axes.of[id] = axes.node(id).or_else(|| axes.of_one_token(id));
    }
    axes.of.into_iter().map(|axis| axis.map(|axis| 3 - axis)).collect()
}

/// How many elements of a scan's node are its outputs, (T, H, E) from the start: the state follows them. `None` of another op.
pub fn outputs_of_scan(graph: &Graph, id: Id) -> Option<usize> {
    // The scanned values have the shape of the outputs.
    let scanned = match graph.get(id).op {
        Op::SsmScan => 1,
        Op::GatedDeltaNet => 2,
        _ => return None,
    };
    Some(graph.get(graph.src(id, scanned)?).elements())
}

/// Axes while they are found, counted from the fastest one as ggml does.
struct Axes<'g> {
    graph: &'g Graph,
    rows: usize,
    of: Vec<Option<usize>>,
}

impl Axes<'_> {
    /// Indices that pick rows of weights, positions, masks.
    fn leaves(&mut self, known: &Known) {
        let graph = self.graph;
        let leaves: Vec<Id> = [known.tokens, known.positions].into_iter().flatten().collect();
        for leaf in leaves {
            self.seed(leaf, 0);
        }
        for id in graph.computed() {
            let slot = match graph.get(id).op {
                Op::GetRows if graph.is_arithmetic(id) => 1,
                Op::FlashAttn | Op::LightningIndexer => 3,
                Op::SoftMax => 1,
                _ => continue,
            };
            if let Some(leaf) = graph.src(id, slot).map(|src| graph.storage(src)) {
                self.seed(leaf, usize::from(slot != 1 || graph.get(id).op == Op::SoftMax));
            }
        }
    }

    /// Gives a leaf an axis, where it has the extent of the token rows.
    fn seed(&mut self, leaf: Id, axis: usize) {
        if self.graph.is_leaf(leaf) && self.graph.get(leaf).ne[axis] == self.rows {
            self.of[leaf] = Some(axis);
        }
    }

    /// Axis and extent of a source.
    fn source(&self, id: Id, slot: usize) -> Option<(usize, usize)> {
        let src = self.graph.src(id, slot)?;
        let axis = self.of[src]?;
        Some((axis, self.graph.get(src).ne[axis]))
    }

    fn node(&self, id: Id) -> Option<usize> {
        let tensor = self.graph.get(id);
        let first = self.source(id, 0);
        // An axis holds only where the extent does: rows that were picked are fewer everywhere behind.
        let keep = |axis: usize, rows: usize| (axis < 4 && tensor.ne[axis] == rows).then_some(axis);
        let moved = |to: usize| first.and_then(|(_, rows)| keep(to, rows));
        match &tensor.op {
            Op::Reshape | Op::Cont | Op::Cpy | Op::Dup => self.reshaped(id),
            Op::View => self.window(id),
            // A permutation is never all zeros: recordings from before parameters are followed by strides.
            Op::Permute if tensor.params == Params::default() => self.window(id),
            Op::Permute => {
                first.and_then(|(axis, rows)| keep(usize::try_from(tensor.params.int(axis)).ok()?, rows))
            }
            Op::Transpose => first.and_then(|(axis, rows)| keep([1, 0, 2, 3][axis], rows)),
            Op::GetRows => self.picked(id),
            Op::SetRows => self.source(id, 2).or(first).and_then(|(axis, rows)| keep(axis, rows)),
            Op::Concat => self.joined(id),
            Op::MulMat => self.product(id),
            // These have an axis for tokens by their own definition.
            Op::MulMatId => self.source(id, 1).or(self.source(id, 2)).and_then(|(_, rows)| keep(2, rows)),
            Op::FlashAttn | Op::Rope | Op::RopeBack => moved(2),
            Op::SsmConv => self.of_rows(id, 1),
            Op::LightningIndexer => self.of_rows(id, 1),
            Op::Dsv4HcComb | Op::Dsv4HcPost => moved(2),
            Op::Dsv4HcPre => moved(1),
            Op::SsmScan | Op::GatedDeltaNet | Op::None | Op::Arange => None,
            op if is_pointwise(op) => self.alike(id),
            _ => self.alike(id),
        }
    }

    /// A single token may lie on any axis of extent 1, and a reshape does not tell on which: where it turns out to
    /// have been another one, the next axis of extent 1 it is.
    fn of_one_token(&self, id: Id) -> Option<usize> {
        let tensor = self.graph.get(id);
        let keeps_tokens = is_pointwise(&tensor.op)
            || matches!(tensor.op, Op::Repeat | Op::Reshape | Op::Cont | Op::MulMat | Op::SumRows);
        let (axis, rows) = self.source(id, 0).or(self.source(id, 1)).filter(|_| keeps_tokens)?;
        if rows != 1 || axis == 0 {
            return None;
        }
        (axis + 1..4).find(|&axis| tensor.ne[axis] == 1)
    }

    /// The axis of a source that has all extents of the result but those that are reduced.
    fn alike(&self, id: Id) -> Option<usize> {
        let tensor = self.graph.get(id);
        let with = |slot| self.source(id, slot).filter(|&(axis, rows)| tensor.ne[axis] == rows);
        // The second operand of a sum counts where the first is made of weights alone.
        with(0).or_else(|| with(1)).map(|(axis, _)| axis)
    }

    /// An op whose result has tokens on an axis of its own, whatever its sources.
    fn of_rows(&self, id: Id, axis: usize) -> Option<usize> {
        (self.graph.get(id).ne[axis] == self.rows).then_some(axis)
    }

    /// The axis that has as many elements between two tokens as before.
    fn reshaped(&self, id: Id) -> Option<usize> {
        let (axis, rows) = self.source(id, 0)?;
        let (from, to) = (self.graph.get(self.graph.src(id, 0)?).ne, self.graph.get(id).ne);
        if from == to {
            return Some(axis);
        }
        let within = |ne: &[usize; 4], axis: usize| ne[..axis].iter().product::<usize>();
        let fits = |&axis_to: &usize| within(&to, axis_to) == within(&from, axis) && to[axis_to] == rows;
        // Several fit only where there is one token: the nearest is taken.
        (0..4).filter(fits).min_by_key(|axis_to| (axis_to.abs_diff(axis), *axis_to))
    }

    /// The axis that steps from token to token in memory.
    fn window(&self, id: Id) -> Option<usize> {
        let (tensor, src) = (self.graph.get(id), self.graph.src(id, 0)?);
        let from = self.graph.get(src);
        let Some((axis, rows)) = self.source(id, 0) else { return self.output_of_scan(id, src) };
        let fits = |&to: &usize| tensor.nb[to] == from.nb[axis] && tensor.ne[to] == rows;
        (0..4).filter(fits).min_by_key(|to| (to.abs_diff(axis), *to))
    }

    /// Scans write their output in front of the states: (S, T, H, E) from the start.
    fn output_of_scan(&self, id: Id, src: Id) -> Option<usize> {
        let scan = self.graph.storage(src);
        let offset = |id: Id| self.graph.get(id).view.map_or(0, |view| view.offset);
        let starts = offset(id) == offset(scan);
        let is_scan = matches!(self.graph.get(scan).op, Op::SsmScan | Op::GatedDeltaNet);
        let mixed = self.graph.get(src).op == Op::View && src != scan;
        if is_scan && starts && !mixed { self.of_rows(id, 2) } else { None }
    }

    /// Rows that were picked by index.
    fn picked(&self, id: Id) -> Option<usize> {
        let tensor = self.graph.get(id);
        if let Some((axis, rows)) = self.source(id, 1) {
            return (axis < 3 && tensor.ne[axis + 1] == rows).then_some(axis + 1);
        }
        let (axis, rows) = self.source(id, 0)?;
        // Of the token rows themselves fewer or as many are left.
        (axis == 1 || tensor.ne[axis] == rows).then_some(axis)
    }

    /// Two tensors one behind the other: along another axis the tokens stay rows.
    fn joined(&self, id: Id) -> Option<usize> {
        let dim = usize::try_from(self.graph.get(id).params.int(0)).ok()?;
        self.alike(id).filter(|axis| *axis != dim)
    }

    /// A product: the rows of the second source stay rows, those of the first become columns.
    fn product(&self, id: Id) -> Option<usize> {
        let tensor = self.graph.get(id);
        let keep = |axis: usize, rows: usize| (tensor.ne[axis] == rows).then_some(axis);
        match self.source(id, 1) {
            Some((0, _)) => None,
            Some((axis, rows)) => keep(axis, rows),
            None => match self.source(id, 0)? {
                (0, _) => None,
                (1, rows) => keep(0, rows),
                (axis, rows) => keep(axis, rows),
            },
        }
    }
}
