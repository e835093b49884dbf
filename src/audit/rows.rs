//! Recorded rows and the tensors of a graph: token rows stand first in a dump, wherever the graph has them.

use std::borrow::Cow;

use super::{Steps, Tensor};
use crate::ops::source::contiguous;

/// Columns of attention matrices up to the last position of a step: a producer's own graph may have others in use.
pub fn columns(steps: &dyn Steps, step: usize) -> usize {
    let last = steps.positions(step).into_iter().max().filter(|_| !steps.is_own_graph());
    last.map_or(usize::MAX, |last| last as usize + 1)
}

/// How the elements of a node lie in a recorded tensor, and which tokens they belong to.
pub struct Arrangement {
    /// Extents of the node, slowest axis first.
    shape: [usize; 4],
    /// Strides of the recorded tensor for the axes of the node; 0 where it is cut.
    strides: [usize; 4],
    /// Extents of what is looked at of the recorded tensor, in the order of the node's axes.
    recorded: [usize; 4],
    /// The axis of the token rows, if there is one.
    axis: Option<usize>,
    /// Positions of the recorded rows.
    positions: Vec<u32>,
    /// Whether the tokens stand behind the heads in the recorded tensor, as in (H, T, S).
    matrix: bool,
    /// How many elements of the node were recorded, one row of them for each token, where others follow that were not.
    leading: Option<usize>,
}

impl Arrangement {
    /// Of a node of `shape` whose token rows lie along `axis`; `matrix` where it is recorded as (H, T, S), cut to
    /// the positions that are cached. `None` where the recorded tensor has other extents.
    pub fn new(
        shape: [usize; 4],
        axis: Option<usize>,
        matrix: bool,
        recorded: &Tensor,
    ) -> Option<Arrangement> {
        let positions = recorded.positions.clone();
        let elements: usize = recorded.shape.iter().product();
        if elements != recorded.values.len() {
            return None;
        }
        let (extents, strides) = if matrix {
            let [heads, rows, cached] = recorded.shape[..] else { return None };
            // Of a single token and a single head any axis may be said to be the token's; behind queries that were rotated
            // none is, since heads and tokens were one axis there.
            let tokens = axis.is_none_or(|axis| axis == 2) || rows == 1;
            let fits = shape[..3] == [1, heads, rows] && tokens && cached <= shape[3];
            let extents = [1, heads, rows, cached];
            fits.then(|| (extents, contiguous(extents)))?
        } else {
            let order = axis.into_iter().chain((0..4).filter(|&other| Some(other) != axis));
            let order: Vec<usize> = order.collect();
            let inner = contiguous([shape[order[0]], shape[order[1]], shape[order[2]], shape[order[3]]]);
            let mut strides = [0; 4];
            order.iter().zip(inner).for_each(|(&to, stride)| strides[to] = stride);
            (elements == shape.iter().product::<usize>()).then_some((shape, strides))?
        };
        let axis = if matrix { Some(2) } else { axis };
        // Where tokens and heads are one axis, rows lie one behind the other.
        let fits = match axis {
            Some(axis) => shape[axis] == positions.len(),
            None => !positions.is_empty() && elements.is_multiple_of(positions.len()),
        };
        fits.then_some(Arrangement {
            shape,
            strides,
            recorded: extents,
            axis,
            positions,
            matrix,
            leading: None,
        })
    }

    /// Of a scan's node of `shape`, of which an engine recorded the `outputs`, one row for each token, and not the state
    /// behind them; `None` where something else was recorded.
    pub fn of_outputs(shape: [usize; 4], outputs: usize, recorded: &Tensor) -> Option<Arrangement> {
        let positions = recorded.positions.clone();
        let rows = !positions.is_empty() && recorded.shape.first() == Some(&positions.len());
        let fits = rows && recorded.values.len() == outputs && outputs < shape.iter().product();
        let strides = contiguous(shape);
        fits.then_some(Arrangement {
            shape,
            strides,
            recorded: shape,
            axis: None,
            positions,
            matrix: false,
            leading: Some(outputs),
        })
    }

    /// Of the context of attention that is computed stream by stream and head by head, (streams, H, T / streams, E), and recorded
    /// row by row, (T, H·E); `None` where something else was recorded.
    pub fn of_streams(shape: [usize; 4], recorded: &Tensor) -> Option<Arrangement> {
        let [streams, heads, rows, width] = shape;
        let positions = recorded.positions.clone();
        let fits = streams * rows == positions.len() && recorded.shape == [positions.len(), heads * width];
        let strides = [rows * heads * width, width, heads * width, 1];
        let (axis, matrix, leading) = (None, false, None);
        fits.then_some(Arrangement { shape, strides, recorded: shape, axis, positions, matrix, leading })
    }

