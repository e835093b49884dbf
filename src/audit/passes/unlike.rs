//! Attention of one layer that nothing but rounding in any order explains, where in most layers its steps are followed: an
//! engine computes nodes of one kind alike in all layers, and what rounding in any order explains hides most mistakes.

use super::super::finding::{Finding, MISTAKES_SHOW};
use super::super::storage_types::readings;
use super::Findings;
use crate::checkpoint::{Checkpoint, Kind};
use crate::numerics::Storage;

/// What such an attention needs.
const NEEDS: &str = "attn_scores and attn_probs: what explains attention in the other layers does not explain it, and \
                     rounding in any order would hide a mistake";

/// Takes such attention for undecided.
pub fn doubt(findings: &mut Findings) {
    let in_any_order: Vec<&str> =
        [Storage::F16, Storage::Bf16].into_iter().filter_map(readings).map(|[kept, _]| kept).collect();
    let is_followed = |finding: &Finding| in_any_order.iter().all(|name| !finding.computed_in.contains(name));
    let is_attention = |(id, finding): &(&Checkpoint, &Finding)| {
        id.kind() == Kind::AttnCtx && finding.judged > 0 && finding.is_healthy()
    };
    let of_layers = findings.nodes.iter().filter(is_attention);
    let (followed, others): (Vec<_>, Vec<_>) = of_layers.partition(|(_, finding)| is_followed(finding));
    if followed.len() <= others.len() {
        return;
    }
    let hides = |finding: &Finding| finding.band().is_some_and(|band| !(band <= MISTAKES_SHOW));
    let unlike: Vec<Checkpoint> =
        others.into_iter().filter(|(_, finding)| hides(finding)).map(|(id, _)| *id).collect();
    for id in unlike {
        let finding = findings.at(id);
        *finding = finding.as_undecided(NEEDS);
    }
}
