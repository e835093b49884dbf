//! A cheap test of a hypothesis: on a few rows and columns, how much of the error does it account for?

use rayon::prelude::*;

use super::predict::{Lab, changed};
use crate::arithmetic::round::{self, Rounding};
use crate::error::Result;
use crate::model::edit::{Change, Edit, Reach};
use crate::model::graph::{Node, Op, WeightRef};
use crate::model::weights::Weight;
use crate::tensor::Matrix;

/// Rows of a sample: those with the largest errors, and both ends.
const ROWS: usize = 4;
/// Columns of a product's sample: half of them those with the largest errors.
const COLUMNS: usize = 48;

/// What hypotheses are measured against.
pub struct Base {
    /// The node that they change: the healthy one, or one with a first mistake.
    pub node: Node,
    /// (T, width) what it should have given.
    pub value: Matrix<f64>,
    /// (T, width) what rounding explains.
    pub bound: Matrix<f64>,
    /// Rows of the sample.
    pub rows: Vec<usize>,
    /// Columns of the sample.
    pub columns: Vec<usize>,
}

impl Base {
    /// Chooses the sample of a node.
    pub fn new(lab: &Lab<'_>, node: Node, value: Matrix<f64>, bound: Matrix<f64>) -> Base {
        let recorded = &lab.case.recorded;
        let error = |t: usize, c: usize| {
            let error = (recorded.row(t)[c] - value.row(t)[c]).abs();
            if error.is_finite() { error } else { 0.0 }
        };
        let mut rows: Vec<usize> = (0..value.rows).collect();
        let of_row = |t: &usize| (0..value.cols).map(|c| error(*t, c)).sum::<f64>();
        let sums: Vec<f64> = rows.iter().map(of_row).collect();
        rows.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
        let mut chosen: Vec<usize> = rows.iter().copied().take(ROWS / 2).collect();
        chosen.extend([0, value.rows.saturating_sub(1)]);
        chosen.sort_unstable();
        chosen.dedup();
        let mut columns: Vec<usize> = (0..value.cols).collect();
        if columns.len() > COLUMNS {
            let sums: Vec<f64> =
                columns.par_iter().map(|&c| chosen.iter().map(|&t| error(t, c)).sum::<f64>()).collect();
            columns.select_nth_unstable_by(COLUMNS / 2, |a, b| sums[*b].total_cmp(&sums[*a]));
            columns.truncate(COLUMNS / 2);
            let step = value.cols / (COLUMNS / 2);
            columns.extend((0..COLUMNS / 2).map(|i| (i * step + i).min(value.cols - 1)));
            columns.sort_unstable();
            columns.dedup();
        }
        Base { node, value, bound, rows: chosen, columns }
    }

    /// Edits that `node` has beyond this one's, where that is all they differ in and none is of an input.
    fn output_edits<'n>(&self, node: &'n Node) -> Option<&'n [Edit]> {
        let same = node.op == self.node.op && node.inputs == self.node.inputs;
        let added = node.edits.strip_prefix(&self.node.edits[..])?;
        (same && added.iter().all(Edit::is_output)).then_some(added)
    }
}

/// Share of the squared error of `base` that `node` accounts for, on a sample: 1 - ‖y - p'‖²/‖y - p‖².
/// `None` where it cannot be computed.
pub fn share(lab: &Lab<'_>, base: &Base, node: &Node) -> Result<Option<f64>> {
    if let Some(edits) = base.output_edits(node) {
        let Some(known) = lab.known(edits) else { return Ok(None) };
        let mut value = base.value.clone();
        for edit in edits {
            lab.by_step(changed(edit), &mut value)?;
        }
        let rows: Vec<usize> = (0..value.rows).filter(|&row| known[row]).collect();
        let value = pick_rows(&value, &rows);
        return Ok(Some(accounted(lab, base, &rows, None, &value)));
    }
    match &node.op {
        Op::Linear { weight, columns } => product(lab, base, node, weight, *columns),
        _ => executed(lab, base, node),
    }
}