    /// The same, of an attention matrix without the columns of no position that lie behind so many: whatever stands there.
    #[must_use]
    pub fn up_to(mut self, positions: usize) -> Arrangement {
        if self.matrix {
            self.recorded[3] = self.recorded[3].min(positions);
        }
        self
    }

    /// Whether it is such a one.
    fn has_streams(&self) -> bool {
        self.axis.is_none() && self.leading.is_none() && self.strides != contiguous(self.shape)
    }

    /// Of rows of several steps, one behind the other along an axis in front of which there is nothing.
    pub fn of_tokens(shape: [usize; 4], axis: usize, positions: Vec<u32>) -> Arrangement {
        let strides = contiguous(shape);
        let (axis, matrix, leading) = (Some(axis), false, None);
        Arrangement { shape, strides, recorded: shape, axis, positions, matrix, leading }
    }

    /// The recorded values in the order of the node; `beyond` gives what was cut.
    pub fn of_node(&self, recorded: &[f32], beyond: impl Fn(usize) -> f64) -> Vec<f64> {
        if let Some(leading) = self.leading {
            let behind = (leading..self.shape.iter().product()).map(beyond);
            return recorded.iter().copied().map(f64::from).chain(behind).collect();
        }
        if self.is_in_order() {
            return recorded.iter().copied().map(f64::from).collect();
        }
        let mut out = Vec::with_capacity(self.shape.iter().product());
        self.each(|at, number| {
            out.push(at.map_or_else(|| beyond(number), |at| f64::from(recorded[at])));
        });
        out
    }

    /// Values in the order of the node as they are recorded.
    pub fn of_rows<S: Copy + Default>(&self, values: &[S]) -> Vec<S> {
        if let Some(leading) = self.leading {
            return values[..leading].to_vec();
        }
        if self.is_in_order() {
            return values.to_vec();
        }
        let whole = || self.recorded.iter().product();
        let elements = if self.matrix { self.recorded[1] * self.strides[1] } else { whole() };
        let mut out = vec![S::default(); elements];
        self.each(|at, index| {
            if let Some(at) = at {
                out[at] = values[index];
            }
        });
        out
    }

    /// Whether all elements of the node were recorded, one behind the other as it has them.
    fn is_in_order(&self) -> bool {
        let strides = self.strides.iter().zip(contiguous(self.shape)).zip(self.shape);
        // The stride of an axis of one element is never taken.
        self.recorded == self.shape && strides.into_iter().all(|((own, stride), n)| n == 1 || *own == stride)
    }

    /// Every element of the node: where it was recorded, and its number.
    fn each(&self, mut see: impl FnMut(Option<usize>, usize)) {
        let [a, b, c, d] = self.shape;
        let [sa, sb, sc, sd] = self.strides;
        let mut number = 0;
        for i in 0..a {
            for j in 0..b {
                for k in 0..c {
                    let start = i * sa + j * sb + k * sc;
                    for l in 0..d {
                        see((l < self.recorded[3]).then_some(start + l * sd), number);
                        number += 1;
                    }
                }
            }
        }
    }

