//! Sums over ranks that lack a summand, seen from behind: where ranks recorded their summands, these come to what is
//! right, and only what reads the engine's own sum is wrong.

use super::predict::{Lab, Prediction};
use super::sample::Base;
use super::{Found, PROMISING, SLACK, explained, nearest, over_bound, ranks_of};
use crate::audit::bridge;
use crate::audit::case::{Case, Input};
use crate::error::Result;
use crate::faults::Fault;
use crate::faults::catalogue::{self, SUMMED, rank_of};
use crate::model::graph::{Node, Op};

/// The rank whose summand is not in what an addition reads.
pub fn found(lab: &Lab<'_>, base: &Base) -> Result<Vec<Found>> {
    let (Some(ranks), Op::Add { .. }) = (ranks_of(lab), &lab.case.node.op) else { return Ok(Vec::new()) };
    let Some(fault) = catalogue::find("ranks.lost_sum") else { return Ok(Vec::new()) };
    for (index, from) in lab.case.node.inputs.iter().enumerate() {
        let Some(product) = lab.context.graph.node(*from).filter(|_| SUMMED.contains(&from.kind())) else {
            continue;
        };
        let positions = &lab.case.positions;
        let cached = positions.iter().max().map_or(0, |last| last + 1);
        let Ok(case) = bridge::unrecorded(lab.context, product, positions, cached, &mut Vec::new())? else {
            continue;
        };
        let of_product = Lab { context: lab.context, site: lab.site, case: &case };
        for rank in 0..ranks {
            if let Some(found) = without(lab, base, fault, &of_product, (index, rank, ranks))? {
                return Ok(vec![found]);
            }
        }
    }
    Ok(Vec::new())
}

/// Whether the addition is right without a rank's summand in input `index`.
fn without(
    lab: &Lab<'_>,
    base: &Base,
    fault: &Fault,
    of_product: &Lab<'_>,
    (index, rank, ranks): (usize, usize, usize),
) -> Result<Option<Found>> {
    let product = &of_product.case.node;
    let (mut node, argument) = (product.clone(), rank_of(rank, ranks));
    if (fault.change)(&lab.site, &mut node, &argument).is_none() {
        return Ok(None);
    }
    for summed in of_product.predict(&node)?.unwrap_or_default() {
        let case = reading(lab.case, index, summed);
        let own = Lab { context: lab.context, site: lab.site, case: &case };
        let Some(prediction) = own.predict(&case.node)?.and_then(|p| nearest(&own, p)) else { continue };
        let explains = explained(&own, base, &prediction);
        if over_bound(&own, &prediction) <= SLACK && explains > PROMISING {
            let text =
                format!("{}: {}", read(&case.node, index), (fault.sentence)(&lab.site, product, &argument));
            return Ok(Some(Found { faults: vec![fault.name], explains, text, fix: fault.fix.to_owned() }));
        }
    }
    Ok(None)
}

/// The addition with another value for one of its inputs.
fn reading(case: &Case, index: usize, value: Prediction) -> Case {
    let mut case = case.clone();
    case.inputs[index] = Input { value: value.value, bound: Some(value.bound), independent: false };
    case
}

fn read(node: &Node, index: usize) -> String {
    let from = node.inputs.get(index).map_or(String::new(), ToString::to_string);
    format!("{from} as it is read here is not what the ranks' parts add up to")
}
