//! Which experts were chosen where rounding decides between two and nobody recorded it: what they come to together tells.
//!
//! In an engine of a narrow type the scores of two experts are often alike but for rounding, and either choice is right. The
//! sum over the experts was recorded, and is computed with both: the nearer one was it, row by row.

use std::collections::{BTreeSet, HashMap, HashSet};

use parity_graph::Op;

use super::bridge::{Unseen, across, moved};
use super::instead::Instead;
use super::{
    Exact, Findings, Labelled, Steps, Tensor, chosen_experts, exact, kinds, lost_steps, storage_types,
};
use crate::arithmetic::Arithmetic;
use crate::checkpoint::Checkpoint;
use crate::engine::op_by_op::{Conductor, Machine, Node, Unknown, Value};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::numerics::Storage;
use crate::ops::Args;

/// The axis of tokens, slowest first, of a node that has one value for each column of a token.
const ROWS: usize = 2;

/// The orders of experts, by step and node.
pub type Orders = HashMap<(usize, Checkpoint), Tensor>;

/// The choices of experts that what follows tells.
pub struct Told {
    pub orders: Orders,
    /// The sums that tell them.
    pub sums: HashSet<Checkpoint>,
}

/// The choices that keep sums over experts from being judged; `None` where there are none.
///
/// # Errors
/// Those of the machine.
pub fn told(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    findings: &Findings,
) -> Result<Option<Told>> {
    let is_unknown = |order: Checkpoint| {
        let is_judged = findings.nodes.get(&order).is_some_and(|order| order.judged > 0);
        findings.order.contains(&order) && !is_judged
    };
    // What each of the chosen experts comes to lies in the order of these, which decides nothing about their sum.
    let is_sum = |id: &Checkpoint| {
        let nodes =
            graphs.iter().flat_map(|(_, labelled)| labelled.nodes().map(move |node| (labelled, node)));
        let mut own = nodes.filter(|(_, (_, known))| known == id);
        own.all(|(labelled, (node, _))| labelled.axes[node] == Some(ROWS))
    };
    let is_open = |id: &Checkpoint| {
        findings.nodes[id].undecided.is_some() && order_of(*id).is_some_and(is_unknown) && is_sum(id)
    };
    let sums: HashSet<Checkpoint> = findings.nodes.keys().filter(|id| is_open(id)).copied().collect();
    if sums.is_empty() {
        return Ok(None);
    }
    let [own, other] = both(steps, graphs, gguf, &sums)?;
    let mut told = own.clone();
    for sum in &sums {
        let Some(order) = order_of(*sum) else { continue };
        let open: BTreeSet<u32> = own
            .iter()
            .filter(|((_, id), _)| *id == order)
            .flat_map(|(key, own)| differing(own, &other[key]))
            .collect();
        let distances = |orders: &Orders| -> Result<Option<Vec<f64>>> {
            let of = |step, id| orders.get(&(step, id)).cloned().map(Some);
            let with = Instead { steps, of: &of, chosen: &|_| true };
            Ok(exact(&with, graphs, gguf, *sum, &open)?.map(|rows| distances(&rows)))
        };
        let (Some(of_own), Some(of_other)) = (distances(&own)?, distances(&other)?) else { continue };
        let nearer = open.iter().zip(of_own.iter().zip(&of_other)).filter(|(_, (own, other))| other < own);
        let nearer: HashSet<u32> = nearer.map(|(position, _)| *position).collect();
        for (key, told) in told.iter_mut().filter(|((_, id), _)| *id == order) {
            let width = told.values.len() / told.positions.len().max(1);
            let rows = told.values.chunks_mut(width.max(1)).zip(other[key].values.chunks(width.max(1)));
            for ((told, other), position) in rows.zip(&told.positions) {
                if nearer.contains(position) {
                    told.copy_from_slice(other);
                }
            }
        }
    }
    Ok(Some(Told { orders: told, sums }))
}

/// The order that a node behind a mixture is of.
pub fn order_of(sum: Checkpoint) -> Option<Checkpoint> {
    format!("blk.{}.{}", sum.layer_index()?, chosen_experts::ORDER).parse().ok()
}

