//! Whether other values would explain the first row of a sequence, which sees one of them for each head, whatever its key is.
//!
//! Heads that share a value have it alike, so that what a cache makes of values moves the row (O,) within the span of K·D columns
//! of the output matmul, those of the heads that share a value added up. Mistakes of that matmul lie outside, unless each head has
//! values of its own.

use std::collections::BTreeSet;

use indexmap::IndexSet;
use parity_graph::Op;

use super::Passes;
use crate::audit::{Labelled, exact};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::gguf::Gguf;

/// Share of what a first row is off by that values leave at most: what f32 rounds is less than a hundredth of what eight bits do.
const LEFT_MAX: f64 = 0.1;

impl Passes<'_> {
    /// Whether other values of attention would leave the first rows of some nodes as they were recorded; true where nothing shows it.
    pub(super) fn first_rows_are_of_values(&self, ids: &IndexSet<Checkpoint>) -> Result<bool> {
        let Passes { steps, graphs, gguf, .. } = *self;
        let Some(&(_, labelled)) =
            graphs.first().filter(|(step, _)| steps.positions(*step).first() == Some(&0))
        else {
            return Ok(true);
        };
        for id in ids {
            let Some(columns) = columns_of_values(labelled, gguf, *id) else { continue };
            let Some(rows) = exact(steps, graphs, gguf, *id, &BTreeSet::from([0]))? else { continue };
            let pairs = rows.recorded.data.iter().zip(&rows.exact.data);
            let off: Vec<f64> = pairs.map(|(own, exact)| own - exact).collect();
            let fits = columns.first().is_some_and(|column| column.len() == off.len());
            if fits && !(left_of(&off, columns) <= LEFT_MAX * norm(&off)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// What each value of a key-value head (K·D columns) adds to a row (O,) of attention, or of the matmul behind it. `None` for any
/// other node.
fn columns_of_values(labelled: &Labelled, gguf: &Gguf, id: Checkpoint) -> Option<Vec<Vec<f64>>> {
    let graph = &labelled.program.graph;
    let (node, _) = labelled.nodes().find(|(_, known)| *known == id)?;
    // A bias may be added to the product.
    let product = [Some(node), graph.src(node, 0).map(|source| graph.root(source))];
    let product = product.into_iter().flatten().find(|node| labelled.multiplies_weight(*node));
    let attention = product.map_or(Some(node), |node| graph.src(node, 1).map(|source| graph.root(source)))?;
    if graph.get(attention).op != Op::FlashAttn {
        return None;
    }
    let [_, _, heads, width] = graph.get(attention).shape();
    let [_, of_values, ..] = graph.get(graph.src(attention, 2)?).shape();
    let shared = heads.checked_div(of_values).filter(|shared| *shared > 0 && shared * of_values == heads)?;
    let all = heads * width;
    let weight = match product {
        None => None,
        Some(node) => Some(gguf.tensor(&graph.get(graph.src(node, 0)?).name)?),
    };
    let outputs = weight.as_ref().map_or(all, |weight| weight.rows());
    let mut columns: Vec<Vec<f64>> = vec![Vec::with_capacity(outputs); of_values * width];
    let mut row = vec![0.0; all];
    for output in 0..outputs {
        match &weight {
            Some(weight) if weight.cols() == all => weight.decode_rows(output..output + 1, &mut row),
            Some(_) => return None,
            None => row.iter_mut().enumerate().for_each(|(i, x)| *x = f64::from(u8::from(i == output))),
        }
        for (column, moved) in columns.iter_mut().enumerate() {
            let (value, i) = (column / width, column % width);
            moved.push((value * shared..(value + 1) * shared).map(|head| row[head * width + i]).sum());
        }
    }
    Some(columns)
}

/// The length of what is left of a vector (O,) beside all that columns of that length span (modified Gram-Schmidt; Å. Björck,
/// "Solving linear least squares problems by Gram-Schmidt orthogonalization", 1967).
fn left_of(vector: &[f64], columns: Vec<Vec<f64>>) -> f64 {
    let mut left = vector.to_vec();
    let mut span: Vec<Vec<f64>> = Vec::new();
    let subtract = |from: &mut [f64], unit: &[f64]| {
        let along: f64 = from.iter().zip(unit).map(|(x, unit)| x * unit).sum();
        from.iter_mut().zip(unit).for_each(|(x, unit)| *x -= along * unit);
    };
    for mut column in columns {
        let before = norm(&column);
        span.iter().for_each(|unit| subtract(&mut column, unit));
        let size = norm(&column);
        // What the others span already is rounding.
        if size > f64::from(f32::EPSILON) * before {
            column.iter_mut().for_each(|x| *x /= size);
            subtract(&mut left, &column);
            span.push(column);
        }
    }
    norm(&left)
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_columns_span_is_taken_away() {
        let columns = || vec![vec![1.0, 1.0, 0.0, 0.0], vec![2.0, 2.0, 0.0, 0.0], vec![0.0, 1.0, 1.0, 0.0]];
        assert!(left_of(&[3.0, 5.0, 2.0, 0.0], columns()) < 1e-12);
        assert!((left_of(&[3.0, 5.0, 2.0, 0.7], columns()) - 0.7).abs() < 1e-12);
        assert!((left_of(&[0.0, 0.0, 0.0, 2.0], columns()) - 2.0).abs() < 1e-12);
    }
}
