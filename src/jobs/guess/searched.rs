//! Mistakes of one number that no list has, in all layers: the number that brings logits nearest to what was seen.

use std::collections::BTreeMap;

use parity_graph::Id;
use parity_graph::fault::{Argument, Entry, Scene, entries};

use super::answer::LIKELIER;
use super::evidence::{Noise, Score};
use super::hypotheses::{Hypothesis, Layers, Rows, again, of_nodes};
use super::search::Search;
use crate::faults::injected::Injected;

/// Numbers that are tried, at most: of each such mistake some octaves, and what is narrowed down there.
pub const TRIED: usize = 512;

/// Each such mistake with the number that is nearest: the roundest of those that explain what was seen about as well.
pub fn searched(search: &Search<'_>, noise: &Noise) -> Vec<Hypothesis> {
    let (full, pass) = (&search.full, search.few.as_ref().unwrap_or(&search.full));
    let labelled = &pass.labelled;
    let scene = Scene::new(&labelled.program.graph);
    let everywhere = |entry: &Entry, argument: &Argument| {
        let at = |(id, checkpoint)| {
            let fault = entry.at(&scene, id, argument)?;
            Some((id, vec![Injected { spec: 0, checkpoint, fault }]))
        };
        let nodes: BTreeMap<Id, Vec<Injected>> = labelled.nodes().filter_map(at).collect();
        let one = of_nodes(nodes, Layers::All, Rows::All, format!("{} of {argument}", entry.name))?;
        let score = search.evidence.weigh(&pass.alone(&one)?, noise);
        Some((one, score))
    };
    let of_entry = |entry: &'static Entry| {
        let distance = |argument: &Argument, _: f64| {
            let far = everywhere(entry, argument).and_then(|(_, score)| score.distance);
            far.filter(|far| far.is_finite()).unwrap_or(f64::INFINITY)
        };
        let has_place = |id: &Id| !entry.all_at(&scene, *id).is_empty();
        let first = labelled.nodes().map(|(id, _)| id).find(has_place)?;
        let told = entry.searched(&scene, first, &distance);
        let told: Vec<(Hypothesis, Score)> = told.iter().filter_map(|one| everywhere(entry, one)).collect();
        let best = told.iter().map(|(_, score)| score.log_likelihood).fold(f64::NEG_INFINITY, f64::max);
        let mut near = told.into_iter().filter(|(_, score)| score.log_likelihood >= best - LIKELIER.ln());
        near.next().map(|(one, _)| one)
    };
    let found: Vec<Hypothesis> = entries().filter(|entry| entry.is_searched()).filter_map(of_entry).collect();
    again(&full.labelled, full.layers(), &found.iter().collect::<Vec<_>>()).into_iter().flatten().collect()
}
