//! Mistakes of engines that divide a model: each rank holds another's part.

use super::linear::{direct, without};
use super::site::made;
use super::{Argument, Entry, Evidence, Made, PLAIN, Site, when};
use crate::op::Op;
use crate::rewrite::{Change, Edit};
use crate::weights::{ATTN_K, ATTN_OUTPUT, ATTN_Q, ATTN_V, FFN_DOWN, FFN_GATE, FFN_UP, OUTPUT, TOKEN_EMBD};

/// Ranks that the parts of a model are divided among, at most.
const RANKS_MAX: usize = 16;

/// What ranks hold parts of side by side.
const DIVIDED: &[&str] = &[FFN_GATE, FFN_UP, ATTN_Q, ATTN_K, ATTN_V, OUTPUT, TOKEN_EMBD];
/// What ranks have summands of: products whose input columns are divided.
const SUMMED: &[&str] = &[ATTN_OUTPUT, FFN_DOWN];

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "ranks.lost_sum",
        summary: "the summand of one rank is not in the sum",
        place: "the all-reduce behind a row-wise matmul of a tensor-parallel engine: a rank that did not take part, or \
                whose buffer was read before it was written",
        fix: "add up the outputs of all ranks (all-reduce) before the residual sum reads them",
        parameter: Some("rank/ranks"),
        ops: &[Op::MulMat],
        values: |_| vec![Argument::name("1/2")],
        make: lost,
        guess: Some(lost_part),
        ..PLAIN
    },
    Entry {
        name: "ranks.repeated",
        summary: "equal parts of the columns hold the same part of the weight",
        place: "ranks of a tensor-parallel engine that loaded one part of a weight twice: an offset that lacks the rank",
        fix: "part r of the rows of the weight belongs to rank r",
        parameter: Some("order"),
        ops: &[Op::MulMat, Op::Add],
        values: |_| vec![Argument::Order(vec![0, 0])],
        make: |site, argument| {
            let (change, order) = ordered(site, argument)?;
            when((0..order.len() as u32).any(|part| !order.contains(&part)))?;
            let text = format!(
                "of {} equal parts of the columns, one a rank, these stand there: {}; a part of the weight is used \
                 twice, and another not at all",
                order.len(),
                spelt(order)
            );
            made(change, text)
        },
        guess: Some(repeats),
        ..PLAIN
    },
    Entry {
        name: "ranks.exchanged",
        summary: "equal parts of the columns have changed places",
        place: "ranks of a tensor-parallel engine that loaded each other's part of a weight, or were gathered in \
                another order",
        fix: "part r of the rows of the weight belongs to rank r",
        parameter: Some("order"),
        ops: &[Op::MulMat, Op::Add],
        values: |_| vec![Argument::Order(vec![1, 0])],
        make: |site, argument| {
            let (change, order) = ordered(site, argument)?;
            when((0..order.len() as u32).all(|part| order.contains(&part)))?;
            let text = format!(
                "the {} equal parts of the columns stand in the order {}: ranks, or heads, hold each other's part",
                order.len(),
                spelt(order)
            );
            made(change, text)
        },
        guess: Some(|site, evidence| {
            let row = divided(site);
            let order = row.and_then(|row| evidence.column_order(row)).and_then(|order| parts(&order));
            order.map(Argument::Order).into_iter().collect()
        }),
        ..PLAIN
    },
];

fn spelt(order: &[u32]) -> String {
    super::spell_order(order).replace(',', ", ")
}

/// Elements of a row that ranks hold parts of.
fn divided(site: Site<'_>) -> Option<usize> {
    site.weight_name().filter(|name| DIVIDED.contains(&name.part))?;
    site.row()
}

fn ordered<'a>(site: Site<'_>, argument: &'a Argument) -> Option<(Change, &'a [u32])> {
    let (row, Argument::Order(order)) = (divided(site)?, argument) else { return None };
    let parts = order.len();
    when(row % parts == 0 && order.iter().all(|part| (*part as usize) < parts))?;
    when(order.iter().enumerate().any(|(i, part)| i as u32 != *part))?;
    Some((Change::ResultEdit(Edit::Columns(columns(order, row))), order))
}

