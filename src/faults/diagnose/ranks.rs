//! Fits what went wrong between the ranks of a tensor-parallel engine: parts that changed places, stand there twice, or
//! are not in a sum.

use std::ops::Range;

use super::fit::{column_order, integers};
use super::predict::Lab;
use super::sample::Base;
use crate::arithmetic::round::{self, Rounding};
use crate::faults::Argument;
use crate::faults::catalogue::{self, part_columns, part_counts, rank_counts, rank_of};
use crate::foreign::RANKS;
use crate::model::graph::Op;
use crate::model::weights::Weight;

/// Columns of a product's output that decide which part of its sum is missing.
const COLUMNS: usize = 8;

/// Sums of one row over the first input columns of a product, at some of its output columns.
pub struct Sums {
    /// For each output column: the recorded value, and the sums over no, one, two, … input columns.
    columns: Vec<(f64, Vec<f64>)>,
}

impl Sums {
    /// Of a product without a mistake; `None` of any other node.
    pub fn new(lab: &Lab<'_>, base: &Base) -> Option<Sums> {
        let Op::Linear { weight, columns: None } = &base.node.op else { return None };
        let found = Weight::find(lab.context.gguf, weight).ok()?;
        let row = *base.rows.first()?;
        let rounding = Rounding::of(lab.context.numerics.products, found.dtype());
        let x = round::activations(rounding, lab.case.inputs.first()?.value.view()).values;
        let (x, recorded) = (x.row(row), lab.case.recorded.row(row));
        let mut w = vec![0.0f64; found.cols()];
        let step = (found.rows() / COLUMNS).max(1);
        let sums = (0..found.rows()).step_by(step).map(|o| {
            found.decode_rows(o..o + 1, &mut w);
            let mut sum = 0.0;
            let products = x.iter().zip(&w).map(|(x, w)| x * w);
            let after = products.map(|product| {
                sum += product;
                sum
            });
            (recorded[o], std::iter::once(0.0).chain(after).collect())
        });
        Some(Sums { columns: sums.collect() })
    }

    /// Number of input columns.
    pub fn width(&self) -> usize {
        self.columns.first().map_or(0, |(_, sums)| sums.len() - 1)
    }

    /// Squared distance of the recorded values from the sums without a part of the input columns.
    pub fn distance(&self, part: Range<usize>) -> f64 {
        let of = |(recorded, sums): &(f64, Vec<f64>)| {
            let without = sums[sums.len() - 1] - (sums[part.end] - sums[part.start]);
            (recorded - without).powi(2)
        };
        self.columns.iter().map(of).sum()
    }
}

/// Of how many ranks the recording was put together, where it says so.
pub fn ranks_of(lab: &Lab<'_>) -> Option<usize> {
    lab.context.recording.manifest().provenance.get(RANKS)?.parse().ok()
}

/// Whether the recording is one of several ranks.
pub fn has_ranks(lab: &Lab<'_>) -> bool {
    ranks_of(lab).is_some()
}

/// The rank whose summand is not in a sum: of those that there are, or of any number of ranks that the heads allow.
pub fn lost_part(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let Some(sums) = Sums::new(lab, base) else { return vec![] };
    let known = ranks_of(lab);
    let counts = rank_counts(&lab.site).filter(|count| known.is_none_or(|known| known == *count));
    let parts = counts.filter(|count| sums.width().is_multiple_of(*count)).flat_map(|count| {
        let part = sums.width() / count;
        (0..count).map(move |rank| (rank * part..(rank + 1) * part, rank, count))
    });
    let best = parts.map(|(part, rank, count)| (sums.distance(part), rank, count));
    let best = best.min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, rank, count)| rank_of(rank, count)).into_iter().collect()
}

/// [`column_order`] where it is one of equal parts, of what ranks hold parts of.
pub fn part_order(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    if !catalogue::DIVIDED.contains(&base.node.checkpoint.kind()) {
        return vec![];
    }
    let mut found = column_order(lab, base);
    found.retain(|order| matches!(order, Argument::Order(order) if catalogue::parts(order).is_some()));
    found
}

/// The fewest equal parts each of which is one of the exact output, one of them twice, of what ranks hold parts of.
pub fn part_repeats(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    if !catalogue::DIVIDED.contains(&base.node.checkpoint.kind()) {
        return vec![];
    }
    let (recorded, exact, bound) = (&lab.case.recorded, &base.value, &base.bound);
    let fits = |to: usize, from: usize, part: usize| {
        (0..exact.rows).all(|t| {
            (0..part).all(|c| {
                let (to, from) = (to * part + c, from * part + c);
                (recorded.row(t)[to] - exact.row(t)[from]).abs() <= bound.row(t)[to] + bound.row(t)[from]
            })
        })
    };
    let order_of = |count: usize| -> Option<Vec<u32>> {
        let part = exact.cols / count;
        // Its own place before any other that fits as well.
        let places = |to: usize| std::iter::once(to).chain(0..count).find(|from| fits(to, *from, part));
        (0..count).map(|to| places(to).map(|from| from as u32)).collect()
    };
    let is_repeat = |order: &Vec<u32>| (0..order.len()).any(|part| !order.contains(&(part as u32)));
    let found = part_counts(exact.cols).filter_map(order_of).find(is_repeat);
    found.map(|order| Argument::Order(part_columns(&order, exact.cols))).into_iter().collect()
}

/// By how many key/value heads query heads may be off.
pub fn kv_turns(lab: &Lab<'_>, _: &Base) -> Vec<Argument> {
    integers(1..lab.site.model.config.dims.kv_heads as i64)
}
