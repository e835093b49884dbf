//! Attention that nothing but rounding in any order explains, which at its worst hides most mistakes. Of one layer it is no
//! arithmetic where in most layers its steps are followed: an engine computes nodes of one kind alike in all layers. Of all
//! layers it is held to what roundings come to by chance, which is simulated: a hundredth of the worst case, as a rule.

use indexmap::IndexMap;

use super::super::Steps;
use super::super::best::Simulated;
use super::super::coarseness;
use super::super::finding::{Finding, MISTAKES_SHOW};
use super::super::storage_types::readings;
use super::Findings;
use super::packed::healthy_attention;
use crate::checkpoint::Checkpoint;
use crate::numerics::Storage;
use crate::ops::bound::UNIT_F32;

/// What such an attention needs.
const NEEDS: &str = "attn_scores and attn_probs: what explains attention in the other layers does not explain it, and \
                     rounding in any order would hide a mistake";

/// What attention needs that is off by more than simulated roundings leave of it.
const NEEDS_STEPS: &str = "attn_scores and attn_probs, or keys and values as its cache holds them: it is off by more than roundings \
                           come to by chance, and the worst that they may come to would hide a mistake";

/// Takes such attention for undecided.
pub fn doubt(findings: &mut Findings) {
    let (others, followed): (Vec<_>, Vec<_>) =
        healthy_attention(findings).partition(|(_, finding)| is_in_any_order(finding));
    if followed.len() > others.len() {
        for id in hiding(findings).collect::<Vec<Checkpoint>>() {
            let finding = findings.at(id);
            *finding = finding.as_undecided(NEEDS);
        }
    }
}

/// Attention that nothing but rounding in any order explains, which at its worst comes to as much as mistakes do.
pub fn hiding(findings: &Findings) -> impl Iterator<Item = Checkpoint> {
    let hides = |finding: &Finding| finding.band().is_some_and(|band| !(band <= MISTAKES_SHOW));
    healthy_attention(findings)
        .filter(move |(_, finding)| is_in_any_order(finding) && hides(finding))
        .map(|(id, _)| *id)
}

/// Takes what was `simulated` of such attention, out of all, for what rounding may come to in it; where it is off by more, nothing
/// tells a mistake from what the worst case of all roundings explains.
pub fn take(findings: &mut Findings, simulated: &mut IndexMap<Checkpoint, Simulated>) {
    let hiding: Vec<Checkpoint> = hiding(findings).collect();
    for id in hiding {
        let Some(found) = simulated.shift_remove(&id) else { continue };
        let finding = findings.at(id);
        if found.is_explained() {
            finding.narrow(found.band);
        } else {
            *finding = finding.as_undecided(NEEDS_STEPS);
        }
    }
}

/// Whether its roundings are in any order.
pub(super) fn is_in_any_order(finding: &Finding) -> bool {
    let mut names = [Storage::F16, Storage::Bf16].into_iter().filter_map(readings);
    names.any(|[kept, _]| finding.computed_in.contains(kept))
}

/// Up to how many times its bound a node is barely wrong.
pub const BARELY: f64 = 2.0;
/// Share of the error that a mistake leaves nothing but rounding of.
pub(super) const WHOLLY: f64 = 0.999;

/// What a node needs that is barely beyond what its engine's own type rounds in between.
const NEEDS_BETWEEN: &str = "what lies before it, or `--numerics`: it is off by little more than what values of their type round in \
                             between, as others of its kind are by little less, and the engine may round more than that";