/// Share on whole rows, or on some columns of them; `value` has just these rows and columns.
fn accounted(
    lab: &Lab<'_>,
    base: &Base,
    rows: &[usize],
    columns: Option<&[usize]>,
    value: &Matrix<f64>,
) -> f64 {
    let (mut before, mut after) = (0.0, 0.0);
    // Where a recorded value is not finite, predicting that is what counts.
    let (mut odd, mut missed) = (0u32, 0u32);
    for (r, &t) in rows.iter().enumerate() {
        for (i, predicted) in value.row(r).iter().enumerate() {
            let c = columns.map_or(i, |columns| columns[i]);
            let recorded = lab.case.recorded.row(t)[c];
            let own = base.value.row(t)[c];
            if recorded.is_finite() && own.is_finite() {
                before += (recorded - own).powi(2);
                after += (recorded - predicted).powi(2);
            } else {
                odd += 1;
                missed += u32::from(recorded != *predicted);
            }
        }
    }
    match before > after {
        true => 1.0 - after / before,
        _ if odd > 0 && after.is_finite() => 1.0 - f64::from(missed) / f64::from(odd),
        _ if before > 0.0 => 1.0 - after / before,
        _ => 0.0,
    }
}

/// A product on the sample's rows and columns.
fn product(
    lab: &Lab<'_>,
    base: &Base,
    node: &Node,
    weight: &WeightRef,
    kept: Option<usize>,
) -> Result<Option<f64>> {
    let outputs = node.edits.iter().filter(|edit| edit.is_output()).count();
    let Some(inputs) = lab.inputs(node)?.filter(|_| outputs == 0) else { return Ok(None) };
    let Some(known) = lab.known(&node.edits) else { return Ok(None) };
    let bare = Node { op: Op::Linear { weight: weight.clone(), columns: kept }, ..node.clone() };
    let case = lab.edited(&bare, &inputs, 0..lab.case.positions.len())?;
    let found = Weight::find(lab.context.gguf, weight)?;
    let x = &case.inputs[0].value;
    if found.cols() != x.cols || found.rows() != base.value.cols {
        return Ok(None);
    }
    let rounding = Rounding::of(lab.context.numerics.products, found.dtype());
    let rows: Vec<usize> = base.rows.iter().copied().filter(|&row| known[row]).collect();
    let x = round::activations(rounding, pick_rows(x, &rows).view()).values;
    let value = columns_of_product(&found, &x, &base.columns);
    Ok(Some(accounted(lab, base, &rows, Some(&base.columns), &value)))
}

/// x·wᵀ at some rows of w, (T, columns).
pub fn columns_of_product(weight: &Weight<'_>, x: &Matrix<f64>, columns: &[usize]) -> Matrix<f64> {
    let sums: Vec<Vec<f64>> = columns
        .par_iter()
        .map(|&o| {
            let mut w = vec![0.0f64; weight.cols()];
            weight.decode_rows(o..o + 1, &mut w);
            (0..x.rows).map(|t| x.row(t).iter().zip(&w).map(|(x, w)| x * w).sum()).collect()
        })
        .collect();
    let mut out = Matrix::zeros(x.rows, columns.len());
    for (i, sums) in sums.iter().enumerate() {
        sums.iter().enumerate().for_each(|(t, sum)| out.row_mut(t)[i] = *sum);
    }
    out
}

/// Any other op, on the sample's rows where its edits allow it.
fn executed(lab: &Lab<'_>, base: &Base, node: &Node) -> Result<Option<f64>> {
    let mixes = node.edits.iter().any(|edit| changed(edit).reach() > Reach::Row);
    let Some(known) = lab.known(&node.edits) else { return Ok(None) };
    let Some(inputs) = lab.inputs(node)? else { return Ok(None) };
    let parts = if mixes { lab.steps() } else { base.rows.iter().map(|&row| row..row + 1).collect() };
    let mut value: Matrix<f64> = Matrix::default();
    let mut rows = Vec::new();
    for part in parts {
        let case = lab.edited(node, &inputs, part.clone())?;
        let mut own = case.execute(&case.node, lab.context.gguf, &lab.context.numerics)?;
        for edit in node.edits.iter().filter(|edit| edit.is_output()) {
            let change: &Change = changed(edit);
            crate::dense::change::apply(change, lab.context.gguf, &mut own, case.rows())?;
        }
        let decided: Vec<usize> = part.clone().filter(|&row| known[row]).collect();
        let within: Vec<usize> = decided.iter().map(|row| row - part.start).collect();
        value.append(pick_rows(&own, &within).view());
        rows.extend(decided);
    }
    Ok(Some(accounted(lab, base, &rows, None, &value)))
}

/// Some rows of a matrix.
fn pick_rows(matrix: &Matrix<f64>, rows: &[usize]) -> Matrix<f64> {
    let data = rows.iter().flat_map(|&t| matrix.row(t).iter().copied()).collect();
    Matrix::new(rows.len(), matrix.cols, data)
}
