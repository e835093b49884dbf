//! A state that was not rolled back with its sequence: what a node makes of the newest one.

use parity_graph::fault::{self, Argument, Scene};
use parity_graph::rewrite::Change;

use super::diagnosis::told;
use crate::audit::{Named, Suspect};

const NO_ROLLBACK: &str = "state.no_rollback";

/// The mistake, where a node before the suspect picks the state and it explains all that is wrong.
pub fn found(suspect: &Suspect<'_>) -> Option<Named> {
    let scene = Scene::new(&suspect.node.program.graph);
    let fault = fault::find(NO_ROLLBACK)?.at(&scene, suspect.node.id, &Argument::None)?;
    let Change::Picked { by, .. } = fault.rewrite.change else { return None };
    let held = suspect.with_newest(by).filter(|held| suspect.is_explained(held))?;
    let left = held.squares[0];
    let explains = 1.0 - left / suspect.held.squares[0];
    let is_most = explains > 0.0;
    is_most.then(|| Named {
        diagnosis: told(suspect, &fault, explains),
        spelling: fault.spelling(),
        left,
        rest: 0.0,
        reaches: None,
        values: left.to_bits(),
    })
}