/// Takes nodes behind what was not recorded for undecided that have no name and are barely further off than all of their kind are, at
/// least half, which what the type of the engine's values rounds explains: products in int8 round a little more than bf16 does. Where
/// the dump declares what is rounded, they are wrong.
pub fn doubt_barely(steps: &dyn Steps, findings: &mut Findings) {
    if steps.declared().is_some() {
        return;
    }
    let least = |id: &Checkpoint| {
        let of_kind =
            || findings.nodes.iter().filter(|(other, one)| other.kind() == id.kind() && one.judged > 0);
        let explained = || of_kind().filter(|(_, one)| one.is_simulated_coarsely());
        let are_half = 2 * explained().count() >= of_kind().count();
        are_half.then(|| explained().map(|(_, one)| one.over()).fold(f64::INFINITY, f64::min))
    };
    let is_barely = |(id, finding): &(&Checkpoint, &Finding)| {
        let is_open = finding.is_wrong() && finding.diagnosis().0.is_empty() && !finding.bridged.is_empty();
        is_open && least(id).is_some_and(|least| finding.over() <= BARELY * least)
    };
    let barely = findings.nodes.iter().filter(is_barely).map(|(id, _)| *id);
    for id in barely.collect::<Vec<Checkpoint>>() {
        findings.nodes[&id] = findings.nodes[&id].as_undecided(NEEDS_BETWEEN);
    }
}

/// Takes the name of a mistake from a node that is barely wrong, where it leaves more than f32 rounds and the same node of
/// other layers is explained by a coarser arithmetic alone: what such an arithmetic rounds looks like many mistakes then.
pub fn unname(findings: &mut Findings) {
    let is_coarse = |finding: &Finding| {
        let mut names = finding.computed_in.iter();
        names.all(|name| coarseness(name).is_some_and(|unit| unit > UNIT_F32))
            && !finding.computed_in.is_empty()
    };
    let is_uncertain = |(id, finding): &(&Checkpoint, &Finding)| {
        let others =
            || findings.nodes.iter().filter(|(other, one)| other.kind() == id.kind() && one.is_healthy());
        let explains = finding.diagnosis().0.first().map(|first| first.explains);
        finding.is_wrong()
            && finding.over() <= BARELY
            && explains.is_some_and(|explains| explains < WHOLLY)
            && others().next().is_some()
            && others().all(|(_, one)| is_coarse(one))
    };
    let uncertain = findings.nodes.iter().filter(is_uncertain).map(|(id, _)| *id);
    for id in uncertain.collect::<Vec<Checkpoint>>() {
        findings.at(id).forget_names();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::node::{Held, nothing};
    use crate::audit::{Arrangement, Named, Names};
    use crate::report::Diagnosis;

    fn attention(over: f64, computed_in: Option<&'static str>, explains: Option<f64>) -> Finding {
        let mut finding = Finding::default();
        let held = Held { over, computed_in, ..nothing() };
        finding.add(held, &Arrangement::of_tokens([1, 1, 1, 1], 2, vec![0]), 1);
        let named = explains.map(|explains| {
            let fault = "attn.clamp".to_owned();
            let diagnosis = Diagnosis { fault: fault.clone(), explains, text: fault.clone(), fix: None };
            Named { diagnosis, spelling: fault, left: 1.0, rest: 0.0, reaches: None, values: 0 }
        });
        finding.diagnosed(Names { found: named.into_iter().collect(), ..Names::default() });
        finding
    }

    /// Whether attention of a layer keeps the name that it was given, beside that of two others.
    fn keeps_name(over: f64, explains: f64, others: [&'static str; 2]) -> bool {
        let id = |layer: usize| format!("blk.{layer}.attn_ctx").parse::<Checkpoint>().unwrap();
        let mut findings = Findings::default();
        for (layer, name) in others.into_iter().enumerate() {
            findings.nodes.insert(id(layer), attention(0.5, Some(name), None));
        }
        findings.nodes.insert(id(2), attention(over, None, Some(explains)));
        unname(&mut findings);
        !findings.nodes[&id(2)].diagnosis().0.is_empty()
    }

    #[test]
    fn what_is_barely_wrong_among_coarse_nodes_has_no_uncertain_name() {
        let (coarse, plain) = ("attention with f16 operands", "nothing but f32 rounding");
        assert!(!keeps_name(1.2, 0.972, [coarse, coarse]));
        for (over, explains, others) in
            [(9.0, 0.972, [coarse; 2]), (1.2, 0.99999, [coarse; 2]), (1.2, 0.972, [coarse, plain])]
        {
            assert!(keeps_name(over, explains, others), "{over}, {explains}, {others:?}");
        }
    }
}
