//! Names of what is wrong with nodes: which of them are diagnosed, and in which of their steps.

use std::collections::{HashMap, HashSet};

use super::super::named::Naming;
use super::super::node::IN_F32;
use super::super::{attentions, shown_products, storage_types};
use super::unlike::BARELY;
use super::{Aim, Assumed, Findings, Passes};
use crate::arithmetic::Operands;
use crate::audit::bridge::Unseen;
use crate::audit::{Finding, Labelled};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::numerics::Storage;

/// Nodes that are diagnosed: the later ones are mostly the same mistake in other layers.
pub(super) const DIAGNOSED_MAX: usize = 8;
/// Steps of a node that are diagnosed: the later ones are mostly alike.
const DIAGNOSED_STEPS_MAX: usize = 4;
/// The same of a node far behind what was recorded before it: each mistake is computed through all between.
const SIMULATED_STEPS_MAX: usize = 2;

impl Passes<'_> {
    /// Names what is wrong with the first of the nodes that are, each in the first steps in which it is.
    pub(super) fn name(&self, assumed: &Assumed, findings: &mut Findings) -> Result<()> {
        let assumed = &self.as_shown(assumed, findings);
        let is_wrong = |id: &&Checkpoint| findings.nodes.get(*id).is_some_and(Finding::is_wrong);
        let wrong: Vec<Checkpoint> =
            findings.order.iter().filter(is_wrong).take(DIAGNOSED_MAX).copied().collect();
        findings.take_names(self.named_beyond(assumed, &wrong, findings)?);
        // Attention that is wrong in all layers shows in none of them what it was computed in.
        let is_open = |id: &Checkpoint| {
            let any = attentions::attends(id.kind()) && !assumed.may_be_any(id.kind());
            any && findings.nodes.get(id).is_some_and(|finding| finding.diagnosis().0.is_empty())
        };
        let open: Vec<Checkpoint> = wrong.into_iter().filter(is_open).collect();
        let in_any = Assumed { any_attention: None, ..assumed.clone() };
        // Where the first has no name so either, the others will have none.
        let (first, rest) = open.split_at(open.len().min(1));
        for some in [first, rest] {
            let names = self.named_beyond(&in_any, some, findings)?;
            let has_names = |finding: &Finding| !finding.diagnosis().0.is_empty();
            let named = names.nodes.into_iter().filter(|(_, finding)| has_names(finding));
            let named = Findings { nodes: named.collect(), ..Findings::default() };
            if named.nodes.is_empty() {
                break;
            }
            findings.take_names(named);
        }
        Ok(())
    }

    /// With products that were not recorded in f32 as those that were show it, or as it is declared: what other engines round there
    /// hides names, and a name that is found in it has another argument.
    fn as_shown(&self, assumed: &Assumed, findings: &Findings) -> Assumed {
        let shown = shown_products::operands(findings, self.graphs).map(|shown| shown.operands);
        let declared = storage_types::declares_plain(self.steps).then_some(Operands::Exact);
        let products = shown.or(declared).filter(|_| assumed.kept == Storage::F32);
        let unseen = Unseen { products: assumed.unseen.products.or(products), ..assumed.unseen };
        Assumed { unseen, ..assumed.clone() }
    }

    /// Names of what is wrong with some nodes, by the first steps in which they are beyond what bounds explain.
    pub(super) fn named_beyond(
        &self,
        assumed: &Assumed,
        wrong: &[Checkpoint],
        findings: &Findings,
    ) -> Result<Findings> {
        let is_beyond = |id: Checkpoint, step| findings.nodes[&id].is_beyond_in(&self.steps.positions(step));
        self.named(assumed, wrong, (&HashMap::new(), findings), is_beyond)
    }

    /// The same of nodes whose bounds are too wide for that, in the first steps of each, by what rounding was `simulated` to leave.
    pub(super) fn named_simulated(
        &self,
        assumed: &Assumed,
        wrong: &[Checkpoint],
        (simulated, findings): (&HashMap<Checkpoint, f64>, &Findings),
    ) -> Result<Findings> {
        self.named(assumed, wrong, (simulated, findings), |_, _| true)
    }

    /// Judges some wrong nodes once more for the names of what is wrong with them, in the first steps in which they are
    /// beyond what rounding explains.
    fn named(
        &self,
        assumed: &Assumed,
        wrong: &[Checkpoint],
        (simulated, findings): (&HashMap<Checkpoint, f64>, &Findings),
        is_beyond: impl Fn(Checkpoint, usize) -> bool,
    ) -> Result<Findings> {
        let (mut named, mut later) = (HashSet::<(usize, Checkpoint)>::new(), HashSet::new());
        for &id in wrong {
            let has_it = |(_, labelled): &&(usize, &Labelled)| labelled.nodes().any(|(_, node)| node == id);
            let there: Vec<usize> = self.graphs.iter().filter(has_it).map(|(step, _)| *step).collect();
            if there.first().is_some_and(|first| !is_beyond(id, *first)) {
                later.insert(id);
            }
            let beyond: Vec<usize> = there.into_iter().filter(|step| is_beyond(id, *step)).collect();
            let steps_max = if simulated.is_empty() { DIAGNOSED_STEPS_MAX } else { SIMULATED_STEPS_MAX };
            named.extend(self.some_of(&beyond, steps_max).map(|step| (step, id)));
        }
        let Some(diagnose) = self.how.diagnose.filter(|_| !named.is_empty()) else {
            return Ok(Findings::default());
        };
        let (wants, in_step) = (|id| wrong.contains(&id), |step, id| named.contains(&(step, id)));
        let declared = storage_types::declares_plain(self.steps).then_some(IN_F32);
        let usual = shown_products::usual(findings, self.graphs).or(declared);
        let wrong = &findings.certain();
        let naming = Naming { diagnose, later: &later, wrong, usual, simulated };
        self.judge(assumed, &wants, &in_step, Aim::Name(naming))
    }

    /// The first of some steps, the last of them the one of most rows: single rows behind a prompt are alike, and a chunk tells
    /// mistakes apart that are the same in all of them.
    fn some_of(&self, steps: &[usize], most: usize) -> impl Iterator<Item = usize> {
        let (first, rest) = steps.split_at(steps.len().min(most - 1));
        let rows = |step: &&usize| self.steps.positions(**step).len();
        let longest = rest.iter().rev().max_by_key(rows);
        first.iter().chain(longest).copied()
    }

    /// Names what is wrong with the first of nodes whose bounds are too wide to tell one mistake from another, by what rounding was
    /// `simulated` to leave of each, or with one that is off by far more than the first; whether the first has a name then.
    pub(super) fn name_simulated(
        &self,
        assumed: &Assumed,
        simulated: &HashMap<Checkpoint, f64>,
        findings: &mut Findings,
    ) -> Result<bool> {
        let open = findings.order.iter().filter(|id| simulated.contains_key(*id));
        let open: Vec<(Checkpoint, f64)> = open.map(|id| (*id, findings.nodes[id].over())).collect();
        let Some(&(first, over)) = open.first() else { return Ok(false) };
        let further = open.into_iter().filter(|one| one.1 > BARELY * over);
        let furthest = further.max_by(|a, b| a.1.total_cmp(&b.1));
        for (id, _) in [(first, over)].into_iter().chain(furthest) {
            if findings.nodes[&first].diagnosis().0.is_empty() {
                findings.take_names(self.named_simulated(assumed, &[id], (simulated, findings))?);
            }
        }
        Ok(!findings.nodes[&first].diagnosis().0.is_empty())
    }
}
