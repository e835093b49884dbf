//! Recordings that were overwritten in place: what reads a tensor wrote its own values where it was, before it was copied.
//!
//! Hooks that keep a tensor without a copy of it see this (an activation or a rotation in place, a residual added to what a matmul
//! left). Such a recording is wrong where its engine is not, as what was computed from the tensor says (`past_faults.rs`). Here it is
//! taken for a recording of what reads it: where rounding explains that, it is one.

use std::collections::HashSet;

use super::super::instead::Instead;
use super::super::{
    AuditRows, Finding, Findings, How, Labelled, MISTAKES_SHOW, Reads, Steps, Tensor, passes,
};
use crate::checkpoint::{Checkpoint, Kind};
use crate::error::Result;
use crate::gguf::Gguf;

/// What stands in place of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overwritten {
    /// What is in its place.
    pub by: Checkpoint,
    /// What that was not yet multiplied with.
    pub before: Option<Checkpoint>,
}

/// What is not right beside tensors that were recorded wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// A node that is wrong itself.
    Wrong(Checkpoint),
    /// A reader that is not judged without them.
    Unknown(Checkpoint),
}

/// Notes of the first tensor of each kind that was recorded wrongly what it holds, where that is what reads it, and of all what is
/// wrong beside them, or else the first reader that is `unknown` without them.
///
/// # Errors
/// None that concerns a single node.
pub fn note(
    of: (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    (rows, unknown): (AuditRows, Option<Checkpoint>),
    reads: &Reads,
    findings: &mut Findings,
) -> Result<()> {
    let mut first: Vec<Checkpoint> = Vec::new();
    let past: HashSet<Checkpoint> =
        findings.order.iter().filter(|id| is_past(findings, **id)).copied().collect();
    let mut wrong = findings.order.iter().filter(|id| findings.nodes.get(*id).is_some_and(Finding::is_wrong));
    // Of an engine that is wrong too, what a wrong node reads was recorded as wrongly as in other layers.
    let wrong = wrong.find(|id| past.iter().all(|known| known.kind() != id.kind())).copied();
    let beside = wrong.map(Beside::Wrong).or(unknown.map(Beside::Unknown));
    for id in &past {
        let finding = findings.at(*id);
        finding.beside = beside;
        // What the error of a wrong copy looks like is no news beside that it is one.
        if finding.diagnosis().0.is_empty() {
            finding.forget_names();
        }
    }
    for id in findings.order.iter().filter(|id| past.contains(*id)) {
        if !first.iter().any(|known| known.kind() == id.kind()) {
            first.push(*id);
        }
    }
    for id in first {
        let mut readers = readers_of(id, reads, findings);
        readers.sort_by_key(|reader| findings.order.iter().position(|id| id == reader));
        let gated = readers.iter().filter(|by| id.kind() == Kind::FfnGate && by.kind() == Kind::FfnAct);
        let before = gated.map(|by| Overwritten { by: *by, before: Some(id.sibling(Kind::FfnUp)) });
        let whole = readers.iter().map(|by| Overwritten { by: *by, before: None });
        for held in whole.chain(before) {
            if holds(of, rows, (id, held), &past)? {
                findings.at(id).overwritten = Some(held);
                findings.at(id).forget_names();
                break;
            }
        }
    }
    Ok(())
}

/// What reads a tensor, or reads what does so and is not recorded: a norm before its weight.
fn readers_of(id: Checkpoint, reads: &Reads, findings: &Findings) -> Vec<Checkpoint> {
    let direct =
        |id: Checkpoint| reads.iter().filter(move |(_, inputs)| inputs.contains(&id)).map(|(by, _)| *by);
    let is_recorded = |by: &Checkpoint| findings.nodes.get(by).is_some_and(|finding| finding.judged > 0);
    let behind = direct(id).filter(|by| !is_recorded(by)).flat_map(direct);
    direct(id).chain(behind).collect()
}

fn is_past(findings: &Findings, id: Checkpoint) -> bool {
    findings.nodes.get(&id).is_some_and(|finding| finding.contradicted_by.is_some())
}

/// Whether rounding explains what was recorded of a tensor as what may stand in its place; other tensors of the `past` were recorded
/// wrongly as well.
fn holds(
    (steps, graphs, gguf): (&dyn Steps, &[(usize, &Labelled)], &Gguf),
    rows: AuditRows,
    (id, held): (Checkpoint, Overwritten),
    past: &HashSet<Checkpoint>,
) -> Result<bool> {
    let of = |step: usize, asked: Checkpoint| match asked {
        _ if asked == held.by => Some(steps.tensor(step, id).and_then(|own| match held.before {
            Some(factor) => multiplied(own, &steps.tensor(step, factor)?),
            None => Some(own),
        })),
        _ if past.contains(&asked) => Some(None),
        _ => None,
    };
    let wants = |asked: Checkpoint| asked == held.by;
    let how = How { rows, wants: &wants, diagnose: None, look: None, only: None };
    let found = passes::bounded(&Instead { steps, of: &of, chosen: &|_| true }, graphs, gguf, &how)?;
    let is_near = |found: &Finding| found.audit().is_some_and(|audit| audit.local.rel_l2 <= MISTAKES_SHOW);
    let is_it = |found: &Finding| found.judged > 0 && found.is_healthy() && is_near(found);
    Ok(found.nodes.get(&held.by).is_some_and(is_it))
}

/// A tensor times another of the same rows; `None` where they differ in shape.
fn multiplied(own: Tensor, by: &Tensor) -> Option<Tensor> {
    let alike = own.positions == by.positions && own.values.len() == by.values.len();
    let values = alike.then(|| own.values.iter().zip(&by.values).map(|(a, b)| a * b).collect())?;
    Some(Tensor { values, ..own })
}