    /// Row `row` of values as they are recorded.
    pub fn row<'a, S: Copy>(&self, values: &'a [S], row: usize) -> Cow<'a, [S]> {
        if self.matrix {
            let [_, of_head, cached, _] = self.strides;
            let of_head = |head: usize| &values[head * of_head + row * cached..][..cached];
            return (0..self.recorded[1]).flat_map(of_head).copied().collect();
        }
        let width = values.len() / self.positions.len().max(1);
        Cow::Borrowed(&values[row * width..][..width])
    }

    /// Extents of the node, slowest axis first.
    pub fn extents(&self) -> [usize; 4] {
        self.shape
    }

    /// Positions of the recorded rows.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Position of the token that an element of the node belongs to; where it belongs to none, the step's last.
    pub fn position(&self, element: usize) -> u32 {
        let row = match self.axis {
            Some(axis) => self.coordinate(element, axis),
            None if self.has_streams() => {
                let [stream, _, row, _] = self.coordinates(element);
                stream * self.shape[2] + row
            }
            None => element / self.width(),
        };
        self.positions.get(row).or(self.positions.last()).copied().unwrap_or_default()
    }

    /// Elements of a row of what has no axis of tokens.
    fn width(&self) -> usize {
        let elements = self.leading.unwrap_or_else(|| self.shape.iter().product());
        (elements / self.positions.len().max(1)).max(1)
    }

    /// Whether all elements of the node were recorded.
    pub fn is_whole(&self) -> bool {
        self.recorded[3] == self.shape[3] && self.leading.is_none()
    }

    /// Whether an element of the node was recorded.
    pub fn is_recorded(&self, element: usize) -> bool {
        let cut = || self.coordinates(element)[3] < self.recorded[3];
        self.is_whole() || self.leading.map_or_else(cut, |leading| element < leading)
    }

    /// Coordinates of an element of the node as a dump has them, the token row by its position.
    pub fn index(&self, element: usize) -> Vec<usize> {
        let at = self.coordinates(element);
        let position = self.position(element) as usize;
        if self.matrix {
            return vec![at[1], position, at[3]];
        }
        if self.has_streams() {
            return vec![position, at[1] * self.shape[3] + at[3]];
        }
        if self.axis.is_none() && (self.positions.len() > 1 || self.leading.is_some()) {
            return vec![position, element % self.width()];
        }
        let others = (0..4).filter(|&axis| Some(axis) != self.axis);
        let inner = others.skip_while(|&axis| self.shape[axis] == 1).map(|axis| at[axis]);
        std::iter::once(position).chain(inner).collect()
    }

    fn coordinates(&self, element: usize) -> [usize; 4] {
        std::array::from_fn(|axis| self.coordinate(element, axis))
    }

    fn coordinate(&self, element: usize, axis: usize) -> usize {
        element / contiguous(self.shape)[axis].max(1) % self.shape[axis].max(1)
    }
}

/// A recorded tensor that lacks some rows of its step, as if it had them.
pub struct Partial {
    /// With zeros where there is no row.
    pub tensor: Tensor,
    lacking: Vec<u32>,
}

impl Partial {
    /// Of a node with `rows` token rows; `None` where nothing is lacking, or where it is no part of the step's rows.
    pub fn of(recorded: &Tensor, rows: Option<usize>, step: &[u32]) -> Option<Partial> {
        let rows = rows.filter(|rows| *rows == step.len() && recorded.positions.len() < *rows)?;
        let (first, inner) = recorded.shape.split_first()?;
        let width: usize = inner.iter().product();
        if *first != recorded.positions.len() || recorded.values.len() != first * width {
            return None;
        }
        let mut values = vec![0.0; rows * width];
        for (row, position) in recorded.positions.iter().enumerate() {
            let at = step.iter().position(|known| known == position)?;
            values[at * width..][..width].copy_from_slice(&recorded.values[row * width..][..width]);
        }
        let shape = std::iter::once(rows).chain(inner.iter().copied()).collect();
        let lacking = step.iter().copied().filter(|p| !recorded.positions.contains(p)).collect();
        Some(Partial { tensor: Tensor { shape, positions: step.to_vec(), values }, lacking })
    }

