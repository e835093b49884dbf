//! The mistakes that explain a node, over all steps.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use parity_graph::fault;

use super::Diagnose;
use super::node::Held;
use crate::checkpoint::Checkpoint;
use crate::report::words::number;
use crate::report::{Diagnosis, Tried};

/// How nodes are named that are wrong.
#[derive(Clone, Copy)]
pub struct Naming<'a> {
    pub diagnose: Diagnose<'a>,
    /// Those that rounding explains in the first step: what makes every step wrong is not their mistake.
    pub later: &'a HashSet<Checkpoint>,
    /// Of all nodes of which that is certain: whether they are wrong.
    pub wrong: &'a HashMap<Checkpoint, bool>,
    /// What most products are computed in of which nothing is wrong, by its name.
    pub usual: Option<&'static str>,
    /// Of nodes whose bounds are too wide to tell mistakes apart: how far from exact arithmetic rounding was simulated to
    /// leave them, relative.
    pub simulated: &'a HashMap<Checkpoint, f64>,
}

impl Naming<'_> {
    /// Up to which squared error rounding was simulated to explain a node, where its bound is too wide.
    pub fn allowed(&self, checkpoint: Checkpoint, held: &Held) -> Option<f64> {
        Some(self.simulated.get(&checkpoint)?.powi(2) * held.squares[1])
    }
}

/// A mistake that explains what was recorded of a node.
#[derive(Clone, Debug)]
pub struct Named {
    /// Its name, and what it is.
    pub diagnosis: Diagnosis,
    /// As it is injected, where it can be: `rope.base=10000`.
    pub spelling: String,
    /// Squared error that it leaves.
    pub left: f64,
    /// What of the node, relative to it, is wrong beside, where rounding does not explain what it leaves; else 0.
    pub rest: f64,
    /// The largest magnitude that exact arithmetic reaches, where values are infinite for want of range.
    pub reaches: Option<f64>,
    /// A digest of the values that it comes to: two mistakes that come to the same in every step are one to us.
    pub values: u64,
}

/// What a diagnosis says of a node in one step.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// The mistakes that explain it, the more specific ones first.
    pub found: Vec<Named>,
    /// What was tried where there are none.
    pub tried: Vec<Tried>,
    /// What the error looks like where there are none.
    pub residual: Option<String>,
    /// Whether they are mistakes in nodes before it that were not recorded.
    pub out_of_sight: bool,
    /// Whether nothing is wrong in the step, by an arithmetic of what was not recorded that all of it is not explained by.
    pub is_healthy: bool,
}

/// What the steps in which a node is wrong agree in.
#[derive(Clone, Debug, Default)]
pub struct Agreed {
    /// With the digests of each step.
    found: Vec<(Named, Vec<u64>)>,
    tried: Vec<Tried>,
    residual: Option<String>,
    named: Vec<Diagnosis>,
    /// Whether the mistakes are in nodes before it that were not recorded.
    pub out_of_sight: bool,
}

impl Agreed {
    /// Adds a step to what the ones before it agreed in: a mistake must explain all, but for what it leaves in a state.
    #[must_use]
    pub fn with(known: Option<Agreed>, names: Names) -> Agreed {
        let Names { found, tried, residual, out_of_sight, is_healthy: _ } = names;
        let Some(mut agreed) = known else {
            let found = found.into_iter().map(|named| (named.values, named));
            let found = found.map(|(values, named)| (named, vec![values])).collect();
            return Agreed { found, tried, residual, named: Vec::new(), out_of_sight }.ranked();
        };
        agreed.found.retain_mut(|(known, values)| {
            let same = |a: &Named| {
                a.diagnosis.fault == known.diagnosis.fault && a.diagnosis.text == known.diagnosis.text
            };
            let Some(again) = found.iter().find(|named| same(named)) else {
                return fault::find(&known.diagnosis.fault).is_some_and(|entry| entry.stays);
            };
            known.left += again.left;
            known.rest = known.rest.max(again.rest);
            known.reaches = [known.reaches, again.reaches].into_iter().flatten().reduce(f64::max);
            values.push(again.values);
            true
        });
        if agreed.tried.is_empty() {
            agreed.tried = tried;
        }
        agreed.residual = agreed.residual.or(residual);
        agreed.ranked()
    }

    /// One of those that come to the same values, the more specific one, with the names of the others; what leaves least
    /// comes first.
    fn ranked(mut self) -> Agreed {
        let mut kept: Vec<(&Named, &Vec<u64>, Vec<&str>)> = Vec::new();
        for (named, values) in &self.found {
            match kept.iter_mut().find(|(_, known, _)| *known == values) {
                Some((.., others)) => others.push(&named.diagnosis.fault),
                None => kept.push((named, values, Vec::new())),
            }
        }
        kept.sort_by(|(a, ..), (b, ..)| a.left.partial_cmp(&b.left).unwrap_or(Ordering::Equal));
        let told = |(named, _, others): (&Named, &Vec<u64>, Vec<&str>)| {
            let mut diagnosis = named.diagnosis.clone();
            if let Some(largest) = named.reaches {
                diagnosis.text += &format!("; exact arithmetic reaches {} here", number(largest));
            }
            if named.rest > 0.0 {
                diagnosis.text += &format!(", and something else of {}", number(named.rest));
            }
            if !others.is_empty() {
                diagnosis.text += &format!(" (indistinguishable here from {})", others.join(", "));
            }
            diagnosis
        };
        self.named = kept.into_iter().map(told).collect();
        self
    }

    /// The mistakes that explain the steps so far, as they are injected.
    pub fn spellings(&self) -> Vec<String> {
        self.found.iter().map(|(named, _)| named.spelling.clone()).collect()
    }

    /// What the error looks like, where no mistake explains it.
    pub fn residual(&self) -> Option<&str> {
        self.residual.as_deref().filter(|_| self.named.is_empty())
    }

    /// The mistakes, the likeliest first, and what was tried where there are none.
    pub fn names(&self) -> (&[Diagnosis], &[Tried]) {
        (&self.named, &self.tried)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(found: &[(&str, f64, u64)]) -> Names {
        let named = |&(fault, left, values): &(&str, f64, u64)| {
            let diagnosis = Diagnosis { fault: fault.into(), explains: 1.0, text: fault.into(), fix: None };
            Named { diagnosis, spelling: fault.into(), left, rest: 0.0, reaches: None, values }
        };
        Names { found: found.iter().map(named).collect(), ..Names::default() }
    }

    fn said(agreed: &Agreed) -> Vec<&str> {
        agreed.names().0.iter().map(|diagnosis| diagnosis.fault.as_str()).collect()
    }

    #[test]
    fn a_mistake_explains_every_step_and_equal_ones_are_told_once() {
        // Two that are alike in the first step are told apart by the second.
        let first = Agreed::with(None, names(&[("a", 1.0, 7), ("b", 1.0, 7), ("c", 0.5, 8)]));
        assert_eq!(said(&first), ["c", "a"]);
        let second = Agreed::with(Some(first), names(&[("b", 1.0, 9), ("c", 3.0, 10)]));
        assert_eq!(said(&second), ["b", "c"]);
        assert!(said(&Agreed::with(Some(second), names(&[("a", 0.0, 1)]))).is_empty());
    }
}
