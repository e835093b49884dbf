//! A wrong node at a few of its rows and columns: how much of its error does a mistake account for there? What costs a
//! pass over a weight, or all of attention, is computed in full only where that is promising.

mod changes;
mod part;

use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;

use parity_graph::rewrite::{Change, Edit, Misreading};
use parity_graph::{Id, Op};

use self::changes::{is_of_scores, is_within_rows, place_of, rows_turned, touches};
use self::part::{Part, part, source};
use super::others::{Other, other};
use super::rewritten::rewrite;
use super::trial::WEIGHT_MAX;
use crate::arithmetic::Arithmetic;
use crate::audit::{Suspect, Tokens};
use crate::engine::op_by_op::compute;
use crate::gguf::{DType, TensorRef, misread};
use crate::ops::flash::KeyProducts;
use crate::ops::source::Data;
use crate::ops::{Args, Source, Strided};

/// Rows of a sample: those with the largest errors, and both ends.
const ROWS: usize = 4;
/// Columns of a product's sample: half of them those with the largest errors.
const COLUMNS: usize = 48;
/// Elements up to which a node is looked at as a whole where it cannot be cut.
const WHOLE_MAX: usize = 1 << 20;

/// See the module.
pub struct Sample<'s, 'a> {
    suspect: &'s Suspect<'a>,
    exact: &'s [f64],
    /// The axis of tokens, the rows that are taken along it, and for a product the columns of its result.
    axis: Option<usize>,
    rows: Vec<usize>,
    columns: Option<Vec<usize>>,
    sources: Vec<Option<Part>>,
    shape: [usize; 4],
    /// Elements of the node that the sample's are.
    picks: Vec<usize>,
    /// Squared error there.
    pub error: f64,
    /// One row of several.
    row: Option<Box<Sample<'s, 'a>>>,
    /// Of a product, all columns of the same rows.
    wide: OnceCell<Option<Box<Sample<'s, 'a>>>>,
    /// The last distances: a search comes back to what it tried.
    known: RefCell<VecDeque<(Change, f64)>>,
    /// Of attention, products of queries and keys: as they are multiplied, and without any rounding.
    products: [OnceCell<Option<KeyProducts>>; 2],
}

/// Distances that are known.
const KNOWN: usize = 4;
/// How many times further than a limit one row must be: sums in another order differ by far less.
const CLEARLY: f64 = 2.0;
/// Share of the error of a sample that no arithmetic leaves which explains nearly all of the whole.
const HALF: f64 = 0.5;

/// Along which axes the tokens of a node lie: of its result, and by slot of its sources.
fn token_axes(op: &Op, args: &Args<'_, f64>) -> Option<(usize, &'static [(usize, usize)])> {
    let [a, b, ..] = args.shape;
    match op {
        Op::FlashAttn if a == 1 => Some((1, &[(0, 2), (3, 2)])),
        Op::SoftMax if a == 1 && args.get(1).is_some() => Some((2, &[(0, 2), (1, 2)])),
        Op::Rope if a == 1 => Some((1, &[(0, 1), (1, 3)])),
        Op::MulMat if a * b == 1 => Some((2, &[(1, 2)])),
        _ => None,
    }
}

/// The squared distance under a change on a sample, or anything that is more than `limit` where it is; infinite without one.
pub fn within(sample: Option<&Sample<'_, '_>>, change: &Change, limit: f64) -> f64 {
    sample.and_then(|sample| sample.within(change, limit)).unwrap_or(f64::INFINITY)
}