/// Columns of `order.len()` equal parts, part i taken from part `order[i]`.
fn columns(order: &[u32], width: usize) -> Vec<u32> {
    let part = (width / order.len()) as u32;
    order.iter().flat_map(|&from| (0..part).map(move |column| from * part + column)).collect()
}

/// Into how many equal parts columns may be divided, the fewest first. Parts of a few columns are no rank's.
fn part_counts(width: usize) -> impl Iterator<Item = usize> {
    (2..=RANKS_MAX).filter(move |count| width.is_multiple_of(*count) && width / count >= *count)
}

/// The order of equal parts that an order of columns is one of: the fewest parts.
fn parts(columns_order: &[u32]) -> Option<Vec<u32>> {
    let width = columns_order.len();
    part_counts(width).find_map(|count| {
        let part = width / count;
        let order: Vec<u32> =
            columns_order.iter().step_by(part).map(|first| first / part.max(1) as u32).collect();
        (columns(&order, width) == columns_order).then_some(order)
    })
}

/// The fewest equal parts each of which is one of the exact output, one of them twice.
fn repeats(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let Some(row) = divided(site) else { return vec![] };
    let rows = evidence.exact.len() / row.max(1);
    let fits = |to: usize, from: usize, part: usize| {
        let all = (0..rows).flat_map(|t| (0..part).map(move |c| t * row + c));
        all.into_iter().all(|at| evidence.is(at + to * part, at + from * part))
    };
    let order_of = |count: usize| -> Option<Vec<u32>> {
        let part = row / count;
        // Its own place before any other that fits as well.
        let place = |to: usize| std::iter::once(to).chain(0..count).find(|from| fits(to, *from, part));
        (0..count).map(|to| place(to).map(|from| from as u32)).collect()
    };
    let is_repeat = |order: &Vec<u32>| (0..order.len()).any(|part| !order.contains(&(part as u32)));
    part_counts(row).filter_map(order_of).find(is_repeat).map(Argument::Order).into_iter().collect()
}

fn lost(site: Site<'_>, argument: &Argument) -> Made {
    direct(site)?;
    site.weight_name().filter(|name| SUMMED.contains(&name.part))?;
    let (rank, ranks) = argument.text()?.split_once('/')?;
    let (rank, ranks): (usize, usize) = (rank.parse().ok()?, ranks.parse().ok()?);
    let width = site.src(1)?.ne[0];
    when(ranks > 1 && ranks <= RANKS_MAX && rank < ranks && width % ranks == 0)?;
    let part = width / ranks;
    let columns = rank * part..(rank + 1) * part;
    let text = format!(
        "the sum lacks what rank {rank} of {ranks} computes, from columns {} to {} of {}",
        columns.start,
        columns.end - 1,
        site.name_of(site.origin(1)?)
    );
    made(without(width, columns), text)
}

/// The rank whose summand is not in a sum, of any number of ranks.
fn lost_part(site: Site<'_>, evidence: &Evidence<'_>) -> Vec<Argument> {
    let all = (2..=RANKS_MAX).flat_map(|ranks| (0..ranks).map(move |rank| format!("{rank}/{ranks}")));
    let change = |text: &String| lost(site, &Argument::name(text)).map(|(change, _)| change);
    evidence.nearest(all, change).map(Argument::Name).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_of_columns_is_told_by_the_fewest_parts() {
        assert_eq!(parts(&columns(&[1, 0], 12)), Some(vec![1, 0]));
        assert_eq!(parts(&columns(&[2, 0, 1], 12)), Some(vec![2, 0, 1]));
        assert_eq!(parts(&columns(&[2, 3, 0, 1], 12)), Some(vec![1, 0]), "two halves");
        assert_eq!(parts(&[1, 0, 3, 2, 5, 4]), None, "neighbours");
        assert_eq!(parts(&columns(&[1, 0], 34).into_iter().rev().collect::<Vec<_>>()), None);
    }
}