/// The positions of rows in which two orders differ.
fn differing(own: &Tensor, other: &Tensor) -> Vec<u32> {
    let width = (own.values.len() / own.positions.len().max(1)).max(1);
    let rows = own.values.chunks(width).zip(other.values.chunks(width)).zip(&own.positions);
    rows.filter(|((own, other), _)| own != other).map(|(_, position)| *position).collect()
}

/// Squared distances of rows from what was recorded of them, in the order of their positions.
fn distances(rows: &Exact) -> Vec<f64> {
    let of = |row: usize| {
        let pairs = rows.recorded.row(row).iter().zip(rows.exact.row(row));
        pairs.map(|(recorded, exact)| (recorded - exact).powi(2)).sum()
    };
    (0..rows.recorded.rows).map(of).collect()
}

/// Both orders of each choice that some sums need, in each step.
fn both(
    steps: &dyn Steps,
    graphs: &[(usize, &Labelled)],
    gguf: &Gguf,
    sums: &HashSet<Checkpoint>,
) -> Result<[Orders; 2]> {
    let kept = storage_types::shown(steps, graphs);
    let of_f32 = kinds::OfF32::of(steps, graphs, kept);
    let mut found = [Orders::new(), Orders::new()];
    let mut machine: Machine<'_, f64> =
        Machine::new(gguf, Arithmetic::LLAMA_CPU).rounding(steps.is_own_graph());
    let wanted: HashSet<Checkpoint> = sums.iter().filter_map(|sum| order_of(*sum)).collect();
    for (&(step, labelled), needed) in
        graphs.iter().zip(super::needed(steps, graphs, &|id| sums.contains(&id)))
    {
        let kept = kinds::kept(steps, (step, labelled), &of_f32, kept);
        let lost = &lost_steps::before(steps, step)[..];
        let mut looks = Looks { step, steps, labelled, lost, kept, wanted: &wanted, found: &mut found };
        let input = |id| labelled.input(steps, step, id);
        machine.step_of(&labelled.program, &|id| needed[id], &input, &mut looks)?;
    }
    Ok(found)
}

/// Goes on with what was recorded, and keeps the orders that were not.
struct Looks<'a> {
    step: usize,
    steps: &'a dyn Steps,
    labelled: &'a Labelled,
    lost: &'a [std::ops::Range<u32>],
    kept: Vec<Storage>,
    wanted: &'a HashSet<Checkpoint>,
    found: &'a mut [Orders; 2],
}

impl Conductor<f64> for Looks<'_> {
    fn value(
        &mut self,
        node: &Node<'_>,
        args: std::result::Result<&Args<'_, f64>, &Unknown>,
    ) -> Result<Value<f64>> {
        let Looks { step, steps, labelled, .. } = *self;
        let lost = lost_steps::read_by(self.lost, (steps, step), labelled, node.id);
        let args = lost.as_ref().map_or(args, Err);
        let label = labelled.labels.get(node.id).copied().flatten();
        let recorded = label.and_then(|id| Some((id, steps.tensor(step, id)?)));
        let arranged = recorded.as_ref().and_then(|(id, tensor)| labelled.arrange(node.id, *id, tensor));
        if let Some(((_, tensor), arranged)) = recorded.as_ref().zip(arranged) {
            return Ok(Ok(arranged.of_node(&tensor.values, |_| 0.0).into()));
        }
        if let (Some(id), Ok(args)) = (label.filter(|id| self.wanted.contains(id)), args)
            && node.program.graph.get(node.id).op == Op::Argsort
            && let Some(orders) = chosen_experts::either(node, args)
        {
            let positions = steps.positions(step);
            let shape = vec![positions.len(), args.shape[3]];
            for (found, order) in self.found.iter_mut().zip(&orders) {
                let values = order.iter().map(|expert| *expert as f32).collect();
                found.insert(
                    (step, id),
                    Tensor { shape: shape.clone(), positions: positions.clone(), values },
                );
            }
            let [own, _] = orders;
            return Ok(Ok(own.into()));
        }
        if label.is_none() && !node.program.graph.is_arithmetic(node.id) {
            return Ok(moved(node, args));
        }
        let unseen = Unseen::of(Arithmetic::EXACT);
        Ok(across(steps, node, args, (self.kept[node.id], &unseen, false)))
    }
}
