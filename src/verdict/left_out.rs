//! What an answer does not rest on: nodes that were left out, tensors that nobody looked at; and what else is to be said of
//! a node.

use std::collections::HashSet;

use crate::audit::{Finding, Findings, Judged, Steps};
use crate::checkpoint::{Checkpoint, Kind};
use crate::compare::{Comparison, Status};
use crate::report::Tried;
use crate::report::words::count;
use crate::select::Selection;

/// What was tried on a node that no known mistake explains.
pub fn tried(findings: &Findings, id: Checkpoint) -> (Vec<Tried>, Option<String>) {
    let of = |finding: &Finding| (finding.diagnosis().1.to_vec(), finding.residual());
    findings.nodes.get(&id).map_or_else(Default::default, of)
}

/// Whether an id is left out of a report: an attention matrix, or any node of an engine that computed another graph,
/// that was neither recorded nor asked for by name, where nodes behind it were judged across it. Only a recording with a
/// graph can be asked for nodes that have no name but its own.
pub fn is_left_out(id: Checkpoint, findings: &Findings, graphs: &Judged<'_>, selection: &Selection) -> bool {
    let finding = findings.nodes.get(&id);
    let unseen = finding
        .is_none_or(|finding| finding.judged == 0 && finding.undecided.is_none() && finding.lost.is_none());
    let is_crossed = findings.is_bridged(id) || finding.is_some_and(|finding| finding.is_behind_lost);
    let exposed = graphs.is_own_graph() && !id.kind().is_optional();
    let asked = selection.names(id) && (graphs.is_own_graph() || id.kind().is_fixed());
    !exposed && !asked && unseen && is_crossed
}

/// What parity rests on where nodes were left out that a side could have recorded, since it does in other layers or the
/// `others` do: how many, and between which.
pub fn left_out(
    side: &str,
    ids: &[Checkpoint],
    recorded: &[Checkpoint],
    others: &[Checkpoint],
) -> Option<String> {
    let kinds: HashSet<Kind> = recorded.iter().map(|id| id.kind()).collect();
    let is_usual = |id: &Checkpoint| kinds.contains(&id.kind()) || others.contains(id);
    let left_out = ids.iter().filter(|id| !id.kind().is_optional() && is_usual(id));
    said_of(left_out, ["node", "was", "were"], |nodes, were| {
        format!("{nodes} of {side} {were} not recorded, and judged by what comes after")
    })
}

/// What nobody looked at: tensors of a side that are no node's result in any of the graphs, such as the parts that were cut
/// out of a fused matmul's. What reads them was judged.
pub fn not_looked_at(side: &str, recorded: &[Checkpoint], nodes: &[Checkpoint]) -> Option<String> {
    let nodes: HashSet<&Checkpoint> = nodes.iter().collect();
    let others = recorded.iter().filter(|id| !nodes.contains(id));
    said_of(others, ["tensor", "is", "are"], |tensors, are| {
        format!("{tensors} of {side} {are} no node's result in the graph, and nobody looked at them")
    })
}

/// That tensors which belong to a step, such as a scan's output with its state, were not compared, where the sides were
/// computed in different steps or one lacks the state; `instead` is what was done with them.
pub fn not_compared(comparisons: &[Comparison], instead: &str) -> Option<String> {
    let others = |comparison: &&Comparison| matches!(comparison.status, Status::OtherSteps(_));
    let ids = comparisons.iter().filter(others).map(|comparison| &comparison.checkpoint);
    said_of(ids, ["node", "has", "have"], |nodes, have| {
        format!(
            "{nodes} {have} one tensor for a step, and the sides were computed in different steps, or one lacks its \
             state, or has it in another form: {instead}"
        )
    })
}

/// A sentence about some ids, if there are any: how many they are, with a verb for one and for more, and the first and the
/// last of them.
fn said_of<'a>(
    ids: impl Iterator<Item = &'a Checkpoint>,
    [noun, one, more]: [&str; 3],
    sentence: impl Fn(&str, &str) -> String,
) -> Option<String> {
    let ids: Vec<&Checkpoint> = ids.collect();
    let (first, last) = (ids.first()?, ids.last()?);
    let said = sentence(&count(ids.len(), noun), if ids.len() == 1 { one } else { more });
    let between = if first == last { first.to_string() } else { format!("{first} … {last}") };
    Some(format!("{said}: {between}"))
}

/// Sentences about discrete nodes in which rounding decided, and about other arithmetic than the usual.
pub fn remarks(finding: &Finding) -> String {
    let mut out = String::new();
    if !finding.arithmetic.is_empty() {
        let names: Vec<&str> = finding.arithmetic.iter().copied().collect();
        out += &format!("; in another arithmetic than llama.cpp's usual: {}", names.join(", "));
    }
    if let Some(tie) = finding.near_ties.iter().max_by(|a, b| a.margin.total_cmp(&b.margin)) {
        let rows = crate::report::words::count(finding.near_ties.len(), "row");
        out += &format!(
            "; a near-tie in {rows}: at position {} another choice is {} better, and rounding of the scores \
             explains {}",
            tie.position,
            crate::report::words::number(tie.margin),
            crate::report::words::number(tie.near)
        );
    }
    if !finding.bridged.is_empty() {
        let names: Vec<String> = finding.bridged.iter().map(ToString::to_string).collect();
        out += &format!("; across {}, which the recording lacks", names.join(", "));
    }
    if finding.explained_nonfinite > 0 {
        out += &format!("; {} NaN or Inf, as in exact arithmetic", finding.explained_nonfinite);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nodes_result_is_said_not_to_be_looked_at() {
        let ids =
            |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<Checkpoint>>();
        let nodes = ids(&["embed", "blk.0.attn_qkv", "blk.0.q_rope"]);
        let told = |recorded: &[&str]| not_looked_at("the dump", &ids(recorded), &nodes);
        assert_eq!(told(&["embed", "blk.0.attn_qkv"]), None);
        let of_three =
            told(&["embed", "blk.0.q_proj", "blk.0.k_proj", "blk.0.v_proj", "blk.0.q_rope"]).unwrap();
        assert!(of_three.starts_with("3 tensors of the dump are no node's result"), "{of_three}");
        assert!(of_three.ends_with("blk.0.q_proj … blk.0.v_proj"), "{of_three}");
        assert!(told(&["blk.0.v"]).unwrap().starts_with("1 tensor of the dump is no node's result"));
    }
}
