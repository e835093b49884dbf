//! What a node would have given with a mistake in it, from its recorded inputs, and what rounding explains.

use std::ops::Range;

use crate::audit::bounds::{self, Units};
use crate::audit::case::{Case, Input, gather};
use crate::audit::{Context, judge};
use crate::dense::change;
use crate::error::Result;
use crate::faults::Site;
use crate::model::edit::{Change, Edit, Reach};
use crate::model::graph::{Attention, Glu, Node, Op};
use crate::model::weights::Weight;
use crate::tensor::Matrix;

/// Roundings that a mistaken variant of an op makes beyond those of the right one: a few more operations of
/// the same kind.
const VARIANT_ROUNDINGS: f64 = 8.0;

/// One node of a recording, and what mistakes in it would have given.
pub struct Lab<'a> {
    /// Recording, weights, declared arithmetic.
    pub context: &'a Context<'a>,
    /// The model.
    pub site: Site<'a>,
    /// The healthy node with its recorded inputs and output.
    pub case: &'a Case,
}

/// The output of a node with or without a mistake.
#[derive(Clone)]
pub struct Prediction {
    /// (T, width)
    pub value: Matrix<f64>,
    /// (T, width) what rounding explains.
    pub bound: Matrix<f64>,
    /// (T,) whether the rows at hand decide a row's value.
    pub known: Vec<bool>,
}