impl<'s, 'a> Sample<'s, 'a> {
    /// Of a node that should have come to `exact` of what it reads, which its producer may have rounded before; `None` where
    /// nothing smaller than the whole can be looked at.
    pub fn of(suspect: &'s Suspect<'a>, args: &Args<'_, f64>, exact: &'s [f64]) -> Option<Sample<'s, 'a>> {
        let op = &suspect.node.program.graph.get(suspect.node.id).op;
        let error = |i: usize| {
            let error = (suspect.recorded[i] - exact[i]).abs();
            if error.is_finite() && suspect.looks_at(i) { error } else { 0.0 }
        };
        let weighted = args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
        let axes = token_axes(op, args).filter(|_| *op != Op::MulMat || weighted);
        if axes.is_none() && args.elements() > WHOLE_MAX {
            return None;
        }
        let (axis, _) = axes.unwrap_or((0, &[]));
        let tokens = args.shape[axis];
        let within: usize = args.shape[axis + 1..].iter().product();
        let outer: usize = args.shape[..axis].iter().product();
        let at = |o: usize, t: usize, i: usize| (o * tokens + t) * within + i;
        let looked_at = |t: usize| (0..outer).any(|o| (suspect.sight.looked_at)(at(o, t, 0)));
        let of_row = |t: usize| {
            (0..outer)
                .flat_map(|o| (0..within).map(move |i| (o, i)))
                .map(|(o, i)| error(at(o, t, i)))
                .sum::<f64>()
        };
        let mut rows: Vec<usize> = (0..tokens).filter(|&t| looked_at(t)).collect();
        if axes.is_some() && rows.len() > ROWS {
            let sums: Vec<f64> = (0..tokens).map(of_row).collect();
            let ends = [*rows.first()?, *rows.last()?];
            rows.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
            rows.truncate(ROWS / 2);
            rows.extend(ends);
        }
        // The first row of a step tells what was there before it.
        rows.extend(axes.filter(|_| *op != Op::MulMat).map(|_| 0));
        rows.sort_unstable();
        rows.dedup();
        let columns = (*op == Op::MulMat && axes.is_some())
            .then(|| columns(args.shape[3], &|c| rows.iter().map(|&t| error(at(0, t, c))).sum::<f64>()));
        let several = rows.len() > 1 && axes.is_some() && columns.is_none();
        let worst = rows.iter().copied().filter(|_| several);
        let worst = worst.max_by(|a, b| of_row(*a).total_cmp(&of_row(*b)));
        let row = worst.map(|row| Box::new(Sample::at(suspect, args, exact, axes, vec![row], None)));
        Some(Sample { row, ..Sample::at(suspect, args, exact, axes, rows, columns) })
    }

    /// Some rows and columns.
    fn at(
        suspect: &'s Suspect<'a>,
        args: &Args<'_, f64>,
        exact: &'s [f64],
        axes: Option<(usize, &'static [(usize, usize)])>,
        rows: Vec<usize>,
        columns: Option<Vec<usize>>,
    ) -> Sample<'s, 'a> {
        let (axis, cut) = axes.unwrap_or((0, &[]));
        let tokens = args.shape[axis];
        let within: usize = args.shape[axis + 1..].iter().product();
        let outer: usize = args.shape[..axis].iter().product();
        let at = |o: usize, t: usize, i: usize| (o * tokens + t) * within + i;
        let mut shape = args.shape;
        if axes.is_some() {
            shape[axis] = rows.len();
        }
        if let Some(columns) = &columns {
            shape[3] = columns.len();
        }
        let picked = |o: usize, t: usize| match &columns {
            Some(columns) => columns.iter().map(|&c| at(o, t, c)).collect::<Vec<usize>>(),
            None => (0..within).map(|i| at(o, t, i)).collect(),
        };
        let picks = match axes {
            Some(_) => (0..outer)
                .flat_map(|o| rows.iter().flat_map(move |&t| [(o, t)]))
                .flat_map(|(o, t)| picked(o, t))
                .collect(),
            None => (0..args.elements()).collect::<Vec<usize>>(),
        };
        let error = |i: usize| {
            let error = (suspect.recorded[i] - exact[i]).abs();
            if error.is_finite() { error } else { 0.0 }
        };
        let sources = args.sources.iter().enumerate().map(|(slot, source)| {
            let source = source.as_ref()?;
            let along = cut.iter().find(|(cut, _)| *cut == slot).map(|(_, axis)| *axis);
            let along = along.filter(|axis| source.shape()[*axis] == tokens);
            Some(part(source, along.map(|axis| (axis, &rows[..])), columns.as_deref().filter(|_| slot == 0)))
        });
        let sources = sources.collect();
        let seen = |i: &&usize| suspect.looks_at(**i);
        let all: f64 = picks.iter().filter(seen).map(|&i| error(i).powi(2)).sum();
        let known = RefCell::default();
        let axis = axes.map(|(axis, _)| axis);
        Sample {
            suspect,
            exact,
            axis,
            rows,
            columns,
            sources,
            shape,
            picks,
            error: all,
            row: None,
            wide: OnceCell::new(),
            known,
            products: Default::default(),
        }
    }

    /// The same, or anything that is more than `limit` where it is.
    fn within(&self, change: &Change, limit: f64) -> Option<f64> {
        if let Some((_, known)) = self.known.borrow().iter().find(|(known, _)| known == change) {
            return Some(*known);
        }
        // What the node is told, each row is told.
        let is_by_row = limit.is_finite() && matches!(change, Change::Words(_) | Change::Scores(_));
        if let Some(row) = self.row.as_ref().filter(|_| is_by_row) {
            let own = row.distance(change)?;
            if own > CLEARLY * limit {
                return Some(own);
            }
        }
        let distance = self.distance(change)?;
        let mut known = self.known.borrow_mut();
        known.push_back((change.clone(), distance));
        if known.len() > KNOWN {
            known.pop_front();
        }
        Some(distance)
    }

    /// Squared distance of what was recorded from the node under a change; `None` where the change does not fit a sample.
    pub fn distance(&self, change: &Change) -> Option<f64> {
        if change.is_of_result() {
            return Some(self.of_result(change)?.0);
        }
        if !self.fits(change) {
            return None;
        }
        self.beside(change, self.parts())
    }

    /// The sources, cut.
    fn parts(&self) -> Vec<Option<Source<'_, f64>>> {
        self.sources.iter().map(|part| part.as_ref().map(source)).collect()
    }

