//! Mistakes of engines that divide a model: each rank holds another's part.

use super::{
    Argument, Fault, Home, PLAIN, Site, attention, diagnose, input, integer, named, output, weight_name, when,
};
use crate::checkpoint::Kind;
use crate::model::edit::Change;
use crate::model::graph::{Node, Op};

/// Ranks that the parts of a model are divided among, at most.
const RANKS_MAX: usize = 16;

/// What ranks hold parts of side by side, before attention: whose heads have a mistake of their own.
pub const DIVIDED: &[Kind] = &[
    Kind::FfnGate,
    Kind::FfnUp,
    Kind::QProj,
    Kind::Q,
    Kind::KProj,
    Kind::K,
    Kind::VProj,
    Kind::V,
    Kind::Logits,
];

/// What ranks have summands of: products whose input columns are divided.
pub const SUMMED: &[Kind] = &[Kind::AttnOut, Kind::FfnOut];

/// Numbers of ranks that a model's heads can be divided among, without one.
pub fn rank_counts(site: &Site<'_>) -> impl Iterator<Item = usize> + use<> {
    let heads = site.model.config.dims.heads;
    (2..=RANKS_MAX).filter(move |ranks| heads.is_multiple_of(*ranks))
}

/// Rank r of R, as an argument: `1/2`.
pub fn rank_of(rank: usize, ranks: usize) -> Argument {
    Argument::Tensor(format!("{rank}/{ranks}"))
}

/// The input columns of a product that belong to the rank of an argument, and the rank and how many there are.
fn summand(
    site: &Site<'_>,
    node: &Node,
    argument: &Argument,
) -> Option<(std::ops::Range<usize>, usize, usize)> {
    let (Argument::Tensor(spelt), Op::Linear { .. }) = (argument, &node.op) else { return None };
    when(SUMMED.contains(&node.checkpoint.kind()))?;
    let (rank, ranks) = spelt.split_once('/')?;
    let (rank, ranks): (usize, usize) = (rank.parse().ok()?, ranks.parse().ok()?);
    let width = *site.shape(weight_name(node))?.last()?;
    when(ranks > 1 && rank < ranks && width.is_multiple_of(ranks))?;
    let part = width / ranks;
    Some((rank * part..(rank + 1) * part, rank, ranks))
}

/// Columns of `order.len()` equal parts, part i taken from part `order[i]`.
pub fn columns(order: &[u32], width: usize) -> Vec<u32> {
    let part = (width / order.len()) as u32;
    order.iter().flat_map(|&from| (0..part).map(move |column| from * part + column)).collect()
}

/// Into how many equal parts columns may be divided, the fewest first. Parts of a few columns are no rank's.
pub fn part_counts(width: usize) -> impl Iterator<Item = usize> {
    (2..=RANKS_MAX).filter(move |count| width.is_multiple_of(*count) && width / count >= *count)
}

/// The order of equal parts that an order of columns is one of: the fewest parts.
pub fn parts(columns_order: &[u32]) -> Option<Vec<u32>> {
    let width = columns_order.len();
    part_counts(width).find_map(|count| {
        let part = width / count;
        let order: Vec<u32> =
            columns_order.iter().step_by(part).map(|first| first / part.max(1) as u32).collect();
        (columns(&order, width) == columns_order).then_some(order)
    })
}

