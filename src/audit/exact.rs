//! Some rows of one node, as they were recorded and as exact arithmetic has them.

use std::collections::BTreeSet;

use parity_graph::Op;

use super::needed::needed;
use super::tokens::Tokens;
use super::{Labelled, Steps, chosen_experts, lost_steps, storage_types};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value, compute, own};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::ops::{Args, rule};
use crate::tensor::Matrix;

/// Some rows of a node.
pub struct Exact {
    /// As they were recorded, (rows, elements).
    pub recorded: Matrix<f64>,
    /// As exact arithmetic has them from what was recorded of the nodes before, (rows, elements).
    pub exact: Matrix<f64>,
    /// What meets a weight in the last product up to the node, (rows, width); `None` where there is none.
    pub multiplied: Option<Matrix<f64>>,
}

impl Exact {
    /// What was recorded is off by (rows, elements).
    pub fn errors(&self) -> Matrix<f64> {
        let errors = self.recorded.data.iter().zip(&self.exact.data).map(|(a, b)| a - b);
        Matrix::new(self.exact.rows, self.exact.cols, errors.collect())
    }
}

/// The recorded rows of a node at `positions`, beside what exact arithmetic makes of what was recorded before it. Nothing
/// else is computed than these rows, and what lies unrecorded before them.
///
/// `None` where a row, or what it is computed from, is not known.
///
/// # Errors
/// Those of the machine.
pub fn exact(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    id: Checkpoint,
    positions: &BTreeSet<u32>,
) -> Result<Option<Exact>> {
    let needed = needed(steps, graphs, &|known| known == id);
    // What is kept from step to step is that of all rows.
    let mixes = graphs.iter().zip(&needed).any(|((_, labelled), needed)| {
        let program = &labelled.program;
        program.executed().any(|node| needed[node] && program.is_written(program.graph.root(node)))
    });
    let mut machine: Machine<'_, f64> = Machine::new(gguf, Arithmetic::EXACT).rounding(steps.is_own_graph());
    let mut rows = Found::default();
    for (&(step, labelled), needed) in graphs.iter().zip(&needed) {
        let own = steps.positions(step);
        let some: BTreeSet<usize> = (0..own.len()).filter(|row| positions.contains(&own[*row])).collect();
        if some.is_empty() && !mixes {
            continue;
        }
        let lost = lost_steps::before(steps, step);
        let tokens = own.len();
        let mut watch = Watch {
            step,
            steps,
            labelled,
            lost,
            tokens,
            mixes,
            some: &some,
            id,
            positions,
            multiplied: None,
            rows: &mut rows,
        };
        let input = |leaf| labelled.input(steps, step, leaf);
        machine.step_of(&labelled.program, &|node| needed[node], &input, &mut watch)?;
    }
    let count = rows.count;
    let matrix = |values: Vec<f64>| Matrix::new(count, values.len() / count.max(1), values);
    let is_known = count > 0 && count == positions.len() && rows.exact.iter().all(|x| !x.is_nan());
    let multiplied = (rows.multiplied.len() == count).then(|| matrix(rows.multiplied.concat()));
    Ok(is_known.then(|| Exact { recorded: matrix(rows.recorded), exact: matrix(rows.exact), multiplied }))
}

/// Rows one behind the other.
#[derive(Default)]
struct Found {
    count: usize,
    recorded: Vec<f64>,
    exact: Vec<f64>,
    multiplied: Vec<Vec<f64>>,
}

/// Goes on with what was recorded, and keeps the rows of one node.
struct Watch<'a> {
    step: usize,
    steps: &'a dyn Steps,
    labelled: &'a Labelled,
    lost: Vec<std::ops::Range<u32>>,
    tokens: usize,
    /// Whether rows of other tokens are read of all but the node that is asked for.
    mixes: bool,
    /// The tokens of the step that are asked for.
    some: &'a BTreeSet<usize>,
    id: Checkpoint,
    positions: &'a BTreeSet<u32>,
    /// (T, width) what meets a weight in the last product.
    multiplied: Option<Matrix<f64>>,
    rows: &'a mut Found,
}

impl Conductor<f64> for Watch<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let lost = lost_steps::read_by(&self.lost, (self.steps, self.step), self.labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let label = self.labelled.labels.get(node.id).copied().flatten();
        let recorded = label.and_then(|id| {
            let recorded = self.steps.tensor(self.step, id);
            recorded.or_else(|| chosen_experts::order(self.steps, self.step, node, id, args))
        });
        let arranged = label.zip(recorded.as_ref());
        let arranged = arranged.and_then(|(id, recorded)| self.labelled.arrange(node.id, id, recorded));
        if let Some((recorded, arranged)) = recorded.as_ref().zip(arranged) {
            if label == Some(self.id)
                && let Ok(values) = self.own(node, args)
            {
                let values = arranged.of_rows(&values);
                for (row, position) in recorded.positions.iter().enumerate() {
                    if self.positions.contains(position) {
                        self.rows.count += 1;
                        self.rows.exact.extend_from_slice(&arranged.row(&values, row));
                        let recorded = arranged.row(&recorded.values, row);
                        self.rows.recorded.extend(recorded.iter().map(|&x| f64::from(x)));
                        let token = self.steps.positions(self.step).iter().position(|own| own == position);
                        let multiplied = self.multiplied.as_ref().zip(token);
                        self.rows.multiplied.extend(multiplied.map(|(all, token)| all.row(token).to_vec()));
                    }
                }
            }
            return Ok(Ok(arranged.of_node(&recorded.values, |_| 0.0).into()));
        }
        Ok(self.own(node, args).map(Into::into))
    }
}

impl Watch<'_> {
    /// A node's exact values; NaN in rows of products that nobody asked for.
    fn own(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> std::result::Result<Vec<f64>, Unknown> {
        let op = &node.program.graph.get(node.id).op;
        // Nothing reads the node that is asked for: of it no other rows are needed, whatever is kept from step to step.
        let is_asked = self.labelled.labels.get(node.id).copied().flatten() == Some(self.id);
        let is_product = args.is_ok_and(|args| storage_types::is_product(op, args));
        let (Ok(known), Some(rule), true) = (args, rule(op), is_product || is_asked) else {
            return own(node, args).map(|values| values.data);
        };
        if is_product
            && *op == Op::MulMat
            && let Some(x) = known.get(1).filter(|x| x.shape()[..3] == [1, 1, self.tokens])
        {
            self.multiplied = Some(Matrix::new(self.tokens, x.shape()[3], x.values().into_owned()));
        }
        let tokens = Tokens::of(rule, known, &[]).filter(|tokens| tokens.count() == self.tokens);
        let Some(tokens) = tokens.filter(|_| is_asked || !self.mixes) else { return compute(rule, known) };
        if self.some.is_empty() {
            return Ok(vec![f64::NAN; known.elements()]);
        }
        let (inner, mut values) = (tokens.inner(), vec![f64::NAN; known.elements()]);
        let found = tokens.with(self.some, |args| compute(rule, args))?;
        for (row, token) in found.chunks(inner.max(1)).zip(self.some) {
            values[token * inner..][..inner].copy_from_slice(row);
        }
        Ok(values)
    }
}
