//! Which node an array is, by its values.

use super::exact::{Exact, is_plain};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::foreign::array::Array;

/// An array of other values of the same size is √2 away, relative to the node's own size, and one of zeros 1: what is
/// nearer than half of that is taken for the node, rounded or not.
pub const NEAR: f64 = 0.5;

/// The next best node is at least so many times farther where a choice is sure: roundings differ by small factors,
/// other values by orders of magnitude.
pub const SURE: f64 = 4.0;

/// Columns by which a part of a wider array is looked for before all of them are compared.
const PROBED: usize = 16;

/// How an array lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Way {
    /// The order of its axes, without leading ones of one entry.
    pub order: Vec<usize>,
    /// Columns of the last axis: first, one behind the last, step; of all `width`.
    pub columns: Option<Columns>,
}

/// Columns of a wider array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Columns {
    /// First one.
    pub from: usize,
    /// One behind the last.
    pub to: usize,
    /// Distance of two.
    pub step: usize,
    /// How many there are.
    pub width: usize,
}

impl Way {
    /// Whether nothing is to be said of it.
    pub fn is_plain(&self) -> bool {
        self.columns.is_none() && self.order.iter().copied().eq(0..self.order.len())
    }
}

/// A node that an array may be.
#[derive(Clone, Debug)]
pub struct Fit {
    /// Where it stands among the nodes that the model computes.
    pub place: usize,
    /// Which node.
    pub id: Checkpoint,
    /// How the array lies.
    pub way: Way,
    /// ‖array − node‖ / ‖node‖.
    pub distance: f64,
    /// The nearest node of other values, and its distance; `None` where no other has the size.
    pub next: Option<(Checkpoint, f64)>,
    /// Nodes of the same values on these tokens, and where they stand.
    pub same: Vec<(usize, Checkpoint)>,
}

impl Fit {
    /// Whether it is near, and no other node is nearly as near.
    pub fn is_sure(&self) -> bool {
        self.distance <= NEAR && self.next.is_none_or(|(_, next)| next >= SURE * self.distance)
    }
}

/// What an array is: one node, or several side by side; the nearest one alone where none is near.
///
/// # Errors
/// Those of arrays that lie beyond their data, which have been refused before.
pub fn fits(array: &Array, nodes: &[Exact], rows: usize) -> Result<Vec<Fit>> {
    let array = squeezed(array);
    let views = views(&array, rows);
    let mut whole: Vec<(f64, usize, Way)> = Vec::new();
    for (order, is_matrix) in &views {
        let values = array.clone().permuted(order)?.values();
        let extents: Vec<usize> = order.iter().map(|&axis| array.shape[axis]).collect();
        for (number, node) in nodes.iter().enumerate() {
            let fits = match node.is_matrix() {
                true => *is_matrix && extents == node.shape,
                false => extents[0] == rows && node.values.len() == values.len(),
            };
            if fits {
                let way = Way { order: order.clone(), columns: None };
                whole.push((distance(&values, &node.values), number, way));
            }
        }
    }
    // Of ways that come to the same, the first: the one that changes the least.
    whole.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = ranked(&whole, nodes);
    if best.as_ref().is_some_and(|best| best.distance <= NEAR) {
        return Ok(best.into_iter().collect());
    }
    let parts = parts(&array, &views, nodes, rows)?;
    Ok(if parts.is_empty() { best.into_iter().collect() } else { parts })
}

/// The nearest node, with the next one of other values.
fn ranked(found: &[(f64, usize, Way)], nodes: &[Exact]) -> Option<Fit> {
    let (distance, number, way) = found.first()?;
    let node = &nodes[*number];
    let is_same = |other: usize| {
        let other = &nodes[other];
        other.values.len() == node.values.len() && other.values.iter().zip(&node.values).all(|(a, b)| a == b)
    };
    let mut same: Vec<(usize, Checkpoint)> = Vec::new();
    let mut next = None;
    for (far, other, _) in found.iter().skip(1).filter(|(_, other, _)| other != number) {
        match is_same(*other) {
            true if !same.iter().any(|(place, _)| place == other) => same.push((*other, nodes[*other].id)),
            true => {}
            false => {
                next = Some((nodes[*other].id, *far));
                break;
            }
        }
    }
    Some(Fit { place: *number, id: node.id, way: way.clone(), distance: *distance, next, same }.of_choice())
}

impl Fit {
    /// Of nodes of the same values: the vocabulary before names of one graph, names of their own before numbered ones,
    /// and of two places the later, which more engines have.
    fn of_choice(mut self) -> Fit {
        self.same.push((self.place, self.id));
        self.same.sort_by_key(|(place, id)| {
            (is_plain(*id), !id.kind().name().contains('#') && id.kind().name() != "norm", *place)
        });
        (self.place, self.id) = self.same.pop().unwrap_or((self.place, self.id));
        self
    }
}