fn spelt(order: &[u32]) -> String {
    order.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Key/value heads, each replaced by the one `by` places on.
fn turned(site: &Site<'_>, by: f64) -> Option<Vec<u32>> {
    let dims = site.model.config.dims;
    when(dims.kv_heads > 1 && by.fract() == 0.0 && by >= 1.0 && by < dims.kv_heads as f64)?;
    let heads = dims.kv_heads as u32;
    Some(attention::head_columns(
        &(0..heads).map(|head| (head + by as u32) % heads).collect::<Vec<_>>(),
        dims.head_width,
    ))
}

/// By how many heads two ranks that hold each other's are off.
fn half(site: &Site<'_>) -> Option<Argument> {
    let heads = site.model.config.dims.kv_heads;
    (heads > 1).then_some(Argument::Number((heads / 2) as f64))
}

/// Two halves of the columns: the first one twice, or each in the other's place.
const REPEATED: [u32; 2] = [0, 0];
const EXCHANGED: [u32; 2] = [1, 0];

/// Columns of what ranks hold parts of in the order of an argument, or else its halves in the `usual` one.
fn ordered(site: &Site<'_>, node: &mut Node, argument: &Argument, usual: [u32; 2]) -> Option<()> {
    let kind = node.checkpoint.kind();
    when(DIVIDED.contains(&kind))?;
    let width = site.model.config.dims.width(kind, 0);
    let order = match argument {
        Argument::Order(order) => order.clone(),
        _ => {
            when(width.is_multiple_of(usual.len()))?;
            columns(&usual, width)
        }
    };
    output(node, Change::Columns(order))
}

/// The order of parts that an argument says, or else the `usual` one of halves.
fn order_of(argument: &Argument, usual: [u32; 2]) -> Vec<u32> {
    let order = match argument {
        Argument::Order(order) => parts(order),
        _ => None,
    };
    order.unwrap_or_else(|| usual.to_vec())
}

/// Faults of tensor-parallel engines.
pub const FAULTS: &[Fault] = &[
    Fault {
        name: "ranks.kv_heads",
        summary: "query heads read the key/value heads of another rank",
        place: "the key/value heads of a tensor-parallel engine, divided otherwise than its query heads",
        fix: "rank r of R holds query heads r·H/R and the key/value heads r·K/R on",
        parameter: integer("heads"),
        home: attention::HOME,
        change: |site, node, argument| {
            let columns = turned(site, argument.number().or(half(site)?.number())?)?;
            attention::cached(node, &Change::Columns(columns))
        },
        default: |site, _| half(site),
        guess: Some(diagnose::kv_turns),
        sentence: |site, _, argument| {
            let dims = site.model.config.dims;
            let group = dims.heads / dims.kv_heads.max(1);
            let by = argument.number().unwrap_or_default();
            let kv = dims.kv_heads;
            format!(
                "query head h reads KV head (h / {group} + {by}) % {kv}, the model says h / {group}: ranks hold each \
                 other's key/value heads"
            )
        },
        ..PLAIN
    },
    Fault {
        name: "ranks.lost_sum",
        summary: "the summand of one rank is not in the sum",
        place: "the all-reduce behind a row-wise matmul of a tensor-parallel engine: a rank that did not take part, \
                or whose buffer was read before it was written",
        fix: "add up the outputs of all ranks (all-reduce) before the residual sum reads them",
        parameter: named("rank/ranks"),
        home: Home::First(SUMMED),
        change: |site, node, argument| {
            let (columns, ..) = summand(site, node, argument)?;
            input(node, 0, Change::Without(columns))
        },
        default: |site, _| Some(rank_of(1, rank_counts(site).next()?)),
        guess: Some(diagnose::lost_part),
        sentence: |site, node, argument| {
            let (columns, rank, ranks) = summand(site, node, argument).unwrap_or_default();
            let input = node.inputs.first().map_or(String::new(), ToString::to_string);
            format!(
                "the sum lacks what rank {rank} of {ranks} computes, from columns {} to {} of {input}",
                columns.start,
                columns.end.saturating_sub(1)
            )
        },
        ..PLAIN
    },
    Fault {
        name: "ranks.repeated",
        summary: "equal parts of the columns hold the same part of the weight",
        place: "ranks of a tensor-parallel engine that loaded one part of a weight twice: an offset that lacks the rank",
        fix: "part r of the rows of the weight belongs to rank r",
        home: Home::First(DIVIDED),
        change: |site, node, argument| ordered(site, node, argument, REPEATED),
        guess: Some(diagnose::part_repeats),
        sentence: |_, _, argument| {
            let order = order_of(argument, REPEATED);
            format!(
                "of {} equal parts of the columns, one a rank, these stand there: {}; a part of the weight is used twice, \
                 and another not at all",
                order.len(),
                spelt(&order)
            )
        },
        ..PLAIN
    },
    Fault {
        name: "ranks.exchanged",
        summary: "equal parts of the columns have changed places",
        place: "ranks of a tensor-parallel engine that loaded each other's part of a weight, or were gathered in another order",
        fix: "part r of the rows of the weight belongs to rank r",
        home: Home::First(DIVIDED),
        change: |site, node, argument| ordered(site, node, argument, EXCHANGED),
        guess: Some(diagnose::part_order),
        sentence: |_, _, argument| {
            let order = order_of(argument, EXCHANGED);
            format!(
                "the {} equal parts of the columns stand in the order {}: ranks, or heads, hold each other's part",
                order.len(),
                spelt(&order)
            )
        },
        ..PLAIN
    },
];

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
