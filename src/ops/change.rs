//! Applies planted mistakes to what a node reads and writes.

use super::{Inputs, Rows, Value};
use crate::model::edit::{Change, Edit};
use crate::model::graph::Node;
use crate::scalar::Scalar;
use crate::tensor::Matrix;

/// The node's inputs, copied only where an edit changes them.
pub fn inputs<'a, S: Scalar>(node: &Node, inputs: &Inputs<'a, S>) -> Vec<Value<'a, S>> {
    let mut values: Vec<Value<'a, S>> = inputs.values.iter().map(|view| Value::Given(*view)).collect();
    for edit in &node.edits {
        let Edit::Input { index, change } = edit else { continue };
        let Some(value) = values.get_mut(*index) else { continue };
        let mut matrix = value.view().to_matrix();
        apply(change, &mut matrix, inputs.rows);
        *value = Value::Changed(matrix);
    }
    values
}

/// Changes (rows, width) in place.
pub fn apply<S: Scalar>(change: &Change, matrix: &mut Matrix<S>, _rows: Rows<'_>) {
    match *change {
        Change::Scale(factor) => {
            let factor = S::from_f64(factor);
            matrix.data.iter_mut().for_each(|value| *value *= factor);
        }
    }
}