/// Nodes that lie side by side in a wider array.
fn parts(array: &Array, views: &[(Vec<usize>, bool)], nodes: &[Exact], rows: usize) -> Result<Vec<Fit>> {
    let mut found: Vec<Fit> = Vec::new();
    for (order, _) in views.iter().filter(|(order, _)| order.len() == 2 && array.shape[order[0]] == rows) {
        let width = array.shape[order[1]];
        let values = array.clone().permuted(order)?.values();
        for (place, node) in nodes.iter().enumerate().filter(|(_, node)| !node.is_matrix()) {
            let own = node.values.len() / rows;
            for step in [1, 2] {
                if own < PROBED.min(width) || own * step > width || own == width {
                    continue;
                }
                let part =
                    |from: usize| Part { values: &values, width, from, step, node: &node.values, own, rows };
                let last = if step == 1 { width - own } else { 1 };
                let near = (0..=last).filter(|&from| part(from).probe() <= NEAR);
                let best = near.map(|from| (part(from).distance(), from)).min_by(|a, b| a.0.total_cmp(&b.0));
                let Some((distance, from)) = best.filter(|(distance, _)| *distance <= NEAR) else { continue };
                let to = if step == 1 { from + own } else { width };
                let way = Way { order: order.clone(), columns: Some(Columns { from, to, step, width }) };
                found.push(Fit { place, id: node.id, way, distance, next: None, same: Vec::new() });
            }
        }
    }
    found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
    let mut kept: Vec<Fit> = Vec::new();
    for fit in found {
        match kept.iter_mut().find(|known| known.way == fit.way) {
            // The same columns: of the same values, or the next best.
            Some(known) if fit.distance <= known.distance => known.same.push((fit.place, fit.id)),
            Some(known) => known.next = known.next.or(Some((fit.id, fit.distance))),
            None => kept.push(fit),
        }
    }
    Ok(kept.into_iter().map(Fit::of_choice).collect())
}

/// Columns of a wider array beside a node.
struct Part<'a> {
    values: &'a [f32],
    width: usize,
    from: usize,
    step: usize,
    node: &'a [f64],
    own: usize,
    rows: usize,
}

impl Part<'_> {
    fn over(&self, rows: std::ops::Range<usize>, columns: usize) -> f64 {
        let (mut error, mut size) = (0.0, 0.0);
        for row in rows {
            for column in 0..columns {
                let exact = self.node[row * self.own + column];
                let value = f64::from(self.values[row * self.width + self.from + column * self.step]);
                error += (value - exact).powi(2);
                size += exact * exact;
            }
        }
        (error / size).sqrt()
    }

    /// By the first columns of the last row alone.
    fn probe(&self) -> f64 {
        self.over(self.rows - 1..self.rows, PROBED.min(self.own))
    }

    fn distance(&self) -> f64 {
        self.over(0..self.rows, self.own)
    }
}

/// Without leading axes of one entry, two axes at least.
fn squeezed(array: &Array) -> Array {
    let mut array = array.clone();
    while array.shape.len() > 2 && array.shape[0] == 1 {
        array = array.at(0, 0);
    }
    array
}

/// Orders of the axes that have the token rows first, or may be an attention matrix's; those that move least first.
fn views(array: &Array, rows: usize) -> Vec<(Vec<usize>, bool)> {
    const AXES_MAX: usize = 4;
    let axes = array.shape.len();
    if !(1..=AXES_MAX).contains(&axes) || array.is_empty() {
        return Vec::new();
    }
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    for _ in 0..axes {
        let longer = |order: &Vec<usize>| {
            let free: Vec<usize> = (0..axes).filter(|axis| !order.contains(axis)).collect();
            free.into_iter().map(|axis| [order.clone(), vec![axis]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    let is_matrix = |order: &[usize]| order.len() == 3 && array.shape[order[1]] == rows;
    let orders = all.into_iter().filter(|order| array.shape[order[0]] == rows || is_matrix(order));
    orders
        .map(|order| {
            let matrix = is_matrix(&order);
            (order, matrix)
        })
        .collect()
}

/// ‖a − b‖ / ‖b‖; of b = 0 it is 0 where a is 0 as well, else infinite.
fn distance(a: &[f32], b: &[f64]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        error += (f64::from(*a) - b).powi(2);
        size += b * b;
    }
    match (error == 0.0, error.is_finite()) {
        (true, _) => 0.0,
        (false, true) => (error / size).sqrt(),
        (false, false) => f64::INFINITY,
    }
}