    /// What nodes like this one are most likely computed in.
    fn arithmetic(&self) -> &Arithmetic {
        self.suspect.tried.first().map_or(self.suspect.args.arithmetic, |first| &first.arithmetic)
    }

    /// Squared distance from the node under a change of what it makes of these sources.
    fn beside(&self, change: &Change, sources: Vec<Option<Source<'_, f64>>>) -> Option<f64> {
        let Suspect { node, args, .. } = *self.suspect;
        let small = Args { sources, shape: self.shape, arithmetic: self.arithmetic(), ..*args };
        let others = |id: Id| self.other(id, change);
        let rewritten = rewrite(&node.program.graph.get(node.id).op, &small, change, &others)?;
        Some(self.off(&rewritten.knowing(self.products(change)).values(&small).ok()?))
    }

    /// Squared distance of what was recorded from these values.
    fn off(&self, values: &[f64]) -> f64 {
        let seen = self.picks.iter().zip(values).filter(|(i, _)| self.suspect.looks_at(**i));
        seen.map(|(&i, value)| (self.suspect.recorded[i] - value).powi(2)).sum()
    }

    /// Products of queries and keys, where a change leaves both as they are. What happens to scores is computed without any
    /// rounding.
    fn products(&self, change: &Change) -> Option<&KeyProducts> {
        let Suspect { node, args, .. } = *self.suspect;
        let is_attention = node.program.graph.get(node.id).op == Op::FlashAttn;
        if !is_attention || touches(change, 0) || touches(change, 1) {
            return None;
        }
        let is_of_scores = is_of_scores(change);
        let arithmetic = if is_of_scores { &Arithmetic::EXACT } else { self.arithmetic() };
        let small = || Args { sources: self.parts(), shape: self.shape, arithmetic, ..*args };
        let made = || KeyProducts::of(&small()).ok().flatten();
        self.products[usize::from(is_of_scores)].get_or_init(made).as_ref()
    }

    /// Whether an arithmetic leaves more than `most` of the squared error, or half of it in the sample, where each row is
    /// computed by itself.
    pub fn is_hopeless_in(&self, arithmetic: &Arithmetic, most: f64) -> bool {
        let left = |sample: &Sample<'_, '_>| sample.left_in(arithmetic);
        self.row.as_deref().and_then(left).is_some_and(|left| left > most)
            || left(self).is_some_and(|left| left > most || left > HALF * self.error)
    }