impl Lab<'_> {
    /// The output of `node` under each arithmetic that the producer's words allow. `None` where the
    /// recording lacks what the node reads, or the rows that its edits mix.
    pub fn predict(&self, node: &Node) -> Result<Option<Vec<Prediction>>> {
        let Some(known) = self.known(&node.edits) else { return Ok(None) };
        let Some(inputs) = self.inputs(node)? else { return Ok(None) };
        let cache_mixes = node.edits.iter().any(|edit| match edit {
            Edit::Input { index, change } => node.op.reads_cache(*index) && change.reach() > Reach::Row,
            Edit::Output(_) => false,
        });
        let all = 0..self.case.positions.len();
        let parts = if cache_mixes { self.steps() } else { std::iter::once(all).collect() };
        let mut predictions: Vec<Prediction> = Vec::new();
        for part in parts {
            let case = self.edited(node, &inputs, part)?;
            let explained = self.explain(&case)?;
            if predictions.is_empty() {
                predictions = explained;
            } else {
                predictions.truncate(explained.len());
                for (whole, part) in predictions.iter_mut().zip(explained) {
                    whole.value.append(part.value.view());
                    whole.bound.append(part.bound.view());
                }
            }
        }
        for prediction in &mut predictions {
            self.edit_output(node, prediction)?;
            prediction.known.clone_from(&known);
        }
        Ok(Some(predictions))
    }

    /// As [`Lab::predict`]; a node that differs from the healthy one in what is done to its output alone needs
    /// no second computation of it.
    pub fn predict_from(&self, healthy: &[Prediction], node: &Node) -> Result<Option<Vec<Prediction>>> {
        let bare = Node { edits: Vec::new(), ..node.clone() };
        let of_output = node.edits.iter().all(|edit| matches!(edit, Edit::Output(_)));
        if bare != self.case.node || !of_output {
            return self.predict(node);
        }
        let Some(known) = self.known(&node.edits) else { return Ok(None) };
        let mut predictions = healthy.to_vec();
        for prediction in &mut predictions {
            self.edit_output(node, prediction)?;
            prediction.known.clone_from(&known);
        }
        Ok(Some(predictions))
    }

    /// Rows of each step, in order.
    pub fn steps(&self) -> Vec<Range<usize>> {
        let steps = &self.case.steps;
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (row, step) in steps.iter().enumerate() {
            match parts.last_mut() {
                Some(part) if steps[part.start] == *step => part.end = row + 1,
                _ => parts.push(row..row + 1),
            }
        }
        parts
    }

    /// (T,) for which rows the rows at hand decide what the edits make of them; `None` where for none.
    pub fn known(&self, edits: &[Edit]) -> Option<Vec<bool>> {
        let reach = edits.iter().map(|edit| changed(edit).reach()).max().unwrap_or(Reach::Row);
        let mut known = Vec::with_capacity(self.case.positions.len());
        for part in self.steps() {
            let step = self.case.steps[part.start].clone();
            let whole = part.len() == step.len();
            known.extend(part.clone().map(|row| match reach {
                Reach::Row | Reach::Start => true,
                Reach::Before => self.case.positions[row] == step.start + (row - part.start) as u32,
                Reach::Step => whole,
            }));
        }
        known.contains(&true).then_some(known)
    }

    /// The recorded inputs of a node that may read other checkpoints than the healthy one.
    pub fn inputs(&self, node: &Node) -> Result<Option<Vec<Matrix<f64>>>> {
        if node.inputs == self.case.node.inputs {
            return Ok(Some(self.case.inputs.iter().map(|input| input.value.clone()).collect()));
        }
        let bare = Node { edits: Vec::new(), ..node.clone() };
        match gather(self.context, &bare, &self.case.positions)? {
            Ok(case) => Ok(Some(case.inputs.into_iter().map(|input| input.value).collect())),
            Err(_) => Ok(None),
        }
    }

    /// A case of some rows whose inputs are edited and whose node has no edits.
    pub fn edited(&self, node: &Node, inputs: &[Matrix<f64>], part: Range<usize>) -> Result<Case> {
        let own = self.case;
        let mut case = Case {
            node: Node { edits: Vec::new(), ..node.clone() },
            tokens: own.tokens[part.clone()].to_vec(),
            positions: own.positions[part.clone()].to_vec(),
            steps: own.steps[part.clone()].to_vec(),
            inputs: Vec::with_capacity(inputs.len()),
            recorded: rows(&own.recorded, part.clone()),
            bridged: Vec::new(),
        };
        for (index, input) in inputs.iter().enumerate() {
            let cached = node.op.reads_cache(index);
            let mut value = if cached { input.clone() } else { rows(input, part.clone()) };
            let edits = node.edits.iter().filter_map(|edit| match edit {
                Edit::Input { index: edited, change } if *edited == index => Some(change),
                _ => None,
            });
            for edit in edits {
                if cached || edit.reach() == Reach::Row {
                    change::apply(edit, self.context.gguf, &mut value, case.rows())?;
                } else {
                    self.by_step(edit, &mut value)?;
                }
            }
            let bound = own.inputs.get(index).filter(|_| node.inputs == own.node.inputs);
            let mut bound = bound.and_then(|input| input.bound.as_ref()).map(|bound| match cached {
                true => bound.clone(),
                false => rows(bound, part.clone()),
            });
            // Where a value comes from, its bound does.
            if let Some(bound) = &mut bound {
                let moves = node.edits.iter().filter_map(|edit| match edit {
                    Edit::Input {
                        index: edited,
                        change: change @ (Change::Columns(_) | Change::Gathered(_)),
                    } => (*edited == index).then_some(change),
                    _ => None,
                });
                for edit in moves {
                    change::apply(edit, self.context.gguf, bound, case.rows())?;
                }
            }
            let independent = own.inputs.get(index).is_some_and(|input| input.independent);
            case.inputs.push(Input { value, bound, independent });
        }
        if let Op::Linear { columns: columns @ Some(_), .. } = &mut case.node.op {
            let kept = columns.take().unwrap_or(usize::MAX);
            if let Some(x) = case.inputs.first_mut() {
                let width = x.value.cols.max(1);
                x.value.data.chunks_exact_mut(width).for_each(|row| row[kept.min(width)..].fill(0.0));
            }
        }
        Ok(case)
    }

    /// Applies a change to all rows, step by step.
    pub fn by_step(&self, edit: &Change, value: &mut Matrix<f64>) -> Result<()> {
        for part in self.steps() {
            let mut own = rows(value, part.clone());
            let steps = &self.case.steps[part.clone()];
            let rows = crate::dense::Rows {
                tokens: &self.case.tokens[part.clone()],
                positions: &self.case.positions[part.clone()],
                steps,
            };
            change::apply(edit, self.context.gguf, &mut own, rows)?;
            value.data[part.start * value.cols..part.end * value.cols].copy_from_slice(&own.data);
        }
        Ok(())
    }

    fn explain(&self, case: &Case) -> Result<Vec<Prediction>> {
        if let Op::Attention(op) = &case.node.op
            && !op.softmax
        {
            return Ok(vec![self.without_softmax(case, op)?]);
        }
        let explained = judge::explain(self.context, case)?.into_iter();
        let mut predictions: Vec<Prediction> =
            explained.map(|e| Prediction { value: e.exact, bound: e.bound, known: Vec::new() }).collect();
        for prediction in &mut predictions {
            self.widen(case, prediction)?;
        }
        Ok(predictions)
    }

    /// Attention that uses its scores as they are: a product of products.
    fn without_softmax(&self, case: &Case, op: &Attention) -> Result<Prediction> {
        let value = case.execute(&case.node, self.context.gguf, &self.context.numerics)?;
        let absolute = |input: &Input| Input {
            value: bounds::map(&input.value, f64::abs),
            bound: None,
            independent: true,
        };
        let magnitudes = Case {
            node: case.node.clone(),
            tokens: case.tokens.clone(),
            positions: case.positions.clone(),
            steps: case.steps.clone(),
            inputs: case.inputs.iter().map(absolute).collect(),
            recorded: Matrix::default(),
            bridged: Vec::new(),
        };
        let magnitude = magnitudes.execute(&case.node, self.context.gguf, &judge::PLAIN)?;
        let units = Units::of(&self.context.numerics);
        let cached = case.inputs.get(1).map_or(1, |k| k.value.rows);
        let factor = bounds::accumulation(op.head_width, units.accumulator)
            + bounds::accumulation(cached, units.accumulator)
            + VARIANT_ROUNDINGS * units.storage;
        Ok(Prediction { value, bound: bounds::map(&magnitude, |m| factor * m), known: Vec::new() })
    }

    /// The bounds are derived for right ops; what a mistaken variant rounds besides.
    fn widen(&self, case: &Case, prediction: &mut Prediction) -> Result<()> {
        let units = Units::of(&self.context.numerics);
        let unit = VARIANT_ROUNDINGS * units.accumulator.max(units.storage);
        match &case.node.op {
            Op::Glu(glu) if *glu != Glu::SWIGLU => {
                let [gate, up] = &case.inputs[..] else { return Ok(()) };
                let terms = gate.value.data.iter().zip(&up.value.data);
                for (bound, (gate, up)) in prediction.bound.data.iter_mut().zip(terms) {
                    *bound += unit * gate.abs() * (1.0 + up.abs());
                }
            }
            Op::Norm(norm) if norm.style.centred || norm.style.offset != 0.0 => {
                let weight: Vec<f64> = Weight::find(self.context.gguf, &norm.weight)?.decode();
                let groups = case.inputs[0].value.data.chunks_exact(norm.width);
                for (bound, x) in prediction.bound.data.chunks_exact_mut(norm.width).zip(groups) {
                    // Magnitudes of a normalised row are of order 1, its largest that of its largest value.
                    let square = x.iter().map(|x| x * x).sum::<f64>() / norm.width as f64;
                    let largest = x.iter().fold(0.0f64, |max, x| max.max(x.abs()));
                    let scale = largest / (square + norm.eps).sqrt();
                    bound.iter_mut().zip(&weight).for_each(|(b, w)| *b += unit * scale * (1.0 + w.abs()));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Applies the edits of the output; a bound becomes what the edit makes of values that far off.
    fn edit_output(&self, node: &Node, prediction: &mut Prediction) -> Result<()> {
        for edit in &node.edits {
            let Edit::Output(change) = edit else { continue };
            let before = prediction.value.clone();
            let mut above = bounds::zip(&before, &prediction.bound, |value, bound| value + bound);
            let mut below = bounds::zip(&before, &prediction.bound, |value, bound| value - bound);
            for value in [&mut prediction.value, &mut above, &mut below] {
                self.by_step(change, value)?;
            }
            let units = Units::of(&self.context.numerics);
            let unit = units.accumulator.max(units.storage);
            let value = &prediction.value;
            let mut bound = Matrix::zeros(value.rows, value.cols);
            for (i, bound) in bound.data.iter_mut().enumerate() {
                let spread = (above.data[i] - value.data[i]).abs().max((below.data[i] - value.data[i]).abs());
                let rounding = match change {
                    Change::Scale(_) => unit * value.data[i].abs(),
                    Change::Offset(_) | Change::AddVector { .. } | Change::Rope(_) => {
                        VARIANT_ROUNDINGS * unit * (value.data[i].abs() + before.data[i].abs())
                    }
                    _ => 0.0,
                };
                *bound = if spread.is_finite() { spread + rounding } else { 0.0 };
            }
            if let Change::Rope(rope) = change {
                // A turn mixes two columns: either may carry the other's error.
                for head in bound.data.chunks_exact_mut(rope.head_width.max(1)) {
                    let largest = head.iter().fold(0.0f64, |max, bound| max.max(*bound));
                    head.fill(2.0 * largest);
                }
            }
            if let Change::Stride(_) = change {
                // What lies in the gap between two rows is anybody's guess.
                let mut filled = bounds::map(value, |_| 1.0);
                self.by_step(change, &mut filled)?;
                let gap = bound.data.iter_mut().zip(&filled.data).filter(|(_, filled)| **filled == 0.0);
                gap.for_each(|(bound, _)| *bound = f64::INFINITY);
            }
            prediction.bound = bound;
        }
        Ok(())
    }
}

/// The change of an edit.
pub fn changed(edit: &Edit) -> &Change {
    match edit {
        Edit::Input { change, .. } | Edit::Output(change) => change,
    }
}

/// Some rows of a matrix.
pub fn rows(matrix: &Matrix<f64>, part: Range<usize>) -> Matrix<f64> {
    let data = matrix.data[part.start * matrix.cols..part.end * matrix.cols].to_vec();
    Matrix::new(part.len(), matrix.cols, data)
}
