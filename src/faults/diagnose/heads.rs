//! Fits which heads of attention were read, and where they were put.

use super::predict::Lab;
use super::sample::Base;
use crate::checkpoint::Kind;
use crate::faults::Argument;
use crate::faults::catalogue::head_columns;
use crate::model::edit::{Change, Edit};
use crate::model::graph::{Node, Op};

/// Which head of the exact context each head of the recorded one is.
pub fn head_order(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    if base.node.checkpoint.kind() != Kind::AttnCtx {
        return vec![];
    }
    let dims = lab.site.model.config.dims;
    let width = dims.head_width;
    let exact: Vec<&[f64]> = base.rows.iter().map(|&t| base.value.row(t)).collect();
    let apart = |to: usize, from: usize| distance(lab, base, &exact, [to, from], dims.heads);
    let order: Vec<u32> = (0..dims.heads)
        .filter_map(|to| (0..dims.heads).min_by(|a, b| apart(to, *a).total_cmp(&apart(to, *b))))
        .map(|head| head as u32)
        .collect();
    let moved = order.iter().enumerate().any(|(i, head)| i as u32 != *head);
    let columns = head_columns(&order, width);
    if moved { vec![Argument::Order(columns)] } else { vec![] }
}

/// Share of the distance from the own head below which another one is what was read.
const NEARER: f64 = 0.5;

/// Which key/value head's keys each query head reads, then which one's values: own ones but for heads that another
/// one's keys, values or both fit better.
pub fn kv_reads(lab: &Lab<'_>, base: &Base) -> Vec<Argument> {
    let (Op::Attention(op) | Op::Scores(op) | Op::Context(op)) = &base.node.op else { return vec![] };
    let caches: Vec<usize> =
        (0..base.node.inputs.len()).filter(|index| base.node.op.reads_cache(*index)).collect();
    if op.kv_heads < 2 || op.group * op.kv_heads != op.heads || !base.node.edits.is_empty() {
        return vec![];
    }
    let own = |head: usize| (head / op.group) as u32;
    // Keys, then values.
    let mut read: [Vec<u32>; 2] = [(); 2].map(|()| (0..op.heads).map(own).collect());
    let first = usize::from(matches!(base.node.op, Op::Context(_)));
    let Some(exact) = computed(lab, base, &base.node) else { return vec![] };
    let mut least: Vec<f64> =
        (0..op.heads).map(|head| NEARER * distance(lab, base, &exact, [head, head], op.heads)).collect();
    let (mut moved, all) = (false, (1u32 << caches.len()) - 1);
    for kv in 0..op.kv_heads as u32 {
        let columns = Change::Columns(head_columns(&vec![kv; op.kv_heads], op.head_width));
        for chosen in (1..=all).rev() {
            let is_chosen = |place: usize| chosen & (1 << place) != 0;
            let places = caches.iter().enumerate().filter(|(place, _)| is_chosen(*place));
            let edits = places.map(|(_, &index)| Edit::Input { index, change: columns.clone() }).collect();
            let Some(other) = computed(lab, base, &Node { edits, ..base.node.clone() }) else {
                return vec![];
            };
            for head in (0..op.heads).filter(|head| own(*head) != kv) {
                let found = distance(lab, base, &other, [head, head], op.heads);
                if found < least[head] {
                    (least[head], moved) = (found, true);
                    for (place, read) in read[first..].iter_mut().enumerate() {
                        read[head] = if is_chosen(place) { kv } else { own(head) };
                    }
                }
            }
        }
    }
    if moved { vec![Argument::Order(read.concat())] } else { vec![] }
}

/// What a node gives at the rows of the sample.
fn computed(lab: &Lab<'_>, base: &Base, node: &Node) -> Option<Vec<Vec<f64>>> {
    let inputs = lab.inputs(node).ok()??;
    let of_row = |&row: &usize| {
        let case = lab.edited(node, &inputs, row..row + 1).ok()?;
        Some(case.execute(&case.node, lab.context.gguf, &lab.context.numerics).ok()?.data)
    };
    base.rows.iter().map(of_row).collect()
}

/// Squared distance of the head `to` of the recorded rows from the head `from` of computed ones, of so many `heads`.
fn distance<R: AsRef<[f64]>>(
    lab: &Lab<'_>,
    base: &Base,
    rows: &[R],
    [to, from]: [usize; 2],
    heads: usize,
) -> f64 {
    let of_row = |(&t, row): (&usize, &R)| {
        let width = row.as_ref().len() / heads;
        let part = |head: usize| head * width..(head + 1) * width;
        let both = lab.case.recorded.row(t)[part(to)].iter().zip(&row.as_ref()[part(from)]);
        both.map(|(a, b)| (a - b).powi(2)).filter(|square| square.is_finite()).sum::<f64>()
    };
    base.rows.iter().zip(rows).map(of_row).sum()
}