    /// The squared distance in an arithmetic; `None` where rows are not computed each by itself. A weight is multiplied as it is
    /// stored.
    pub fn left_in(&self, arithmetic: &Arithmetic) -> Option<f64> {
        let Suspect { node, args, recorded, .. } = *self.suspect;
        let rule = node.rule.filter(|_| self.axis.is_some())?;
        let values = match &self.columns {
            Some(columns) => {
                let under = |args: &Args<'_, f64>| {
                    compute(rule, &Args { arithmetic, sources: args.sources.clone(), ..*args })
                };
                let rows = self.rows.iter().copied().collect();
                Tokens::of(rule, args, recorded)?.with_outputs(&rows, Some(columns), under)
            }
            None => compute(rule, &Args { sources: self.parts(), shape: self.shape, arithmetic, ..*args }),
        };
        Some(self.off(&values.ok()?))
    }

    /// Share of the squared error that a change leaves; `None` where it does not fit a sample.
    pub fn left(&self, change: &Change) -> Option<f64> {
        let (distance, all) = match change {
            change if change.is_of_result() => self.of_result(change)?,
            Change::Misread { how, .. } => (self.misread(*how)?, self.error),
            change if self.fits(change) => (self.distance(change)?, self.error),
            change => match self.wide().filter(|wide| wide.fits(change)) {
                Some(wide) => (wide.distance(change)?, wide.error),
                None => (self.beyond(change)?, self.error),
            },
        };
        Some(distance / all)
    }

    /// The squared distance under a change that takes rows of a source from elsewhere, which is made before the source is cut,
    /// where that is more than the error of all rows: what it makes of the others need not be known then.
    fn beyond(&self, change: &Change) -> Option<f64> {
        let (slot, edit, rest) = rows_turned(change).filter(|(.., rest)| self.fits(rest))?;
        let (own, axis) = (self.suspect.args.get(slot)?, self.sources.get(slot)?.as_ref()?.rows_along?);
        let (shape, mut values) = (own.shape(), own.values().into_owned());
        let [d, c, b, a] = shape;
        edit.apply(&mut [a, b, c, d], &mut values);
        let turned = Source { dtype: own.dtype, data: Data::Values(Strided::whole(&values, shape)) };
        let turned = part(&turned, Some((axis, &self.rows)), None);
        let mut sources = self.parts();
        sources[slot] = Some(source(&turned));
        let distance = self.beside(&rest, sources)?;
        let without = self.distance(&Change::All(Vec::new()))?;
        (distance > CLEARLY * (self.suspect.held.squares[0] + without)).then_some(distance)
    }

    /// All columns of a product: an edit of a weight, in which any value may come from anywhere, needs them.
    fn wide(&self) -> Option<&Sample<'s, 'a>> {
        let Suspect { node, args, .. } = *self.suspect;
        self.columns.as_ref()?;
        let weight: usize = args.get(0)?.shape().iter().product();
        let made = || {
            let axes = token_axes(&node.program.graph.get(node.id).op, args);
            Box::new(Sample::at(self.suspect, args, self.exact, axes, self.rows.clone(), None))
        };
        self.wide.get_or_init(|| (weight <= WEIGHT_MAX).then(made)).as_deref()
    }

    /// The squared distance under a change of the result, and the squared error there: in the rows of the sample where each
    /// row is changed by itself, else in all.
    fn of_result(&self, change: &Change) -> Option<(f64, f64)> {
        let Suspect { node, args, recorded, held, .. } = *self.suspect;
        let rewritten = rewrite(&node.program.graph.get(node.id).op, args, change, &|_: Id| None)?;
        let off =
            |i: usize, value: f64| if self.suspect.looks_at(i) { (recorded[i] - value).powi(2) } else { 0.0 };
        let some = self.axis.filter(|axis| is_within_rows(change) && self.rows.len() < args.shape[*axis]);
        let Some(axis) = some else {
            let values = rewritten.finished(self.exact.to_vec(), args).ok()?;
            return Some((values.iter().enumerate().map(|(i, value)| off(i, *value)).sum(), held.squares[0]));
        };
        let mut shape = args.shape;
        let within: usize = shape[axis + 1..].iter().product();
        let outer: usize = shape[..axis].iter().product();
        let starts =
            (0..outer).flat_map(|o| self.rows.iter().map(move |t| (o * args.shape[axis] + t) * within));
        let places: Vec<usize> = starts.flat_map(|start| start..start + within).collect();
        let exact: Vec<f64> = places.iter().map(|&i| self.exact[i]).collect();
        let all = places.iter().zip(&exact).map(|(&i, value)| off(i, *value)).sum();
        shape[axis] = self.rows.len();
        let small = Args { shape, sources: args.sources.clone(), ..*args };
        let values = rewritten.finished(exact, &small).ok()?;
        Some((places.iter().zip(&values).map(|(&i, value)| off(i, *value)).sum(), all))
    }

    /// Whether a change is the same for some rows and columns as for all.
    fn fits(&self, change: &Change) -> bool {
        let whole_rows = self.columns.is_none();
        match change {
            Change::After { .. } | Change::Part { .. } => false,
            Change::SourceEdit { edit: Edit::RowsTurned(_), .. } => false,
            Change::SourceEdit { slot: 0, .. } | Change::Misread { .. } | Change::Exchange(..) => whole_rows,
            Change::ResultEdit(edit) => edit.is_by_element() || whole_rows && edit.is_within_rows(),
            Change::All(changes) => changes.iter().all(|change| self.fits(change)),
            _ => true,
        }
    }

    /// A tensor that is read besides the sources, cut as the source is whose place it takes.
    fn other<'b>(&self, id: Id, change: &Change) -> Option<Other<'b, f64>> {
        let Suspect { node, gguf, others, .. } = *self.suspect;
        let slot = place_of(change, id);
        let own = slot.and_then(|slot| self.sources.get(slot)?.as_ref());
        let whole = match other(&node.program.graph, gguf, id, others)? {
            Other::Weight(weight) => Source { dtype: weight.info.dtype, data: Data::Weight(weight) },
            Other::Values(values, shape) => {
                let source = Source { dtype: DType::F32, data: Data::Values(Strided::whole(&values, shape)) };
                let part = part(&source, own.and_then(|own| Some((own.rows_along?, &self.rows[..]))), None);
                return Some(Other::Values(part.values, part.shape));
            }
        };
        let columns = self.columns.as_deref().filter(|_| slot == Some(0));
        let part = part(&whole, None, columns);
        Some(Other::Values(part.values, part.shape))
    }

    /// Squared distance where some blocks of a weight are misread.
    pub fn misread(&self, how: Misreading) -> Option<f64> {
        let (args, columns) = (self.suspect.args, self.columns.as_ref()?);
        let Data::Weight(weight) = &args.get(0)?.data else { return None };
        let op = &self.suspect.node.program.graph.get(self.suspect.node.id).op;
        let width = args.get(0)?.shape()[3];
        let mut values = vec![0.0; columns.len() * width];
        for (row, &column) in values.chunks_exact_mut(width).zip(columns) {
            let (info, bytes) = misread::read(how, weight, column..column + 1);
            TensorRef { info: &info, bytes: &bytes }.decode_rows(0..1, row);
        }
        let first = Source {
            dtype: weight.info.dtype,
            data: Data::Values(Strided::whole(&values, [1, 1, columns.len(), width])),
        };
        let rest = self.sources.iter().skip(1).map(|part| part.as_ref().map(source));
        let small =
            Args { sources: [Some(first)].into_iter().chain(rest).collect(), shape: self.shape, ..*args };
        let values = compute::<f64>(crate::ops::rule(op)?, &small).ok()?;
        Some(
            self.picks
                .iter()
                .zip(&values)
                .map(|(&i, value)| (self.suspect.recorded[i] - value).powi(2))
                .sum(),
        )
    }
}

/// Columns of a sample: those with the largest errors, and some over all.
fn columns(width: usize, error: &dyn Fn(usize) -> f64) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..width).collect();
    if width > COLUMNS {
        let sums: Vec<f64> = columns.iter().map(|&c| error(c)).collect();
        columns.select_nth_unstable_by(COLUMNS / 2, |a, b| sums[*b].total_cmp(&sums[*a]));
        columns.truncate(COLUMNS / 2);
        let step = width / (COLUMNS / 2);
        columns.extend((0..COLUMNS / 2).map(|i| (i * step + i).min(width - 1)));
        columns.sort_unstable();
        columns.dedup();
    }
    columns
}