    /// Whether the row of a position is lacking.
    pub fn lacks(&self, position: u32) -> bool {
        self.lacking.contains(&position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[usize], positions: &[u32]) -> Tensor {
        let values = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
        Tensor { shape: shape.to_vec(), positions: positions.to_vec(), values }
    }

    #[test]
    fn rows_stand_where_the_graph_has_them() {
        // (1, E, T, D) with the tokens along axis 2, recorded as (T, E, D).
        let recorded = tensor(&[3, 2, 4], &[5, 6, 7]);
        let arranged = Arrangement::new([1, 2, 3, 4], Some(2), false, &recorded).unwrap();
        let node = arranged.of_node(&recorded.values, |_| f64::NAN);
        // Expert 1, token 2, column 3.
        let element = (3 + 2) * 4 + 3;
        assert_eq!(node[element], f64::from(recorded.values[(2 * 2 + 1) * 4 + 3]));
        assert_eq!(arranged.index(element), [7, 1, 3]);
        let back: Vec<f32> = arranged.of_rows(&node.iter().map(|&x| x as f32).collect::<Vec<_>>());
        assert_eq!(back, recorded.values);
    }

    #[test]
    fn what_is_cut_of_a_matrix_is_filled_in() {
        let recorded = tensor(&[2, 3, 4], &[1, 2, 3]);
        let arranged = Arrangement::new([1, 2, 3, 8], Some(2), true, &recorded).unwrap();
        let node = arranged.of_node(&recorded.values, |element| -(element as f64));
        assert_eq!(node[8..12], [4.0, 5.0, 6.0, 7.0]);
        assert_eq!(node[12..16], [-12.0, -13.0, -14.0, -15.0]);
        assert_eq!((arranged.index(8 + 1), arranged.is_recorded(8 + 4)), (vec![0, 2, 1], false));
        // An axis that is not known is that of as many rows as there are tokens; another one is another matrix.
        let unknown = Arrangement::new([1, 2, 3, 8], None, true, &recorded).unwrap();
        assert_eq!(unknown.index(8 + 1), [0, 2, 1]);
        assert!(Arrangement::new([1, 2, 3, 8], Some(1), true, &recorded).is_none());
    }

    #[test]
    fn columns_of_no_position_are_not_looked_at() {
        let recorded = tensor(&[2, 3, 4], &[0, 1, 2]);
        let arranged = Arrangement::new([1, 2, 3, 8], Some(2), true, &recorded).unwrap().up_to(3);
        let node = arranged.of_node(&recorded.values, |element| -(element as f64));
        assert_eq!(node[8..12], [4.0, 5.0, 6.0, -11.0]);
        assert_eq!((arranged.is_recorded(8 + 2), arranged.is_recorded(8 + 3)), (true, false));
        assert_eq!(*arranged.row(&recorded.values, 1), [4.0, 5.0, 6.0, 7.0, 16.0, 17.0, 18.0, 19.0]);
        assert_eq!(arranged.of_rows(&node)[4..8], [4.0, 5.0, 6.0, 0.0]);
    }

    #[test]
    fn rows_without_an_axis_lie_one_behind_the_other() {
        // Two tokens of three heads, heads and tokens on one axis.
        let arranged = Arrangement::new([1, 1, 6, 2], None, false, &tensor(&[2, 6], &[4, 5])).unwrap();
        assert_eq!((arranged.position(5), arranged.position(6)), (4, 5));
        assert_eq!(arranged.index(7), [5, 1]);
        assert!(Arrangement::new([1, 1, 5, 1], None, false, &tensor(&[2, 5], &[4, 5])).is_none());
    }

    #[test]
    fn rows_of_streams_have_their_heads_together() {
        // (streams, H, T, E) of two streams with two rows each, recorded as (T, H·E).
        let recorded = tensor(&[4, 6], &[4, 5, 6, 7]);
        let arranged = Arrangement::of_streams([2, 3, 2, 2], &recorded).unwrap();
        let node = arranged.of_node(&recorded.values, |_| f64::NAN);
        // Stream 1, head 2, row 0, column 1: row 2 of the recorded ones.
        let element = ((3 + 2) * 2) * 2 + 1;
        assert_eq!(node[element], f64::from(recorded.values[2 * 6 + 2 * 2 + 1]));
        assert_eq!((arranged.position(element), arranged.index(element)), (6, vec![6, 5]));
        let back: Vec<f32> = arranged.of_rows(&node.iter().map(|&x| x as f32).collect::<Vec<_>>());
        assert_eq!(back, recorded.values);
        assert!(Arrangement::of_streams([2, 3, 3, 2], &recorded).is_none());
    }

    #[test]
    fn a_state_behind_outputs_need_not_be_recorded() {
        // Two tokens of three outputs, and four values of a state behind them.
        let recorded = tensor(&[2, 3], &[4, 5]);
        let arranged = Arrangement::of_outputs([1, 1, 2, 5], 6, &recorded).unwrap();
        let node = arranged.of_node(&recorded.values, |element| -(element as f64));
        assert_eq!(node[4..8], [4.0, 5.0, -6.0, -7.0]);
        assert_eq!(
            (arranged.is_recorded(5), arranged.is_recorded(6), arranged.is_whole()),
            (true, false, false)
        );
        assert_eq!((arranged.position(3), arranged.position(9), arranged.index(4)), (5, 5, vec![5, 1]));
        assert_eq!(arranged.of_rows(&node).len(), 6);
        assert!(Arrangement::of_outputs([1, 1, 2, 5], 4, &recorded).is_none());
        assert!(Arrangement::of_outputs([1, 1, 1, 6], 6, &recorded).is_none());
    }

    #[test]
    fn other_extents_are_refused() {
        assert!(Arrangement::new([1, 1, 3, 4], Some(2), false, &tensor(&[3, 5], &[0, 1, 2])).is_none());
        assert!(Arrangement::new([1, 1, 3, 4], Some(2), false, &tensor(&[3, 4], &[0, 1])).is_none());
        assert!(Arrangement::new([1, 1, 3, 4], None, false, &tensor(&[1, 12], &[2])).is_some());
    }
}
